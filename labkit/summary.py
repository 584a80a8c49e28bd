"""What one lesson came to, read from its rows in a ledger: peak, out-of-memory errors, guesses, claims, points."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import guesses, verdicts
from .results import Report
from .units import show_bytes


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
    answers = {r["name"]: guesses.Answer.from_row(r) for r in rows if r.get("kind") in ("guess", "choice")}
    claims = {r["key"]: verdicts.Claim.from_row(r) for r in rows if r.get("kind") == "claim"}
    checks = {r["exercise"]: r for r in rows if r.get("kind") == "check"}
    ends = [r for r in rows if r.get("kind") == "finish"]
    return Summary(
        lesson,
        tuple(Report.from_dict(r) for r in rows if r.get("kind") == "report"),
        tuple(answers.values()),
        tuple(claims.values()),
        tuple(checks.values()),
        str(ends[-1].get("checklist") or "") if ends else "",
        next((r for r in rows if r.get("kind") == "begin"), None),
        bool(ends),
    )
