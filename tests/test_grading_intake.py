"""What is taken from a folder of submissions, what is not, and that nothing is passed over in silence."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
from grading_samples import HOME, NAME, course, hand_in, lesson, notebook, solved

from labkit import bundles, notebooks
from labkit.grading import grader, intake, submissions, summary
from labkit.grading.intake import LeftOut
from labkit.units import UserError

BUNDLE = f"{NAME}{bundles.SUFFIX}"


def bundle(folder: Path, student: str, name: str = BUNDLE) -> Path:
    target = folder / student / name
    target.parent.mkdir(parents=True, exist_ok=True)
    made = bundles.write(target.parent / BUNDLE, bundles.Bundle(NAME, notebooks.dumps(solved()).encode()))
    return made.rename(target)


def opened(folder: Path) -> list[submissions.Submission]:
    return submissions.open_all(intake.collect(folder).entries, {NAME: lesson()})


@pytest.mark.parametrize(
    "name",
    [
        "00_environment.IPYNB",
        "00_environment (1).ipynb",
        "00_environment.ipynb (2)",
        "00_environment.ipynb.txt",
        "00_environment.ipynb.json",
        "Ada_Lovelace_4711_assignsubmission_file_/00_environment.ipynb",
        "a/b/c/00_environment.ipynb",
    ],
)
def test_a_notebook_is_taken_whatever_a_download_made_of_it(tmp_path, name):
    hand_in(tmp_path, "ada", solved(), name)
    (one,) = opened(tmp_path)
    assert (one.lesson, one.unreadable, one.entry.stem) == (NAME, "", NAME)
    assert not one.findings and not intake.collect(tmp_path).left_out


@pytest.mark.parametrize("name", [BUNDLE, "00_environment.labkit (1).zip", "00_environment.Labkit-2.ZIP", "week 1.zip"])
def test_a_file_of_labkit_submit_is_taken_whatever_it_is_called(tmp_path, name):
    bundle(tmp_path, "ada", name)
    (one,) = opened(tmp_path)
    assert (one.lesson, one.unreadable, one.entry.bundled) == (NAME, "", True)
    assert not intake.collect(tmp_path).left_out


def odd(folder: Path) -> dict[str, str]:
    """A folder with everything that is not taken; path and a word of the reason."""
    hand_in(folder, "ada", solved())
    hand_in(folder, "ada", "my notes", "notes.pdf")
    hand_in(folder, "ada", "{}", ".ipynb_checkpoints/00_environment-checkpoint.ipynb")
    hand_in(folder, "ada", "{}", "1/2/3/4/deep.ipynb")
    hand_in(folder, "ada", b"PK\x03\x04", "everything.zip")
    os.mkfifo(folder / "ada" / "pipe.ipynb")
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(folder / "ada")  # a socket's path may have 107 bytes
        made.bind("socket.ipynb")
        os.chdir(here)
    os.symlink("/etc", folder / "ada" / "etc")
    os.symlink("/", folder / "root")
    hand_in(folder, ".hidden", solved())
    (folder / "bob").mkdir()
    hand_in(folder, "eve", "", "answer.txt")
    (folder / "loose.ipynb").write_text("{}")
    return {
        "ada/notes.pdf": "neither",
        "ada/.ipynb_checkpoints": "hidden",
        "ada/1/2/3/4": "more than 3 folders deep",
        "ada/everything.zip": "unpack it",
        "ada/pipe.ipynb": "a pipe",
        "ada/socket.ipynb": "a socket",
        "ada/etc": "a link",
        "root": "a link",
        ".hidden": "hidden",
        "loose.ipynb": "no student's folder",
        "bob/": "empty",
        "eve/answer.txt": "neither",
        "eve/": "nothing in this folder",
    }


def test_what_is_not_taken_is_named_with_the_reason(tmp_path):
    wanted = odd(tmp_path)
    found = intake.collect(tmp_path)
    assert [e.relative for e in found.entries] == [f"ada/{NAME}.ipynb"]
    said = {o.path or f"{o.student}/": o.reason for o in found.left_out}
    assert said.keys() == wanted.keys()
    for path, word in wanted.items():
        assert word in said[path], path
    assert len(intake.lines(found.left_out)) >= 10


@pytest.mark.slow
def test_the_terminal_the_summary_and_later_calls_name_it(tmp_path, monkeypatch, capsys):
    folder, out = tmp_path / "in", tmp_path / "out"
    wanted = odd(folder)
    (folder / "ada" / f"{NAME}.ipynb").write_text("{")  # unreadable: nothing is run
    monkeypatch.setattr(grader, "require", lambda: None)
    grader.grade(folder, out, home=course(tmp_path / "course"), options=grader.Options(exercises_only=True))
    said, page = capsys.readouterr().out, (out / "summary.html").read_text()
    for path, word in wanted.items():
        assert path in said and path in page and word.split("'")[0] in page, path
    summary.write(out)
    assert (out / "summary.html").read_text() == page
    named = [line for line in said.splitlines() if line.startswith("not graded")]
    assert len(named) == len(intake.lines(intake.load(out)))


def test_many_files_for_the_same_reason_are_one_line():
    left = [LeftOut("ada", f"ada/{i}.png", "neither") for i in range(30)]
    (line,) = intake.lines(left)
    assert "ada/0.png" in line and "and 22 more" in line and "29.png" not in line


def test_a_terminal_is_not_flooded():
    left = [LeftOut(f"s{i}", f"s{i}/a.pdf", "neither") for i in range(300)]
    said = intake.lines(left)
    assert len(said) == intake.MOST_LINES + 1 and said[-1] == "not graded: and 280 more, all in summary.html"
    assert len(intake.lines(left[: intake.MOST_LINES + 1])) == intake.MOST_LINES + 1


def test_a_folder_of_thousands_of_files_is_not_looked_through(tmp_path, monkeypatch):
    monkeypatch.setattr(intake, "MOST", 5)
    for number in range(9):
        hand_in(tmp_path, "ada", "x", f"{number}.txt")
    hand_in(tmp_path, "bob", "{")
    found = intake.collect(tmp_path)
    assert [o.path for o in found.left_out if "not looked at" in o.reason] == ["ada/5.txt"]
    assert [e.student for e in found.entries] == ["bob"]


def test_two_students_whose_names_look_alike_stay_two(tmp_path):
    for name in (b"Jos\xe9", b"Jos?", b"Jos\xe8"):
        target = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(target)
        with open(os.path.join(target, b"00_environment.ipynb"), "w") as file:
            file.write("{}")
    students = [e.student for e in intake.collect(tmp_path).entries]
    assert len(set(students)) == 3 and "Jos?" in students


@pytest.mark.parametrize(
    ("files", "graded", "rule"),
    [
        ({"00_environment.ipynb": 9, BUNDLE: 1}, BUNDLE, "was written by labkit submit"),
        ({"draft.ipynb": 9, "00_environment.ipynb": 1}, "00_environment.ipynb", "has the lesson's name"),
        ({"00_environment.ipynb": 9, "00_environment (1).ipynb": 1}, "00_environment.ipynb", "is newer"),
        (
            {"00_environment.ipynb": 5, "00_environment (2).ipynb": 5},
            "00_environment (2).ipynb",
            "is the later download",
        ),
        ({"a/00_environment.ipynb": 5, "b/00_environment.ipynb": 5}, "b/00_environment.ipynb", "is the last by name"),
    ],
)
def test_of_two_files_one_is_graded_by_a_rule_that_is_said(tmp_path, files, graded, rule):
    for name, time in files.items():
        made = bundle(tmp_path, "ada", name) if name.endswith("zip") else hand_in(tmp_path, "ada", notebook(), name)
        os.utime(made, (time, time))
    (one,) = opened(tmp_path)
    (other,) = set(files) - {graded}
    assert one.entry.relative == f"ada/{graded}"
    assert f"ada/{other} is not graded: ada/{graded} {rule}" in [f.text for f in one.findings]


def test_a_file_that_can_be_read_goes_before_one_that_cannot(tmp_path):
    hand_in(tmp_path, "ada", notebook(), "draft.ipynb")
    (tmp_path / "ada" / BUNDLE).write_text("PK")
    found = {s.lesson: s for s in opened(tmp_path)}
    assert not found[NAME].unreadable and "can be read" in found[NAME].findings[-1].text


def test_the_line_of_the_instructors_manual_sorts_what_canvas_downloads(tmp_path):
    """Canvas: name of the student, perhaps LATE, two numbers, name of the file, all with underscores between them."""
    (line,) = re.findall(r"^for file in .*$", (HOME / "instructor" / "README.md").read_text(), re.M)
    folder = tmp_path / "in"
    for name in ("lovelaceada_101_2001_00_environment.ipynb", "bool_LATE_102_2002_00_environment (1)-1.ipynb"):
        hand_in(tmp_path, "in", solved(), name)
    bundle(tmp_path, "in", f"hopper_103_2003_{BUNDLE}")
    subprocess.run(["bash", "-c", line], cwd=folder, check=True)
    found = opened(folder)
    assert {s.entry.student: (s.lesson, s.unreadable) for s in found} == dict.fromkeys(
        ("bool", "hopper", "lovelaceada"), (NAME, "")
    )
    assert not intake.collect(folder).left_out


def test_notebooks_of_a_size_that_no_lesson_has_are_not_looked_through(tmp_path):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": "x", "outputs": [], "execution_count": None}
    many = {"cells": [cell] * 1001, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    long = json.loads(notebooks.dumps(notebook()))
    long["cells"][1] |= {**cell, "id": "long", "source": "a=0\n" * 600_000}
    hand_in(tmp_path, "ada", many)
    hand_in(tmp_path, "bob", long)
    assert [s.unreadable for s in opened(tmp_path)] == [
        "a notebook of 1001 cells; at most 1000 are graded",
        "its code cells hold more than 2000000 characters",
    ]


@pytest.mark.parametrize(
    ("folder", "out", "said"),
    [
        ("in", "in", "itself"),
        ("in", "in/graded", "inside the folder of submissions"),
        ("out/in", "out", "the submissions lie inside"),
        ("in", "in/../in", "itself"),
    ],
)
def test_results_and_submissions_lie_apart(tmp_path, folder, out, said):
    hand_in(tmp_path / folder, "ada", notebook())
    with pytest.raises(UserError, match=said):
        grader.grade(tmp_path / folder, tmp_path / out, home=HOME)
    assert not list(tmp_path.rglob("scores.csv")) and not list(tmp_path.rglob(".lock"))


def test_an_old_list_that_cannot_be_read_is_none(tmp_path):
    for text in ("{", '{"a": [{"x": 1}]}', "[]"):
        (tmp_path / intake.FILE).write_text(text)
        assert intake.load(tmp_path) == []
