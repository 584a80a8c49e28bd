"""How a peak or a time grows with a setting: `sweep`, and the exponent it prints, `fit_exponent`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..results import Report
from ..units import UserError, show_bytes, show_seconds
from . import canvas
from .canvas import BLACK, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLAT = 0.02  # a series that varies by less than this part of its largest value has no exponent worth printing

XLABELS = {
    "batch": "batch (sequences)",
    "seq": "sequence length (tokens)",
    "tokens": "tokens in one step",
    "accumulation": "micro-batches in one step",
    "checkpoint": "blocks in one checkpointed segment",
    "every": "interval N (blocks)",
}


class _Quantity(NamedTuple):
    label: str
    unit: str
    of: Callable[[Report], float | None]
    shown: Callable[[float], str]


def _reserved(report: Report) -> float | None:
    peaks = [p.reserved_bytes for p in (report.first, report.steady) if p]
    return max(peaks) if peaks and report.ok else None


def _requested(report: Report) -> float | None:
    peaks = [p.requested_bytes for p in (report.first, report.steady) if p]
    return max(peaks) if peaks and report.ok else None


QUANTITIES = {
    "peak": _Quantity("peak allocated", "bytes", lambda r: r.peak_bytes, show_bytes),
    "requested": _Quantity("peak requested", "bytes", _requested, show_bytes),
    "reserved": _Quantity("peak reserved", "bytes", _reserved, show_bytes),
    "time": _Quantity("one step", "ms", lambda r: r.timing.median_seconds * 1e3 if r.timing else None,
                      lambda ms: show_seconds(ms / 1e3)),
    "throughput": _Quantity("throughput", "tokens/s", lambda r: r.tokens_per_second,
                            lambda v: f"{v:,.0f} tokens/s"),
}  # fmt: skip


class Fit(NamedTuple):
    """``y = offset + factor * x ** exponent``; ``error`` is the largest relative deviation of a point from it."""

    exponent: float
    factor: float
    offset: float
    error: float


def fit_exponent(xs: Sequence[float], ys: Sequence[float], offset: bool = False) -> Fit:
    """The exponent with which `ys` grow with `xs`.

    The model is ``y = factor * x ** exponent``, fitted by least squares of the logarithms (at least 2 different xs).
    With `offset` it is ``y = offset + factor * x ** exponent``, fitted by least squares of the relative residuals for
    an exponent between -4 and 6 (at least 4 different xs): a peak holds weights that do not grow with the batch, and
    without an offset the exponent would come out too small. Raises `UserError` for too few points, values that are
    not positive, or a series with no growth to fit.
    """
    import numpy

    x, y = numpy.asarray(xs, dtype=float), numpy.asarray(ys, dtype=float)
    need = 4 if offset else 2
    if x.shape != y.shape or x.ndim != 1 or len(set(x.tolist())) < need:
        raise UserError(f"an exponent {'with an offset ' if offset else ''}needs {need} points with different x")
    if not (numpy.isfinite(x).all() and numpy.isfinite(y).all() and (x > 0).all() and (y > 0).all()):
        raise UserError("an exponent needs positive values")
    if not offset:
        exponent, log_factor = numpy.polyfit(numpy.log(x), numpy.log(y), 1)
        fitted = numpy.exp(log_factor) * x**exponent
        return Fit(float(exponent), float(numpy.exp(log_factor)), 0.0, float(abs(fitted / y - 1).max()))
    if numpy.ptp(y) == 0:
        raise UserError("a constant series has no exponent")
    unit = float(numpy.exp(numpy.log(x).mean()))  # powers of x / unit stay near 1, so the two columns differ

    def solve(exponent: float) -> tuple[float, Any]:
        columns = numpy.stack([1 / y, (x / unit) ** exponent / y], axis=1)
        coefficients = numpy.linalg.lstsq(columns, numpy.ones_like(y), rcond=None)[0]
        return float(((columns @ coefficients - 1) ** 2).sum()), coefficients

    grid = [p for p in numpy.linspace(-4, 6, 201).tolist() if abs(p) > 0.01]  # x ** 0 is the offset once more
    best = min(grid, key=lambda p: solve(p)[0])
    exponent = _narrow(lambda p: solve(p)[0], best - 0.05, best + 0.05)
    base, factor = solve(exponent)[1]
    fitted = base + factor * (x / unit) ** exponent
    return Fit(exponent, float(factor / unit**exponent), float(base), float(abs(fitted / y - 1).max()))


def _narrow(cost: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of `cost` between `low` and `high`, by golden section."""
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return (low + high) / 2


def sweep(
    reports: Iterable[Report] | Mapping[str, Iterable[Report]],
    x: str = "batch",
    y: str = "peak",
    *,
    log: bool = False,
    fit: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Peaks against a setting: one curve, or one for each entry of a mapping from name to reports.

    `x` is a key of ``report.settings`` (or ``"tokens"``), `y` one of ``"peak"``, ``"requested"`` (the peak without the
    allocator's rounding), ``"reserved"``, ``"time"``, ``"throughput"``. Runs that ran out of memory stand as crosses on
    the budget line (for a time or throughput, at the upper edge). With `fit`, the exponent of
    ``offset + factor * x ** exponent`` stands in the legend of a series of
    at least 4 points. Raises `UserError` when there is nothing to draw or `x` is not a number.
    """
    if y not in QUANTITIES:
        raise UserError(f"sweep draws {', '.join(QUANTITIES)}, not {y!r}")
    quantity = QUANTITIES[y]
    named = reports if isinstance(reports, Mapping) else {"": reports}
    series = {name: _points(canvas.as_reports(items, "sweep"), x, quantity) for name, items in named.items()}
    everything = [report for items in series.values() for _, _, report in items]
    drawn = [v for items in series.values() for _, v, _ in items if v is not None]
    if not everything:
        raise UserError("sweep has nothing to draw: no report was given")
    budgets = [r.budget_bytes for r in everything if r.budget_bytes]
    failed = any(v is None for items in series.values() for _, v, _ in items)
    in_bytes = quantity.unit == "bytes"
    top = max([*drawn, *(budgets if failed else [])], default=1)
    divisor, unit = canvas.scale(top) if in_bytes else (1, quantity.unit)
    said: list[str] = []
    crosses: dict[float, int] = {}
    with canvas.drawing(ax, height=3.2 + 0.08 * len(series)) as ax:
        if log:
            ax.set_xscale("log")
            ax.set_yscale("log")
        for number, (name, points) in enumerate(series.items()):
            good = [(a, v) for a, v, _ in points if v is not None]
            law, sentence = _law(good, x) if fit else ("", "")
            colour = canvas.SERIES[number % len(canvas.SERIES)]
            label = ": ".join(part for part in (name, law) if part)
            ax.plot(
                [a for a, _ in good], [v / divisor for _, v in good], color=colour, label=label or None,
                marker=canvas.MARKERS[number % len(canvas.MARKERS)],
                linestyle=canvas.DASHES[number % len(canvas.DASHES)],
            )  # fmt: skip
            lost = [(a, r) for a, v, r in points if v is None]
            for a, report in lost:
                budget = report.budget_bytes if in_bytes else None
                _cross(ax, a, budget / divisor if budget else None, colour, crosses)
            said.append(_series_text(name, x, good, [a for a, _ in lost], quantity, sentence))
        if failed:
            ax.plot([], [], marker="X", markersize=8, color="white", markeredgecolor=BLACK, linestyle="",
                    label="out of memory")  # fmt: skip
            ax.margins(y=0.2)  # above the curves: what ran out is at the top
        _sweep_axes(ax, x, [a for items in series.values() for a, _, _ in items], log)
        ax.set_ylabel(f"{quantity.label} ({unit})")
        if in_bytes:
            _budget_lines(ax, budgets, divisor, max(drawn, default=0), failed)
        if ax.get_legend_handles_labels()[1]:
            canvas.legend_below(ax, columns=2)
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        ax.set_axisbelow(True)
        where = canvas.source_line(everything) if in_bytes else canvas.time_source(everything, memory=False)
        canvas.entitle(ax, f"{quantity.label.capitalize()} against {x}", where)
    words = canvas.budget_words(everything) if in_bytes else ""
    canvas.describe(ax, f"{quantity.label.capitalize()} against {x} ({where}): {'; '.join(said)}{words}.")
    return ax


def _cross(ax: Axes, x: float, y: float | None, colour: str, crosses: dict[float, int]) -> None:
    """A cross at ``(x, y)``, or at the upper edge when y is None; the second at the same x stands above the first."""
    from matplotlib.transforms import offset_copy

    base = ax.get_xaxis_transform() if y is None else ax.transData
    ax.plot(
        x, 0.96 if y is None else y, marker="X", markersize=8, color=colour, markeredgecolor=BLACK, markeredgewidth=0.7,
        linestyle="", clip_on=False, zorder=4,
        transform=offset_copy(base, ax.get_figure(root=True), y=9 * crosses.get(x, 0), units="points"),
    )  # fmt: skip
    crosses[x] = crosses.get(x, 0) + 1


def _points(reports: list[Report], x: str, quantity: _Quantity) -> list[tuple[float, float | None, Report]]:
    """``(x, y, report)`` by rising x; y is None where memory ran out."""
    found = []
    for report in reports:
        value = report.tokens if x == "tokens" else report.settings.get(x)
        if value is None:
            known = ", ".join(sorted(report.settings)) or "none"
            raise UserError(f"sweep: {report.name} has no setting {x!r} (it has: {known})")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"sweep: {x} must be a number, not {value!r}; plots.bars compares named recipes")
        measured = quantity.of(report)
        if measured is None and report.ok:
            raise UserError(f"sweep: {report.name} has no {quantity.label}")
        found.append((value, measured, report))
    return sorted(found, key=lambda point: point[0])


def _law(points: list[tuple[float, float]], x: str) -> tuple[str, str]:
    """The exponent of a series for the legend and for the description; empty for too few points."""
    if len({a for a, _ in points}) < 4 or min(a for a, _ in points) <= 0:
        return "", ""
    values = [v for _, v in points]
    if max(values) - min(values) < FLAT * max(values):
        return "flat", "does not change"
    found = fit_exponent([a for a, _ in points], values, offset=True)
    sign = "+" if found.factor > 0 else "−"
    law = f"a {sign} b·{x}^{found.exponent:.2f}"
    return law, f"follows {law}"


def _series_text(
    name: str, x: str, good: list[tuple[float, float]], lost: list[float], quantity: _Quantity, sentence: str
) -> str:
    parts = []
    if good:
        (a, v), (b, w) = good[0], good[-1]
        span = f"from {quantity.shown(v)} at {x} {canvas.plain(a)} to {quantity.shown(w)} at {canvas.plain(b)}"
        parts.append(span + (f" and {sentence}" if sentence else ""))
    if lost:
        parts.append(f"out of memory at {canvas.listing([canvas.plain(a) for a in lost])}")
    return " ".join(part for part in (name, ", ".join(parts)) if part)


def _sweep_axes(ax: Axes, x: str, xs: list[float], log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    ax.set_xlabel(XLABELS.get(x, x))
    pad = 0.05 * (max(xs) - min(xs)) or 1
    ax.set_xlim((0.9 * min(xs), 1.1 * max(xs)) if log else (min(xs) - pad, max(xs) + pad))
    formatter = FuncFormatter(lambda value, _: canvas.plain(value))
    if log:
        ticks = sorted(set(xs))
        ax.set_xticks(ticks[:: -(-len(ticks) // 9)])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(formatter)
        low, high = ax.get_ylim()
        marks = (2, 5) if high > 10 * low else (2, 3, 4, 6, 8)  # a narrow range has few powers of ten, or none
        ax.yaxis.set_minor_locator(LogLocator(subs=marks, numticks=99))
        ax.yaxis.set_minor_formatter(formatter)
    else:
        ticks = sorted(set(xs))
        gaps = [b - a for a, b in pairwise(ticks)]
        if gaps and min(gaps) >= 0.06 * (ticks[-1] - ticks[0]):
            ax.set_xticks(ticks)
        else:
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(formatter)


def _budget_lines(ax: Axes, budgets: list[int], divisor: int, largest: float, failed: bool) -> None:
    for budget in dict.fromkeys(budgets):
        if not failed and not canvas.budget_near(budget, largest):
            continue
        ax.axhline(budget / divisor, color=VERMILLION, linewidth=1.3, zorder=1)
        ax.annotate(
            f"budget {show_bytes(budget)}", (0.005, budget / divisor), xycoords=("axes fraction", "data"),
            xytext=(0, 3), textcoords="offset points", va="bottom", fontsize=canvas.SMALL, color=canvas.DARK_RED,
        )  # fmt: skip
        if ax.get_yscale() == "linear":
            ax.set_ylim(0, max(ax.get_ylim()[1], 1.12 * budget / divisor))
        else:  # room for the words between the line and the title
            low, high = ax.get_ylim()
            ax.set_ylim(low, max(high, budget / divisor * (high / low) ** 0.1))
