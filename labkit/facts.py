"""Numbers that are no `Report`: `fact` writes one into the ledger, `reference` reads those that real cards wrote.

A lesson without a card shows what a card measured in the same lesson, labelled with the card's name; the rows lie in
``data/reference/lessons-*.jsonl``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import lesson, machine, places, show
from .results import Ledger, Report

CLOCK = "reference"  # what the clock of a borrowed time begins with


def fact(
    name: str, value: float | str | bool | None, unit: str = "", *, what: str | None = None, source: str | None = None,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Write one number of this run to the open lesson's ledger; returns the row.

    `what` tells several numbers of one name apart (``what="int8"``); `source` is ``measured`` on a card and ``cpu``
    without one unless given; `more` are further fields (settings, a spread, seeds).
    """
    here = machine.here()
    where = source or ("measured" if here.card else "cpu")
    card = (here.card or "processor") if where in ("measured", "cpu") else lesson.current().card
    fields = {"name": name, "what": what, "value": value, "unit": unit, "source": where, "card": card}
    row = lesson.current().write("fact", **lesson._finite({**fields, "capability": here.sm, **more}))
    return {**row, "label": where if where != "measured" else f"measured · {card}"}


def reference(
    name: str, *, what: str | None = None, lesson: str | None = None, kind: str = "fact"
) -> list[dict[str, Any]]:
    """The rows called `name` that real cards wrote, the latest of each card and `what`, with ``label``.

    `lesson` is the open one unless given; `kind` is ``"fact"``, ``"report"``, ``"claim"`` or ``"guess"``. An empty list
    where there is none.
    """
    latest: dict[Any, dict[str, Any]] = {}
    for row in _measured(kind, lesson or _open(), name):
        if what is None or row.get("what") == what:
            latest.pop((row["card"], row.get("what")), None)  # the place of the last, not of the first
            latest[row["card"], row.get("what")] = {**row, "label": _label(row)}
    return list(latest.values())


def known(
    name: str, value: float | str | bool | None, unit: str = "", *, what: str | None = None, **more: Any
) -> dict[str, Any]:
    """A number that only a card can tell. On a card: `fact`. Without one: the reference row, or, where there is none,
    a row whose value is None and whose label says so."""
    if machine.here().card:
        return fact(name, value, unit, what=what, **more)
    for row in reference(name, what=what):
        return row
    return {"name": name, "what": what, "value": None, "unit": unit, "source": None, "label": "no reference row"}


def with_times(reports: Iterable[Report]) -> list[Report]:
    """Without a card: the same reports with the time that a real card measured for the report of the same name in this
    lesson, its clock marked ``reference · <card>``. Reports that have a time, or none to borrow, stay as they are."""
    found = []
    for report in reports:
        rows = [] if report.timing or not report.ok else _measured("report", _open(), report.name)
        timed = [r for r in rows if r.get("timing") and _same(report.settings, r.get("settings") or {})]
        if timed:
            timing = Report.from_dict(dict(timed[-1])).timing
            assert timing is not None
            tokens = report.tokens or timed[-1].get("tokens")
            report = replace(report, timing=replace(timing, clock=_label(timed[-1])), tokens=tokens)
        found.append(report)
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Show a table: HTML in a notebook, columns of text elsewhere. Cells that are no text go through `show.number`."""
    cells = [[c if isinstance(c, str) else show.number(c) for c in row] for row in rows]
    show.emit(show.text_table(list(head), cells), show.table(list(head), cells))


def _measured(kind: str, lesson: str, name: str) -> list[Mapping[str, Any]]:
    """Every row of this kind, lesson and name: rough ones first, then oldest first, so that the last is the best."""
    rows = _rows(str(places.home() / "data" / "reference"))
    found = [r for r in rows if (r.get("kind"), r.get("lesson"), r.get("name")) == (kind, lesson, name)]
    return sorted(found, key=lambda row: (not row.get("remark"), row.get("at", "")))


def _label(row: Mapping[str, Any]) -> str:
    """Where a row comes from; what was measured beside other work says that it is rough."""
    return f"{CLOCK} · {row['card']}" + (" (rough)" if row.get("remark") else "")


def _same(settings: Mapping[str, Any], older: Mapping[str, Any]) -> bool:
    """Whether a row was measured with these settings; fields that came later than the row do not count."""
    return all(key in settings and settings[key] == value for key, value in older.items())


def _open() -> str:
    return lesson.current().name


@functools.lru_cache
def _rows(folder: str) -> tuple[Mapping[str, Any], ...]:
    """What cards measured in lessons. Read once: a run does not change it."""
    rows: list[Mapping[str, Any]] = []
    for file in sorted(Path(folder).glob("lessons-*.jsonl")):
        rows += [row for row in Ledger(file) if row.get("source") == "measured"]
    return tuple(rows)
