"""`labkit submit`: what a learner is told about a notebook before it is handed in, and what the file then holds."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path

import pytest

from labkit import bundles, cli, submitting
from labkit.results import Ledger
from labkit.units import UserError

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
LESSON = "01_baseline_oom"


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A learner's folder: notebooks/, work/ with one lesson in it, and a ledger with two lessons' rows."""
    for folder in ("notebooks", "work"):
        (tmp_path / folder).mkdir()
    for name in (LESSON, "02_mixed_precision"):
        content = (NOTEBOOKS / f"{name}.ipynb").read_bytes()
        (tmp_path / "notebooks" / f"{name}.ipynb").write_bytes(content)
    save(tmp_path, answered(pristine()))
    ledger = Ledger(tmp_path / "runs" / "interactive" / "ledger.jsonl")
    for lesson in (LESSON, "02_mixed_precision"):
        ledger.append(
            {"kind": "begin", "lesson": lesson, "session": "s", "machine": {"card": "Tesla T4"}, "source": "m"}
        )
        ledger.append({"kind": "check", "lesson": lesson, "session": "s", "exercise": "block_mib"})
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.delenv("LABKIT_RUN", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pristine(name: str = LESSON) -> dict:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())


def save(home: Path, notebook: dict, name: str = LESSON) -> Path:
    path = home / "work" / f"{name}.ipynb"
    path.write_text(json.dumps(notebook))
    return path


def answered(notebook: dict) -> dict:
    """The notebook with every exercise answered and every cell run in order."""
    notebook = copy.deepcopy(notebook)
    for count, one in enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), start=1):
        one["execution_count"] = count
        if one["metadata"].get("nbgrader", {}).get("solution"):
            one["source"] = f"{one['metadata']['nbgrader']['grade_id']} = 1"
    return notebook


def cell(notebook: dict, name: str) -> dict:
    return next(c for c in notebook["cells"] if c["id"] == name)


def look(notebook: dict) -> submitting.Look:
    return submitting.inspect(notebook, pristine(), LESSON)


def test_a_whole_notebook_gives_no_word_and_a_file_with_its_own_rows(course):
    path, bundle, found = submitting.submit("01", student="Ada")
    assert (found.answered, found.problems, found.warnings) == (("block_mib", "largest_batch", "cured", "why"), (), ())
    assert path == course / "01_baseline_oom.labkit.zip" and bundles.read(path) == bundle
    assert bundle.notebook == (course / "work" / f"{LESSON}.ipynb").read_bytes()
    assert [row["lesson"] for row in bundle.rows] == [LESSON, LESSON] and bundle.student == "Ada"
    made = bundle.made_with
    assert made["card"] == "Tesla T4" and {"labkit", "python", "torch"} <= set(made["versions"])
    sha = hashlib.sha256((NOTEBOOKS / f"{LESSON}.ipynb").read_bytes()).hexdigest()
    assert made["course"] == {"notebook_sha256": sha, "copied_sha256": None}
    before = path.read_bytes()
    assert submitting.submit("01", student="Ada")[0].read_bytes() == before


def test_the_version_that_the_copy_was_made_from_goes_along(course):
    (course / "work" / ".copied.json").write_text(json.dumps({f"{LESSON}.ipynb": "abc"}))
    assert submitting.submit("01")[1].made_with["course"]["copied_sha256"] == "abc"


def test_blank_answers_are_named_also_behind_comments_and_blank_lines(course):
    notebook = answered(pristine())
    blank = cell(pristine(), "why")["source"]
    cell(notebook, "why")["source"] = ["# later\n", "\n", *(blank if isinstance(blank, list) else [blank])]
    assert look(notebook).blank == ("why",)
    assert set(look(pristine()).blank) == {"block_mib", "largest_batch", "cured", "why"}
    assert "blank     why" in look(notebook).text()


def test_a_lost_or_copied_exercise_is_a_problem_that_only_anyway_passes(course):
    for lost, say in (("why", "the cell of why is gone"), ("cured-check", "the check of cured is gone")):
        notebook = answered(pristine())
        notebook["cells"].remove(cell(notebook, lost))
        assert look(notebook).problems == (say,)
        save(course, notebook)
        with pytest.raises(UserError, match=f"{say}. Repair it"):
            submitting.submit("01")
        assert not list(course.glob("*.labkit.zip"))
        assert submitting.submit("01", anyway=True)[2].problems == (say,)
        (course / "01_baseline_oom.labkit.zip").unlink()
    notebook = answered(pristine())
    notebook["cells"].append({**cell(notebook, "why"), "id": "x"})
    assert look(notebook).problems == ("why is there 2 times",)


def test_changed_checks_lost_cells_and_answers_that_are_no_python_are_told(course):
    notebook = answered(pristine())
    cell(notebook, "cured-check")["source"] = "cured"
    cell(notebook, "largest_batch")["source"] = "%time\ndef largest_batch(:\n    pass"
    notebook["cells"].remove(cell(notebook, "sweeps"))
    assert look(notebook).warnings == (
        "largest_batch: is not Python yet (line 2: invalid syntax)",
        "the check of cured was changed; grading uses the lesson's own",
        "cells of the lesson are gone: sweeps",
    )
    assert look(notebook).problems == ()


def test_how_it_was_run_is_told(course):
    fresh = answered(pristine())
    for one in fresh["cells"]:
        one["execution_count"] = None
    assert "never run" in look(fresh).warnings[0]
    mixed = answered(pristine())
    cell(mixed, "baseline")["execution_count"] = 900
    cell(mixed, "finish")["execution_count"] = None
    cell(mixed, "oom")["outputs"] = [{"output_type": "error", "ename": "NameError"}]
    count = sum(c["cell_type"] == "code" for c in mixed["cells"])
    assert look(mixed).warnings == (
        f"1 of {count} code cells were not run",
        "cells were run out of order; grading runs them top to bottom",
        "the cell oom ended in an error: NameError",
    )


def test_another_lessons_notebook_is_refused_under_this_lessons_name(course):
    save(course, pristine("02_mixed_precision"))
    with pytest.raises(UserError, match=r"is not this lesson: inside it is 02_mixed_precision"):
        submitting.submit("01")
    stripped = pristine("02_mixed_precision")
    del stripped["metadata"]["labkit"]
    save(course, stripped)
    with pytest.raises(UserError, match="no exercise of 01_baseline_oom"):
        submitting.submit("01")


def test_a_path_is_taken_by_what_is_inside(course):
    path = course / "my copy.ipynb"
    path.write_text(json.dumps(answered(pristine())))
    assert submitting.submit(str(path), out=course / "x.labkit.zip")[1].lesson == LESSON
    path.write_text(json.dumps({**pristine(), "metadata": {"labkit": {"name": "../../x"}}}))
    with pytest.raises(UserError, match="none of the lessons"):
        submitting.submit(str(path))


@pytest.mark.parametrize(
    ("content", "say"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no notebook of format 4"),
        ('{"nbformat": 3, "cells": []}', "no notebook of format 4"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code"}]}', "damaged"),
        ('{"nbformat": 4, "cells": [1]}', "damaged"),
        ('{"nbformat": 4, "cells": []}', "no exercise of"),
        (
            '{"nbformat": 4, "metadata": 3, "cells": [{"cell_type": "code", "source": "", "metadata": []}]}',
            "no exercise",
        ),
    ],
)
def test_what_is_no_notebook_is_refused_in_one_sentence(course, content, say):
    (course / "work" / f"{LESSON}.ipynb").write_text(content)
    with pytest.raises(UserError, match=say):
        submitting.submit("01")


def test_a_notebook_that_is_too_large_is_refused_before_it_is_read(course):
    with (course / "work" / f"{LESSON}.ipynb").open("wb") as file:
        file.truncate(bundles.NOTEBOOK_BYTES + 1)
    with pytest.raises(UserError, match="clear the largest outputs"):
        submitting.submit("01")


def test_of_too_many_rows_the_newest_sessions_are_kept(course, monkeypatch):
    ledger = Ledger(course / "runs" / "interactive" / "ledger.jsonl")
    for session in ("t", "u"):
        ledger.append({"kind": "begin", "lesson": LESSON, "session": session, "pad": "x" * 600})
    monkeypatch.setattr(bundles, "LEDGER_BYTES", 800)
    _, bundle, found = submitting.submit("01")
    assert [row["session"] for row in bundle.rows] == ["u"]
    assert found.warnings == ("the oldest of your 4 ledger rows are left out: 1 are handed in",)


def test_rows_of_another_version_and_no_rows_are_told(course):
    ledger = Ledger(course / "runs" / "interactive" / "ledger.jsonl")
    for name in ("gone", ["odd"]):
        ledger.append({"kind": "check", "lesson": LESSON, "session": "s", "exercise": name})
    with ledger.path.open("a") as file:
        file.write('{"schema": 1, "lesson": "01_baseline_oom", "value": NaN}\n')
    assert submitting.submit("01")[2].warnings == (
        "ledger rows that are not written by labkit and are left out: 1",
        "the ledger speaks of exercises that this notebook does not have: ['odd'], gone",
    )
    ledger.path.unlink()
    assert "no ledger rows" in submitting.submit("01")[2].warnings[0]


def test_where_the_file_goes(course):
    (course / "box").mkdir()
    assert submitting.submit("01", out="box")[0] == Path("box/01_baseline_oom.labkit.zip")
    with pytest.raises(UserError, match=r"a file called ….labkit.zip"):
        submitting.submit("01", out="hand-in.zip")


def test_the_command_says_what_it_saw_and_refuses_in_one_line(course, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["submit", "01", "--student", "Ada"])
    said = capsys.readouterr()
    assert ended.value.code == 0 and not said.err
    assert "answered  block_mib, largest_batch, cured, why" in said.out and "2 ledger rows" in said.out
    (course / "work" / f"{LESSON}.ipynb").unlink()
    with pytest.raises(SystemExit) as ended:
        cli.main(["submit", "01"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.err.count("\n") == 1 and "make lab" in said.err
