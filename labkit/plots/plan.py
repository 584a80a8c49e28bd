"""A plan's reasons as a picture: the questions of its decision tree, and the nine-grid with the case marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import canvas
from .canvas import BLACK, DARK_RED, GREEN, GREY, PALE, SMALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..planner.explanation import Node, Row
    from ..planner.planning import Plan

STEP, CELL = 1.0, 1.25  # heights of a question and of a row of the grid, in the figure's own units
PLACES = ("low", "middle", "high")
MARKED = "#D9EFE7"  # the green of `GREEN`, pale enough for black words on it


def picture(plan: Plan) -> Axes:
    """The questions from the plain step to the plan, top to bottom, and under them what kind of case this is."""
    nodes, rows = plan.tree, plan.grid
    height = STEP * (len(nodes) + 1) + CELL * (len(rows) + 0.75)
    with canvas.drawing(None, height=0.62 * height + 0.5) as ax:
        ax.set_xlim(0, 12)
        ax.set_ylim(0, height)
        ax.axis("off")
        top = height - 0.1
        for number, node in enumerate(nodes):
            _question(ax, node, top - STEP * number, last=number == len(nodes) - 1)
        _answer(ax, plan, top - STEP * len(nodes))
        _grid(ax, rows, CELL * (len(rows) + 0.1))
        canvas.entitle(ax, f"{plan.model}, {plan.seq} tokens: why this plan", f"predicted · {plan.card.name}")
    canvas.describe(ax, _words(plan))
    return ax


def _question(ax: Any, node: Node, y: float, last: bool) -> None:
    tone = GREEN if node.yes else DARK_RED
    ax.text(0.2, y - 0.28, node.question, fontsize=canvas.FONT, color=BLACK, va="center", weight="bold")
    ax.text(0.2, y - 0.62, canvas.wrapped(node.figures, 62), fontsize=SMALL, color="#444444", va="center")
    ax.text(7.35, y - 0.28, "yes" if node.yes else "no", fontsize=canvas.FONT, color=tone, va="center", weight="bold")
    ax.text(8.1, y - 0.28, canvas.wrapped(node.advice.rstrip(": "), 34), fontsize=SMALL, color=BLACK, va="center")
    if not last:
        ax.plot([0.05, 0.05], [y - 0.1, y - STEP + 0.05], color=GREY, linewidth=1)


def _answer(ax: Any, plan: Plan, y: float) -> None:
    from ..planner.text import shown

    words = shown(plan.best) if plan.best else "nothing fits"
    ax.text(
        0.2, y - 0.45, canvas.wrapped(f"plan: {words}", 100), fontsize=SMALL, color=BLACK, va="center",
        bbox={"boxstyle": "round,pad=0.35", "facecolor": MARKED if plan.best else "#F6DDD0", "edgecolor": GREY},
    )  # fmt: skip


def _grid(ax: Any, rows: tuple[Row, ...], top: float) -> None:
    from matplotlib.patches import Rectangle

    for column, place in enumerate(PLACES):
        ax.text(4.15 + 2.65 * column, top + 0.18, place, fontsize=SMALL, color=BLACK, ha="center")
    for number, row in enumerate(rows):
        y = top - CELL * (number + 1)
        ax.text(0.0, y + 0.8, row.quantity, fontsize=canvas.FONT, color=BLACK, weight="bold", va="center")
        ax.text(0.0, y + 0.38, canvas.wrapped(row.value, 26), fontsize=SMALL, color="#444444", va="center")
        for column, cell in enumerate(row.cells):
            here = column == row.place
            ax.add_patch(
                Rectangle((2.87 + 2.65 * column, y + 0.05), 2.56, CELL - 0.1, facecolor=MARKED if here else "white",
                          edgecolor=GREEN if here else PALE, linewidth=1.6 if here else 0.8)
            )  # fmt: skip
            ax.text(4.15 + 2.65 * column, y + CELL / 2, canvas.wrapped(cell, 23), fontsize=SMALL, ha="center",
                    va="center", color=BLACK if here else "#666666", weight="bold" if here else "normal")  # fmt: skip


def _words(plan: Plan) -> str:
    from ..planner.text import shown

    asked = "; ".join(f"{n.question} {'yes' if n.yes else 'no'} ({n.figures})" for n in plan.tree)
    case = ", ".join(f"{row.quantity} {PLACES[row.place]} ({row.value})" for row in plan.grid)
    return f"Why this plan for {plan.model} on {plan.card.name}: {asked}. Plan: " + (
        f"{shown(plan.best) if plan.best else 'nothing fits'}. The case: {case}."
    )
