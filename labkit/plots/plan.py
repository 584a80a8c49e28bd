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
INCHES, TITLE = 0.46, 0.5  # of such a unit, and of the title
COLUMN, FIRST = 2.9, 3.25  # widths in twelfths of the figure: a cell of the grid, and what comes before the first
PLACES = ("low", "middle", "high")
MARKED = "#D9EFE7"  # the green of `GREEN`, pale enough for black words on it


def picture(plan: Plan) -> Axes:
    """The questions from the plain step to the plan, top to bottom, and under them what kind of case this is."""
    nodes, rows = plan.tree, plan.grid
    height = STEP * (len(nodes) + 1) + CELL * (len(rows) + 0.75)
    with canvas.drawing(None, height=INCHES * height + TITLE) as ax:
        figure: Any = ax.figure
        figure.set_layout_engine("none")  # words would push the axes together
        ax.set_position((0.02, 0.01, 0.96, INCHES * height / (INCHES * height + TITLE) - 0.01))
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
    ax.text(0.2, y - 0.62, canvas.wrapped(node.figures, 80), fontsize=SMALL, color="#444444", va="center")
    ax.text(6.75, y - 0.28, "yes" if node.yes else "no", fontsize=canvas.FONT, color=tone, va="center", weight="bold")
    ax.text(7.55, y - 0.28, canvas.wrapped(node.advice, 32), fontsize=SMALL, color=BLACK, va="center")
    if not last:
        ax.plot([0.05, 0.05], [y - 0.1, y - STEP + 0.05], color=GREY, linewidth=1)


def _answer(ax: Any, plan: Plan, y: float) -> None:
    from ..planner.text import shown

    words = shown(plan.best) if plan.best else "nothing fits"
    ax.text(
        0.2, y - 0.45, canvas.wrapped(f"plan: {words}", 80), fontsize=SMALL, color=BLACK, va="center",
        bbox={"boxstyle": "round,pad=0.35", "facecolor": MARKED if plan.best else "#F6DDD0", "edgecolor": GREY},
    )  # fmt: skip


def _grid(ax: Any, rows: tuple[Row, ...], top: float) -> None:
    from matplotlib.patches import Rectangle

    for column, place in enumerate(PLACES):
        ax.text(FIRST + COLUMN * (column + 0.5), top + 0.18, place, fontsize=SMALL, color=BLACK, ha="center")
    for number, row in enumerate(rows):
        y = top - CELL * (number + 1)
        ax.text(0.0, y + 0.95, row.quantity, fontsize=canvas.FONT, color=BLACK, weight="bold", va="center")
        ax.text(0.0, y + 0.42, canvas.wrapped(row.value, 21), fontsize=SMALL, color="#444444", va="center")
        for column, cell in enumerate(row.cells):
            here = column == row.place
            corner = FIRST + COLUMN * column, y + 0.05
            looks = {"facecolor": MARKED, "edgecolor": GREEN, "linewidth": 1.6} if here else {"facecolor": "white"}
            ax.add_patch(Rectangle(corner, COLUMN - 0.09, CELL - 0.1, **({"edgecolor": PALE} | looks)))
            ax.text(
                FIRST + COLUMN * (column + 0.48), y + CELL / 2, canvas.wrapped(cell, 20), fontsize=SMALL, ha="center",
                va="center", color=BLACK if here else "#666666",
            )  # fmt: skip


def _words(plan: Plan) -> str:
    from ..planner.text import shown

    asked = "; ".join(f"{n.question} {'yes' if n.yes else 'no'} ({n.figures})" for n in plan.tree)
    case = ", ".join(f"{row.quantity} {PLACES[row.place]} ({row.value})" for row in plan.grid)
    return f"Why this plan for {plan.model} on {plan.card.name}: {asked}. Plan: " + (
        f"{shown(plan.best) if plan.best else 'nothing fits'}. The case: {case}."
    )
