"""Ways to do the same work, side by side: how fast, and in how much memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ..units import GiB, UserError
from . import canvas
from .canvas import BLACK, BLUE, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rates(
    rows: Mapping[str, tuple[float, int]], *, title: str, source: str, ours: Collection[str] = (),
    memory: str = "device memory",
) -> tuple[Axes, Axes]:  # fmt: skip
    """A pair of horizontal bars for each row: ``{name: (tokens a second, bytes)}``; rows named in `ours` stand out.

    `memory` says which bytes they are. Raises `UserError` when there is no row, and for a name in `ours` that is none.
    """
    if not rows:
        raise UserError("rates has nothing to draw: there is no row")
    if unknown := [name for name in ours if name not in rows]:
        raise UserError(f"rates: {', '.join(unknown)} is no row")
    names, places = list(rows), range(len(rows))
    colours = [BLUE if name in ours else GREY for name in names]
    hatches = ["" if name in ours else "///" for name in names]
    speeds, sizes = [rows[name][0] / 1e3 for name in names], [rows[name][1] / GiB for name in names]
    with canvas.styled():
        figure = canvas.new_figure(canvas.WIDTH_INCHES, 0.8 + 0.36 * len(names))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for ax, values, unit in ((left, speeds, "1000 tokens/s"), (right, sizes, f"{memory} (GiB)")):
            drawn = ax.barh(places, values, 0.42, color=colours, edgecolor="white")
            for bar, hatch in zip(drawn, hatches, strict=True):
                bar.set_hatch(hatch)
            for place, value in zip(places, values, strict=True):
                ax.annotate(
                    canvas.plain(value), (value, place), xytext=(3, 0), textcoords="offset points", va="center",
                    fontsize=canvas.SMALL, color=BLACK,
                )  # fmt: skip
            ax.margins(x=0.18)
            ax.set_xlabel(unit)
            ax.tick_params(left=False, labelleft=False)
            ax.patch.set_visible(False)
            ax.spines["left"].set_visible(False)
        for place, name in zip(places, names, strict=True):  # above its bars: names are long
            text = left.annotate(
                name, (0, place - 0.27), xytext=(1, 0), textcoords="offset points", va="bottom",
                fontsize=canvas.SMALL, fontweight="bold" if name in ours else "normal", annotation_clip=False,
            )  # fmt: skip
            text.set_in_layout(False)  # they may reach over the second pair of axes
        left.set_ylim(len(names) - 0.6, -0.75)
        canvas.entitle(left, title, source)
    for ax, values, unit in ((left, speeds, "thousand tokens a second"), (right, sizes, f"GiB of {memory}")):
        said = ", ".join(f"{name} {canvas.plain(value)}" for name, value in zip(names, values, strict=True))
        canvas.describe(ax, f"{title} ({source}), {unit}: {said}.")
    return left, right
