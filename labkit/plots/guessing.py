"""Guesses against what was measured: `calibration`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..units import UserError
from . import canvas
from .canvas import BLACK
from .front import label_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.2  # a guess counts as good within 20 %


def calibration(rows: Iterable[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Guesses against what was measured, on logarithmic axes, with the band of ±20 %.

    `rows` are ledger rows of kind ``guess`` with ``name``, ``guess``, ``measured`` and ``unit`` (others are passed
    over, so a whole `Ledger` will do); a guess of None was never made and is not scored. Markers tell the units apart;
    guesses outside the band carry their names. Raises `UserError` when there is no guess to draw.
    """
    from matplotlib.ticker import FuncFormatter

    guesses = [row for row in rows if row.get("kind", "guess") == "guess"]
    made = [r for r in guesses if r.get("guess") is not None and r.get("measured") is not None]
    points = [r for r in made if r["guess"] > 0 and r["measured"] > 0]
    if not points:
        raise UserError("calibration has nothing to draw: no positive guess with a measurement among the rows")
    good = [r for r in points if abs(r["guess"] / r["measured"] - 1) <= BAND]
    low = min(min(r["guess"], r["measured"]) for r in points) / 1.8
    high = max(max(r["guess"], r["measured"]) for r in points) * 1.8
    units = list(dict.fromkeys(str(r.get("unit") or "") for r in points))
    axis_unit = units[0] or "plain number" if len(units) == 1 else "each in its unit"
    with canvas.drawing(ax, height=3.5) as ax:
        ax.set_xscale("log")
        ax.set_yscale("log")
        ends = [low, high]
        ax.fill_between(ends, [v * (1 - BAND) for v in ends], [v * (1 + BAND) for v in ends], color="#DDDDDD",
                        linewidth=0, label="within ±20 %")  # fmt: skip
        ax.plot(ends, ends, color=BLACK, linewidth=0.8)
        for number, unit in enumerate(units):
            those = [r for r in points if str(r.get("unit") or "") == unit]
            ax.plot(
                [r["measured"] for r in those], [r["guess"] for r in those], linestyle="", markeredgecolor=BLACK,
                markeredgewidth=0.5, marker=canvas.MARKERS[number % len(canvas.MARKERS)], label=unit or "plain number",
                color=canvas.SERIES[number % len(canvas.SERIES)], markersize=6,
            )  # fmt: skip
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: canvas.plain(value)))
        ax.set_xlabel(f"measured ({axis_unit})")
        ax.set_ylabel(f"guess ({axis_unit})")
        canvas.legend_below(ax)
        score = f"{len(good)} of {len(points)} guesses within ±20 %"
        sources = dict.fromkeys(" · ".join(str(r[k]) for k in ("source", "card") if r.get(k)) for r in points)
        canvas.entitle(ax, score, " + ".join(s for s in sources if s))
        outside = [r for r in points if r not in good]
        label_points(ax, [(r["measured"], r["guess"], str(r["name"])) for r in outside])
    worst = max(points, key=lambda r: abs(math.log(r["guess"] / r["measured"])))
    unmade = len(guesses) - len(made)
    left_out = len(made) - len(points)
    extra = f"; {unmade} not guessed" if unmade else ""
    extra += f"; {left_out} not drawn because zero or negative" if left_out else ""
    values = " and measured ".join(canvas.plain(worst[key]) for key in ("guess", "measured"))
    canvas.describe(
        ax,
        f"Guesses against measurements on logarithmic axes: {score}; the furthest off is {worst['name']}, "
        f"guessed {values} {worst.get('unit') or ''}".rstrip()
        + f"{extra}.",
    )
    return ax
