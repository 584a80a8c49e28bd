"""Which recipe fits a card and is fastest, and why: `plan`.

candidates -> search (counting and roofline for time, room for memory) -> explanation -> text, picture, JSON, script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .planning import Plan


def plan(model: str = "gpt2", **asked: Any) -> Plan:
    """The recipes that train `model` on a card, the fastest first; see `labkit.planner.planning.plan`."""
    from . import planning

    return planning.plan(model, **asked)
