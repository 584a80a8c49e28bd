"""`labkit doctor`: what is right and wrong with this machine, and what to do about it.

Every check is a small function that returns a `Check`. No GPU is a warning that says what will be different; what
would silently waste a GPU that is there (a driver too old, a CPU build of torch) blocks.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable

from ..units import UserError
from . import card, environment, host, software, wiring
from .check import FAIL, OK, WARN, Check, first_line

CHECKS: tuple[Callable[[], Check | None], ...] = (
    environment.python, environment.isolation, environment.packages,
    card.torch_build, card.driver, card.usable, card.dtypes, card.memory, wiring.bus, wiring.spill,
    software.compiler, software.bitsandbytes, software.optional,
    environment.kernel, host.memory, host.shared_memory, host.disk, host.caches, host.models,
)  # fmt: skip


_NEED_TORCH = (card.__name__, wiring.__name__, software.__name__)


def examine() -> list[Check]:
    """All checks, in order. A check that breaks is a finding itself, so that one surprise does not hide the rest."""
    found: list[Check] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns about a driver is a finding here
        for check in CHECKS:
            if check.__module__ in _NEED_TORCH and any(c.name == "torch" and c.status == FAIL for c in found):
                continue  # nothing can be said about the card without torch
            name = check.__name__.replace("_", " ")
            try:
                result = check()
            except UserError as error:  # a setting such as LABKIT_CARD that cannot be read
                result = Check(name, FAIL, str(error))
            except ModuleNotFoundError as error:
                result = Check(name, FAIL, f"the package {error.name} is missing", "make setup")
            except Exception as error:
                result = Check(name, WARN, f"could not be looked at ({type(error).__name__}: {first_line(error)})")
            if result is not None:
                found.append(result)
    return found


def to_text(checks: list[Check]) -> str:
    """One line a finding, with what to do under it, and a closing line."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:4s}  {check.name:{width}s}  {check.detail}")
        if check.fix:
            lines.append(f"      {'':{width}s}  -> {check.fix}")
    count = {status: sum(check.status == status for check in checks) for status in (OK, WARN, FAIL)}
    verdict = "something blocks the course" if count[FAIL] else "ready"
    lines.append(f"{verdict}: {count[OK]} fine, {count[WARN]} to know, {count[FAIL]} blocking")
    return "\n".join(lines)


def to_json(checks: list[Check]) -> str:
    """One JSON document: ``ok``, and ``checks`` with name, status, detail and fix."""
    rows = [dataclasses.asdict(check) for check in checks]
    return json.dumps(
        {"ok": all(check.status != FAIL for check in checks), "checks": rows}, indent=1, ensure_ascii=False
    )
