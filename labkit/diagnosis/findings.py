"""What a diagnosis says: causes with evidence, changes with their effects; as text, as JSON, in a notebook."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from .effects import Effect
from .matching import Evidence

STRONG, LIKELY = 1.5, 1.15  # weights of evidence; a rule fires at 1


@dataclass(frozen=True)
class Advice:
    """A change to make: a sentence, the code or switch, and its predicted effect where a recipe is known."""

    do: str
    code: str = ""
    effect: Effect | None = None


@dataclass(frozen=True)
class Cause:
    """A cause that the evidence points to: the rule's name and kind, the sentence, evidence and advice, best first."""

    name: str
    kind: str
    cause: str
    weight: float
    evidence: tuple[Evidence, ...]
    advice: tuple[Advice, ...]
    lesson: str = ""
    source: str = ""

    @property
    def confidence(self) -> str:
        """``strong``, ``likely`` or ``possible``, by the weight of the evidence."""
        return "strong" if self.weight >= STRONG else "likely" if self.weight >= LIKELY else "possible"


@dataclass(frozen=True)
class Diagnosis:
    """Causes, the most likely first; none where nothing that is known here was found. ``numbers`` are the bytes of an
    out-of-memory message, ``notes`` what else is worth saying."""

    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether a cause was found."""
        return bool(self.causes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a cause has its ``confidence``."""
        causes = [
            {**dataclasses.asdict(c), "rank": i, "confidence": c.confidence} for i, c in enumerate(self.causes, 1)
        ]
        return {"known": self.known, "causes": causes, "numbers": self.numbers, "notes": list(self.notes)}

    def to_json(self) -> str:
        """One document."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        lines: list[str] = []
        for rank, cause in enumerate(self.causes, 1):
            lines += [*_cause(rank, cause), ""]
        if not self.causes:
            lines.append("no cause that is known here")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines).rstrip()

    __repr__ = __str__


def _cause(rank: int, cause: Cause) -> list[str]:
    lines = [f"{rank}. {cause.cause}", f"   {cause.kind} · {cause.confidence} · {cause.name}"]
    told: list[str] = []
    for evidence in cause.evidence:
        if any(evidence.quote in quote for quote in told) or len(told) == 4:
            continue
        told.append(evidence.quote)
        where = f"line {evidence.line}: " if evidence.line else ""
        lines.append(f"   because  {where}{evidence.quote}")
    for advice in cause.advice:
        lines.append(f"   change   {advice.do}")
        lines += [f"            {line}" for line in advice.code.splitlines()]
        if advice.effect is not None:
            lines.append(f"            {advice.effect}")
    if cause.lesson:
        lines.append(f"   lesson   {cause.lesson}")
    return lines
