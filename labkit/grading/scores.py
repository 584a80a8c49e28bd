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
            writer.writerow([e.student, e.lesson, e.exercise, f"{e.points:g}", f"{e.maximum:g}", e.status])
    target = out / "scores.csv"
    executing.write_text(target, text.getvalue())
    return target
