"""One training step as a picture: `heatmap` (who holds how much, when) and `timeline` (what kind of memory, when)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ..results import Report, Timeline
from ..units import UserError, show_bytes
from . import canvas
from .canvas import BLACK, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}
GAMMA = 0.5  # of the colour scale: a block's 30 MiB of weights stay visible beside a head's 3 GiB of logits
MOST_LABELS = 18  # of rows; more would touch each other


def heatmap(report: Report, ax: Axes | None = None, vmax: int | None = None) -> Axes:
    """Bytes held by each module through one step, above them their total with the budget and the peak.

    Rows are the modules of ``report.timeline``, columns its moments, grouped into forward, backward (recomputation
    hatched) and optimizer. Colour is bytes on a square-root scale that ends at `vmax` bytes. Raises `UserError` for a
    report without a timeline.
    """
    steps = _timeline(report, "heatmap")
    vmax = vmax or _largest(steps)
    with canvas.drawing(ax, height=_height(steps)) as ax:
        mesh = _draw_map(ax, report, steps, vmax, _ceiling(report, steps))
        _colour_bar(mesh, [ax], vmax)
    return ax


class HeatmapPair(NamedTuple):
    """The two heatmaps of one figure."""

    left: Axes
    right: Axes

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return canvas.bundle(self, **kwargs)


def heatmap_pair(left: Report, right: Report) -> HeatmapPair:
    """Two heatmaps side by side, 960 pixels wide, that share the scale of colours and that of the total.

    Raises `UserError` when one of them has no timeline.
    """
    both = [(report, _timeline(report, "heatmap_pair")) for report in (left, right)]
    vmax = max(_largest(steps) for _, steps in both)
    ceiling = max(_ceiling(report, steps) for report, steps in both)
    with canvas.styled():
        figure = canvas.new_figure(2 * canvas.WIDTH_INCHES, max(_height(steps) for _, steps in both))
        axes = HeatmapPair(*figure.subplots(1, 2))
        for ax, (report, steps) in zip(axes, both, strict=True):
            mesh = _draw_map(ax, report, steps, vmax, ceiling)
        _colour_bar(mesh, list(axes), vmax)
    return axes


def timeline(report: Report, ax: Axes | None = None) -> Axes:
    """Bytes held through one step, stacked by category, with the budget and the peak.

    Raises `UserError` for a report without a timeline.
    """
    steps = _timeline(report, "timeline")
    rows = dict(zip(steps.categories, steps.by_category, strict=True))
    ceiling = _ceiling(report, steps)
    divisor, unit = canvas.scale(max(steps.totals))
    with canvas.drawing(ax, height=3.3) as ax:
        moments = range(len(steps.phases) + 1)  # a column is a stretch, not a point: its value holds up to its end
        below = [0.0] * len(moments)
        for position, label in enumerate(canvas.ordered(c for c in rows if any(rows[c]))):
            held = [*rows[label], rows[label][-1]]
            above = [b + n / divisor for b, n in zip(below, held, strict=True)]
            colour, hatch = canvas.look(label, position)
            ax.fill_between(
                moments, below, above, step="post", facecolor=colour, hatch=hatch, linewidth=0,
                edgecolor=canvas.hatch_colour(colour), label=canvas.plural(label),
            )  # fmt: skip
            below = above
        _draw_total(ax, report, steps, ceiling)
        ax.set_ylabel(f"held ({unit})")
        _phase_axis(ax, steps, bool(report.failure))
        canvas.legend_below(ax)
        canvas.entitle(ax, canvas.named(report), _under_title(report, ceiling))
    at = _peak_column(steps)
    parts = sorted(((row[at], c) for c, row in rows.items() if row[at]), reverse=True)
    made_of = canvas.listing([f"{canvas.plural(c)} {show_bytes(n)}" for n, c in parts])
    words = canvas.budget_words([report])
    canvas.describe(ax, f"Memory through one step of {_course(report, steps)}: {made_of}{words}.")
    return ax


def _timeline(report: Report, function: str) -> Timeline:
    """The report's timeline, checked. Raises `UserError` that says what to draw instead."""
    (report,) = canvas.as_reports(report, function)
    steps = report.timeline
    if steps is None or not steps.phases or not steps.held:
        why = "it holds no traced step"
        if report.failure:
            why = f"it ran out of memory in {report.failure.phase} before a whole step was traced"
        raise UserError(f"{function}: {report.name} has no timeline ({why}); plots.bars(report) shows what was alive")
    return steps


def _largest(steps: Timeline) -> int:
    return max(max(row) for row in steps.held) or 1


def _ceiling(report: Report, steps: Timeline) -> int:
    """The top of the axis of totals, in bytes: room for the budget where it is near, and for the peak's label."""
    peak = max(steps.totals)
    budget = report.budget_bytes if canvas.budget_near(report.budget_bytes, peak) else None
    return int(1.3 * max(peak, budget or 0)) or 1


def _height(steps: Timeline) -> float:
    """Inches: rows tall enough for their labels, a strip for the total, title and axis."""
    return 0.135 * min(max(len(steps.modules), 6), 24) + 1.75


def _peak_column(steps: Timeline) -> int:
    return steps.totals.index(max(steps.totals))


def _draw_map(ax: Axes, report: Report, steps: Timeline, vmax: int, ceiling: int) -> Any:
    """The map on `ax`, the total in a strip above it, title and description; returns the mesh."""
    from matplotlib.colors import PowerNorm

    divisor, _ = canvas.scale(vmax)
    cells = [[n / divisor for n in row] for row in steps.held]
    norm = PowerNorm(GAMMA, 0, vmax / divisor)
    every = -(-len(steps.modules) // MOST_LABELS)
    numbers = [_number(name) for name in steps.modules]
    edges = [0, *accumulate(every if n is None else 1 for n in numbers)]  # where blocks are thin, others stay readable
    mesh = ax.pcolormesh(range(len(cells[0]) + 1), edges, cells, cmap="magma_r", norm=norm, rasterized=True)
    ax.set_ylim(edges[-1], 0)  # the forward pass reads downwards
    shown = [i for i, n in enumerate(numbers) if n is None or n % every == every // 2]
    ax.set_yticks([(edges[i] + edges[i + 1]) / 2 for i in shown], [_clip(steps.modules[i]) for i in shown])
    ax.tick_params(axis="y", length=0, pad=2)
    for first, last, phase in _stretches(steps.phases):
        if phase == "recompute":
            ax.axvspan(first, last, facecolor="none", edgecolor=BLACK, hatch="/////", linewidth=0, alpha=0.45)
    ax.axvline(_peak_column(steps) + 0.5, color=VERMILLION, linewidth=0.8, linestyle=":")
    _phase_axis(ax, steps, bool(report.failure))
    top = _strip_above(ax)
    for first, last, phase in _stretches(steps.phases):
        if phase == "recompute":
            top.axvspan(first, last, facecolor="none", edgecolor=canvas.GREY, hatch="/////", linewidth=0)
    _draw_total(top, report, steps, ceiling)
    top.set_xticks([])
    top.set_ylabel(f"total\n({canvas.scale(max(steps.totals))[1]})", rotation=0, ha="right", va="center")
    canvas.entitle(ax, canvas.named(report), _under_title(report, ceiling))
    canvas.describe(ax, _heatmap_text(report, steps))
    return mesh


def _strip_above(ax: Axes) -> Axes:
    """Axes as wide as `ax`, standing on it. Their height is in inches, not in parts of `ax`, so that the layout, which
    changes the height of `ax`, knows how much room they need."""
    from matplotlib.transforms import ScaledTranslation, blended_transform_factory

    inches: Any = ax.get_figure(root=True).dpi_scale_trans  # type: ignore[union-attr]
    edge: Any = ax.transAxes
    above = inches + ScaledTranslation(0, 1, edge)
    return ax.inset_axes((0, 0.06, 1, 0.8), transform=blended_transform_factory(ax.transAxes, above))


def _colour_bar(mesh: Any, axes: list[Axes], vmax: int) -> None:
    bar = axes[0].figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30, fraction=0.05)
    bar.set_label(f"held by the row ({canvas.scale(vmax)[1]})")
    bar.outline.set_visible(False)  # type: ignore[operator]


def _draw_total(ax: Axes, report: Report, steps: Timeline, ceiling: int) -> None:
    """The line of totals with the peak marked and the budget as a rule, on an axis up to `ceiling` bytes."""
    divisor, _ = canvas.scale(max(steps.totals))
    totals = [n / divisor for n in steps.totals]
    at = _peak_column(steps)
    ax.step(range(len(totals) + 1), [*totals, totals[-1]], where="post", color=BLACK, linewidth=1.2)
    ax.plot(at + 0.5, totals[at], marker="v", color=VERMILLION, markeredgecolor=BLACK, markeredgewidth=0.5)
    right = at > 0.55 * len(totals)
    room = (report.budget_bytes or 0) - max(steps.totals)
    near = 0 < room < 0.2 * ceiling  # no room for words between the line and the budget's rule: they go above it
    level = report.budget_bytes / divisor if near and report.budget_bytes else totals[at]
    crowded = near and at < 0.3 * len(totals)  # by the budget's own words
    ax.annotate(
        f"peak {show_bytes(max(steps.totals))}", (at + 0.5, level), xytext=(-6 if right else 6, 1),
        textcoords="offset points", ha="right" if right else "left", va="bottom",
        fontsize=canvas.SMALL, bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.3},
    )  # fmt: skip
    if report.failure:
        ax.plot(len(totals), totals[-1], marker="X", markersize=8, color="white", markeredgecolor=BLACK, clip_on=False)
    ax.set_xlim(0, len(totals))
    ax.set_ylim(0, ceiling / divisor)
    ax.locator_params(axis="y", nbins=3)
    if not report.budget_bytes or report.budget_bytes > ceiling:
        return
    ax.axhline(report.budget_bytes / divisor, color=VERMILLION, linewidth=1.3)
    ax.annotate(
        f"budget {show_bytes(report.budget_bytes)}", (0.99 if crowded else 0.01, report.budget_bytes / divisor),
        xycoords=("axes fraction", "data"), xytext=(0, 1), textcoords="offset points", va="bottom",
        ha="right" if crowded else "left", color=canvas.DARK_RED, fontsize=canvas.SMALL,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
    )  # fmt: skip


def _under_title(report: Report, ceiling: int) -> str:
    """Source and card, and the budget where it lies above what is drawn."""
    source = canvas.source_line([report])
    if report.budget_bytes and report.budget_bytes > ceiling:
        source += f" · budget {show_bytes(report.budget_bytes)}, above the scale"
    return source


def _stretches(phases: Iterable[str]) -> list[tuple[int, int, str]]:
    """``(first, end, phase)`` of the runs of columns that share a phase."""
    found, column = [], 0
    for phase, run in groupby(phases):
        length = len(list(run))
        found.append((column, column + length, phase))
        column += length
    return found


def _phase_axis(ax: Axes, steps: Timeline, failed: bool) -> None:
    """Name the groups of columns under the axis and part them; a name that finds no room is shortened or left out."""
    columns, centres, names = len(steps.phases), [], []
    groups = _stretches("backward" if phase == "recompute" else phase for phase in steps.phases)
    room = {(first, last): 330 * (last - first) / columns / 6 for first, last, _ in groups}  # in letters
    narrow = any(len(phase) > room[a, b] for a, b, phase in groups if phase in ("forward", "backward"))
    for first, last, phase in groups:
        known = [SHORT.get(phase, phase)] if narrow else [phase, SHORT.get(phase, phase)]
        centres.append((first + last) / 2)
        names.append(next((name for name in known if len(name) < room[first, last]), ""))
        if first:
            ax.axvline(first, color=BLACK, linewidth=0.8)
    ax.set_xlim(0, columns)
    ax.set_xticks(centres, names)
    ax.tick_params(axis="x", length=0)
    hatched = "; hatched: recomputation" if "recompute" in steps.phases else ""
    ax.set_xlabel(f"one step, {'until memory ran out' if failed else 'start to end'}{hatched}")


def _number(name: str) -> int | None:
    """The number in a row's label ("block 7"), None for a row that stands alone."""
    digits = "".join(c for c in name if c.isdigit())
    return int(digits) if digits else None


def _clip(name: str, most: int = 16) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _heatmap_text(report: Report, steps: Timeline) -> str:
    at = _peak_column(steps)
    largest = sorted(((row[at], name) for name, row in zip(steps.modules, steps.held, strict=True)), reverse=True)[:3]
    holders = canvas.listing([f"{name} {show_bytes(n)}" for n, name in largest if n])
    return (
        f"Heatmap of the memory that {len(steps.modules)} modules hold through one step of {_course(report, steps)}, "
        f"when most is held by {holders}{canvas.budget_words([report])}."
    )


def _course(report: Report, steps: Timeline) -> str:
    """Name, source and how the total goes, for a description."""
    totals, at = steps.totals, _peak_column(steps)
    text = (
        f"{report.name} ({canvas.source_line([report])}): the total goes from {show_bytes(totals[0])} to a peak of "
        f"{show_bytes(totals[at])} in {steps.phases[at]}"
    )
    if report.failure:
        wanted = show_bytes(report.failure.wanted_bytes)
        return text + f" and the step runs out of memory in {report.failure.phase} (wanted {wanted})"
    counted = report.steady.allocated_bytes if report.steady else report.peak_bytes
    if counted is not None and abs(counted - totals[at]) > 0.01 * counted:
        text += f" (by the allocator's counter {show_bytes(counted)})"
    return text
