"""Feedback pages: what was handed in beside what came out again, everything escaped, no image that is none."""

from __future__ import annotations

import base64
import dataclasses
import json
import re

import graded
import pytest
from graded import LESSON, notebook, png, row, session

from labkit.grading import comparing, feedback, figures, outcomes
from labkit.units import UserError

GIB = 2**30


def pairs(saved, again) -> dict[tuple[str, str], comparing.Pair]:
    return {(p.kind, p.what): p for p in comparing.rows(saved, again, LESSON)}


def test_the_same_session_is_the_same_throughout_and_nothing_is_flagged():
    found = pairs(session(), session())
    assert {key: p.verdict for key, p in found.items()} == {
        ("memory", "baseline"): "same",
        ("time", "baseline"): "close",
        ("number", "loss"): "same",
        ("claim", "linear"): "same",
        ("check", "block_mib"): "same",
    }
    assert not any(p.flagged for p in found.values())


@pytest.mark.parametrize(
    ("saved", "again", "verdict"),
    [
        ({"peak": 3 * GIB + 512}, {}, "differs"),  # predicted twice for one card by one PyTorch: to the byte
        ({"peak": 3 * GIB + 512, "versions": {"torch": "2.9.0"}}, {}, "close"),
        ({"peak": 4 * GIB, "versions": {"torch": "2.9.0"}}, {}, "differs"),
        ({"peak": 4 * GIB, "card": "t4"}, {}, "not comparable"),
        ({"peak": int(3.1 * GIB), "source": "measured", "card": "Tesla T4"}, {}, "close"),
        ({"peak": 2 * GIB, "source": "measured", "card": "Tesla T4"}, {}, "differs"),
        ({"peak": 2**20, "source": "measured"}, {"peak": 18 * 2**20}, "close"),  # workspaces of cuBLAS
        ({"budget_bytes": GIB}, {}, "not comparable"),
    ],
)
def test_memory_is_held_to_the_byte_only_where_it_must_be(saved, again, verdict):
    assert pairs(session(**saved), session(**again))["memory", "baseline"].verdict == verdict


def test_times_are_compared_loosely_and_borrowed_ones_not_at_all():
    def verdict(seconds):
        return pairs(session(seconds=seconds), session())["time", "baseline"].verdict

    assert [verdict(s) for s in (0.02, 0.2, 0.5, 0.001)] == ["close", "close", "differs", "differs"]
    borrowed = session()
    borrowed[1]["timing"]["clock"] = "reference · NVIDIA H200"
    assert pairs(session(), borrowed)["time", "baseline"].verdict == "not comparable"


def test_out_of_memory_claims_and_checks_are_compared_by_their_words():
    again = session()
    again[1] |= {"status": "oom", "steady": None}
    again[3] |= {"verdict": "does not hold", "outcome": "does not hold"}
    again[4] |= {"status": "wrong", "points": 0}
    found = pairs(session(), again)
    assert found["memory", "baseline"].verdict == "differs" and found["memory", "baseline"].again == "oom"
    assert found["claim", "linear"].flagged
    assert (found["check", "block_mib"].saved, found["check", "block_mib"].again) == ("right, 1 of 1", "wrong, 0 of 1")
    again[3] |= {"outcome": "not measured here"}
    assert pairs(session(), again)["claim", "linear"].verdict == "not comparable"


def test_the_last_finished_session_counts_and_what_is_only_on_one_side_is_said():
    opened_again = [row("begin", session="s2"), row("fact", name="loss", value=9.0, session="s2")]
    found = pairs([*session(), *opened_again], session()[:3])
    assert found["number", "loss"].verdict == "same"
    assert found["claim", "linear"].verdict == "only handed in"
    assert pairs(session()[:3], session())["claim", "linear"].verdict == "only run again"
    assert pairs([], session())["claim", "linear"].verdict == "only run again"


def test_rows_that_say_anything_break_nothing():
    wild = [
        row("begin", machine=[], source={"a": 1}, card=None),
        row("report", name=None, status=7, steady="x", timing=[1]),
        row("report", name="r", status="ok", steady={"allocated_bytes": "many"}),
        row("report", name="r", status="ok", timing={"median_seconds": 10**400, "spread_seconds": 0, "repeats": 1}),
        row("fact", name=["x"], value=1e999, versions=None),
        row("fact", name="f", value=10**500),
        row("fact", value=1),
        row("claim", verdict=3),
        row("check", exercise=[], points="1", maximum=None, status={}),
        {"lesson": LESSON, "session": "s1"},
        {"lesson": LESSON},
    ]
    for saved, again in ((wild, session()), (session(), wild), (wild, wild)):
        for pair in comparing.rows(saved, again, LESSON):
            assert isinstance(pair.saved, str) and isinstance(pair.what, str)
        comparing.where(saved, LESSON)
        comparing.messages(saved, LESSON)


def figure(tmp_path, saved: list[str], again: list[str]) -> list[figures.FigurePair]:
    books = [notebook(tmp_path / f"{n}.ipynb", {"sweep": images}) for n, images in (("a", saved), ("b", again))]
    return figures.pairs(*books)


def test_figures_are_compared_as_they_look(tmp_path):
    assert figure(tmp_path, [png()], [png()])[0].verdict == "same"
    assert figure(tmp_path, [png(90)], [png(91)])[0].verdict == "same"  # other bytes, no visible difference
    assert figure(tmp_path, [png(split=20)], [png(split=21)])[0].verdict == "differs"  # 1 of 48 lines: 2.1 %
    assert figure(tmp_path, [png(height=96, split=20)], [png(height=96, split=21)])[0].verdict == "close"
    assert figure(tmp_path, [png()], [png(height=50)])[0].verdict == "differs"
    assert [p.verdict for p in figure(tmp_path, [png(), png()], [png()])] == ["same", "only handed in"]
    assert figure(tmp_path, [], [png()])[0].verdict == "only run again"
    assert figures.pairs(None, tmp_path / "missing.ipynb") == []


def test_what_only_calls_itself_an_image_is_left_out(tmp_path):
    cut = base64.b64encode(base64.b64decode(png())[:60]).decode()
    bad = [
        '"><script>alert(1)</script>',
        base64.b64encode(b"<svg onload=alert(1)>" * 9).decode(),
        png()[:-8] + '"onerror=x',
        base64.b64encode(base64.b64decode(png())[:16] + b"\x7f" * 40).decode(),  # 2 billion pixels wide
        png(width=2001, height=2000),  # small as a file, and slow to compare
        "A" * (figures.PNG_BYTES * 2),
        "",
    ]
    assert figure(tmp_path, bad, []) == []
    assert figure(tmp_path, [cut], [png()])[0].verdict == "differs"
    for strange in (
        {"cells": 3},
        {"cells": [{"outputs": [{"data": 3}]}]},
        {"cells": [{"outputs": 5}]},
        [],
        {"cells": [1]},
    ):
        (tmp_path / "x.ipynb").write_text(json.dumps(strange))
        assert figures.pairs(tmp_path / "x.ipynb", None) == []


def page(out, **changed) -> str:
    """The page of one student of the class, with a session and figures."""
    first = graded.small_class(out)[1]
    notebook(out / "nb" / "a.ipynb", {"sweep": [png(90)], "small": [png()]})
    notebook(out / "nb" / "b.ipynb", {"sweep": [png(10)], "small": [png()]})
    books = {"saved_notebook": "nb/a.ipynb", "regenerated_notebook": "nb/b.ipynb"}
    rows = {"saved_rows": tuple(session(peak=GIB)), "regenerated_rows": tuple(session())}
    outcomes.save(out, dataclasses.replace(first, **{**books, **rows, **changed}))
    feedback.write(out)
    return (out / "feedback" / "bob.html").read_text()


def test_the_page_says_points_status_message_and_what_differs(tmp_path):
    text = page(tmp_path)
    for say in (
        "1.25 of 6",
        "✗ not right",
        "off by a factor of 1024: which unit is asked for?",
        "◐ partly right",
        "A larger batch still fits.",
        "○ not answered",
        "cells were run out of order: graded top to bottom",
        "1.00 GiB",
        "3.00 GiB",
        "must be equal",
        "2 figures; 1 looks different when drawn again",
        "✗ <b>sweep</b>: differs",
        "<b>small</b>: the same",
    ):
        assert say in text, say
    assert text.count("data:image/png;base64,") == 3  # a figure that is the same is shown once
    assert "not yet" not in text and "run again: right" not in text


def test_there_is_a_page_for_each_student_and_written_answers_wait(tmp_path):
    graded.small_class(tmp_path)
    pages = feedback.write(tmp_path)
    assert [p.stem for p in pages] == ["ada", "bob", "cyd", "dee", "eve"]
    assert "1 written answer" in pages[0].read_text() and "2 of 2 so far" in pages[0].read_text()
    assert "✗ could not be read" in pages[4].read_text() and "the file is not JSON" in pages[4].read_text()


def test_a_notebook_that_was_not_run_again_has_no_comparison(tmp_path):
    text = page(tmp_path, regenerated_rows=(), regenerated_notebook="")
    assert "The notebook was not run again, so no numbers are compared" in text
    assert "only handed in" not in text and "<img" not in text and "run again from top to bottom" not in text
    assert "No ledger was handed in" in page(tmp_path, saved_rows=())


def test_a_page_of_somebody_who_has_no_result_any_more_goes(tmp_path):
    graded.small_class(tmp_path)
    feedback.write(tmp_path)
    outcomes.path(tmp_path, "eve", LESSON).unlink()
    assert "eve" not in [p.stem for p in feedback.write(tmp_path)]
    assert not (tmp_path / "feedback" / "eve.html").exists()


def test_a_file_that_is_no_lessons_has_one_line(tmp_path):
    none = outcomes.ExerciseResult("zed", "99_none", "", 0, 0, "unreadable", "names no lesson")
    outcomes.save(tmp_path, outcomes.SubmissionResult("zed", "99_none", "zed/x.ipynb", (none,)))
    assert "the whole file" in feedback.write(tmp_path)[0].read_text()


def test_a_check_that_says_something_else_when_run_again_is_shown_with_both(tmp_path):
    again = session()
    again[4] |= {"status": "wrong", "points": 0, "message": "too large."}
    text = page(tmp_path, regenerated_rows=tuple(again))
    assert "run again: wrong, 0 of 1: too large.<br><small>as handed in: right, 1 of 1" in text


def test_a_check_that_says_what_grading_found_is_not_said_twice(tmp_path):
    far = "off by a factor of 1024: which unit is asked for?"
    again = session()
    again[4] |= {"status": "wrong", "points": 0, "message": far}
    text = page(tmp_path, saved_rows=tuple(again), regenerated_rows=tuple(again))
    assert text.count(far) == 1 and "<span>the same</span>" in text


def test_figures_of_the_run_for_grading_alone_are_said_to_be_so(tmp_path):
    graded.small_class(tmp_path)
    text = page(tmp_path, saved_notebook="")
    assert "2 figures, all from the run for grading: the notebook was handed in without any" in text


def test_everything_a_learner_can_write_is_escaped(tmp_path):
    evil = '<script>alert("x")</script>\ud800'
    rows = session()
    rows[1] |= {"name": evil, "card": evil}
    rows[3] |= {"key": evil, "verdict": f"holds when {evil}", "measured": evil}
    rows[4] |= {"exercise": evil, "message": evil}
    bob = graded.exercise("bob", "block_mib", "wrong", 0, evil, answer=evil, notes=(evil,))
    book = notebook(tmp_path / "a.ipynb", {evil[:-1]: [png()]}, alt='"><script>x')
    one = graded.result(
        "bob",
        bob,
        findings=(outcomes.Finding("order", evil, evil), outcomes.Finding(evil, evil)),
        saved_rows=tuple(rows),
        regenerated_rows=tuple(session()),
        saved_notebook=book.name,
    )
    text = feedback.html(tmp_path, evil, [dataclasses.replace(one, file=evil)])
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    text.encode()  # what no encoding can write is gone
    assert not re.search(r"<[^>]*\son\w+=", text)


def test_a_page_has_room_for_so_many_figures_and_says_what_it_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(feedback, "FIGURE_BYTES", len(png(90)) * 2 + 4)
    assert "2 figures; 1 looks different when drawn again; 1 left out, the page would be too large" in page(tmp_path)


def test_nothing_graded_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no results"):
        feedback.write(tmp_path)
