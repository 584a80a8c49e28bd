"""The figures of the class summary: what became of each exercise, and how its points are spread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..progress import label
from .outcomes import STATUSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .summary import Exercise


def statuses(those: Sequence[Exercise], lesson: str) -> Axes:
    """Bars of how many students have each status, one bar for each exercise."""
    from matplotlib.ticker import MaxNLocator

    from ..plots import canvas

    looks = _looks()
    with canvas.drawing(None, height=1.4 + 0.34 * len(those)) as ax:
        for place, one in enumerate(those):
            left = 0
            for status, count in one.statuses.items():
                colour, hatch, ink = looks[status]
                ax.barh(place, count, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
                ax.annotate(
                    str(count), (left + count / 2, place), ha="center", va="center", color=ink, fontsize=canvas.SMALL,
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": colour, "edgecolor": "none"},
                )  # fmt: skip
                left += count
        for status in (s for s in STATUSES if any(s in e.statuses for e in those)):
            ax.bar(0, 0, color=looks[status][0], hatch=looks[status][1], edgecolor="white", linewidth=0, label=status)
        ax.set_yticks(range(len(those)), [e.name for e in those])
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_xlabel("students")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.entitle(ax, "What became of each exercise", f"grading · {label(lesson)}")
        canvas.legend_below(ax)
        canvas.describe(
            ax,
            f"Bars: statuses of each exercise of {label(lesson)}. "
            + ". ".join(f"{e.name}: {e.states()}" for e in those)
            + ".",
        )
    return ax


def points(those: Sequence[Exercise], lesson: str) -> tuple[Axes, ...]:
    """How the points of each exercise are spread: a histogram for each, one below the other, on a common axis."""
    from ..plots import canvas

    edges = [n / 10 for n in range(11)]
    with canvas.styled():
        figure = canvas.new_figure(canvas.WIDTH_INCHES, 1.0 + 0.55 * len(those))
        panels = figure.subplots(len(those), 1, sharex=True, squeeze=False)[:, 0]
        for ax, one in zip(panels, those, strict=True):
            counts = [
                sum(low <= s < high or (high == 1 and s == 1) for s in one.shares) for low, high in pairwise(edges)
            ]
            ax.bar([e * 100 + 5 for e in edges[:-1]], counts, width=9, color=canvas.BLUE)
            ax.set_ylim(0, 1.15 * max(1, *counts))
            ax.set_yticks([max(1, *counts)])
            ax.set_ylabel(one.name, rotation=0, ha="right", va="center")
            said = ", ".join(
                f"{n} at {round(100 * e)}–{round(100 * e) + 10} %" for e, n in zip(edges, counts, strict=False) if n
            )
            canvas.describe(ax, f"{one.name}: {said or 'not scored yet'}.")
        panels[-1].set_xlabel("part of the points (%), written answers not yet read left out")
        canvas.entitle(panels[0], "How the points are spread (students)", f"grading · {label(lesson)}")
    return tuple(panels)


def _looks() -> dict[str, tuple[str, str, str]]:
    """Colour, hatch and colour of the words of each status."""
    from ..plots.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW

    return {
        "graded": (GREEN, "", "white"),
        "partial": (ORANGE, "///", BLACK),
        "wrong": (VERMILLION, "\\\\\\", "white"),
        "blank": (GREY, "", BLACK),
        "error": (PURPLE, "xxx", BLACK),
        "timeout": (YELLOW, "---", BLACK),
        "crashed": (YELLOW, "+++", BLACK),
        "unreadable": (BLACK, "", "white"),
        "tampered": (BLUE, "o", "white"),
        "needs-manual": (SKY, "...", BLACK),
    }
