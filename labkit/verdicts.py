"""Claims of the field and what became of them: a verdict comes from this run, on this card, or the claim stays open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import show
from .results import SOURCES
from .units import UserError

HOLDS, DEPENDS, FAILS, ELSEWHERE, OPEN = "holds", "holds when", "does not hold", "not measured here", "open"
_TONES = {HOLDS: "good", DEPENDS: "half", FAILS: "bad", ELSEWHERE: "plain", OPEN: "plain"}
_SIGNS = {HOLDS: "✓", DEPENDS: "◐", FAILS: "✗", ELSEWHERE: "–", OPEN: "○"}
HEAD = ("claim", "said by", "measured here", "verdict", "card")


@dataclass(frozen=True)
class Claim(show.Silent):
    """One claim: what is said, by which kind of source; once settled what was measured, the verdict, and its ``scope``
    (the compute capability it holds for)."""

    key: str
    text: str
    said_by: str
    measured: str | None = None
    verdict: str | None = None
    source: str | None = None
    scope: str | None = None

    @property
    def outcome(self) -> str:
        """The kind of verdict: one of `HOLDS`, `DEPENDS`, `FAILS`, `ELSEWHERE`, `OPEN`."""
        return outcome(self.verdict)

    def row(self) -> dict[str, Any]:
        """The row for the ledger."""
        return {"kind": "claim", **asdict(self), "outcome": self.outcome}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Claim:
        """The claim in a ledger row."""
        return cls(**{k: row.get(k) for k in cls.__dataclass_fields__})  # type: ignore[arg-type]

    def cells(self) -> tuple[str, ...]:
        """What the table of claims shows, in the order of `HEAD`."""
        where = ""
        if self.outcome not in (OPEN, ELSEWHERE):
            where = f"{self.scope} · {self.source}" if self.source != "cpu" else "processor"
        return (self.text, self.said_by, self.measured or "", f"{_SIGNS[self.outcome]} {self.verdict or OPEN}", where)

    def tone(self) -> str:
        """The colour of its outcome, as `labkit.show.TONES` names it."""
        return _TONES[self.outcome]


def outcome(verdict: str | None) -> str:
    """Which kind of verdict a sentence is. Raises `UserError` when it is none."""
    if verdict is None:
        return OPEN
    words = verdict.strip().lower()
    if words.startswith(DEPENDS + " ") and len(words) > len(DEPENDS) + 3:
        return DEPENDS
    for kind in (HOLDS, FAILS, ELSEWHERE):
        if words == kind or words.startswith((kind + ":", kind + ",")):
            return kind
    raise UserError(
        f"not a verdict: {verdict!r}; write 'holds', 'holds when ...', 'does not hold' or 'not measured here'"
    )


def check_source(source: str | None, verdict: str) -> None:
    """Raises `UserError` when a verdict does not say where its number comes from."""
    if source not in SOURCES and outcome(verdict) != ELSEWHERE:
        raise UserError(f"a verdict needs its source, one of {', '.join(SOURCES)}; not {source!r}")


def table(claims: Sequence[Claim]) -> tuple[str, str]:
    """The table of claims, as plain text and as HTML."""
    rows = [claim.cells() for claim in claims]
    return show.text_table(HEAD, rows), show.table(HEAD, rows, [claim.tone() for claim in claims])


def summary(outcomes: Iterable[str]) -> str:
    """``2 hold, 1 does not, 1 depends``; a dash when there are no claims."""
    counts = dict.fromkeys(_TONES, 0)
    for kind in outcomes:
        counts[kind] += 1
    words = {
        HOLDS: ("holds", "hold"), FAILS: ("does not", "do not"), DEPENDS: ("depends", "depend"),
        ELSEWHERE: ("not measured", "not measured"), OPEN: ("open", "open"),
    }  # fmt: skip
    return ", ".join(f"{n} {words[kind][n > 1]}" for kind, n in counts.items() if n) or "–"
