"""The file that learners hand in: the same bytes for the same content, and nothing in a hostile one is believed."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest

from labkit import bundles
from labkit.units import UserError

LESSON = "01_baseline_oom"
ROW = {"schema": 1, "kind": "begin", "lesson": LESSON, "session": "a"}


def bundle(**changed) -> bundles.Bundle:
    given = {
        "lesson": LESSON,
        "notebook": b'{"cells": []}',
        "rows": (ROW,),
        "student": "Zoë",
        "made_with": {"card": "t4"},
    }
    return bundles.Bundle(**{**given, **changed})


def forged(path: Path, members: dict[str, bytes], **options) -> Path:
    """A zip file with these members, as an attacker would make it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, options.get("packing", zipfile.ZIP_DEFLATED))
    return path


def members(tmp_path: Path) -> dict[str, bytes]:
    """The members of a sound file."""
    with zipfile.ZipFile(bundles.write(tmp_path / "sound.labkit.zip", bundle())) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_what_is_written_is_read_back(tmp_path):
    path = bundles.write(tmp_path / "deep" / "one.labkit.zip", bundle())
    assert bundles.read(path) == bundle()
    assert not list(path.parent.glob("*.part"))


def test_the_same_content_gives_the_same_bytes(tmp_path):
    first, second = (bundles.write(tmp_path / name, bundle()) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert bundles.write(tmp_path / "c", bundle(student="x")).read_bytes() != first.read_bytes()


def test_a_part_over_its_limit_is_not_written_and_the_old_file_stays(tmp_path):
    path = bundles.write(tmp_path / "one.labkit.zip", bundle())
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"01_baseline_oom.ipynb has 20.0 MiB; at most 20.0 MiB"):
        bundles.write(path, bundle(notebook=b" " * (bundles.NOTEBOOK_BYTES + 1)))
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("lesson", ["../../etc", "01_baseline_oom/../x", "", "1_x", "01_Baseline", "01_a\n"])
def test_a_lesson_that_could_leave_a_folder_is_no_lesson(lesson):
    with pytest.raises(UserError, match="is no lesson's name"):
        bundle(lesson=lesson)


def test_files_that_are_no_zip(tmp_path):
    for content in (b"", b"PK", b"not a zip", b"PK\x03\x04" + bytes(200)):
        (tmp_path / "x.labkit.zip").write_bytes(content)
        with pytest.raises(UserError, match="no sound zip file"):
            bundles.read(tmp_path / "x.labkit.zip")
    with pytest.raises(UserError, match="cannot be read"):
        bundles.read(tmp_path / "missing.labkit.zip")
    with pytest.raises(UserError, match="cannot be read"):
        bundles.read(tmp_path)


def test_a_cut_or_damaged_file_is_refused_wherever_it_is_cut(tmp_path):
    whole = bundles.write(
        tmp_path / "whole", bundle(notebook=json.dumps({"cells": list(range(500))}).encode())
    ).read_bytes()
    for end in range(0, len(whole), 97):
        (tmp_path / "cut").write_bytes(whole[:end])
        with pytest.raises(UserError):
            bundles.read(tmp_path / "cut")
    for at in range(40, 400, 7):  # inside the packed notebook
        (tmp_path / "bent").write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with pytest.raises(UserError):
            bundles.read(tmp_path / "bent")


def test_other_names_members_twice_and_missing_ones_are_refused(tmp_path):
    sound = members(tmp_path)
    book = sound[f"{LESSON}.ipynb"]
    without = {k: v for k, v in sound.items() if k != f"{LESSON}.ipynb"}
    for bad in (
        {**sound, "extra.txt": b""},
        {**without, "../01_baseline_oom.ipynb": book},
        {**without, "/tmp/01_baseline_oom.ipynb": book},
        {**without, "..\\01_baseline_oom.ipynb": book},
        {**without, "notebook.ipynb": book},
        without,
        {k: v for k, v in sound.items() if k != "ledger.jsonl"},
    ):
        with pytest.raises(UserError):
            bundles.read(forged(tmp_path / "bad.labkit.zip", bad))
    with zipfile.ZipFile(tmp_path / "twice.labkit.zip", "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for name in (*sound, "manifest.json"):
            archive.writestr(name, sound[name])
    with pytest.raises(UserError, match="nothing else"):
        bundles.read(tmp_path / "twice.labkit.zip")


def test_a_bomb_is_stopped_at_the_limit_also_when_its_header_lies(tmp_path):
    sound = members(tmp_path)
    bomb = forged(tmp_path / "bomb.labkit.zip", {**sound, "manifest.json": b" " * (8 * bundles.MANIFEST_BYTES)})
    assert bomb.stat().st_size < 100_000
    with pytest.raises(UserError, match=r"manifest.json unpacks to more than 1.0 MiB"):
        bundles.read(bomb)
    size = struct.pack("<L", 8 * bundles.MANIFEST_BYTES)
    bomb.write_bytes(bomb.read_bytes().replace(size, struct.pack("<L", 100)))
    with pytest.raises(UserError):
        bundles.read(bomb)


def test_a_file_that_is_too_large_is_not_opened(tmp_path):
    path = tmp_path / "large.labkit.zip"
    with path.open("wb") as file:
        file.truncate(bundles.FILE_BYTES + 1)
    with pytest.raises(UserError, match="larger than 24"):
        bundles.read(path)


def test_packing_and_encryption_that_submit_never_uses_are_refused(tmp_path):
    sound = members(tmp_path)
    with pytest.raises(UserError, match="does not use"):
        bundles.read(forged(tmp_path / "bz2.labkit.zip", sound, packing=zipfile.ZIP_BZIP2))
    content = bytearray(forged(tmp_path / "plain.labkit.zip", sound).read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + offset] |= 1
    (tmp_path / "locked.labkit.zip").write_bytes(content)
    with pytest.raises(UserError, match="is encrypted"):
        bundles.read(tmp_path / "locked.labkit.zip")


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"schema": 2, "lesson": "01_baseline_oom"}',
        b'{"schema": 1, "lesson": "02_x"}',
        b"[" * 100_000,
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, manifest):
    bad = forged(tmp_path / "bad.labkit.zip", {**members(tmp_path), "manifest.json": manifest})
    with pytest.raises(UserError, match=r"manifest.json is none"):
        bundles.read(bad)


def test_rows_that_do_not_belong_are_left_out_and_counted_and_changed_parts_are_named(tmp_path):
    lines = [
        json.dumps(ROW),
        "no json",
        "[1]",
        json.dumps({**ROW, "lesson": "02_other"}),
        '{"lesson": NaN}',
        "[" * 90_000,
    ]
    bad = {**members(tmp_path), "ledger.jsonl": "\n".join(lines).encode() + b"\n\xff\xfe\n"}
    found = bundles.read(forged(tmp_path / "changed.labkit.zip", bad))
    assert found.rows == (ROW,)
    assert found.notes == (
        "ledger rows that cannot be read, or belong to another lesson, and are left out: 6",
        "changed after `labkit submit` wrote the file: ledger.jsonl",
    )


def test_a_students_name_is_one_line_that_can_be_written(tmp_path):
    manifest = json.loads(members(tmp_path)["manifest.json"])
    for wild, tame in (("a\n\x1b[2Jb\u202e", "a [2Jb"), ("\ud800x", "?x"), ("n" * 999, "n" * 200), ([1], "")):
        bad = {**members(tmp_path), "manifest.json": json.dumps({**manifest, "student": wild}).encode()}
        assert bundles.read(forged(tmp_path / "name.labkit.zip", bad)).student == tame
