"""What a lesson says about itself in its header, and the title cell made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .units import UserError

FIRST = "the course, installed (`make setup`), and that you have trained a model before"  # of a lesson without `needs`


@dataclass(frozen=True)
class FrontMatter:
    """What a lesson says about itself. ``minutes`` on a GPU and without one; ``fetch`` names what it needs in data/."""

    title: str
    question: str
    after: str
    minutes_gpu: float
    minutes_cpu: float
    memory: str
    needs: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Any, where: str) -> FrontMatter:
        """The front matter in a lesson's header. Raises `UserError` naming what is missing."""
        if not isinstance(found, dict):
            raise UserError(f"{where}: the header has no `jupyter: labkit:` block")
        missing = [k for k in ("title", "question", "after", "minutes", "memory") if k not in found]
        unknown = set(found) - {"title", "question", "after", "minutes", "memory", "needs", "fetch"}
        if missing or unknown:
            raise UserError(f"{where}: front matter lacks {missing} and does not know {sorted(unknown)}")
        minutes = found["minutes"]
        if not isinstance(minutes, dict) or set(minutes) != {"gpu", "cpu"}:
            raise UserError(f"{where}: minutes must be {{gpu: 2, cpu: 0.5}}, not {minutes!r}")
        return cls(
            str(found["title"]),
            str(found["question"]),
            str(found["after"]),
            float(minutes["gpu"]),
            float(minutes["cpu"]),
            str(found["memory"]),
            tuple(found.get("needs") or ()),
            tuple(found.get("fetch") or ()),
        )

    def cell(self, name: str) -> str:
        """The text of the title cell."""
        needs = ", ".join(f"[{n.replace('_', ' ')}]({n}.ipynb)" for n in self.needs) or FIRST
        lines = [
            f"# {name[:2]} · {self.title}",
            f"**{self.question}**",
            f"- After this lesson you can {self.after.rstrip('.')}.\n"
            f"- Running it takes {_minutes(self.minutes_gpu)} on a GPU, {_minutes(self.minutes_cpu)} without one; the"
            f" exercises take their own time. Memory: {self.memory}.\n"
            f"- Needs: {needs}.",
        ]
        return "\n\n".join(lines)


def _minutes(minutes: float) -> str:
    return f"{60 * minutes:.0f} s" if minutes < 1 else f"{minutes:g} min"
