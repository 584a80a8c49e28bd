"""A plan to turn in a notebook: card, batch, sequence and switches, and a stacked bar against the room there is.

It needs ipywidgets; without them `interactive` shows the plan's table instead.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .. import machine, show
from ..recipes import CHOICES, Recipe, conflict
from ..units import UserError, show_bytes
from .roofline import estimate
from .room import Need, Room, least_bytes, need
from .shape import Shape

if TYPE_CHECKING:
    from .planning import Plan

SWITCHES = ("precision", "optimizer", "checkpoint", "loss", "gradients", "offload", "activation", "compile")
_CHECKPOINTS = ("0", "1", "2", "4")


def has_widgets() -> bool:
    """Whether the interactive view can be shown here."""
    return show.in_kernel() and importlib.util.find_spec("ipywidgets") is not None


def interactive(plan: Plan) -> Any:
    """Widgets that start at the best plan; the plan itself, as a table, where there are none."""
    if not has_widgets():
        return plan
    import ipywidgets as widgets  # type: ignore[import-untyped, import-not-found, unused-ignore]

    shown = plan.best or plan.nearest_miss
    begin = shown.recipe if shown else plan.plain
    card = widgets.Dropdown(options=list(machine.PRESETS), value=plan.card.name, description="card")
    batch = widgets.BoundedIntText(value=begin.batch, min=1, max=512, description="batch")
    seq = widgets.BoundedIntText(value=begin.seq, min=1, max=2**17, description="seq")
    rounding = widgets.Checkbox(value=begin.stochastic_rounding, description="stochastic rounding")
    chosen = {name: widgets.Dropdown(options=_options(name), value=str(getattr(begin, name)), description=name)
              for name in SWITCHES}  # fmt: skip
    out = widgets.HTML()

    def refresh(_: Any = None) -> None:
        fields = {**begin.to_dict(), "batch": batch.value, "seq": seq.value, "stochastic_rounding": rounding.value}
        fields |= {name: int(box.value) if name == "checkpoint" else box.value for name, box in chosen.items()}
        out.value = described(fields, card.value, plan.room)

    for box in (card, batch, seq, rounding, *chosen.values()):
        box.observe(refresh, names="value")
    refresh()
    return widgets.VBox([widgets.HBox([card, batch, seq]), _rows(widgets, [*chosen.values(), rounding]), out])


def _rows(widgets: Any, boxes: list[Any]) -> Any:
    return widgets.VBox([widgets.HBox(boxes[n : n + 3]) for n in range(0, len(boxes), 3)])


def _options(name: str) -> list[str]:
    return list(_CHECKPOINTS if name == "checkpoint" else CHOICES[name])


def described(fields: dict[str, Any], card: str, room: Room) -> str:
    """What a set of switches comes to, as HTML: the bar, the peak, the speed; or why it does not exist."""
    wrong = conflict(fields)
    if wrong is not None:
        return show.card(show.inline(wrong), "half")
    preset = machine.preset(card)
    here = Room(preset, room.budget_bytes, room.host_bytes)
    try:
        recipe = Recipe.of(**fields)
        wanted, seconds = _priced(recipe, card)
    except UserError as error:
        return show.card(show.inline(str(error)), "half")
    fits = here.fits(wanted)
    verdict = "fits" if fits else f"{show_bytes(wanted.worst_bytes - here.limit_bytes)} too much"
    line = (
        f"**{verdict}**: {show_bytes(wanted.reserved_bytes)} of {show_bytes(here.limit_bytes)}, about "
        f"{recipe.tokens / seconds:,.0f} tokens/s (estimated), host memory {show_bytes(wanted.host_bytes)}"
    )
    return show.card(_bar(parts(recipe, wanted), here.limit_bytes) + f"<div>{show.inline(line)}</div>",
                     "good" if fits else "bad")  # fmt: skip


@lru_cache(maxsize=256)
def _priced(recipe: Recipe, card: str) -> tuple[Need, float]:
    preset = machine.preset(card)
    return need(recipe, preset), estimate(recipe, preset).seconds


def parts(recipe: Recipe, wanted: Need) -> dict[str, int]:
    """The peak by who holds it: weights, gradients and states by arithmetic, the rest is activations and buffers."""
    shape = Shape.of(recipe)
    weights = shape.parameters * shape.weight_bytes(recipe)
    waiting = recipe.gradients == "card" and not recipe.offload.endswith("gradients")
    gradients = weights if waiting else 0
    states = max(0, least_bytes(recipe, shape) - weights - gradients)
    rest = max(0, wanted.reserved_bytes - weights - gradients - states)
    return {"parameter": weights, "gradient": gradients, "optimizer state": states, "activation": rest}


def _bar(held: dict[str, int], limit: int) -> str:
    from ..plots.canvas import LOOKS, plural

    full = max(sum(held.values()), limit)
    pieces = "".join(
        f'<span style="width:{100 * size / full:.2f}%;background-color:{LOOKS[name][0]}"></span>'
        for name, size in held.items()
        if size
    )
    rule = (
        f'<span style="position:absolute;left:{100 * limit / full:.2f}%;top:-3px;bottom:-3px;'
        f'border-left:2px solid {show.TONES["bad"]}"></span>'
    )
    legend = " · ".join(f"{plural(name)} {show_bytes(size)}" for name, size in held.items() if size)
    return (
        f'<div style="position:relative;display:flex;height:1.1em;margin:0.45em 2px">{pieces}{rule}</div>'
        f"<div>{show.inline(legend)} (the line: {show_bytes(limit)})</div>"
    )
