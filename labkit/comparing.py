"""Two runs side by side, or a run beside the committed reference rows: every number as a ratio with its band.

Peaks of memory do not depend on the card's speed, so they are held to a tight band on any card. Times are held to a
loose one on the same card, and only shown on another. A claim's verdict is held to on the same card.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import machine, places, show
from .memory import workspaces
from .results import Ledger, Report
from .runs import Run
from .units import MiB, UserError, show_bytes, show_seconds

AGREES, DIFFERS, SHOWN, ONLY_A, ONLY_B = "agrees", "differs", "shown", "only in A", "only in B"
_TIME = ("s", "ms", "FLOP/s", "bytes/s", "GB/s", "tokens/s")  # units of facts that are held to the band of times


@dataclass(frozen=True)
class Band:
    """How far two numbers may lie apart: by a factor, and by so many bytes besides; and what that rests on."""

    factor: float
    why: str
    nbytes: int = 0


LEFT = 32 * MiB  # what earlier cells of a lesson may still hold on a real card: compiled steps, library workspaces
# bench/results/spread.md, made by `bench/spread.py`, says how far runs lie apart; a test holds the factors to it
BANDS = {
    "peak": Band(1.01, "two runs of the course on an H200 gave equal peaks (bench/results/spread.md)"),
    "reserved": Band(1.03, "two runs of the course on an H200 gave equal peaks (bench/results/spread.md)"),
    "time": Band(2.0, "95 of 100 times of two runs on an H200, its host not left alone (bench/results/spread.md)"),
    "predicted peak": Band(
        1.01, "predictions of 160 random recipes are at most 0.1 % off (bench/results/memory.md)", LEFT
    ),
    "verdict": Band(1.0, "the same kind of verdict on the same card"),
}


@dataclass(frozen=True)
class Side:
    """One of the two: where its rows come from, the card, and each row under what it is about."""

    title: str
    card: str
    source: str  # of most of its memory: measured or predicted
    rows: dict[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """One quantity of both sides: ``ratio`` is B over A (None where there is none), ``factor`` the band it is held to
    (None: shown only), ``verdict`` one of `AGREES`, `DIFFERS`, `SHOWN`, `ONLY_A`, `ONLY_B`."""

    lesson: str
    name: str
    quantity: str
    a: float | str | None
    b: float | str | None
    unit: str
    ratio: float | None
    factor: float | None
    verdict: str
    note: str = ""

    def shown(self, value: float | str | None) -> str:
        """A value of this line for people."""
        if isinstance(value, str) or value is None:
            return value or "–"
        if self.unit == "bytes":
            return show_bytes(value)
        return show_seconds(value) if self.unit == "s" else show.number(value, self.unit)


@dataclass(frozen=True)
class Comparison:
    """Both sides without their rows, and every line."""

    a: Side
    b: Side
    lines: tuple[Line, ...]

    @property
    def same_card(self) -> bool:
        """Whether both sides are about the same kind of card."""
        return card_name(self.a.card) == card_name(self.b.card)

    def of(self, *verdicts: str) -> tuple[Line, ...]:
        """The lines with one of these verdicts."""
        return tuple(line for line in self.lines if line.verdict in verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        sides = {
            name: {"title": s.title, "card": s.card, "source": s.source} for name, s in (("a", self.a), ("b", self.b))
        }
        bands = {name: asdict(band) for name, band in BANDS.items()}
        return {**sides, "same_card": self.same_card, "bands": bands, "lines": [asdict(line) for line in self.lines]}


def compare(a: Path | str, b: Path | str | None = None) -> Comparison:
    """Compare the run in folder `a` (or a file of rows) with the run `b`; without `b`, with data/reference/.

    From data/reference/ the rows of the same card are taken where there are some, else those of an H200. Raises
    `UserError` when there are no rows, or none in common.
    """
    left = _side(Path(a))
    right = _side(Path(b)) if b is not None else _reference(left)
    lines: list[Line] = []
    shared = {key[0] for key in left.rows} & {key[0] for key in right.rows}
    for key in [*left.rows, *(key for key in right.rows if key not in left.rows)]:
        if key[0] in shared:
            lines += _lines(key, left.rows.get(key), right.rows.get(key))
    if not any(line.verdict in (AGREES, DIFFERS, SHOWN) for line in lines):
        raise UserError(f"{left.title} and {right.title} have no row in common")
    return Comparison(left, right, tuple(sorted(lines, key=lambda line: line.lesson)))


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    """What a row is about: lesson, kind, name, and what tells rows of one name apart."""
    settings = json.dumps(row.get("settings") or {}, sort_keys=True)
    name = row.get("key") if row.get("kind") == "claim" else row.get("name")
    return str(row.get("lesson")), str(row.get("kind")), str(name), str(row.get("what") or ""), settings


def card_name(card: str) -> str:
    """The preset's name of a card given by name or as the driver calls it; a card without a preset as it is."""
    wanted = card.lower()
    return next((p.name for p in machine.PRESETS.values() if wanted in (p.name, p.title.lower())), wanted)


def _side(path: Path) -> Side:
    run = Run.load(path) if path.is_dir() else None
    file = path / "ledger.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} holds no run: no ledger.jsonl in it, and it is no file of rows")
    rows = list(_read(file))
    sessions = {row.get("lesson"): row.get("session") for row in rows if row.get("kind") == "begin"}
    rows = [row for row in rows if row.get("session") == sessions.get(row.get("lesson"), row.get("session"))]
    card = run.machine.get("card") if run else None
    return _made("/".join(path.resolve().parts[-2:]), rows, card)


def _reference(other: Side) -> Side:
    folder = places.home() / "data" / "reference"
    rows = [row for file in sorted(folder.glob("lessons-*.jsonl")) for row in _read(file)]
    rows = [row for row in rows if row.get("source") == "measured"]
    cards = {card_name(str(row.get("card"))) for row in rows}
    wanted = card_name(other.card) if card_name(other.card) in cards else machine.DEFAULT_CARD
    return _made("data/reference", [row for row in rows if card_name(str(row.get("card"))) == wanted], None)


def _read(file: Path) -> Iterable[dict[str, Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = Ledger(file).rows()
    if caught and not rows:
        raise UserError(f"{file}: {caught[0].message}")
    return [row for row in rows if row.get("kind") in ("begin", "report", "fact", "claim")]


def _made(title: str, rows: Sequence[dict[str, Any]], card: str | None) -> Side:
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: not row.get("remark")):  # what was measured beside other work comes first
        if row.get("kind") != "begin":
            found[identity(row)] = row
    sources = [str(row.get("source")) for row in found.values() if row.get("kind") == "report"]
    source = max(("measured", "predicted"), key=sources.count)
    cards = [str(row.get("card")) for row in found.values() if row.get("source") == source]
    if not found:
        raise UserError(f"{title}: nothing was measured or predicted there")
    return Side(title, card or (max(cards, key=cards.count) if cards else "no card"), source, found)


def _lines(key: tuple[str, ...], a: dict[str, Any] | None, b: dict[str, Any] | None) -> list[Line]:
    lesson, kind, name, what, _ = key
    name = f"{name}, {what}" if what else name
    if a is None or b is None:
        missing = ONLY_B if a is None else ONLY_A
        return [Line(lesson, name, kind, None, None, "", None, None, missing)]
    try:
        return [replace(line, lesson=lesson, name=name) for line in _PAIRS[kind](a, b)]
    except (KeyError, TypeError, ValueError, AttributeError):  # written by hand, or by another version
        return [Line(lesson, name, kind, None, None, "", None, None, SHOWN, "cannot be read")]


def _reports(a: dict[str, Any], b: dict[str, Any]) -> list[Line]:
    left, right = _report(a), _report(b)
    same, predicted = _same_card(a, b), (left.source == "predicted") != (right.source == "predicted")
    if left.status != right.status:
        same_budget = left.budget_bytes == right.budget_bytes
        verdict, note = (DIFFERS, "") if same_budget else (SHOWN, "under another budget")
        return [
            Line("", "", "outcome", left.status, right.status, "", None, 1.0 if same_budget else None, verdict, note)
        ]
    if not left.ok:
        return [Line("", "", "outcome", left.status, right.status, "", None, 1.0, AGREES)]
    lines = []
    bands = (BANDS["predicted peak"], None) if predicted else (BANDS["peak"], BANDS["reserved"])
    extra = 0 if same else _workspaces(a, b)
    for when in ("first", "steady"):
        one, other = getattr(left, when), getattr(right, when)
        for field, band in zip(("allocated_bytes", "reserved_bytes"), bands, strict=True):
            if one and other:
                held = replace(band, nbytes=band.nbytes + extra) if band else None
                quantity = f"{field.removesuffix('_bytes')}, {when} step"
                found = _held(quantity, getattr(one, field), getattr(other, field), "bytes", held)
                lines.append(_within_estimate(found, left, right) if when == "steady" and band else found)
    if left.timing and right.timing:
        x, y = left.timing, right.timing
        own = max(t.spread_seconds / t.median_seconds for t in (x, y) if t.median_seconds)
        band = BANDS["time"] if same and not _rough(a, b) and not predicted else None
        if band:
            band = replace(band, factor=max(band.factor, 1 + own))  # a time that scatters in its own run says less
        lines.append(_held("step", x.median_seconds, y.median_seconds, "s", band, note=_rough(a, b)))
    return lines


def _facts(a: dict[str, Any], b: dict[str, Any]) -> list[Line]:
    x, y, unit = a.get("value"), b.get("value"), str(a.get("unit") or "")
    if a.get("unit") != b.get("unit") or isinstance(x, (str, bool)) or isinstance(y, (str, bool)) or unit == "text":
        return []
    measured = a.get("source") == b.get("source") == "measured"
    band = BANDS["time"] if unit in _TIME and measured and _same_card(a, b) and not _rough(a, b) else None
    return [_held("value", x, y, unit, band, note=_rough(a, b))]


def _claims(a: dict[str, Any], b: dict[str, Any]) -> list[Line]:
    x, y = str(a.get("outcome")), str(b.get("outcome"))
    held = _same_card(a, b) and a.get("source") == b.get("source")
    verdict = (AGREES if x == y else DIFFERS) if held else SHOWN
    return [
        Line("", "", "verdict", x, y, "", None, 1.0 if held else None, verdict, "" if x == y else "another verdict")
    ]


_PAIRS = {"report": _reports, "fact": _facts, "claim": _claims}


def _report(row: dict[str, Any]) -> Report:
    return Report.from_dict({**row, "timeline": None, "alive": (), "failure": None})  # long, and not compared


def _held(quantity: str, a: float | None, b: float | None, unit: str, band: Band | None, note: str = "") -> Line:
    """A line of two numbers: their ratio, and whether it lies in the band."""
    if a is None or b is None:
        return Line("", "", quantity, a, b, unit, None, None, SHOWN, note)
    ratio = b / a if a > 0 and b > 0 else None
    if band is None:
        return Line("", "", quantity, a, b, unit, ratio, None, SHOWN, note)
    inside = abs(b - a) <= (band.factor - 1) * min(a, b) * (1 + 1e-12) + band.nbytes
    return Line("", "", quantity, a, b, unit, ratio, band.factor, AGREES if inside else DIFFERS, note)


def _within_estimate(line: Line, left: Report, right: Report) -> Line:
    """A prediction that calls itself an estimate is held to its own band instead."""
    for one, other in ((left, right), (right, left)):
        if one.band_bytes and one.source == "predicted" != other.source and other.steady:
            low, high = one.band_bytes
            inside = low <= other.steady.allocated_bytes <= high
            note = f"an estimate: from {show_bytes(low)} to {show_bytes(high)}"
            return replace(line, factor=high / low, verdict=AGREES if inside else DIFFERS, note=note)
    return line


def _same_card(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return card_name(str(a.get("card"))) == card_name(str(b.get("card")))


def _rough(a: dict[str, Any], b: dict[str, Any]) -> str:
    return str(a.get("remark") or b.get("remark") or "")


def _workspaces(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Bytes by which cuBLAS's workspaces may differ between the two cards."""
    held = [sum(workspaces.workspaces(_capability(row))) for row in (a, b)]
    return abs(held[0] - held[1])


def _capability(row: dict[str, Any]) -> tuple[int, int]:
    preset = machine.PRESETS.get(card_name(str(row.get("card"))))
    if preset:
        return preset.capability
    digits = str((row.get("provenance") or {}).get("capability") or row.get("capability") or "sm_80").removeprefix(
        "sm_"
    )
    return int(digits[:-1]), int(digits[-1])
