"""`plan`: a model, a card and a goal in; recipes that fit, with their price and their reasons, out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import machine, models, quiet
from ..recipes import LIMITS, Recipe
from ..units import UserError, parse_size
from . import explanation, search
from .candidates import candidates, plain
from .explanation import Node, Row, Switch
from .room import Need, Room, host_memory, need
from .search import Choice
from .text import COLUMNS, cells

GOALS = ("fastest", "largest-batch", "longest")
START_BATCH = 8  # of the plain step that a plan is held against, where no batch was asked for


@dataclass(frozen=True)
class Plan:
    """What came out: ``choices`` that fit, the best first; ``plain``, the step without any switch, and whether it
    fits; where nothing fits the ``nearest_miss`` and the ``smallest_card`` of the presets that would do (None: none).
    """

    model: str
    card: machine.Card
    room: Room
    seq: int
    goal: str
    choices: tuple[Choice, ...]
    plain: Recipe
    nearest_miss: Choice | None = None
    smallest_card: str | None = None

    @property
    def best(self) -> Choice | None:
        """The plan to take; None when nothing fits."""
        return self.choices[0] if self.choices else None

    @property
    def recipe(self) -> Recipe:
        """The best plan's recipe. Raises `UserError` when nothing fits."""
        if self.best is None:
            raise UserError(f"no plan for {self.model} fits {self.card.title}")
        return self.best.recipe

    @cached_property
    def plain_need(self) -> Need:
        """What the plain step would need."""
        return need(self.plain, self.card)

    @property
    def nothing_needed(self) -> bool:
        """Whether the plain step fits as it is."""
        return self.room.fits(self.plain_need)

    columns = COLUMNS

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """One row of text cells for each choice, under `columns`."""
        return [cells(choice) for choice in self.choices]

    @cached_property
    def why(self) -> tuple[Switch, ...]:
        """Each switch of the best plan (of the nearest miss, when nothing fits): what it saves and costs here."""
        shown = self.best or self.nearest_miss
        return explanation.switches(shown.recipe, self.card) if shown else ()

    @cached_property
    def tree(self) -> tuple[Node, ...]:
        """The questions that lead from the plain step to the best plan."""
        return explanation.tree(self.plain, self.best.recipe if self.best else None, self.card, self.room)

    @cached_property
    def grid(self) -> tuple[Row, ...]:
        """What kind of case this is: compute intensity, parameter bytes, data lengths."""
        return explanation.grid(self.plain, self.card, self.room)

    def to_dict(self) -> dict[str, Any]:
        """The document that ``labkit plan --json`` prints."""
        from .text import reasons

        return {
            "card": self.card.name,
            "budget_bytes": self.room.limit_bytes,
            "plans": [_row(c, reasons(self, c)) for c in self.choices],
            "nearest_miss": None
            if self.nearest_miss is None
            else _row(self.nearest_miss, reasons(self, self.nearest_miss)),
        }

    def __str__(self) -> str:
        from .text import text

        return text(self)

    def _repr_html_(self) -> str:
        from .text import html

        return html(self)

    def picture(self) -> Any:
        """The decision tree and the nine-grid, as a matplotlib figure."""
        from ..plots.plan import picture

        return picture(self)

    def show(self) -> Any:
        """In a notebook: card, batch, sequence and switches to turn, with a stacked bar against the room."""
        from .view import interactive

        return interactive(self)

    def export(self, path: str | Path) -> Path:
        """Write the best plan as a training script of plain PyTorch. Raises `UserError` when nothing fits."""
        from .export import write

        return write(self.recipe, path, card=self.card)


def _row(choice: Choice, why: str) -> dict[str, Any]:
    return {
        "recipe": choice.recipe.to_dict(),
        "allocated_bytes": choice.need.allocated_bytes,
        "reserved_bytes": choice.need.reserved_bytes,
        "tokens_per_second": round(choice.tokens_per_second, 1),
        "why": why,
    }


def plan(
    model: str = "gpt2",
    *,
    card: str | None = None,
    budget: int | str | None = None,
    seq: int = 1024,
    batch: int | None = None,
    goal: str = "fastest",
    host_memory: int | str | None = None,
    compile: bool = True,
    **fixed: Any,
) -> Plan:
    """The recipes that train `model` at sequences of `seq` tokens, by their predicted memory and estimated time.

    model: a GPT-2 size, a folder with a Hugging Face ``config.json``, or a hub name. card: a preset; the default is
    `machine.preset`'s. budget: what PyTorch may reserve (``"8GiB"``); without it, all that the card leaves beside a
    CUDA context. batch: sequences in an optimizer step (micro-batches are then chosen); free without it. goal:
    ``fastest``, ``largest-batch`` or ``longest`` (the longest sequence that fits; `seq` is then not used). host_memory:
    what the host has; without it plans say how much they need. compile: whether compiled blocks are tried. `fixed` are
    fields of `Recipe` that must be as given (``clip=1.0``, ``dropout=0.0``).

    Raises `UserError` for an unknown card, model or goal, and for sizes that the model does not have.
    """
    quiet.transformers()
    if goal not in GOALS:
        raise UserError(f"goal {goal!r} is not one of {', '.join(GOALS)}")
    preset = machine.preset(card)
    room = Room(preset, None if budget is None else parse_size(budget), _host(host_memory))
    for name, value in (("batch", batch), ("seq", seq)):
        low, high = LIMITS[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise UserError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
    if goal == "longest":
        return _longest(model, preset, room, batch or 1, compile, fixed)
    if goal == "largest-batch" and batch is not None:
        raise UserError("goal largest-batch looks for the batch: leave --batch out")
    Recipe.of(model=model, seq=seq, batch=batch or 1).config()  # whether there is such a model, and such a length

    def ones(on: machine.Card) -> list[tuple[str, Recipe]]:
        return list(candidates(on, model=model, batch=1, seq=seq, compile=compile, **fixed))

    structures = ones(preset)
    if goal == "fastest":
        found = search.fastest(structures, preset, room, batch=batch)
    else:
        found = search.largest_batch(structures, preset, room)
    start = plain(model, batch=batch or START_BATCH, seq=seq, **_kept(fixed))
    plan = Plan(model, preset, room, seq, goal, tuple(found), start)
    return plan if found else _nothing(plan, ones, batch)


def _host(size: int | str | None) -> int | None:
    return host_memory(size)


def _kept(fixed: dict[str, Any]) -> dict[str, Any]:
    """Of the fields that a user fixed, those that the plain step has, too."""
    return {name: fixed[name] for name in ("dropout", "clip", "activation") if name in fixed}


def _nothing(plan: Plan, ones: Callable[[machine.Card], list[tuple[str, Recipe]]], batch: int | None) -> Plan:
    """The same plan with its nearest miss, and the smallest card on which something would fit."""
    miss = search.smallest(ones(plan.card), plan.card, plan.room, batch=batch)
    larger = sorted((c for c in machine.PRESETS.values()), key=lambda c: c.memory_bytes)
    for card in larger:
        room = Room(card, None, plan.room.host_bytes)
        if room.limit_bytes <= plan.room.limit_bytes:
            continue
        least = search.smallest(ones(card), card, room, batch=batch)
        if least is not None and room.fits(least.need):
            return dataclasses.replace(plan, nearest_miss=miss, smallest_card=card.name)
    return dataclasses.replace(plan, nearest_miss=miss)


def _longest(model: str, card: machine.Card, room: Room, batch: int, compile: bool, fixed: dict[str, Any]) -> Plan:
    """The plan at the longest sequence that fits, among `lengths`."""
    found: Plan | None = None
    for seq in lengths(model):
        found = plan(model, card=card.name, budget=room.budget_bytes, seq=seq, batch=batch, host_memory=room.host_bytes,
                     compile=compile, **fixed)  # fmt: skip
        if found.choices:
            break
    assert found is not None
    return dataclasses.replace(found, goal="longest")


def lengths(model: str) -> list[int]:
    """Sequence lengths that are tried, longest first: what the model has positions for, then eighths and halves."""
    most = models.positions(models.config(model)) or 2**17
    ladder = {most, *(most * n // 8 for n in (7, 6, 5, 4, 3)), *(2**n for n in range(7, 18))}
    return sorted((n for n in ladder if 1 <= n <= most), reverse=True)
