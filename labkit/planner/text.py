"""A plan in words: for a terminal, and as a table for a notebook without widgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..units import show_bytes
from . import explanation, roofline

if TYPE_CHECKING:
    from .planning import Plan
    from .search import Choice

COLUMNS = ("plan", "batch", "peak", "tokens/s", "step", "switches")


def text(plan: Plan) -> str:
    """The whole answer."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> list[str]:
    lines = [heading(plan), f"room: {plan.room}", f"      {start(plan)}", ""]
    if not plan.choices:
        return lines + nothing(plan)
    rows = [COLUMNS[:-1], *(cells(c)[:-1] for c in plan.choices)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for number, row in enumerate(rows):
        mark = f"{number:2d} " if number else "   "
        lines.append(
            mark
            + "  ".join(c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        )
        if number:
            lines.append(f"     {shown(plan.choices[number - 1])}")
    lines += ["", "why the first:", *(f"  {switch}" for switch in plan.why)]
    lines += [
        "",
        "how it is found:",
        *(f"  {n.question} {'yes' if n.yes else 'no'} ({n.figures}): {n.advice}" for n in plan.tree),
    ]
    if plan.best is not None and plan.best.need.host_bytes:
        lines.append(f"it needs {show_bytes(plan.best.need.host_bytes)} of the host's memory")
    return [*lines, f"labkit plan … --export FILE writes the first as a training script; times: {where(plan)}"]


def heading(plan: Plan) -> str:
    """Model, sequence and card in one line."""
    return f"{plan.model}, {plan.seq} tokens, on {plan.card.title} ({plan.card.sm}): {plan.goal}"


def start(plan: Plan) -> str:
    """Whether the plain step fits."""
    wanted = show_bytes(plan.plain_need.reserved_bytes)
    if plan.nothing_needed:
        return f"the plain step ({plan.plain}) fits with {wanted}: nothing is needed; these are faster"
    return f"the plain step ({plan.plain}) needs {wanted}: it does not fit"


def nothing(plan: Plan) -> list[str]:
    """What to say when nothing fits."""
    miss = plan.nearest_miss
    lines = ["nothing fits."]
    if miss is not None:
        short = miss.need.worst_bytes - plan.room.limit_bytes
        host = plan.room.host_bytes
        if short > 0:
            lines.append(
                f"nearest: {miss.recipe} needs {show_bytes(miss.need.worst_bytes)}, {show_bytes(short)} too much"
            )
        elif host is not None:
            lines.append(
                f"nearest: {miss.recipe} needs {show_bytes(miss.need.host_bytes)} of the host's {show_bytes(host)}"
            )
    card = plan.smallest_card
    lines.append(f"the smallest card that would do: {card}" if card else "no card of the presets would do")
    return lines


def cells(choice: Choice) -> tuple[str, ...]:
    """A plan as one row of a table."""
    recipe = choice.recipe
    batch = f"{recipe.batch}" if recipe.accumulation == 1 else f"{recipe.batch} x {recipe.accumulation}"
    step = choice.times.seconds
    return (
        choice.family, batch, show_bytes(choice.need.reserved_bytes), f"{choice.tokens_per_second:,.0f}",
        f"{step * 1e3:.0f} ms" if step < 10 else f"{step:.1f} s", shown(choice),
    )  # fmt: skip


def shown(choice: Choice) -> str:
    """The switches of a plan, as `predict` would take them."""
    return " ".join(switch.name for switch in explanation.names(choice.recipe))


def reasons(plan: Plan, choice: Choice) -> str:
    """Why this plan, in one text: of the first each switch with its effect here, of the others what differs."""
    if choice is (plan.best or plan.nearest_miss):
        if plan.nothing_needed and plan.best is not None:
            begin = "nothing is needed to fit; for speed: "
        else:
            begin = ""
        return begin + "; ".join(str(switch) for switch in plan.why)
    first = {switch.name for switch in explanation.names(plan.choices[0].recipe)} if plan.choices else set()
    own = [str(switch) for switch in explanation.names(choice.recipe) if switch.name not in first]
    slower = 1 - choice.tokens_per_second / plan.choices[0].tokens_per_second
    pace = f"{abs(slower):.0%} {'slower' if slower >= 0 else 'faster'} than the first"
    return "; ".join([pace, *own])


def where(plan: Plan) -> str:
    """Where the times come from."""
    source = roofline.provenance()
    off = f"off by {source['error']['median']:.0%} in the median and up to {source['error']['p90']:.0%} in nine of ten"
    base = f"fitted to {source['error']['rows']} steps of an {source['card']} ({off})"
    if plan.card.name == source["card"]:
        return base
    return f"an estimate for this card, by its data sheet from rates {base}"


def html(plan: Plan) -> str:
    """The answer as a table for a notebook."""
    from .. import show

    body = [f"<b>{show.inline(heading(plan))}</b><div>room: {show.inline(str(plan.room))}</div>"]
    body.append(f"<div>{show.inline(start(plan))}</div>")
    if plan.choices:
        rows = [COLUMNS, *(cells(c) for c in plan.choices)]
        tags = ["th", *["td"] * len(plan.choices)]
        table = "".join(
            f"<tr>{''.join(f'<{tag}>{show.inline(cell)}</{tag}>' for cell in row)}</tr>"
            for tag, row in zip(tags, rows, strict=True)
        )
        body.append(f"<table>{table}</table>")
        body += [f"<div>{show.inline(str(switch))}</div>" for switch in plan.why]
    else:
        body += [f"<div>{show.inline(line)}</div>" for line in nothing(plan)]
    body.append(f"<div style='opacity:0.75'>{show.inline(where(plan))}</div>")
    return show.card("".join(body), "good" if plan.choices else "bad")
