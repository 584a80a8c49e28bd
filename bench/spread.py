"""How far two runs of the course on one kind of card lie apart: what the bands of `labkit compare` rest on.

    python bench/spread.py RUN RUN     compares the runs and writes results/spread.md

Both runs are to be of the same code on cards of the same kind; the table says which versions made them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit import comparing
from labkit.units import UserError

OUT = Path(__file__).resolve().parent / "results" / "spread.md"
HEAD = ("quantity", "rows", "median", "95th percentile", "99th percentile", "worst", "the worst is")


def rows(found: comparing.Comparison) -> list[tuple[str, ...]]:
    """One row a kind of quantity: by how many per cent the larger of two values exceeds the smaller."""
    kinds: dict[str, list[comparing.Line]] = {}
    for line in found.lines:
        if line.ratio is not None and line.factor is not None:
            kind = line.quantity.split(",")[0]
            kinds.setdefault({"value": "rates and times as facts"}.get(kind, kind), []).append(line)
    table = []
    for kind, lines in kinds.items():
        apart = sorted(((_apart(line), line) for line in lines), key=lambda pair: pair[0])
        sizes = [size for size, _ in apart]
        worst = apart[-1][1]
        cells = [statistics.median(sizes), _at(sizes, 0.95), _at(sizes, 0.99), sizes[-1]]
        table.append((kind, str(len(sizes)), *(f"{c:.3f} %" for c in cells), f"{worst.lesson[:2]} {worst.name}"))
    verdicts = [line for line in found.lines if line.quantity == "verdict" and line.factor is not None]
    other = sum(line.a != line.b for line in verdicts)
    table.append(("verdict", str(len(verdicts)), *[""] * 4, f"{other} of them came out otherwise"))
    return table


def _apart(line: comparing.Line) -> float:
    ratio = line.ratio or 1.0
    return 100 * (max(ratio, 1 / ratio) - 1)


def _at(sizes: Sequence[float], share: float) -> float:
    return sizes[min(len(sizes) - 1, round(share * (len(sizes) - 1)))]


def main(a: str, b: str) -> None:
    """Write the table of the runs in the folders `a` and `b`."""
    found = comparing.compare(a, b)
    if not found.same_card:
        raise UserError(f"{a} and {b} are of two kinds of card: {found.a.card}, {found.b.card}")
    made = [min(row["at"] for row in side.rows.values()) for side in (found.a, found.b)]
    versions = sorted({row["versions"]["torch"] for side in (found.a, found.b) for row in side.rows.values()})
    lines = [
        "# How far two runs of the course lie apart",
        "",
        f"Two runs on {found.a.card}, begun {made[0]} and {made[1]} (PyTorch {', '.join(versions)});",
        "made by `python bench/spread.py`.",
        "By how many per cent the larger value of a row exceeds the smaller. The bands of `labkit compare` rest on it.",
        "The host may have done other work meanwhile; steps of many small kernels feel it most.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "| " + " | ".join("---" for _ in HEAD) + " |",
        *("| " + " | ".join(row) + " |" for row in rows(found)),
    ]
    OUT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
