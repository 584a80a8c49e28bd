"""Figures of plain numbers, for what is no `Report`: `lines`, `grouped` bars, `histograms`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..units import UserError
from . import canvas
from .canvas import BLACK, DASHES, MARKERS, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Mapping[str, tuple[Sequence[float], Sequence[float | None]]]
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---")


def lines(
    series: Series,
    *,
    x: str,
    y: str,
    title: str,
    source: str,
    log: str = "",
    marks: Mapping[str, float] | None = None,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    zero: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Curves ``{label: (xs, ys)}`` on one pair of axes; a y that is None or not finite leaves a gap.

    `x` and `y` are the labels of the axes, units included; `source` stands under the title. `log` names the axes that
    are logarithmic (``"x"``, ``"y"``, ``"xy"``). `marks` are vertical rules ``{label: x}``; `bands` shade from low to
    high around the series of the same label; `zero` starts a linear y axis at 0. Raises `UserError` when nothing can
    be drawn.
    """
    _check_log(log)
    points = {label: _finite(*pair, log) for label, pair in series.items()}
    drawn = {label: pair for label, pair in points.items() if any(v is not None for v in pair[1])}
    if not drawn:
        raise UserError("lines has nothing to draw: no series has a finite value")
    with canvas.drawing(ax, height=3.0 + 0.09 * len(series)) as ax:
        _scales(ax, log)
        for number, (label, (xs, ys)) in enumerate(drawn.items()):
            colour = SERIES[number % len(SERIES)]
            if bands and label in bands:
                low, high = (_finite(xs, side, log)[1] for side in bands[label])
                ax.fill_between(xs, _gaps(low), _gaps(high), color=colour, alpha=0.18, linewidth=0)
            ax.plot(
                xs, _gaps(ys), color=colour, label=label, linestyle=DASHES[number % len(DASHES)],
                marker=MARKERS[number % len(MARKERS)] if len(xs) <= 24 else None, markersize=4,
            )  # fmt: skip
        _rules(ax, marks)
        ax.set_xlabel(x)
        ax.set_ylabel(y)
        _ticks(ax, log, [v for xs, _ in drawn.values() for v in xs])
        if zero and "y" not in log:
            ax.set_ylim(bottom=0)
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        ax.set_axisbelow(True)
        if len(drawn) > 1 or bands:
            canvas.legend_below(ax, columns=2)
        canvas.entitle(ax, title, source)
    said = [f"{label} {_span(*pair)}" for label, pair in drawn.items()]
    canvas.describe(ax, f"{title} ({source}): {y} against {x}; {'; '.join(said)}.")
    return ax


def grouped(
    rows: Mapping[str, Sequence[float | None]],
    *,
    labels: Sequence[str],
    unit: str,
    title: str,
    source: str,
    log: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Horizontal bars: each row holds one value for each of the `labels`, written at the bar's end; None: no bar.

    `unit` is the label of the axis. Raises `UserError` when a row has another number of values, or none is there.
    """
    for name, values in rows.items():
        if len(values) != len(labels):
            raise UserError(f"grouped: {name} has {len(values)} values for {len(labels)} labels")
    if not any(v is not None for values in rows.values() for v in values):
        raise UserError("grouped has nothing to draw: no row has a value")
    step = 0.8 / len(labels)
    with canvas.drawing(ax, height=1.1 + 0.2 * max(len(rows) * len(labels), 4) + 0.1 * len(labels)) as ax:
        if log:
            ax.set_xscale("log")
        for number, label in enumerate(labels):
            places = [row + step * (number - (len(labels) - 1) / 2) for row in range(len(rows))]
            values = [v[number] for v in rows.values()]
            ax.barh(
                [p for p, v in zip(places, values, strict=True) if v is not None],
                [v for v in values if v is not None], 0.9 * step, color=SERIES[number % len(SERIES)],
                hatch=HATCHES[number % len(HATCHES)], edgecolor="white", label=label,
            )  # fmt: skip
            for place, value in zip(places, values, strict=True):
                if value is not None:
                    ax.annotate(
                        canvas.plain(value), (value, place), xytext=(3, 0), textcoords="offset points", va="center",
                        fontsize=canvas.SMALL, color=BLACK,
                    )  # fmt: skip
        ax.set_yticks(range(len(rows)), list(rows))
        ax.invert_yaxis()
        ax.margins(x=0.15)
        ax.set_xlabel(unit)
        if len(labels) > 1:
            canvas.legend_below(ax, columns=min(3, len(labels)))
        canvas.entitle(ax, title, source)
    said = [
        f"{name}: "
        + ", ".join(f"{label} {canvas.plain(v)}" for label, v in zip(labels, vs, strict=True) if v is not None)
        for name, vs in rows.items()
    ]
    canvas.describe(ax, f"{title} ({source}), in {unit}. {'; '.join(said)}.")
    return ax


def histograms(
    values: Mapping[str, Any],
    *,
    x: str,
    title: str,
    source: str,
    bins: int | Sequence[float] = 60,
    marks: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Shares of values by size, outlined so that several can be compared: ``{label: array}``.

    `bins` is their number over the common range, or their edges; `marks` are vertical rules ``{label: x}``. Values that
    are not finite are left out and counted in the legend. Raises `UserError` when nothing can be drawn.
    """
    import numpy

    arrays = {label: numpy.asarray(v, dtype=float).ravel() for label, v in values.items()}
    finite = {label: v[numpy.isfinite(v)] for label, v in arrays.items()}
    everything = numpy.concatenate([*finite.values(), numpy.empty(0)])
    if not everything.size:
        raise UserError("histograms has nothing to draw: no value is finite")
    edges = numpy.histogram_bin_edges(everything, bins) if isinstance(bins, int) else numpy.asarray(bins, dtype=float)
    with canvas.drawing(ax, height=2.9 + 0.09 * len(values)) as ax:
        for number, (label, array) in enumerate(finite.items()):
            counts, _ = numpy.histogram(array, edges)
            lost = arrays[label].size - array.size
            ax.stairs(
                100 * counts / max(1, arrays[label].size), edges, color=SERIES[number % len(SERIES)], linewidth=1.4,
                linestyle=DASHES[number % len(DASHES)], fill=False,
                label=label + (f" ({canvas.plain(100 * lost / arrays[label].size)} % not finite)" if lost else ""),
            )  # fmt: skip
        _rules(ax, marks)
        ax.set_xlabel(x)
        ax.set_ylabel("share of the values (%)")
        ax.set_ylim(bottom=0)
        canvas.legend_below(ax, columns=2)
        canvas.entitle(ax, title, source)
    said = [
        f"{label}: half lie from {canvas.plain(float(numpy.quantile(v, 0.25)))} to "
        f"{canvas.plain(float(numpy.quantile(v, 0.75)))}"
        for label, v in finite.items()
        if v.size
    ]
    canvas.describe(ax, f"{title} ({source}): share of the values by {x}. {'; '.join(said)}.")
    return ax


def _rules(ax: Axes, marks: Mapping[str, float] | None) -> None:
    """Dotted vertical rules with their names, in three rows so that neighbours keep apart."""
    for number, (label, place) in enumerate((marks or {}).items()):
        ax.axvline(place, color=BLACK, linewidth=0.9, linestyle=":")
        ax.annotate(
            label, (place, 1.0 - 0.08 * (number % 3)), xycoords=("data", "axes fraction"), xytext=(3, -2),
            textcoords="offset points", va="top", fontsize=canvas.SMALL, color=BLACK,
        )  # fmt: skip


def _check_log(log: str) -> None:
    if log not in ("", "x", "y", "xy"):
        raise UserError(f"log={log!r}: the axes to draw logarithmically are 'x', 'y', 'xy' or none ('')")


def _finite(xs: Sequence[float], ys: Sequence[float | None], log: str) -> tuple[list[float], list[float | None]]:
    """The points in the order of x; a y that cannot stand on this axis becomes None."""
    pairs = sorted(zip(xs, ys, strict=True), key=lambda pair: pair[0])
    kept = [(a, b) for a, b in pairs if math.isfinite(a) and not ("x" in log and a <= 0)]
    fine = [b if b is not None and math.isfinite(b) and not ("y" in log and b <= 0) else None for _, b in kept]
    return [a for a, _ in kept], fine


def _gaps(ys: Sequence[float | None]) -> list[float]:
    return [math.nan if v is None else float(v) for v in ys]


def _scales(ax: Axes, log: str) -> None:
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")


def _ticks(ax: Axes, log: str, xs: list[float]) -> None:
    """Plain numbers on logarithmic axes; on x, the values that were measured where they are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    formatter = FuncFormatter(lambda value, _: f"{value:,.10g}")
    if "x" in log:
        places = sorted(set(xs))
        if len(places) <= 24:
            ax.set_xticks(places[:: -(-len(places) // 9)])
            ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(formatter)
    if "y" in log:
        low, high = ax.get_ylim()
        if high / low < 300:  # few decades: label 2 and 5 as well
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(formatter)


def _span(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    points = [(a, b) for a, b in zip(xs, ys, strict=True) if b is not None]
    (a, v), (b, w) = points[0], points[-1]
    if len(points) == 1:
        return f"{canvas.plain(v)} at {canvas.plain(a)}"
    return f"from {canvas.plain(v)} at {canvas.plain(a)} to {canvas.plain(w)} at {canvas.plain(b)}"
