"""labkit: times, measures, predicts and draws what a training step does to a small GPU.

Everything is reached as ``import labkit as lab`` and loads on first use, so that importing costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = (
    "checks",
    "course",
    "data",
    "machine",
    "memory",
    "models",
    "plots",
    "recipes",
    "report",
    "results",
    "timing",
    "training",
    "units",
)
_NAMES = {
    "measure": "measuring", "sweep": "measuring", "largest": "measuring",
    "budget": "machine", "device": "machine", "default_budget": "machine",
    "Recipe": "recipes", "plan": "planner",
    "Report": "results", "Ledger": "results", "Peaks": "results", "Timing": "results",
    "time_step": "timing",
    "diagnose": "diagnosis",
    "UserError": "units", "parse_size": "units", "show_bytes": "units", "show_seconds": "units",
    "begin": "lesson", "guess": "lesson", "answer": "lesson", "claim": "lesson", "settle": "lesson", "claims": "lesson",
    "finish": "lesson", "calibration": "lesson",
    "fact": "facts", "known": "facts", "reference": "facts", "table": "facts", "with_times": "facts",
}  # fmt: skip

__all__ = sorted([*_MODULES, *_NAMES, "check"])


def __getattr__(name: str) -> Any:
    if name == "check":  # lab.check.number(...) reads better than lab.checks.number(...)
        name = "checks"
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
