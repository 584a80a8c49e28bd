"""A finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "OK", "WARN", "FAIL"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, whether it is right, what was found, and what to do when it is not."""

    name: str
    status: str  # OK, WARN, FAIL
    detail: str
    fix: str = ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to a length that fits a finding."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
