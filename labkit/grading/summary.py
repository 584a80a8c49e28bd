"""The class at a glance: a page with figures and a short form for the terminal, made from the results alone.

What was missed most, which wrong answers are common (by what was found, and by value), how the points of each exercise
are spread, what was noticed about submissions, and how long things took.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import executing, show
from ..pages import page, rich, safe, table
from ..progress import label
from ..units import UserError, show_seconds
from . import intake, manual, noticed, outcomes
from .intake import LeftOut
from .outcomes import STATUSES, ExerciseResult, SubmissionResult

PAUSE_SECONDS = 1800.0  # a longer gap between two rows of a ledger is not counted as work
MOST = 8  # lines of each list
_WRONG = ("wrong", "partial", "error", "timeout", "crashed")
_VALUES = ("number", "choice")
_ANSWER = 60


@dataclass(frozen=True)
class Exercise:
    """One exercise over the class: the results of all who handed the lesson in."""

    lesson: str
    name: str
    results: tuple[ExerciseResult, ...]

    @property
    def shares(self) -> list[float]:
        """The part of the maximum that each student has, 0 to 1, written answers that nobody has read left out."""
        return [r.points / r.maximum for r in self.results if r.status != "needs-manual" and r.maximum]

    @property
    def mean(self) -> float | None:
        """The mean of `shares`; None while answers wait to be read (those that do not are the blank ones)."""
        return statistics.fmean(self.shares) if self.shares and not self.waiting else None

    @property
    def waiting(self) -> int:
        """How many written answers nobody has read yet."""
        return sum(r.status == "needs-manual" for r in self.results)

    @property
    def statuses(self) -> dict[str, int]:
        """How many results have each status that occurs, in the order of `STATUSES`."""
        count = Counter(r.status for r in self.results)
        return {status: count[status] for status in STATUSES if count[status]}

    def states(self) -> str:
        """``"4 graded, 10 wrong"``."""
        return ", ".join(f"{n} {status}" for status, n in self.statuses.items())

    def complaints(self) -> list[tuple[str, int]]:
        """What was found wrong, the most frequent first; what a reader wrote to one student is left out."""
        found = [r for r in self.results if r.status in _WRONG and r.message]
        ours = [r for r in found if not any(note.startswith(manual.MARKED) for note in r.notes)]
        return Counter(r.message for r in ours).most_common(MOST)

    def wrong_answers(self) -> list[tuple[str, int]]:
        """The wrong values of a number or a choice, the most frequent first; numbers alike in three digits are one."""
        wrong = [r for r in self.results if r.status in _WRONG and r.kind in _VALUES and r.answer]
        return Counter(_value(r) for r in wrong).most_common(MOST)


def write(out: Path) -> Path:
    """Write ``OUT/summary.html`` from the results in `out`, a reader's marks counted in; returns its path.

    Raises `UserError` when there are no results, or the page cannot be written.
    """
    target = out / "summary.html"
    try:
        executing.write_text(target, html(manual.apply(out, outcomes.load_all(out)), intake.load(out)))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def text(results: Sequence[SubmissionResult]) -> str:
    """The short form: one line for each exercise, then the exercises that were missed most."""
    rows = []
    for one in exercises(results):
        worst = one.complaints()
        shown = f"{worst[0][1]} x {worst[0][0]}" if worst else ""
        rows.append((one.lesson[:2], one.name, _percent(one.mean), one.states(), show_safely(shown)))
    body = show.text_table(("", "exercise", "mean", "statuses", "found most often"), rows, limit=48)
    return f"{_line(results)}\n{body}"


def exercises(results: Iterable[SubmissionResult]) -> list[Exercise]:
    """Every exercise over the class, in the order of lessons and of exercises in them."""
    found: dict[tuple[str, str], list[ExerciseResult]] = {}
    for result in sorted(results, key=lambda r: r.lesson):
        for one in (e for e in result.exercises if e.exercise):  # a file that is no lesson's has none
            found.setdefault((one.lesson, one.exercise), []).append(one)
    return [Exercise(lesson, name, tuple(those)) for (lesson, name), those in found.items()]


def worked_seconds(rows: Sequence[dict[str, Any]]) -> float | None:
    """How long a learner worked by the times in a ledger's rows, pauses over half an hour left out; None: unknown."""
    times = []
    for row in rows:
        try:
            times.append(datetime.strptime(str(row.get("at")), "%Y-%m-%dT%H:%M:%SZ").timestamp())
        except (ValueError, OverflowError):
            continue
    times.sort()
    gaps = [b - a for a, b in pairwise(times) if b - a <= PAUSE_SECONDS]
    return sum(gaps) if gaps else None


def html(results: Sequence[SubmissionResult], left_out: Sequence[LeftOut] = ()) -> str:
    """The page; `left_out` is what was not graded."""
    every = exercises(results)
    lessons = list(dict.fromkeys(e.lesson for e in every))
    sections = [("missed", "Missed most", _missed(every))]
    for lesson in lessons:
        sections.append((lesson, label(lesson), _lesson([e for e in every if e.lesson == lesson], lesson)))
    sections += [
        ("not-graded", "Not graded", noticed.left_out(left_out)),
        ("noticed", "Noticed about submissions", noticed.findings(results)),
        ("time", "Time", _times(results, lessons)),
        ("students", "Students", noticed.students(results, lessons, left_out)),
    ]
    facts = _facts(results)
    cells = "".join(f"<div><dt>{safe(k)}</dt><dd>{safe(v)}</dd></div>" for k, v in facts)
    head = f"<h1>{safe(_line(results))}</h1><dl class=facts>{cells}</dl>"
    foot = "<p>Made from the results that grading left; <code>scores.csv</code> beside this page has every row.</p>"
    return page("Class summary", "Class summary", head, sections, foot)


def _line(results: Sequence[SubmissionResult]) -> str:
    students, lessons = {r.student for r in results}, {r.lesson for r in results}
    return f"{_count(len(students), 'student')}, {_count(len(lessons), 'lesson')}, {_count(len(results), 'notebook')}"


def _facts(results: Sequence[SubmissionResult]) -> list[tuple[str, str]]:
    shares = [r.points / r.maximum for r in results if r.maximum]
    waiting = sum(e.status == "needs-manual" for r in results for e in r.exercises)
    return [
        ("Points of a notebook, median", _percent(statistics.median(shares) if shares else None)),
        ("Points of a notebook, all", f"{_percent(min(shares))} to {_percent(max(shares))}" if shares else "–"),
        ("Written answers to be read", str(waiting)),
        ("Grading took", show_seconds(sum(r.seconds for r in results))),
    ]


def _missed(every: Sequence[Exercise]) -> str:
    known = sorted((e for e in every if e.mean is not None and e.mean < 1), key=lambda e: e.mean or 0.0)[:MOST]
    rows, tones = [], []
    for one in known:
        worst = one.complaints()[:1]
        rows.append(
            (
                f"<b>{safe(one.lesson[:2])}</b> {safe(one.name)}",
                _percent(one.mean),
                safe(one.states()),
                f"{worst[0][1]} × {rich(worst[0][0])}" if worst else "–",
            )
        )
        tones.append("bad" if (one.mean or 0) < 0.5 else "half" if (one.mean or 0) < 0.8 else "good")
    return table(("Exercise", "Mean", "Statuses", "Found most often"), rows, tones) if rows else ""


def _lesson(those: Sequence[Exercise], lesson: str) -> str:
    from ..plots import canvas
    from . import drawing

    images = "".join(
        f"<figure>{canvas.img(ax)}<figcaption>{safe(caption)}</figcaption></figure>"
        for ax, caption in (
            (drawing.statuses(those, lesson), "What to see: the exercises with the shortest green bars."),
            (
                drawing.points(those, lesson),
                "What to see: two heaps, at nothing and at everything, mean one missing idea.",
            ),
        )
    )
    parts = [f"<div class=gallery>{images}</div>"]
    for one in those:
        complaints, values = one.complaints(), one.wrong_answers()
        if complaints or values:
            parts.append(f"<h3>{safe(one.name)}</h3>")
        if complaints:
            rows = [(str(n), rich(message)) for message, n in complaints]
            parts.append(table(("Students", "What was found"), rows, ["bad"] * len(rows)))
        if values:
            rows = [(str(n), f"<code>{safe(value)}</code>") for value, n in values]
            parts.append(table(("Students", "Wrong answer"), rows, ["bad"] * len(rows)))
    return "".join(parts)


def _times(results: Sequence[SubmissionResult], lessons: Sequence[str]) -> str:
    rows = []
    for lesson in lessons:
        those = [r for r in results if r.lesson == lesson]
        worked = [w for r in those if (w := worked_seconds(r.saved_rows)) is not None]
        rows.append(
            (
                safe(label(lesson)),
                show_seconds(statistics.median(r.seconds for r in those)),
                show_seconds(max(r.seconds for r in those)),
                f"{statistics.median(worked) / 60:.0f} min ({_count(len(worked), 'ledger')})" if worked else "–",
            )
        )
    head = ("Lesson", "Grading a notebook, median", "Longest", "Learners worked, median")
    note = "<p>Learners' time: from the first row of their ledger to the last, pauses over half an hour left out.</p>"
    return note + table(head, rows, ["plain"] * len(rows)) if rows else ""


def show_safely(line: str) -> str:
    """`line` without what would move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in line)


def _value(result: ExerciseResult) -> str:
    """An answer as it is counted: a number to three digits, a word as it is."""
    if result.kind == "number":
        try:
            return f"{float(result.answer):.3g}"
        except (ValueError, OverflowError):
            pass
    return show_safely(result.answer)[:_ANSWER]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}\u00a0%"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
