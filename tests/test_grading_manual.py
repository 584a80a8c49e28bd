"""Written answers: what a reader sees in nbgrader's formgrader is harmless, and the marks come back and stay right."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from pathlib import Path

import graded
import pytest
from graded import LESSON, exercise, png, result

from labkit.grading import export, feedback, formgrader, manual, outcomes, summary
from labkit.grading.harmless import harmless
from labkit.units import UserError

PRISTINE = json.loads((Path(__file__).resolve().parents[1] / "notebooks" / f"{LESSON}.ipynb").read_text())


def handed_in(
    out: Path, student: str, why: str = "because", without: tuple[str, ...] = (), status: str = "needs-manual"
):
    """Save a result of this student with a notebook in which `why` is answered and the cells `without` are gone."""
    book = json.loads(json.dumps(PRISTINE))
    book["cells"] = [c for c in book["cells"] if c["id"] not in without]
    for cell in book["cells"]:
        if cell["id"] == "why":
            cell["source"] = f"why = {why!r}"
    path = out / "regenerated" / student / f"{LESSON}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(book))
    exercises = (
        exercise(student, "block_mib", "graded", 1),
        exercise(student, "largest_batch", "partial", 1.25, "A larger batch still fits."),
        exercise(student, "cured", "wrong", 0),
        exercise(student, "why", status, 1.5 if status == "needs-manual" else 0, "words found", answer=why),
    )
    outcomes.save(out, result(student, *exercises, regenerated_notebook=str(path.relative_to(out))))


@contextmanager
def gradebook(out: Path):
    """The gradebook as formgrader opens it."""
    with formgrader._gradebook(out / "nbgrader") as book:
        yield book


def give(
    out: Path, student: str, cell: str, points: float | None, comment: str = "", extra: float | None = None
) -> None:
    """What formgrader stores when somebody types a score and a comment."""
    with gradebook(out) as book:
        grade = book.find_grade(cell, LESSON, LESSON, student)
        if points is not None:
            grade.manual_score, grade.extra_credit, grade.needs_manual_grade = points, extra, False
        said = book.find_comment(cell.removesuffix("-check"), LESSON, LESSON, student)
        said.manual_comment = comment or None
        book.db.commit()


def of(out: Path, student: str, name: str):
    """One exercise with the marks in place."""
    found = next(r for r in manual.apply(out, outcomes.load_all(out)) if r.student == student)
    return next(e for e in found.exercises if e.exercise == name)


@pytest.mark.slow
def test_marks_come_back_and_stay_until_the_answer_is_another(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")  # nbgrader calls alembic by its bare name: labkit finds it all the same
    for student in ("ada", "bob"):
        handed_in(tmp_path, student)
    handed_in(tmp_path, "cyd", status="blank")
    done = manual.sync(tmp_path)
    assert (done.marked, done.waiting, done.changed) == (0, 2, ())
    assert "jupyter lab" in done.text()
    with gradebook(tmp_path) as book:
        waits = {
            (s.student.id, g.name)
            for s in book.assignment_submissions(LESSON)
            for n in s.notebooks
            for g in n.grades
            if g.needs_manual_grade
        }
        assert waits == {("ada", "why"), ("bob", "why")}
        assert book.find_grade("largest_batch-check", LESSON, LESSON, "ada").auto_score == 1.25
        assert book.find_submission(LESSON, "ada").score == 2.25  # nothing for what nobody has read

    give(tmp_path, "ada", "why", 1.5, "say what is alive")
    give(tmp_path, "bob", "why", 9, extra=0.5)
    give(tmp_path, "bob", "block_mib-check", -3)
    give(tmp_path, "bob", "cured-check", None, "look at the figure")
    done = manual.sync(tmp_path)
    assert (done.marked, done.waiting) == (3, 0)
    one = of(tmp_path, "ada", "why")
    assert (one.points, one.status, one.message) == (1.5, "partial", "say what is alive")
    assert (of(tmp_path, "bob", "why").points, of(tmp_path, "bob", "why").status) == (
        2.5,
        "graded",
    )  # 2, and extra credit
    assert of(tmp_path, "bob", "block_mib").points == 0
    assert "who gave 0 instead of 1" in of(tmp_path, "bob", "block_mib").message
    assert of(tmp_path, "bob", "cured").notes == ("a reader: look at the figure",)

    # the pages and the export count them in
    feedback.write(tmp_path)
    assert "say what is alive" in (tmp_path / "feedback" / "ada.html").read_text()
    assert "0 students" not in summary.write(tmp_path).read_text()
    assert export.write(tmp_path, "plain").waiting == ()

    # everything is graded again: the marks stay; ada hands in another answer, bob nothing any more
    handed_in(tmp_path, "ada", "another answer")
    (tmp_path / "results" / "bob" / f"{LESSON}.json").unlink()
    assert of(tmp_path, "ada", "why").status == "needs-manual"
    done = manual.sync(tmp_path)
    assert (done.waiting, done.changed) == (1, ("ada 01 why",))
    assert "to be read again: ada 01 why" in done.text()
    with gradebook(tmp_path) as book:
        grade = book.find_grade("why", LESSON, LESSON, "ada")
        assert (grade.manual_score, grade.needs_manual_grade) == (None, True)
        assert [s.student.id for s in book.assignment_submissions(LESSON)] == ["ada", "cyd"]
    assert not (tmp_path / "nbgrader" / "autograded" / "bob" / LESSON).exists()
    assert manual.sync(tmp_path).waiting == 1  # the old mark does not come back by itself

    # a gradebook that is lost is filled again from manual.json
    give(tmp_path, "ada", "why", 2)
    manual.sync(tmp_path)
    (tmp_path / "nbgrader" / "gradebook.db").unlink()
    assert manual.sync(tmp_path).waiting == 0
    with gradebook(tmp_path) as book:
        assert book.find_grade("why", LESSON, LESSON, "ada").manual_score == 2


@pytest.mark.slow
def test_a_gradebook_that_is_none_is_said_in_one_sentence(tmp_path):
    handed_in(tmp_path, "ada")
    (tmp_path / "nbgrader").mkdir()
    (tmp_path / "nbgrader" / "gradebook.db").write_text("no database at all " * 99)
    with pytest.raises(UserError, match="gradebook in .* cannot be used"):
        manual.sync(tmp_path)


@pytest.mark.slow
def test_a_deleted_answer_waits_for_nobody_and_what_is_unreadable_is_left_out(tmp_path):
    handed_in(tmp_path, "ada", without=("why", "cured-check"), status="blank")
    outcomes.save(tmp_path, result("eve", exercise("eve", "why", "unreadable", 0)))
    (tmp_path / "bad.ipynb").write_text("{")
    outcomes.save(tmp_path, result("dan", exercise("dan", "why", "needs-manual", 0), saved_notebook="bad.ipynb"))
    manual.sync(tmp_path)
    with gradebook(tmp_path) as book:
        assert [s.student.id for s in book.assignment_submissions(LESSON)] == ["ada"]
        assert not book.find_submission(LESSON, "ada").needs_manual_grade
        grade = book.find_grade("why", LESSON, LESSON, "ada")
        assert (grade.auto_score, grade.manual_score, grade.needs_manual_grade) == (0, None, False)


@pytest.mark.slow
def test_formgrader_lists_what_there_is_to_read_and_has_nothing_to_run(tmp_path, monkeypatch):
    from nbgrader.apps.api import NbGraderAPI
    from traitlets.config import PyFileConfigLoader

    handed_in(tmp_path, "ada")
    folder = manual.sync(tmp_path).folder
    monkeypatch.chdir(folder)
    config = PyFileConfigLoader(formgrader.CONFIG, str(folder)).load_config()
    assert config.HTMLExporter.sanitize_html is True
    assert (config.Execute.enabled, config.SaveAutoGrades.enabled) == (False, False)
    config.CourseDirectory.root = str(folder)
    api = NbGraderAPI(config=config)
    assert [(a["name"], a["num_submissions"], a["max_score"]) for a in api.get_assignments()] == [(LESSON, 1, 6)]
    assert [s["student"] for s in api.get_submissions(LESSON)] == ["ada"]
    assert not list((folder / "submitted").rglob("*.ipynb"))
    assert "BEGIN SOLUTION" in (folder / "source" / LESSON / f"{LESSON}.ipynb").read_text()
    one = api.get_notebook_submissions(LESSON, LESSON)
    assert [(n["student"], n["needs_manual_grade"]) for n in one] == [("ada", True)]


def test_only_the_lessons_own_prose_text_and_sound_images_reach_a_readers_browser():
    script = "<script>alert(1)</script><b>bold</b>"
    given = next(c for c in PRISTINE["cells"] if c["cell_type"] == "markdown")
    why = next(c for c in PRISTINE["cells"] if c["id"] == "why")
    outputs = [
        {"output_type": "display_data", "data": {"text/html": script, "application/javascript": "alert(1)"}},
        {"output_type": "display_data", "data": {"image/svg+xml": "<svg onload=alert(1)>", "text/plain": "plain"}},
        {"output_type": "display_data", "data": {"image/png": '"><script>'}, "metadata": {"image/png": {"width": '"'}}},
        {"output_type": "display_data", "data": {"image/png": png()}, "metadata": {"image/png": {"width": '"><x'}}},
        {"output_type": "error", "ename": "E", "evalue": "v", "traceback": ["\x1b[31mred\x1b[0m"]},
        {"output_type": "stream", "text": ["a\n", "b\n"]},
        {"output_type": "stream", "text": "x" * 30_000},
        "nonsense",
    ]
    evil = {"nbgrader": {"grade_id": "why", "points": '"><script>', "solution": True}, "tags": ["<x>"]}
    learner = [
        given,
        {"cell_type": "markdown", "id": given["id"], "source": f"{script} ```x```", "attachments": {"a": 1}},
        {"cell_type": "raw", "id": "r", "source": script, "metadata": {"raw_mimetype": "text/html"}},
        {
            "cell_type": "code",
            "id": "why",
            "source": ["why = ", "1"],
            "metadata": evil,
            "outputs": outputs,
            "execution_count": "<x>",
        },
        {"cell_type": "code", "id": "why2", "source": "2", "metadata": evil, "outputs": 7, "execution_count": True},
    ]
    made = harmless({"cells": learner, "metadata": {"x": script}}, PRISTINE)
    first, mine, raw, answer, copied = made["cells"]
    text = given["source"]
    assert first["source"] == ("".join(text) if isinstance(text, list) else text)
    assert mine["source"] == f"``````text\n{script} ```x```\n``````" and "attachments" not in mine
    assert raw == {"id": "cell-2", "metadata": {}, "cell_type": "markdown", "source": f"```text\n{script}\n```"}
    assert answer["metadata"] == why["metadata"] and answer["source"] == "why = 1" and answer["execution_count"] is None
    assert (copied["metadata"], copied["execution_count"], copied["outputs"]) == ({}, None, [])
    assert [o.get("text") or o["data"] for o in answer["outputs"]] == [
        "alert(1)bold\n",
        "plain\n",
        {"image/png": png()},
        "red\n",
        "a\nb\n",
        "x" * 20_000 + "\n… (10000 more characters)\n",
    ]
    assert made["metadata"] == PRISTINE["metadata"]
    shown = json.dumps([c["metadata"] for c in made["cells"]] + [c.get("outputs") for c in made["cells"]])
    assert "<" not in shown


def test_a_long_written_answer_is_shown_in_lines_that_fit():
    book = json.loads(json.dumps(PRISTINE))
    for cell in book["cells"]:
        if cell["id"] in ("why", "block_mib"):
            cell["source"] = f"{cell['id']} = {'a word ' * 40!r}"
    shown = {c["metadata"].get("nbgrader", {}).get("grade_id"): c for c in harmless(book, PRISTINE)["cells"]}
    lines = shown["why"]["outputs"][0]["text"].splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 74 and " ".join(lines).count("a word") == 40
    assert shown["block_mib"]["outputs"] == [] and shown["why"]["source"].count("\n") == 0


def test_what_is_shown_is_a_notebook():
    import nbformat

    nbformat.validate(harmless(PRISTINE, PRISTINE), version=4)


def test_marks_that_cannot_be_read_are_not_passed_over_in_silence(tmp_path):
    graded.small_class(tmp_path)
    assert manual.load(tmp_path) == []
    for bad in ("", "[]", '{"schema": 9, "marks": []}', '{"schema": 1, "marks": [{"student": "a"}]}'):
        (tmp_path / "manual.json").write_text(bad)
        with pytest.raises(UserError, match="is damaged"):
            manual.apply(tmp_path, outcomes.load_all(tmp_path))


def test_a_mark_for_another_answer_or_another_student_changes_nothing(tmp_path):
    handed_in(tmp_path, "ada")
    digest = formgrader.answers(tmp_path, outcomes.load_all(tmp_path)[0])["why"]
    for student, answer, points in (("ada", "other", 1.5), ("bob", digest, 1.5), ("ada", digest, 2)):
        manual.save(tmp_path, [formgrader.Mark(student, LESSON, "why", 2, "", answer)])
        assert of(tmp_path, "ada", "why").points == points
    assert dataclasses.asdict(manual.load(tmp_path)[0])["points"] == 2
