"""``scores.csv``: one line for each exercise of each student."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from .. import executing
from .outcomes import SubmissionResult

HEAD = ("student", "lesson", "exercise", "points", "maximum", "status")


def write(out: Path, results: Iterable[SubmissionResult]) -> Path:
    """Write ``OUT/scores.csv`` in one step and return its path."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    for result in sorted(results, key=lambda r: (r.student, r.lesson)):
        for e in result.exercises:
            names = (_text(e.student), _text(e.lesson), e.exercise)
            writer.writerow([*names, f"{e.points:g}", f"{e.maximum:g}", e.status])
    target = out / "scores.csv"
    executing.write_text(target, text.getvalue())
    return target


def _text(name: str) -> str:
    """A name that a spreadsheet takes for a name, not for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
