"""GPU memory without a GPU: run an experiment on tensors without data, replay the allocator, say who held what.

`predict` takes any experiment; `predict_recipe` a `labkit.recipes.Recipe`, and `host_memory` says what that keeps on
the host; `labkit.memory.estimate` ranks many recipes quickly; `Tracer` is the dispatch mode behind both
and works on a real GPU too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..recipes import Recipe
    from ..results import Report
    from .attribution import difference
    from .ghosts import PredictionError
    from .host import HostMemory, host_memory
    from .prediction import predict, predict_recipe
    from .tracer import Tracer

__all__ = [
    "HostMemory", "PredictionError", "Tracer", "difference", "host_memory", "predict", "predict_recipe", "recipe_row",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "difference":
        from .attribution import difference

        return difference
    if name == "Tracer":
        from .tracer import Tracer

        return Tracer
    if name in ("predict", "predict_recipe"):
        from . import prediction

        return getattr(prediction, name)
    if name in ("HostMemory", "host_memory"):
        from . import host

        return getattr(host, name)
    if name == "PredictionError":
        from .ghosts import PredictionError

        return PredictionError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def recipe_row(recipe: Recipe, report: Report, seconds: float, host: HostMemory | None = None) -> dict[str, Any]:
    """The line that ``labkit predict --json`` prints for a recipe; byte counts are None where memory ran out. What
    it keeps on the host comes with it, if anything."""
    row: dict[str, Any] = {**recipe.to_dict(), "status": report.status}
    for prefix, peaks in (("", report.steady), ("first_step_", report.first)):
        for name in ("allocated_bytes", "requested_bytes", "reserved_bytes"):
            row[prefix + name] = getattr(peaks, name) if peaks is not None else None
    if host is not None and host.total_bytes:
        row |= {"host_pinned_bytes": host.pinned_bytes, "host_pageable_bytes": host.pageable_bytes}
    return {**row, "context_bytes": report.context_bytes, "seconds": round(seconds, 4)}
