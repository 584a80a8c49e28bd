"""How long grading takes: made-up submissions of one lesson, in sandboxes, and how the time grows with their number.

    python bench/grading.py [--lesson 00] [--counts 10 20 40 60] [--jobs 1 2] [--whole 10] [--out bench/results]

Every fourth submission is right, untouched, wrong in one exercise, or raises in one. Each count is graded once with
each number of jobs, exercises only; ``--whole N`` grades N submissions with the whole notebook run again, too. Writes
``grading.md``. Needs bubblewrap, and a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from labkit import notebooks  # noqa: E402
from labkit.grading import grader, lessons, outcomes  # noqa: E402
from labkit.grading.lessons import Lesson  # noqa: E402


def submissions(lesson: Lesson, folder: Path, count: int) -> None:
    """Write `count` submissions, four kinds in turn."""
    cells = {c.id: c.source for c in notebooks.solved(notebooks.master(ROOT / "lessons" / f"{lesson.name}.py")).cells}
    right = {task.answer: cells[task.answer] for task in lesson.tasks}
    number = next(task for task in lesson.tasks if task.kind == "number")
    kinds: list[dict[str, str]] = [
        right,
        {},
        {**right, number.answer: f"{number.variable} = 1.0"},
        {**right, number.answer: f"{number.variable} = 1 / 0"},
    ]
    for student in range(count):
        made = copy.deepcopy(lesson.notebook)
        for cell in made.cells:
            cell.source = kinds[student % 4].get(cell.id, cell.source)
        target = folder / f"student{student:03d}" / f"{lesson.name}.ipynb"
        target.parent.mkdir(parents=True)
        target.write_text(notebooks.dumps(made), encoding="utf-8")


def timed(lesson: Lesson, count: int, jobs: int, whole: bool) -> dict[str, Any]:
    """Grade `count` submissions; seconds in all, of the median submission, and what came out."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch) / "in", Path(scratch) / "out"
        submissions(lesson, folder, count)
        options = grader.Options(jobs=jobs, exercises_only=not whole)
        load = os.getloadavg()[0]
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            code = grader.grade(folder, out, options=options, home=ROOT)
        seconds = time.perf_counter() - began
        results = outcomes.load_all(out)
    wrong = [r for r in results if r.points != _expected(lesson, int(r.student[-3:]))]
    if code or len(results) != count or wrong:
        said = [f"{r.student} {e.exercise}: {e.status}, {e.message}" for r in wrong for e in r.exercises]
        raise SystemExit("\n".join([f"graded wrongly: {len(results)} results, {len(wrong)} of them wrong", *said]))
    each = [r.seconds for r in results if any(e.status != "blank" for e in r.exercises)]
    middle = statistics.median(each)
    return {"count": count, "jobs": jobs, "whole": whole, "seconds": seconds, "median": middle, "load": load}


def _expected(lesson: Lesson, student: int) -> float:
    total = sum(task.maximum for task in lesson.tasks)
    number = next(task for task in lesson.tasks if task.kind == "number")
    return (total, 0.0, total - number.maximum, total - number.maximum)[student % 4]


def page(lesson: Lesson, rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = [
        "# How long grading takes",
        "",
        f"{lesson.name}, {len(lesson.tasks)} exercises, made-up submissions: a quarter each right, untouched, wrong in "
        f"one exercise, raising in one. {platform.machine()}, {os.cpu_count()} processors, Python "
        f"{platform.python_version()}, no GPU. Written by "
        "`python bench/grading.py`; every score was compared with what it should be.",
        "",
        "*median* is one submission that is not untouched, from its start to its result, while `jobs` run side by side."
        " The total includes starting, reading the lessons, the feedback pages and the summary. *load* is that of the"
        " machine when the row began, the row before it included.",
        "",
        "| what is run | submissions | jobs | total, s | s per submission | median, s | load |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        what = "exercises and the whole notebook" if r["whole"] else "exercises"
        each = r["seconds"] / r["count"]
        numbers = [f"{r['seconds']:.0f}", f"{each:.1f}", f"{r['median']:.1f}", f"{r['load']:.1f}"]
        lines.append(f"| {' | '.join([what, str(r['count']), str(r['jobs']), *numbers])} |")
    jobs = sorted({r["jobs"] for r in rows})
    grown = [line for whole in (False, True) for n in jobs if (line := growth(rows, whole, n))]
    return "\n".join([*lines, *(["", *grown] if grown else [])]) + "\n"


def growth(rows: list[dict[str, Any]], whole: bool, jobs: int) -> str:
    """How the total grows with the number of submissions: the straight line through the rows, and the worst distance
    from it. Nothing where there are fewer than three rows."""
    mine = [r for r in rows if (r["whole"], r["jobs"]) == (whole, jobs)]
    if len(mine) < 3:
        return ""
    counts, seconds = [r["count"] for r in mine], [r["seconds"] for r in mine]
    slope, start = statistics.linear_regression(counts, seconds)
    worst = max(abs(start + slope * n - s) / s for n, s in zip(counts, seconds, strict=True))
    what = "with the whole notebook" if whole else "exercises"
    return (
        f"Growth, {what}, {jobs} job{'' if jobs == 1 else 's'}: {start:.0f} s + {slope:.2f} s for each submission; "
        f"the rows lie within {100 * worst:.0f} % of that line."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--lesson", default="00")
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 20, 40, 60])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--whole", type=int, nargs="*", default=[10])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    given = parser.parse_args()
    lesson = lessons.read(lessons.find(ROOT / "lessons", given.lesson))
    rows = []
    for whole, counts in ((False, given.counts), (True, given.whole)):
        for count in counts:
            for jobs in given.jobs:
                rows.append(timed(lesson, count, jobs, whole))
                print(rows[-1], flush=True)
                given.out.mkdir(parents=True, exist_ok=True)
                (given.out / "grading.md").write_text(page(lesson, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
