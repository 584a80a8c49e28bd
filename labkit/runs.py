"""The state of a run of the course, as its folder's ``run.json`` holds it."""

from __future__ import annotations

import json
import math
import sys
import types
import typing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from . import __version__, executing


@dataclass(frozen=True)
class State:
    """One lesson of a run: ``status`` is ``pending``, ``running``, ``done`` or ``failed``. ``made_of`` identifies what
    was run where (notebook, package, machine); a lesson that is done is kept only while that stays the same."""

    name: str
    title: str
    made_of: str
    status: str = "pending"
    seconds: float | None = None
    cell: int | None = None
    cell_id: str | None = None
    error: str | None = None
    traceback: str | None = None

    def where(self) -> str:
        """``cell 14 (baseline-3): ZeroDivisionError: division by zero``."""
        place = f"cell {self.cell} ({self.cell_id})" if self.cell else "before its first cell"
        return f"{place}: {self.error}"


def sound(machine: Any) -> bool:
    """Whether a machine as a file describes it can be shown: its capability is a pair, its memory a number."""
    if not isinstance(machine, dict):
        return False
    capability, memory = machine.get("capability"), machine.get("memory_bytes")
    pair = isinstance(capability, (list, tuple)) and len(capability) == 2
    return (capability is None or pair) and (memory is None or type(memory) in (int, float))


def _well_formed(made: State | Run) -> bool:
    """Whether every field holds what its annotation says, as far as the page of a run relies on it."""
    kinds = typing.get_type_hints(type(made))
    for one in fields(made):
        kind = kinds[one.name]
        allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        plain = tuple(typing.get_origin(k) or k for k in allowed)
        value = getattr(made, one.name)
        whole_as_float = float in plain and isinstance(value, int)
        if isinstance(value, bool) or not (isinstance(value, plain) or whole_as_float):
            return False
    if isinstance(made, State):
        return made.seconds is None or math.isfinite(made.seconds)
    return sound(made.machine)


@dataclass(frozen=True)
class Run:
    """The state of a run, as ``run.json`` holds it."""

    started: str
    machine: dict[str, Any]
    line: str
    lessons: tuple[State, ...]
    finished: str | None = None
    labkit: str = __version__
    python: str = field(default_factory=lambda: sys.version.split()[0])

    @classmethod
    def load(cls, folder: Path) -> Run | None:
        """The run in a folder; None when there is none that can be read."""
        found = executing.read_json(folder / "run.json")
        try:
            states = tuple(State(**state) for state in found["lessons"])
            run = cls(**{**found, "lessons": states})
        except (TypeError, KeyError):
            return None
        return run if _well_formed(run) and all(map(_well_formed, states)) else None

    def save(self, folder: Path) -> None:
        """Write ``run.json``."""
        executing.write_text(folder / "run.json", json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    def changed(self, state: State) -> Run:
        """This run with the state of one lesson replaced."""
        return replace(self, lessons=tuple(state if s.name == state.name else s for s in self.lessons))
