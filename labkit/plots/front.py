"""Memory against time: `pareto`, the recipes that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..results import Report
from ..units import UserError, show_bytes
from . import canvas
from .canvas import BLACK, BLUE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = 5  # points at most that carry their names; more carry numbers, and the names stand under the axis

Side = tuple[str, str, float, float]  # where a name stands beside its point: alignment, offset in points
Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels
SIDES: tuple[Side, ...] = (  # best first
    ("left", "bottom", 5, 3), ("right", "bottom", -5, 3), ("left", "top", 5, -3), ("right", "top", -5, -3),
    ("center", "bottom", 0, 6), ("center", "top", 0, -6),
)  # fmt: skip


def pareto(reports: Iterable[Report], ax: Axes | None = None) -> Axes:
    """Peak memory against time, each report a labelled point, with the front drawn through the unbeaten ones.

    Time is that of one step, or of one token where the reports' steps differ in tokens. Runs that ran out of memory
    have no point and are named under the axis. Raises `UserError` when no report has both a peak and a time.
    """
    found = canvas.as_reports(reports, "pareto")
    timed = [r for r in found if r.peak_bytes is not None and r.timing]
    if not timed:
        raise UserError("pareto has nothing to draw: no report has both a peak and a time (predictions have no time)")
    per_token = len({r.tokens for r in timed}) > 1
    if per_token and not all(r.tokens for r in timed):
        raise UserError("pareto: some reports do not say how many tokens their step has, so times cannot be compared")
    points = sorted(((r.peak_bytes or 0, _seconds(r, per_token), r) for r in timed), key=lambda p: p[:2])
    front = [p for p in points if not any(_beats(q, p) for q in points)]
    divisor, unit = canvas.scale(max(p[0] for p in points))
    factor, time_unit = (1e6, "µs a token") if per_token else (1e3, "ms a step")
    lost = [r.name for r in found if not r.ok]
    untimed = [r.name for r in found if r.ok and r not in timed]
    with canvas.drawing(ax, height=3.5 + (0.1 * len(points) if len(points) > NAMED else 0)) as ax:
        corners: list[tuple[float, float]] = [(front[0][0], max(p[1] for p in points) * 1.05)]
        for memory, seconds, _ in front:  # down the stairs: to the left of a corner nothing is as fast
            corners += [(memory, corners[-1][1]), (memory, seconds)]
        corners.append((max(p[0] for p in points) * 1.05, corners[-1][1]))
        ax.plot([m / divisor for m, _ in corners], [s * factor for _, s in corners], color=BLUE, linewidth=1.2,
                label="front: nothing is both smaller and faster")  # fmt: skip
        for point in points:
            unbeaten = point in front
            ax.plot(
                point[0] / divisor, point[1] * factor, linestyle="", marker="o" if unbeaten else "s",
                color=BLUE if unbeaten else "white", markeredgecolor=BLUE if unbeaten else BLACK, markersize=6,
            )  # fmt: skip
        ax.plot([], [], linestyle="", marker="s", color="white", markeredgecolor=BLACK, label="beaten")
        ax.margins(0.2)
        ax.set_xlabel(f"peak allocated ({unit})" + "".join(
            f"\n{canvas.wrapped(f'{why}: ' + ', '.join(names), 70)}"
            for why, names in (("out of memory", lost), ("not timed", untimed)) if names
        ))  # fmt: skip
        ax.set_ylabel(f"time ({time_unit})")
        names = [r.name for _, _, r in points]
        if len(points) > NAMED:
            for number, name in enumerate(names, start=1):
                ax.plot([], [], linestyle="", marker=f"${number}$", color=BLACK, markeredgewidth=0, label=name)
            names = [str(number) for number in range(1, len(points) + 1)]
        canvas.legend_below(ax, columns=2)
        for budget in dict.fromkeys(r.budget_bytes for r in found):
            canvas.budget_rule(ax, budget, divisor, largest=max(p[0] for p in points))
        canvas.entitle(ax, "Memory against time", canvas.time_source(found), pad=16)
        label_points(ax, [(m / divisor, s * factor, name) for (m, s, _), name in zip(points, names, strict=True)])
    said = [f"{r.name} {show_bytes(m)} in {canvas.plain(s * factor)} {time_unit}" for m, s, r in front]
    beaten = [r.name for m, s, r in points if (m, s, r) not in front]
    extra = f"; beaten: {canvas.listing(beaten)}" if beaten else ""
    extra += f"; out of memory: {canvas.listing(lost)}" if lost else ""
    extra += f"; not timed: {canvas.listing(untimed)}" if untimed else ""
    canvas.describe(
        ax, f"Peak memory against time ({canvas.time_source(found)}): the front is {canvas.listing(said)}{extra}."
    )
    return ax


def _seconds(report: Report, per_token: bool) -> float:
    assert report.timing is not None
    return report.timing.median_seconds / (report.tokens if per_token and report.tokens else 1)


def _beats(a: tuple[int, float, Report], b: tuple[int, float, Report]) -> bool:
    return a[0] <= b[0] and a[1] <= b[1] and a[:2] != b[:2]


def label_points(ax: Axes, points: Iterable[tuple[float, float, str]]) -> None:
    """Write each name beside its point, on the side where it covers least of other names, points, lines and edges.

    The axes must have their final limits, title and legend.
    """
    figure: Any = ax.get_figure(root=True)
    figure.draw_without_rendering()  # lays out the axes, so that sizes in pixels are known
    points = [(x, y, canvas.wrapped(name, 22)) for x, y, name in points]
    dot = figure.dpi / 72  # pixels in a point
    frame = ax.get_window_extent()
    inside = (frame.x0, frame.y0, frame.x1, frame.y1)
    marks = [tuple(ax.transData.transform((x, y))) for x, y, _ in points]
    taken = [_around(px, py, 3.5 * dot) for px, py in marks] + [
        _around(px, py, dot) for px, py in _on_lines(ax, 4 * dot)
    ]
    for number, (x, y, name) in enumerate(points):
        text = ax.annotate(name, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=canvas.SMALL)
        extent = text.get_window_extent()
        others = taken[:number] + taken[number + 1 :]
        boxes = {side: _box(marks[number], extent.width, extent.height, side, dot) for side in SIDES}
        hidden = {s: sum(_overlap(b, o) for o in others) - 9 * _overlap(b, inside) for s, b in boxes.items()}
        best = min(SIDES, key=hidden.__getitem__)
        text.set(horizontalalignment=best[0], verticalalignment=best[1], position=best[2:])
        taken.append(boxes[best])


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _on_lines(ax: Axes, spacing: float) -> list[tuple[float, float]]:
    """Pixels along the lines of the figure, at most `spacing` apart."""
    found = []
    for line in ax.lines:
        if line.get_linestyle() != "None":
            for start, end in pairwise(line.get_transform().transform(line.get_path().vertices)):
                found += _along(tuple(start), tuple(end), spacing)
    return found


def _along(start: tuple[float, ...], end: tuple[float, ...], spacing: float) -> list[tuple[float, float]]:
    (x0, y0), (x1, y1) = start, end
    count = 1 + int(max(abs(x1 - x0), abs(y1 - y0)) / spacing)
    return [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(count + 1)]


def _box(mark: tuple[float, ...], width: float, height: float, side: Side, dot: float) -> Box:
    """The pixels that a name of this size takes on one side of its point."""
    ha, va, dx, dy = side
    x = mark[0] + dx * dot - {"left": 0, "center": width / 2, "right": width}[ha]
    y = mark[1] + dy * dot - {"bottom": 0, "top": height}[va]
    return x, y, x + width, y + height


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
