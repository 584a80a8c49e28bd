"""What people see of a comparison: a text table, JSON, and a page of HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from . import executing, pages, show
from .comparing import AGREES, BANDS, DIFFERS, ONLY_A, ONLY_B, SHOWN, Comparison, Line
from .progress import label
from .units import UserError, show_bytes

_TONES = {AGREES: "good", DIFFERS: "bad", SHOWN: "plain", ONLY_A: "half", ONLY_B: "half"}
_SIGNS = {AGREES: "✓ agrees", DIFFERS: "✗ differs", SHOWN: "shown", ONLY_A: "only in A", ONLY_B: "only in B"}
_HEAD = ("lesson", "peaks", "ratio", "times", "ratio", "verdicts", "only in A", "only in B")
_LINE = ("lesson", "what", "quantity", "A", "B", "B / A", "band", "")


def text(found: Comparison, *, everything: bool = False) -> str:
    """One row a lesson, then the lines that differ, or every line."""
    parts = [_sides(found), show.text_table(_HEAD, _lessons(found))]
    lines = found.lines if everything else found.of(DIFFERS)
    if lines:
        title = "every line:" if everything else "outside their bands:"
        parts.append(f"{title}\n" + show.text_table(_LINE, [_cells(line) for line in lines], limit=48))
    parts += [_ending(found), "\n".join(f"  {name:15s} {said}" for name, said in _bands(found))]
    return "\n\n".join(parts)


def as_json(found: Comparison) -> str:
    """The comparison as one JSON document."""
    return json.dumps(found.to_dict(), ensure_ascii=False, indent=1)


def write(found: Comparison, target: Path) -> Path:
    """The page of a comparison in the file `target`. Raises `UserError` when it cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        executing.write_text(target, html(found))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def html(found: Comparison) -> str:
    """The page: both sides, one row a lesson, what differs, and every line folded away by lesson."""
    a, b = found.a, found.b
    facts = (("A", f"{a.title}: {a.card}, {a.source}"), ("B", f"{b.title}: {b.card}, {b.source}"))
    cells = "".join(f"<div><dt>{pages.safe(k)}</dt><dd>{pages.safe(v)}</dd></div>" for k, v in facts)
    rows = _lessons(found)
    tones = ["bad" if _in(found, line, DIFFERS) else "good" for line in _names(found)]
    folded = []
    for name in _names(found):
        lines = _in(found, name, *_TONES)
        folded.append(
            f"<details><summary>{pages.safe(label(name))}: {len(lines)} lines</summary>{_table(lines)}</details>"
        )
    listed = "".join(f"<li>{pages.safe(name)}: {pages.safe(said)}</li>" for name, said in _bands(found))
    differing = found.of(DIFFERS)
    sections = [
        ("lessons", "Lessons", pages.table(_HEAD, [[pages.safe(c) for c in row] for row in rows], tones)),
        ("differs", "Outside their bands", _table(differing) if differing else ""),
        ("lines", "Every line", "".join(folded)),
        ("bands", "Bands", f"<ul>{listed}</ul>"),
    ]
    head = f"<h1>{pages.safe(a.title)} beside {pages.safe(b.title)}</h1><dl class=facts>{cells}</dl>"
    return pages.page(
        f"{a.title} beside {b.title}", "Comparison", head, sections, f"<p>{pages.safe(_ending(found))}</p>"
    )


def _sides(found: Comparison) -> str:
    lines = [f"{name}  {s.title}: {s.card}, {s.source}" for name, s in (("A", found.a), ("B", found.b))]
    if not found.same_card:
        lines.append("two cards: peaks are held to their band, times and verdicts are only shown")
    return "\n".join(lines)


def _names(found: Comparison) -> list[str]:
    return sorted({line.lesson for line in found.lines})


def _in(found: Comparison, lesson: str, *verdicts: str) -> list[Line]:
    return [line for line in found.of(*verdicts) if line.lesson == lesson]


def _lessons(found: Comparison) -> list[list[str]]:
    rows = []
    for name in _names(found):
        lines = _in(found, name, AGREES, DIFFERS, SHOWN)
        peaks = [line for line in lines if line.quantity.startswith(("allocated", "reserved", "outcome"))]
        times = [line for line in lines if line.quantity == "step"]
        verdicts = [line for line in lines if line.quantity == "verdict"]
        same = f"{sum(line.a == line.b for line in verdicts)} of {len(verdicts)}" if verdicts else "–"
        only = [str(len(_in(found, name, kind)) or "–") for kind in (ONLY_A, ONLY_B)]
        rows.append([label(name), _count(peaks), _ratios(peaks), _count(times), _ratios(times), same, *only])
    return rows


def _count(lines: Sequence[Line]) -> str:
    held = [line for line in lines if line.verdict in (AGREES, DIFFERS)]
    if not held:
        return f"{len(lines)} shown" if lines else "–"
    return f"{sum(line.verdict == AGREES for line in held)} of {len(held)}"


def _ratios(lines: Sequence[Line]) -> str:
    found = [line.ratio for line in lines if line.ratio is not None and not line.quantity.startswith("reserved")]
    if not found:
        return "–"
    low, high = (f"{bound:.3f}" for bound in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def _cells(line: Line) -> list[str]:
    ratio = "–" if line.ratio is None else f"{line.ratio:.4f}"
    band = f"x {line.factor:.3g}" if line.factor and line.factor != 1 and line.ratio is not None else ""
    said = f"{_SIGNS[line.verdict]}{f' ({line.note})' if line.note else ''}"
    return [line.lesson[:2], line.name, line.quantity, line.shown(line.a), line.shown(line.b), ratio, band, said]


def _table(lines: Sequence[Line]) -> str:
    rows = [[pages.safe(cell) for cell in _cells(line)] for line in lines]
    return pages.table(_LINE, rows, [_TONES[line.verdict] for line in lines])


def _ending(found: Comparison) -> str:
    counts = {kind: len(found.of(kind)) for kind in _TONES}
    held = counts[AGREES] + counts[DIFFERS]
    return (
        f"{counts[AGREES]} of {held} numbers that are held to a band lie in it, {counts[SHOWN]} more are shown; "
        f"{counts[ONLY_A]} rows are only in A, {counts[ONLY_B]} only in B."
    )


def _bands(found: Comparison) -> list[tuple[str, str]]:
    predicted = found.a.source != found.b.source
    names = ["predicted peak"] if predicted else ["peak", "reserved", *(["time", "verdict"] if found.same_card else [])]
    lines = []
    for name in names:
        band = BANDS[name]
        more = f" and {show_bytes(band.nbytes)}" if band.nbytes else ""
        lines.append((name, f"x {band.factor:g}{more}: {band.why}" if band.factor != 1 else band.why))
    if not found.same_card:
        lines.append(
            ("two cards", "what cuBLAS holds may differ besides; no second kind of card was at hand to measure")
        )
    return lines
