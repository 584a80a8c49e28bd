"""The ledger rows that a learner handed in beside those that the same notebook writes when it is run again.

Memory that was predicted for the same card by the same PyTorch must come out equal to the byte. What a card measured is
held against the prediction with a tolerance, times only loosely: they belong to the machine. Nothing here decides a
score; a difference is something to look at. Everything that is read was written by a learner's process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import show, summary, verdicts
from ..units import GiB, KiB, MiB, show_bytes, show_seconds
from .outcomes import Finding

SAME, CLOSE, DIFFERS = "same", "close", "differs"
ONLY_SAVED, ONLY_AGAIN, APART = "only handed in", "only run again", "not comparable"
MEASURED_WITHIN = 0.05  # a prediction beside a card's own number; the worst of `reserved` in bench/memory.py is 4.4 %
MEASURED_SLACK = 66 * MiB  # the workspaces of cuBLAS on an H200: a small experiment may hold them or not
NUMBER_WITHIN = 0.05
TIME_FACTOR = 5.0  # two machines, or two moments of one
_TIME_UNITS = {"s", "ms", "us", "µs", "min", "tokens/s", "it/s", "GB/s", "GiB/s", "TFLOP/s", "FLOP/s", "×", "x"}
_MEMORY_UNITS = {"bytes": 1, "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_LONGEST = 160
BAD_ROW = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, ArithmeticError)


@dataclass(frozen=True)
class Pair:
    """One number, word or verdict as handed in and as run again (each as text), and how they compare.

    ``verdict`` is ``same``, ``close``, ``differs``, ``only handed in``, ``only run again`` or ``not comparable``;
    ``why`` says in a few words what it rests on.
    """

    kind: str  # memory, time, number, claim, check
    what: str
    saved: str
    again: str
    verdict: str
    why: str = ""

    @property
    def flagged(self) -> bool:
        """Whether this is a difference that somebody should look at."""
        return self.verdict == DIFFERS


@dataclass(frozen=True)
class _Entry:
    """One comparable thing of a session: its kind, its value (memory in bytes), its text, and where it comes from."""

    kind: str
    value: Any
    shown: str
    source: str = ""
    card: str = ""
    torch: str = ""
    budget: Any = None


def rows(saved: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]], lesson: str) -> list[Pair]:
    """The last whole session of `lesson` in two ledgers, entry by entry, in the order of the lesson."""
    before, after = _entries(saved, lesson), _entries(again, lesson)
    found = []
    for key in [*after, *(k for k in before if k not in after)]:
        one, other = before.get(key), after.get(key)
        entry = one or other
        assert entry is not None
        verdict, why = _judge(one, other) if one and other else (ONLY_SAVED if one else ONLY_AGAIN, "")
        what = key[1] if len(key[1]) <= _LONGEST else key[1][: _LONGEST - 1] + "…"
        found.append(Pair(entry.kind, what, one.shown if one else "–", other.shown if other else "–", verdict, why))
    return found


def messages(rows_: Sequence[dict[str, Any]], lesson: str) -> dict[str, str]:
    """What the visible checks said in a ledger's last whole session, by exercise."""
    session = _session(rows_, lesson)
    return {str(r.get("exercise")): str(r.get("message") or "")[:400] for r in session if r.get("kind") == "check"}


def where(rows_: Sequence[dict[str, Any]], lesson: str) -> str:
    """Where the numbers of a ledger's last whole session come from: ``"predicted for h200, torch 2.11.0"``."""
    begin = next((r for r in _session(rows_, lesson) if r.get("kind") == "begin"), None)
    if begin is None:
        return ""
    verb = "measured on" if begin.get("source") == "measured" else "predicted for"
    return f"{verb} {str(begin.get('card'))[:60]}, torch {_torch(begin)[:30] or '?'}"


def ledger_findings(
    saved: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]], lesson: str
) -> tuple[Finding, ...]:
    """What in a handed-in ledger cannot come from this notebook: memory that was predicted twice for the same card by
    the same PyTorch, with two results."""
    pairs = rows(saved, again, lesson) if saved else []
    wrong = [p for p in pairs if p.flagged and p.kind == "memory" and "must be equal" in p.why]
    return tuple(
        Finding("ledger", f"{p.what}: the ledger says {p.saved}, running the notebook gives {p.again}")
        for p in wrong[:5]
    )


def _judge(one: _Entry, other: _Entry) -> tuple[str, str]:
    """How what was handed in compares with what came out again, and why."""
    if one.kind == "claim" and one.value != other.value and verdicts.ELSEWHERE in (one.value, other.value):
        return APART, "one of them needs a card"
    if one.kind in ("claim", "check"):
        return (SAME, "") if one.value == other.value else (DIFFERS, "")
    if one.budget != other.budget:
        return APART, "another budget"
    if isinstance(one.value, str) or isinstance(other.value, str):
        same_card = one.card == other.card
        if one.value == other.value:
            return SAME, ""
        return (DIFFERS, "") if same_card else (APART, "another card")
    ratio = _ratio(one.value, other.value)
    if one.kind == "time":
        if "reference" in (one.source, other.source) and one.source != other.source:
            return APART, "one is borrowed from a reference row"
        return (CLOSE, "") if 1 / TIME_FACTOR <= ratio <= TIME_FACTOR else (DIFFERS, f"more than {TIME_FACTOR:g} times")
    if one.value == other.value:
        return SAME, ""
    if one.source == other.source == "predicted":
        if one.card != other.card:
            return APART, "predicted for another card"
        if one.torch == other.torch:
            return DIFFERS, "predicted for the same card by the same PyTorch: must be equal"
        return _within(ratio, MEASURED_WITHIN, "predicted by another PyTorch")
    if one.kind == "memory":
        why = f"{one.source} beside {other.source}"
        return (CLOSE, why) if abs(one.value - other.value) <= MEASURED_SLACK else _within(ratio, MEASURED_WITHIN, why)
    if one.source != other.source or one.card != other.card:
        return APART, "from another machine"
    return _within(ratio, NUMBER_WITHIN, "")


def _within(ratio: float, share: float, why: str) -> tuple[str, str]:
    return (CLOSE if abs(ratio - 1) <= share else DIFFERS), why


def _ratio(one: float, other: float) -> float:
    if one == other:
        return 1.0
    return one / other if other else math.inf


def _session(rows_: Sequence[dict[str, Any]], lesson: str) -> list[dict[str, Any]]:
    """The rows of the last session that was finished, or of the last one where none was."""
    mine = [r for r in rows_ if r.get("lesson") == lesson and isinstance(r.get("session"), str)]
    begun = list(dict.fromkeys(r["session"] for r in mine if r.get("kind") == "begin"))
    done = {r["session"] for r in mine if r.get("kind") == "finish"}
    chosen = next((s for s in reversed(begun) if s in done), begun[-1] if begun else None)
    return [r for r in mine if r["session"] == chosen]


def _entries(rows_: Sequence[dict[str, Any]], lesson: str) -> dict[tuple[str, str], _Entry]:
    """The comparable entries of a ledger's last whole session. A row that cannot be read is left out."""
    session = _session(rows_, lesson)
    found: dict[tuple[str, str], _Entry] = {}
    for row in session:
        try:
            for what, entry in _of_row(row):
                found[entry.kind, what] = entry
        except BAD_ROW:
            continue
    return found


def _of_row(row: dict[str, Any]) -> Iterator[tuple[str, _Entry]]:
    kind = str(row.get("kind"))
    if kind == "report":
        yield from _of_report(row)
    elif kind in ("fact", "guess", "choice"):
        value = row["value"] if kind == "fact" else row["measured"]
        what = f"{row['name']}: {row['what']}" if row.get("what") else str(row["name"])
        unit = str(row.get("unit") or "")
        known = _number(value)
        if known is None and not isinstance(value, str):
            return
        shown = show.number(known, unit) if known is not None else str(value)[:_LONGEST]
        sort = "time" if unit in _TIME_UNITS else "memory" if unit in _MEMORY_UNITS else "number"
        plain = known * _MEMORY_UNITS.get(unit, 1) if known is not None else value
        yield what, _Entry(sort, plain, shown, *_origin(row))
    elif kind == "claim" and row.get("verdict"):
        text = f"{row['verdict']} ({row['measured']})" if row.get("measured") else str(row["verdict"])
        yield str(row["key"]), _Entry("claim", str(row["outcome"]), text[:_LONGEST])
    elif kind == "check":
        points, maximum = _number(row["points"]), _number(row["maximum"])
        text = f"{row['status']}, {show.number(points)} of {show.number(maximum)}"
        yield str(row["exercise"]), _Entry("check", (row["status"], points), text[:_LONGEST])


def _of_report(row: dict[str, Any]) -> Iterator[tuple[str, _Entry]]:
    one = summary.Report.from_dict(row)
    origin = (*_origin(row), _number(one.budget_bytes))
    name = str(one.name)
    if one.status != "ok":
        yield name, _Entry("memory", str(one.status)[:_LONGEST], str(one.status)[:_LONGEST], *origin)
        return
    peak = _number(one.peak_bytes)
    if peak is not None:
        yield name, _Entry("memory", peak, show_bytes(peak), *origin)
    seconds = _number(one.timing.median_seconds) if one.timing else None
    if seconds is not None and one.timing:
        source = "reference" if str(one.timing.clock).startswith("reference") else origin[0]
        yield name, _Entry("time", seconds, show_seconds(seconds), source, *origin[1:])


def _origin(row: dict[str, Any]) -> tuple[str, str, str]:
    return str(row.get("source")), str(row.get("card")), _torch(row)


def _torch(row: dict[str, Any]) -> str:
    versions = row.get("versions")
    return str(versions.get("torch")) if isinstance(versions, dict) else ""


def _number(value: Any) -> float | None:
    """A finite number of a sane size; None for anything else that a row may hold. True and False count as 1 and 0."""
    if not isinstance(value, (int, float)) or not -1e18 < value < 1e18:  # also refuses nan
        return None
    return value
