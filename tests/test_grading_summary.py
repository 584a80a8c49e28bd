"""The class summary: what is counted, what is grouped, and that a page and a terminal show it safely."""

from __future__ import annotations

import dataclasses

import graded
import pytest

from labkit import plots
from labkit.grading import drawing, intake, noticed, outcomes, summary
from labkit.grading.intake import LeftOut
from labkit.units import UserError


def exercise(out, name: str) -> summary.Exercise:
    return next(e for e in summary.exercises(graded.small_class(out)) if e.name == name)


def test_statuses_means_and_common_wrong_answers_are_counted(tmp_path):
    number = exercise(tmp_path, "block_mib")
    assert number.statuses == {"graded": 1, "wrong": 2, "blank": 1, "unreadable": 1}
    assert number.mean == pytest.approx(1 / 5)
    assert number.complaints() == [("off by a factor of 1024: which unit is asked for?", 2)]
    assert number.wrong_answers() == [("0.158", 2)]
    assert exercise(tmp_path, "cured").wrong_answers() == [("weights", 2)]
    assert exercise(tmp_path, "largest_batch").wrong_answers() == []  # code has no value to count
    assert exercise(tmp_path, "largest_batch").mean == pytest.approx((2 + 2 * 1.25) / 2 / 5)


def test_a_mean_waits_for_written_answers_and_then_counts_them(tmp_path):
    why = exercise(tmp_path, "why")
    assert why.waiting == 1 and why.mean is None and why.shares == [0, 0, 0, 0]
    read = [dataclasses.replace(r, status="partial") if r.status == "needs-manual" else r for r in why.results]
    assert dataclasses.replace(why, results=tuple(read)).mean == pytest.approx(1 / 5)


def test_numbers_alike_in_three_digits_are_one_wrong_answer():
    given = ("0.1582", "0.15817", "1.58", "twelve", "twelve")
    results = [graded.exercise(str(n), "block_mib", "wrong", 0, answer=a) for n, a in enumerate(given)]
    one = summary.Exercise(graded.LESSON, "block_mib", tuple(results))
    assert one.wrong_answers() == [("0.158", 2), ("twelve", 2), ("1.58", 1)]


def test_time_of_work_leaves_pauses_out():
    rows = [{"at": f"2026-03-01T{t}:00Z"} for t in ("10:20", "10:00", "10:05", "14:00", "14:10")]
    assert summary.worked_seconds([*rows, {"at": "soon"}, {}]) == (5 + 15 + 10) * 60
    assert summary.worked_seconds([rows[0]]) is None


def test_the_page_has_figures_findings_and_students(tmp_path):
    graded.small_class(tmp_path)
    page = summary.write(tmp_path).read_text()
    for say in (
        "5 students, 1 lesson, 5 notebooks",
        "1 graded, 2 wrong, 1 blank, 1 unreadable",
        "2 × off by a factor of 1024",
        "<code>0.158</code>",
        "2: bob, cyd",
        'href="feedback/ada.html"',
        "Bars: statuses of each exercise of 01 baseline oom. block_mib: 1 graded, 2 wrong, 1 blank, 1 unreadable.",
        "largest_batch: 2 at 0–10 %, 2 at 60–70 %, 1 at 90–100 %.",
    ):
        assert say in page, say
    assert page.count("<img") == 2


def test_whom_to_look_at_and_what_was_not_graded_stand_on_the_page(tmp_path):
    graded.small_class(tmp_path)
    left = [LeftOut("zoe", "zoe/<b>.pdf", "neither"), LeftOut("zoe", "", "empty"), LeftOut("", "x.ipynb", "loose")]
    intake.save(tmp_path, tmp_path / "in", left)
    page = summary.write(tmp_path).read_text()
    for say in (
        "<code>zoe/&lt;b&gt;.pdf</code>",
        '<a href="#not-graded">nothing graded</a>',
        "<span>1 to be read</span>",
        "<span>4 unreadable</span>",
        "<b>order</b>: saved with cells run out of order; graded from top to bottom",
        "<b>unreadable</b>: no notebook of this course",
    ):
        assert say in page, say
    right = summary.Exercise(graded.LESSON, "cured", (graded.exercise("ada", "cured", "graded", 1),))
    assert summary._missed([right]) == "", "what nobody missed is not missed"
    intake.save(tmp_path, tmp_path / "in", [])
    assert "nothing graded" not in summary.write(tmp_path).read_text()


def test_every_kind_of_finding_is_explained():
    from labkit.grading.feedback import _FINDINGS

    assert set(_FINDINGS) == set(noticed.KINDS)


def test_the_short_form_fits_a_terminal_and_moves_no_cursor(tmp_path):
    found = graded.small_class(tmp_path)
    evil = dataclasses.replace(found[1].exercises[0], message="\x1b[2Jgone\nnext", student="zed")
    text = summary.text([*found, dataclasses.replace(found[1], student="zed", exercises=(evil,) * 3)])
    assert "\x1b" not in text and len(text.splitlines()) == 3 + 4
    assert text.splitlines()[0] == "6 students, 1 lesson, 6 notebooks"
    assert max(map(len, text.splitlines())) < 130


def test_what_learners_wrote_is_escaped(tmp_path):
    evil = "<script>x</script>\ud800"
    bad = graded.exercise("bob", "block_mib", "wrong", 0, evil, answer=evil)
    finding = outcomes.Finding(evil, evil, evil)
    page = summary.html([dataclasses.replace(graded.result("bob", bad), student=evil, findings=(finding,))])
    assert "<script" not in page
    page.encode()


def test_every_status_has_a_look_and_words():
    from labkit.grading import feedback

    assert set(drawing._looks()) == set(outcomes.STATUSES) == set(feedback.WORDS)


def test_figures_say_what_they_show(tmp_path):
    those = summary.exercises(graded.small_class(tmp_path))
    assert "why: 3 blank, 1 unreadable, 1 needs-manual" in plots.alt(drawing.statuses(those, graded.LESSON))
    assert "why: 4 at 0–10 %" in plots.alt(drawing.points(those, graded.LESSON))
    assert plots.png(drawing.statuses(those, graded.LESSON)).startswith(b"\x89PNG")


def test_nothing_graded_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no results"):
        summary.write(tmp_path)
