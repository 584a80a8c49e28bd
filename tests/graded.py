"""What the tests of pages and exports share: results of a small class, as grading leaves them, without grading."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from labkit.grading import outcomes
from labkit.grading.outcomes import ExerciseResult, Finding, SubmissionResult

LESSON = "01_baseline_oom"
MAXIMA = {"block_mib": 1.0, "largest_batch": 2.0, "cured": 1.0, "why": 2.0}
KINDS = {"block_mib": "number", "largest_batch": "code", "cured": "choice", "why": "words"}


def png(grey: int = 90, width: int = 64, height: int = 48, split: int | None = None) -> str:
    """Base64 of a small PNG; from the row `split` on it is white."""
    split = height if split is None else split
    rows = b"".join(b"\0" + bytes([grey if y < split else 255] * width) for y in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    out = io.BytesIO(b"")
    out.write(b"\x89PNG\r\n\x1a\n")
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        out.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return base64.b64encode(out.getvalue()).decode()


def notebook(path: Path, figures: dict[str, list[str]], alt: str = "a figure") -> Path:
    """An executed notebook with these images in these cells."""
    cells: list[dict[str, Any]] = []
    for name, images in figures.items():
        outputs = [
            {
                "output_type": "display_data",
                "data": {"image/png": i},
                "metadata": {"image/png": {"alt": alt, "width": 480}},
            }
            for i in images
        ]
        cells.append({"cell_type": "code", "id": name, "metadata": {}, "source": "", "outputs": outputs})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))
    return path


def row(kind: str, lesson: str = LESSON, source: str = "predicted", **fields: Any) -> dict[str, Any]:
    """One ledger row as a lesson writes it."""
    about = {"schema": 1, "kind": kind, "lesson": lesson, "session": "s1", "at": "2026-03-01T10:00:00Z", "card": "h200"}
    return {**about, "source": source, "versions": {"torch": "2.11.0"}, **fields}


def session(peak: int = 3 * 2**30, seconds: float = 0.05, **fields: Any) -> list[dict[str, Any]]:
    """A whole session: a report with a time, a fact, a claim, a check."""
    peaks = {"allocated_bytes": peak, "requested_bytes": peak, "reserved_bytes": peak}
    timing = {"median_seconds": seconds, "spread_seconds": 0.001, "repeats": 9}
    return [
        row("begin", **fields),
        row("report", name="baseline", status="ok", steady=peaks, timing=timing, **fields),
        row("fact", name="loss", what=None, value=3.25, unit="", **fields),
        row("claim", key="linear", verdict="holds", measured="exponent 0.97", outcome="holds", **fields),
        row("check", exercise="block_mib", points=1, maximum=1, status="right", message="right", **fields),
        row("finish", **fields),
    ]


def exercise(student: str, name: str, status: str, points: float, message: str = "", **fields: Any) -> ExerciseResult:
    """One exercise of lesson 01."""
    given = {"kind": KINDS[name], **fields}
    return ExerciseResult(student, LESSON, name, points, MAXIMA[name], status, message, **given)


def result(student: str, *exercises: ExerciseResult, **fields: Any) -> SubmissionResult:
    """One student's lesson 01."""
    return SubmissionResult(student, LESSON, f"{student}/{LESSON}.ipynb", exercises, **fields)


def small_class(out: Path) -> list[SubmissionResult]:
    """Five students: one right, two with the same wrong number, one blank, one unreadable. Saved under `out`."""
    far = "off by a factor of 1024: which unit is asked for?"
    found = [
        result(
            "ada",
            exercise("ada", "block_mib", "graded", 1, "right", answer="162", seconds=0.1),
            exercise("ada", "largest_batch", "graded", 2, "right", seed=4),
            exercise("ada", "cured", "graded", 1, "right", answer="activations"),
            exercise(
                "ada", "why", "needs-manual", 2, "the words looked for are there", answer="Because one sequence …"
            ),
            seconds=21.0,
        ),
        *(
            result(
                name,
                exercise(name, "block_mib", "wrong", 0, far, answer="0.158"),
                exercise(name, "largest_batch", "partial", 1.25, "returns 7. A larger batch still fits.", seed=4),
                exercise(name, "cured", "wrong", 0, "not this one", answer="weights"),
                exercise(name, "why", "blank", 0, "write your answer between quotes"),
                findings=(Finding("order", "cells were run out of order: graded top to bottom"),),
                seconds=25.0,
            )
            for name in ("bob", "cyd")
        ),
        result("dee", *(exercise("dee", name, "blank", 0, "not answered") for name in MAXIMA), seconds=19.0),
        result(
            "eve",
            *(exercise("eve", name, "unreadable", 0, "the file is not JSON") for name in MAXIMA),
            findings=(Finding("unreadable", "the file is not JSON"),),
        ),
    ]
    for one in found:
        outcomes.save(out, one)
    return found
