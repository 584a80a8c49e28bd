"""The open lesson: what reaches the ledger, what is shown, and what happens without a lesson or a place to write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit as lab
from labkit import checks, lesson, machine, places, results, show, summary, verdicts
from labkit.results import Peaks, Report
from labkit.units import GiB, UserError


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[lesson.Lesson]:
    monkeypatch.setenv("LABKIT_RUN", str(tmp_path))
    made = lab.begin("01_baseline_oom", budget="6GiB")
    yield made
    lesson.close()


def rows(opened: lesson.Lesson, kind: str) -> list[dict[str, Any]]:
    return [row for row in opened.ledger.rows() if row["kind"] == kind]


def test_begin_says_where_numbers_come_from(opened: lesson.Lesson, capsys: pytest.CaptureFixture[str]) -> None:
    opened.show_line()
    line = capsys.readouterr().out
    assert line.startswith(f"labkit {lab.__version__}") and "6.00 GiB" in line and "\n" not in line.strip()
    assert ("numbers: measured" in line) == machine.has_gpu()
    begun = rows(opened, "begin")[0]
    assert begun["budget_bytes"] == opened.budget == 6 * GiB
    assert begun["source"] == ("measured" if machine.has_gpu() else "predicted")


def test_every_row_says_lesson_card_versions_method_and_schema(opened: lesson.Lesson) -> None:
    lab.guess("peak", 7, "How much?", unit="GiB")
    lab.answer("peak", measured=8)
    lab.claim("a", "text", said_by="papers")
    lab.check.number("bytes", 12, 12)
    results.publish(Report("x", "ok", "predicted", "h200", steady=Peaks(GiB, GiB, GiB)))
    lab.finish("Count.")
    found = opened.ledger.rows()
    assert [r["kind"] for r in found] == ["begin", "commit", "guess", "claim", "check", "report", "finish"]
    for row in found:
        assert row["lesson"] == "01_baseline_oom" and row["schema"] == results.SCHEMA and row["method"]
        assert row["card"] and row["versions"]["labkit"] and row["session"] == opened.session


def test_guess_then_answer_is_scored(opened: lesson.Lesson, capsys: pytest.CaptureFixture[str]) -> None:
    lab.guess("peak", 7.1, "With autocast?", unit="GiB")
    made = lab.answer("peak", measured=12.4, formula=12.5, source="measured")
    assert "your guess 7.1 GiB · formula 12.5 GiB · measured 12.4 GiB · off by 43 %" in capsys.readouterr().out
    assert not made.good and rows(opened, "guess")[0]["good"] is False


def test_a_guess_changed_after_the_answer_is_not_scored(opened: lesson.Lesson) -> None:
    lab.guess("peak", 7.1, "With autocast?", unit="GiB")
    lab.answer("peak", measured=12.4)
    assert lab.guess("peak", 12.4, "With autocast?", unit="GiB").late
    again = lab.answer("peak", measured=12.4)
    assert again.guess == 7.1 and not again.good


def test_running_a_guess_again_unchanged_is_not_late(opened: lesson.Lesson) -> None:
    lab.guess("peak", 12, "With autocast?", unit="GiB")
    lab.answer("peak", measured=12.4)
    assert not lab.guess("peak", 12, "With autocast?", unit="GiB").late
    assert lab.answer("peak", measured=12.4).good


def test_no_guess_runs_through(opened: lesson.Lesson, capsys: pytest.CaptureFixture[str]) -> None:
    lab.guess("peak", None, "With autocast?", unit="GiB")
    lab.answer("peak", measured=12.4, formula=12.5)
    lab.answer("never asked", measured=1.0)
    assert "no score" in capsys.readouterr().out
    assert all(r["good"] is None for r in rows(opened, "guess"))


def test_what_was_not_measured_has_no_source(opened: lesson.Lesson) -> None:
    assert lab.answer("peak", measured=None).source is None
    assert lab.answer("peak", measured=float("nan")).measured is None
    with pytest.raises(UserError, match="source 'guessed'"):
        lab.answer("peak", measured=1.0, source="guessed")


def test_a_verdict_comes_with_measurement_source_and_scope(opened: lesson.Lesson) -> None:
    lab.claim("linear", "memory grows linearly", said_by="blog posts")
    assert opened.claims["linear"].outcome == verdicts.OPEN
    lab.settle("linear", measured="exponent 0.97", verdict="holds when activations dominate")
    text, html = verdicts.table(list(opened.claims.values()))
    for part in ("memory grows linearly", "blog posts", "exponent 0.97", "holds when activations dominate", opened.sm):
        assert part in text and part in html
    assert rows(opened, "claim")[-1]["outcome"] == verdicts.DEPENDS


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [("holds", verdicts.HOLDS), ("holds when x > 2", verdicts.DEPENDS), ("does not hold", verdicts.FAILS),
     ("not measured here", verdicts.ELSEWHERE), ("Does not hold: 6 %", verdicts.FAILS), (None, verdicts.OPEN)],
)  # fmt: skip
def test_kinds_of_verdict(verdict: str | None, kind: str) -> None:
    assert verdicts.outcome(verdict) == kind


@pytest.mark.parametrize("verdict", ["true", "holds when", "", "it holds", "holdss"])
def test_a_verdict_that_is_none(verdict: str, opened: lesson.Lesson) -> None:
    lab.claim("a", "text", said_by="papers")
    with pytest.raises(UserError, match="not a verdict"):
        lab.settle("a", measured="1", verdict=verdict)


def test_a_verdict_cannot_come_from_nowhere(opened: lesson.Lesson) -> None:
    lab.claim("a", "text", said_by="papers")
    with pytest.raises(UserError, match="unknown claim 'b': a"):
        lab.settle("b", measured="1", verdict="holds")
    with pytest.raises(UserError, match="needs its source"):
        lab.settle("a", measured="1", verdict="holds", source="hearsay")
    lab.settle("a", measured="", verdict="not measured here")
    assert opened.claims["a"].source is None and opened.claims["a"].scope is None


def test_summary_of_verdicts() -> None:
    kinds = [verdicts.HOLDS, verdicts.HOLDS, verdicts.FAILS, verdicts.DEPENDS, verdicts.OPEN]
    assert verdicts.summary(kinds) == "2 hold, 1 depends, 1 does not, 1 open"
    assert verdicts.summary([]) == "–"


def test_reports_and_checks_reach_the_ledger_only_while_a_lesson_is_open(opened: lesson.Lesson) -> None:
    report = Report("x", "ok", "predicted", "h200", steady=Peaks(GiB, GiB, GiB))
    results.publish(report)
    lesson.close()
    results.publish(report)
    checks.number("n", 12, 12)
    assert len(rows(opened, "report")) == 1 and not rows(opened, "check")
    assert Report.from_dict(rows(opened, "report")[0]) == report


def test_beginning_again_listens_once(opened: lesson.Lesson) -> None:
    again = lab.begin("01_baseline_oom")
    results.publish(Report("x", "ok", "predicted", "h200"))
    assert len(rows(again, "report")) == 1
    assert summary.by_lesson(again.ledger.rows())["01_baseline_oom"].reports[0].name == "x"


def test_nan_in_a_report_does_not_break_the_ledger(opened: lesson.Lesson) -> None:
    results.publish(Report("x", "ok", "predicted", "h200", loss=float("nan")))
    assert rows(opened, "report")[0]["loss"] is None


def test_without_a_lesson_there_is_one_clear_sentence() -> None:
    lesson.close()
    for call in (lambda: lab.guess("a", 1, "?"), lab.claims, lab.finish, lab.calibration):
        with pytest.raises(UserError, match="no lesson is open"):
            call()


def test_a_ledger_that_cannot_be_written_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LABKIT_RUN", str(blocked / "below"))
    with pytest.raises(UserError, match="cannot write"):
        lab.begin("01_baseline_oom")
    with pytest.raises(UserError, match="no lesson is open"):
        lesson.current()


def test_finish_sums_up(opened: lesson.Lesson, capsys: pytest.CaptureFixture[str]) -> None:
    lab.guess("peak", 12, "?", unit="GiB")
    lab.answer("peak", measured=12.4)
    lab.check.number("bytes", 24, 12, points=2, mistakes={24: ("half", 0.5)})
    lab.check.words("why", ..., {})
    lab.check.words("how", "with all the words", {}, least=2)
    lab.finish("Count before you allocate.", next="02_mixed_precision")
    out = capsys.readouterr().out
    for part in (
        "1 of 1 guesses",
        "1 of 2 points",
        "why blank, how words found",
        "Count before",
        "02_mixed_precision.ipynb",
        f"{opened.folder.name}/ledger.jsonl",
    ):
        assert part in out
    assert str(opened.folder.parent) not in out
    end = rows(opened, "finish")[0]
    assert (end["points"], end["maximum"], end["checklist"]) == (1, 2, "Count before you allocate.")


def test_the_next_lesson_is_found_with_its_title(
    opened: lesson.Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    books = tmp_path / "notebooks"
    books.mkdir()
    for name in ("00_environment", "01_baseline_oom", "02_mixed_precision"):
        (books / f"{name}.ipynb").write_text(json.dumps({"metadata": {"labkit": {"title": "Half the bits"}}}))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    shown: list[str] = []
    monkeypatch.setattr(show, "emit", lambda text, html: shown.append(html))
    lab.finish()
    assert 'href="02_mixed_precision.ipynb"' in shown[-1] and "02 Half the bits" in shown[-1]


def test_the_next_lesson_is_known_before_the_notebooks_are_built(
    opened: lesson.Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lessons").mkdir()
    for name in ("01_baseline_oom.py", "02_mixed_precision.py", "notes.py"):
        (tmp_path / "lessons" / name).write_text("")
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    lab.finish()
    assert "02_mixed_precision.ipynb" in capsys.readouterr().out


def test_calibration_rows_are_the_latest_of_each_number(opened: lesson.Lesson) -> None:
    for value in (5, 12):
        lab.guess("peak", value, "?", unit="GiB")
        lab.answer("peak", measured=12.4)
    lab.guess("fits", True, "?")
    lab.answer("fits", measured=False)
    found = lab.calibration()
    assert [(r["name"], r["guess"]) for r in found] == [("peak", 5.0)]  # the first, which was not late


def test_budget_of_a_lesson(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LABKIT_RUN", str(tmp_path))
    monkeypatch.setenv("LABKIT_BUDGET", "3GiB")
    assert lab.begin("x", budget="6GiB").budget == 3 * GiB
    monkeypatch.delenv("LABKIT_BUDGET")
    small = machine.Machine("3", "Linux", "2", "12", "1", "12", "RTX 2060", (7, 5), 6 * GiB, 1)
    monkeypatch.setattr(machine, "here", lambda: small)
    made = lab.begin("x", budget="8GiB")
    assert made.budget == int(0.9 * 6 * GiB) and made.source == "measured" and made.sm == "sm_75"
    with pytest.raises(UserError, match="not a size"):
        lab.begin("x", budget="much")
    lesson.close()


def test_home_is_found_from_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lessons").mkdir()
    (tmp_path / "labkit").mkdir()
    (tmp_path / "labkit" / "__init__.py").write_text("")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert places.home() == tmp_path
    assert places.results_folder() == tmp_path / "runs" / "interactive"
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="names no folder"):
        places.home()


def test_what_functions_return_is_not_echoed(opened: lesson.Lesson) -> None:
    for made in (opened, lab.guess("a", 1, "?"), lab.answer("a", measured=1), lab.claim("k", "t", said_by="s")):
        assert made._ipython_display_() is None
