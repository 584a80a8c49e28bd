"""The file that a learner hands in, ``<lesson>.labkit.zip``: the notebook, the lesson's ledger rows, the versions.

Three members, and no others: ``<lesson>.ipynb``, ``ledger.jsonl`` and ``manifest.json``. The same content gives the
same bytes (fixed times, fixed order), so that two files can be compared. Who reads one trusts nothing in it: `read`
takes every member into memory up to a limit, never onto the disk, so no name in the file can lead anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .units import MiB, UserError, show_bytes

SCHEMA = 1
SUFFIX = ".labkit.zip"
LEDGER, MANIFEST = "ledger.jsonl", "manifest.json"
NOTEBOOK_BYTES, LEDGER_BYTES, MANIFEST_BYTES = 20 * MiB, 20 * MiB, 1 * MiB  # the most that a member may unpack to
FILE_BYTES = 24 * MiB  # the most that the file itself may have
_LESSON = re.compile(r"[0-9]{2}_[a-z0-9_]{1,60}")
_STUDENT_LENGTH = 200
_WHEN = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can name


@dataclass(frozen=True)
class Bundle:
    """What is handed in. ``notebook`` is the ``.ipynb`` file as it is, not parsed; ``rows`` the lesson's ledger rows;
    ``student`` the name that the learner gave (one line of any text, no file name), or nothing; ``made_with`` the
    versions and the card: what the file says about itself, which nobody has checked. ``notes`` are sentences on what
    `read` found odd and left out."""

    lesson: str
    notebook: bytes
    rows: tuple[dict[str, Any], ...] = ()
    student: str = ""
    made_with: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_lesson(self.lesson):
            raise UserError(f"{self.lesson[:80]!r} is no lesson's name")


def is_lesson(name: str) -> bool:
    """Whether `name` has the form of a lesson's name (``01_baseline_oom``): nothing in it can leave a folder."""
    return _LESSON.fullmatch(name) is not None


def write(path: Path, bundle: Bundle) -> Path:
    """Write `bundle` to `path` in one step and return the path: a kill leaves the old file or the new one.

    Raises `UserError` when a part is over its limit, or the file cannot be written.
    """
    ledger = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in bundle.rows).encode()
    manifest = {
        "schema": SCHEMA,
        "lesson": bundle.lesson,
        "student": _one_line(bundle.student),
        "made_with": bundle.made_with,
        "sha256": {_book(bundle.lesson): _sha256(bundle.notebook), LEDGER: _sha256(ledger)},
    }
    text = (json.dumps(manifest, ensure_ascii=False, allow_nan=False, indent=1, sort_keys=True) + "\n").encode()
    members = {_book(bundle.lesson): bundle.notebook, LEDGER: ledger, MANIFEST: text}
    for name, limit in _limits(bundle.lesson).items():
        if len(members[name]) > limit:
            raise UserError(
                f"{name} has {show_bytes(len(members[name]))}; at most {show_bytes(limit)} can be handed in"
            )
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, content in members.items():
                    entry = zipfile.ZipInfo(name, _WHEN)
                    entry.create_system, entry.external_attr = 3, 0o100644 << 16  # the same on every system
                    archive.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)
            file.flush()
            os.fsync(file.fileno())
        if partial.stat().st_size > FILE_BYTES:
            raise UserError(f"the file would have more than {show_bytes(FILE_BYTES)}")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def read(path: Path) -> Bundle:
    """The bundle in the file at `path`.

    Raises `UserError` in one sentence for everything that is no such file: no zip, too large (the file, or what a
    member unpacks to, whatever its header says), encrypted, a member twice, missing or of another name, a manifest that
    is none. What can be left out (ledger rows that are none, sums that do not fit) is left out and named in ``notes``.
    """
    try:
        if path.stat().st_size > FILE_BYTES:
            raise UserError(f"{path.name}: larger than {show_bytes(FILE_BYTES)}")
        with zipfile.ZipFile(path) as archive:
            return _bundle(archive, path.name)
    except OSError as error:
        raise UserError(f"{path.name}: cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, RuntimeError, EOFError, ValueError) as error:
        # zlib.error, a truncated member, a compression or a version that Python does not know, a broken file name
        raise UserError(f"{path.name}: is no sound zip file ({type(error).__name__})") from error


def _bundle(archive: zipfile.ZipFile, name: str) -> Bundle:
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    books = [n for n in names if n.endswith(".ipynb")]
    if len(names) != 3 or len(books) != 1 or set(names) != {*books, LEDGER, MANIFEST}:
        raise UserError(f"{name}: must hold one notebook, {LEDGER} and {MANIFEST}, and nothing else")
    lesson = books[0].removesuffix(".ipynb")
    if not is_lesson(lesson):
        raise UserError(f"{name}: {books[0][:80]!r} is no lesson's notebook")
    limits = _limits(lesson)
    content = {entry.filename: _member(archive, entry, limits[entry.filename], name) for entry in entries}
    try:
        manifest = json.loads(content[MANIFEST].decode())
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA or manifest.get("lesson") != lesson:
        raise UserError(f"{name}: {MANIFEST} is none, is of another version of labkit, or names another lesson")
    student, made_with, sums = (manifest.get(key) for key in ("student", "made_with", "sha256"))
    rows, bad = _rows(content[LEDGER], lesson)
    notes = [f"ledger rows that cannot be read, or belong to another lesson, and are left out: {bad}"] if bad else []
    sums = sums if isinstance(sums, dict) else {}
    changed = [part for part in (books[0], LEDGER) if sums.get(part) != _sha256(content[part])]
    if changed:
        notes.append(f"changed after `labkit submit` wrote the file: {', '.join(changed)}")
    return Bundle(
        lesson,
        content[books[0]],
        rows,
        _one_line(student) if isinstance(student, str) else "",
        made_with if isinstance(made_with, dict) else {},
        tuple(notes),
    )


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, limit: int, name: str) -> bytes:
    """A member's bytes. The size in its header is a claim: what is unpacked is counted."""
    if entry.flag_bits & 1:
        raise UserError(f"{name}: {entry.filename} is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"{name}: {entry.filename} is packed in a way that `labkit submit` does not use")
    with archive.open(entry) as file:
        try:
            content = file.read(limit + 1)
        except Exception as error:  # zlib's own error class, and what a forged header leads to
            raise UserError(f"{name}: {entry.filename} cannot be unpacked ({type(error).__name__})") from error
    if len(content) > limit:
        raise UserError(f"{name}: {entry.filename} unpacks to more than {show_bytes(limit)}")
    return content


def _rows(content: bytes, lesson: str) -> tuple[tuple[dict[str, Any], ...], int]:
    """The rows of `lesson` in a ledger's bytes, and how many lines are none."""
    rows, bad = [], 0
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode(), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and row.get("lesson") == lesson:
            rows.append(row)
        else:
            bad += 1
    return tuple(rows), bad


def _one_line(text: str) -> str:
    """`text` without control characters and without what no encoding can write, cut to a length."""
    sound = text.encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in sound).split())[:_STUDENT_LENGTH]


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _limits(lesson: str) -> dict[str, int]:
    return {_book(lesson): NOTEBOOK_BYTES, LEDGER: LEDGER_BYTES, MANIFEST: MANIFEST_BYTES}


def _book(lesson: str) -> str:
    return f"{lesson}.ipynb"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
