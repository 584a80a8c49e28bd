"""What one lesson came to, read from its rows in a ledger: peak, out-of-memory errors, guesses, claims, points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import guesses, verdicts
from .results import Report
from .units import UserError, show_bytes


@dataclass(frozen=True)
class Summary:
    """A lesson's last session in a ledger."""

    lesson: str
    reports: tuple[Report, ...] = ()
    answers: tuple[guesses.Answer, ...] = ()
    claims: tuple[verdicts.Claim, ...] = ()
    checks: tuple[dict[str, Any], ...] = ()
    checklist: str = ""
    begun: dict[str, Any] | None = None
    finished: bool = False
    unreadable: int = 0  # rows that are of a known kind and lack something

    @property
    def calibration(self) -> guesses.Calibration:
        """How good the guesses were."""
        return guesses.Calibration.of(self.answers)

    @property
    def peak_bytes(self) -> int | None:
        """The largest peak of an experiment that ran."""
        return max((r.peak_bytes for r in self.reports if r.peak_bytes is not None), default=None)

    @property
    def failures(self) -> int:
        """How many experiments ran out of memory."""
        return sum(r.status == "oom" for r in self.reports)

    def peak_text(self) -> str:
        """``7.62 GiB, 2 OOM``; a dash when nothing was measured."""
        parts = [] if self.peak_bytes is None else [show_bytes(self.peak_bytes)]
        return ", ".join([*parts, *([f"{self.failures} OOM"] if self.failures else [])]) or "–"

    def claims_text(self) -> str:
        """``2 hold, 1 does not``; a dash when there are no claims."""
        return verdicts.summary(c.outcome for c in self.claims)

    def points_text(self) -> str:
        """``3 of 5``, written answers left out; a dash when there are no exercises."""
        scored = [c for c in self.checks if not c.get("manual")]
        if not scored:
            return "–"
        return f"{sum(c['points'] for c in scored):g} of {sum(c['maximum'] for c in scored):g}"


def by_lesson(rows: Iterable[dict[str, Any]]) -> dict[str, Summary]:
    """The summary of the last session of every lesson in `rows`, by name in order. Rows of no session are left out."""
    sessions: dict[str, str] = {}
    kept = [row for row in rows if isinstance(row.get("lesson"), str) and isinstance(row.get("session"), str)]
    for row in kept:
        if row.get("kind") == "begin":
            sessions[row["lesson"]] = row["session"]
    return {
        lesson: _summary(lesson, [r for r in kept if r["lesson"] == lesson and r["session"] == session])
        for lesson, session in sorted(sessions.items())
    }


def _summary(lesson: str, rows: list[dict[str, Any]]) -> Summary:
    found: dict[str, dict[Any, Any]] = {kind: {} for kind in _READERS}
    unreadable = 0
    for number, row in enumerate(rows):
        kind = _SAME.get(str(row.get("kind")), str(row.get("kind")))
        if kind not in _READERS:
            continue
        try:
            key, value = _READERS[kind](row)
        except (KeyError, TypeError, ValueError, AttributeError, UserError):  # written by hand, or by another version
            unreadable += 1
            continue
        found[kind][number if key is None else key] = value
    return Summary(
        lesson,
        tuple(found["report"].values()),
        tuple(found["guess"].values()),
        tuple(found["claim"].values()),
        tuple(found["check"].values()),
        next(iter(found["finish"].values()), ""),
        next(iter(found["begin"].values()), None),
        bool(found["finish"]),
        unreadable,
    )


def _claim(row: dict[str, Any]) -> tuple[str, verdicts.Claim]:
    claim = verdicts.Claim.from_row(row)
    claim.cells()  # raises for a verdict that is none
    return row["key"], claim


def _check(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return row["exercise"], {**row, "points": float(row["points"]), "maximum": float(row["maximum"])}


# how a row of each kind is read: what it replaces when it comes again (None: nothing), and its value
_READERS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    "begin": lambda row: ("begin", row),
    "report": lambda row: (None, Report.from_dict(row)),
    "guess": lambda row: (row["name"], guesses.Answer.from_row(row)),
    "claim": _claim,
    "check": _check,
    "finish": lambda row: ("finish", str(row.get("checklist") or "")),
}
_SAME = {"choice": "guess"}
