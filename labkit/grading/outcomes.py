"""What grading found, as data: one `SubmissionResult` for each student and lesson, one JSON file each.

The files under ``OUT/results/<student>/<lesson>.json`` are what an interrupted grading goes on from, and what the
feedback pages, the class summary and the exports are made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import executing
from ..units import UserError

SCHEMA = 2  # of a result file; raised when a field changes its meaning
STATUSES = (
    "graded",  # full marks
    "partial",
    "wrong",
    "blank",  # untouched
    "error",  # the answer raised
    "timeout",
    "crashed",  # its process died before the check
    "unreadable",  # not a notebook, or another lesson's
    "tampered",  # a check, its metadata or an output was changed, or the answer does what no answer needs
    "needs-manual",  # a written answer; its points are provisional
)


@dataclass(frozen=True)
class ExerciseResult:
    """One exercise of one student: `points` out of `maximum`, one of `STATUSES`, and what the student is told.

    ``message`` gives neither the answer nor a hidden input away. ``kind`` is the kind of its check (``number``,
    ``choice``, ``code``, ``words``). ``answer`` is a short form of what was answered: the value, the word, the text;
    empty for code. ``notes`` are further observations, for student and instructor. ``seed`` is the seed of the hidden
    inputs, with which the score can be had again; None where there are none.
    """

    student: str
    lesson: str
    exercise: str
    points: float
    maximum: float
    status: str
    message: str
    notes: tuple[str, ...] = ()
    kind: str = ""
    answer: str = ""
    seed: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {', '.join(STATUSES)}")


@dataclass(frozen=True)
class Finding:
    """One thing that was noticed about a whole submission.

    ``kind``: ``unreadable``, ``renamed``, ``order`` (saved with its cells run out of order), ``version`` (made with
    another version of the course), ``tampered``, ``ledger`` (rows that cannot be right), ``run`` (what happened when
    the notebook was run again). ``cell`` is the id of the cell it is about, or empty.
    """

    kind: str
    text: str
    cell: str = ""


@dataclass(frozen=True)
class SubmissionResult:
    """Everything that grading found about one student's notebook of one lesson.

    Paths are relative to the folder of results (OUT); empty where there is no such file. ``saved_rows`` are the ledger
    rows of this lesson that were handed in, ``regenerated_rows`` those of the run in the sandbox. ``made_of`` has
    everything that decides the score, by the names in `keeping.NAMES`; it is empty when grading itself failed.
    ``folder`` is the folder of submissions.
    """

    student: str
    lesson: str
    file: str  # as handed in, relative to the folder of submissions
    exercises: tuple[ExerciseResult, ...]
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    saved_rows: tuple[dict[str, Any], ...] = ()
    regenerated_rows: tuple[dict[str, Any], ...] = ()
    saved_notebook: str = ""
    regenerated_notebook: str = ""
    made_of: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    schema: int = field(default=SCHEMA)

    @property
    def points(self) -> float:
        """The sum over the exercises; written answers count what they have so far."""
        return sum(e.points for e in self.exercises)

    @property
    def maximum(self) -> float:
        """What all exercises of the lesson are worth."""
        return sum(e.maximum for e in self.exercises)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> SubmissionResult:
        """The result in a row. Raises `ValueError` when the row is of another schema or lacks a field."""
        if not isinstance(row, dict) or row.get("schema") != SCHEMA:
            raise ValueError("not a result of this version")
        try:
            exercises = tuple(ExerciseResult(**{**e, "notes": tuple(e["notes"])}) for e in row["exercises"])
            findings = tuple(Finding(**f) for f in row["findings"])
            rows = {k: tuple(row[k]) for k in ("saved_rows", "regenerated_rows")}
            made_of = {str(k): str(v) for k, v in row["made_of"].items()}
            return cls(**{**row, "exercises": exercises, "findings": findings, "made_of": made_of, **rows})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a result of this version: {error}") from error


def path(out: Path, student: str, lesson: str) -> Path:
    """Where the result of a student's lesson lies."""
    return out / "results" / student / f"{lesson}.json"


def save(out: Path, result: SubmissionResult) -> Path:
    """Write a result so that a kill leaves the old file or the new one. Returns its path."""
    target = path(out, result.student, result.lesson)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.to_dict(), indent=1, ensure_ascii=False)
    executing.write_text(target, text.encode("utf-8", "replace").decode() + "\n")  # half a character is none
    return target


def load(file: Path) -> SubmissionResult | None:
    """The result in a file; None when there is none, or none of this version."""
    found = executing.read_json(file)
    try:
        return SubmissionResult.from_dict(found)
    except ValueError:
        return None


def load_all(out: Path) -> list[SubmissionResult]:
    """Every result under `out`, by student and lesson. Raises `UserError` when there is no such folder."""
    if not (out / "results").is_dir():
        raise UserError(f"no results in {out}: labkit grade SUBMISSIONS --out {out.name}")
    return list(_each(out))


def _each(out: Path) -> Iterator[SubmissionResult]:
    for file in sorted((out / "results").glob("*/*.json")):
        found = load(file)
        if found is not None:
            yield found
