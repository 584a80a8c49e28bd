"""Exports for learning-management systems: every student is in the file or named, nothing unread goes out as final."""

from __future__ import annotations

import csv
import dataclasses

import graded
import pytest

from labkit.grading import export, outcomes
from labkit.units import UserError


def table(exported: export.Exported) -> list[list[str]]:
    with exported.path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def roster(tmp_path, text: str):
    path = tmp_path / "roster.csv"
    path.write_bytes(text.encode("utf-8-sig"))
    return path


MOODLE = "First name,Email address,ID number,folder\nAda,Ada@x.org,7,ada\nBob,bob@x.org,8,bob\nZed,z@x.org,9,zed\n"
CANVAS = (
    "Student,ID,SIS User ID,SIS Login ID,Section,01 baseline oom (4711),folder\n"
    "    Points Possible,,,,,6,\n"
    '"Lovelace, Ada",11,u1,ada@x.org,A,,ada\n"Bee, Bob",12,u2,bob@x.org,A,,bob\n'
)


def test_moodle_gets_its_id_columns_and_whoever_is_not_in_the_roster_is_named(tmp_path):
    graded.small_class(tmp_path)
    done = export.write(tmp_path, "moodle", roster(tmp_path, MOODLE))
    assert table(done) == [
        ["First name", "ID number", "Email address", "01 baseline oom"],
        ["Ada", "7", "Ada@x.org", ""],  # a written answer waits
        ["Bob", "8", "bob@x.org", "1.25"],
        ["Zed", "9", "z@x.org", ""],
    ]
    assert (done.unknown, done.waiting, done.absent) == (("cyd", "dee", "eve"), ("ada 01",), ("zed",))
    for say in (
        "3 students",
        "not in the file: cyd, dee, eve",
        "are read (--provisional fills them in): ada 01",
        "zed",
    ):
        assert say in done.text()


def test_what_is_not_read_yet_goes_out_only_when_asked_for(tmp_path):
    graded.small_class(tmp_path)
    done = export.write(tmp_path, "moodle", roster(tmp_path, MOODLE), provisional=True)
    assert table(done)[1][-1] == "6" and done.waiting == ()


def test_canvas_gets_all_its_columns_points_possible_and_its_own_assignment(tmp_path):
    graded.small_class(tmp_path)
    done = export.write(tmp_path, "canvas", roster(tmp_path, CANVAS), provisional=True)
    assert table(done) == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "01 baseline oom (4711)"],
        ["    Points Possible", "", "", "", "", "6"],
        ["Lovelace, Ada", "11", "u1", "ada@x.org", "A", "6"],
        ["Bee, Bob", "12", "u2", "bob@x.org", "A", "1.25"],
    ]


def test_plain_needs_no_roster_and_has_everybody_with_the_maximum(tmp_path):
    found = graded.small_class(tmp_path)
    done = export.write(tmp_path, "plain", results=[*found, dataclasses.replace(found[3], student="=1+1")])
    assert table(done)[0] == ["folder", "01 baseline oom", "01 baseline oom, of"]
    assert table(done)[1] == ["'=1+1", "0", "6"] and len(table(done)) == 7 and done.unknown == ()


def test_a_lesson_that_somebody_did_not_hand_in_stays_empty(tmp_path):
    found = graded.small_class(tmp_path)
    second = dataclasses.replace(found[1], lesson="02_mixed_precision")
    outcomes.save(tmp_path, second)
    rows = table(export.write(tmp_path, "plain"))
    assert rows[0][1:3] == ["01 baseline oom", "02 mixed precision"]
    assert rows[2][:3] == ["bob", "1.25", "1.25"] and rows[4][:3] == ["dee", "0", ""]


def test_semicolons_and_tabs_part_columns_too(tmp_path):
    for mark in ";\t":
        text = MOODLE.replace(",", mark)
        assert list(export.read_roster(roster(tmp_path, text), "moodle")) == ["ada", "bob", "zed"]


@pytest.mark.parametrize(
    ("text", "say"),
    [
        ("", "has none"),
        ("Name,Email address\nAda,a@x.org\n", "needs a column 'folder'"),
        ("folder,Name\nada,Ada\n", "one of 'Email address', 'ID number', 'Username'"),
        ("folder,Email address\nada,a@x\nada,b@x\n", "line 3: ada is there twice"),
        ("folder,Email address\nada,\n", "line 2: ada has none of"),
        ("folder,Email address\n,a@x\n", "no line has anything"),
    ],
)
def test_a_roster_that_identifies_nobody_is_refused_by_line(tmp_path, text, say):
    with pytest.raises(UserError, match=say):
        export.read_roster(roster(tmp_path, text), "moodle")


def test_mistakes_are_said_in_one_sentence(tmp_path):
    graded.small_class(tmp_path)
    with pytest.raises(UserError, match="not one of moodle, canvas, plain"):
        export.write(tmp_path, "blackboard")
    with pytest.raises(UserError, match="needs --roster FILE"):
        export.write(tmp_path, "moodle")
    with pytest.raises(UserError, match="cannot read the roster"):
        export.write(tmp_path, "moodle", tmp_path / "missing.csv")
    (tmp_path / "latin.csv").write_bytes(b"folder,Email address\nad\xe9,x\n")
    with pytest.raises(UserError, match="not UTF-8"):
        export.write(tmp_path, "moodle", tmp_path / "latin.csv")
    with pytest.raises(UserError, match="no results"):
        export.write(tmp_path / "nowhere", "plain")


def test_the_command_exports_results_that_are_there_and_needs_something_to_do(tmp_path, capsys):
    from labkit import cli

    graded.small_class(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["grade", "--out", str(tmp_path), "--export", "plain", "--provisional"])
    said = capsys.readouterr()
    assert ended.value.code == 0 and "5 students, 1 lesson, 5 notebooks" in said.out and "export-plain.csv" in said.out
    assert {"scores.csv", "summary.html", "feedback", "export-plain.csv"} <= {p.name for p in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as ended:
        cli.main(["grade", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.err.count("\n") == 1 and "give the folder of submissions" in said.err
