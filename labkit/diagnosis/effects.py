"""What a change would do to the memory of a step, by the predictor: for a known recipe, before and after."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import machine
from ..recipes import CHOICES, Recipe
from ..results import Report
from ..units import UserError, show_bytes
from .rule import Change
from .settings import Settings

_MOST = 7  # predictions in one diagnosis: each takes seconds


@dataclass(frozen=True)
class Room:
    """The memory that a step may take: ``limit_bytes`` of ``what`` (``"a budget"``, the card's title)."""

    limit_bytes: int
    what: str
    context_bytes: int = 0  # taken from it outside the allocator

    @property
    def for_torch(self) -> int:
        """What PyTorch's allocator may reserve."""
        return max(1, self.limit_bytes - self.context_bytes)


@dataclass(frozen=True)
class Effect:
    """The predicted peaks (allocated) before and after a change, in bytes, and whether it then fits."""

    before_bytes: int
    after_bytes: int
    fits: bool | None
    what: str = ""
    limit_bytes: int = 0

    def __str__(self) -> str:
        verdict = "" if self.fits is None else f", {'fits' if self.fits else 'does not yet fit'} {self.what}"
        if self.fits is False and self.after_bytes < self.limit_bytes:
            verdict += " in the pieces that the allocator needs"
        return f"predicted peak {show_bytes(self.before_bytes)} -> {show_bytes(self.after_bytes)}{verdict}"


def room(budget_bytes: int | None, card: str | None, total_bytes: int | None = None) -> Room | None:
    """What there is: a budget, else a named card, else the card whose size an error message gives."""
    if budget_bytes is not None:
        return Room(budget_bytes, f"the {show_bytes(budget_bytes)}")
    if card is not None:
        preset = machine.preset(card)
        return Room(
            preset.memory_bytes, f"the {show_bytes(preset.memory_bytes)} of {preset.title}", preset.context_bytes
        )
    if total_bytes is not None:
        return Room(total_bytes, f"the card's {show_bytes(total_bytes)}", machine.preset("rtx3090").context_bytes)
    return None


def recipe_of(settings: Settings, raw: dict[str, Any] | None = None) -> Recipe | None:
    """The recipe that settings describe, or None where model, batch or length are not known, or no recipe can say it.

    `raw` is what a file holds: where all its names are a recipe's, it is one, and wrong values are the user's mistake
    (`UserError`).
    """
    names = {f.name for f in dataclasses.fields(Recipe)}
    if raw is not None and raw.keys() & {"model", "batch", "seq"} and not raw.keys() - names:
        return Recipe.of(**raw)
    if settings.get("lora") or settings.get("quantised") or not {"model", "batch", "seq"} <= settings.keys():
        return None
    fields: dict[str, Any] = {}
    for name in names & settings.keys():
        value = settings[name]
        if name in CHOICES and value not in CHOICES[name]:
            if name == "attention" and value == "flash":
                value = "sdpa"
            else:
                continue
        fields[name] = value
    fields["model"] = str(fields["model"]).removeprefix("openai-community/")
    if not fields["model"].startswith("gpt2"):
        return None  # another model's configuration may need the network
    try:
        return Recipe.of(**fields)
    except UserError:  # the text names a combination that is no recipe: no prediction then
        return None


def predict(recipe: Recipe, card: str | None, *, budget_bytes: int | None = None, trace: bool = False) -> Report:
    """The prediction for `recipe`; under a cap the same run is only replayed. Raises `UserError` for a recipe that
    cannot be built."""
    from .. import memory, quiet

    quiet.transformers()
    return memory.predict_recipe(recipe, card=card, budget_bytes=budget_bytes, trace=trace)


def fits(recipe: Recipe, card: str | None, there_is: Room) -> bool:
    """Whether the step runs in what there is: the allocator gives cached segments back before it fails."""
    return predict(recipe, card, budget_bytes=there_is.for_torch).ok


class Effects:
    """Predicts changes of one recipe, each once, and no more than a few."""

    def __init__(self, recipe: Recipe, base: Report, card: str | None, there_is: Room | None) -> None:
        self.recipe, self.base, self.card, self.room = recipe, base, card, there_is
        self._known: dict[tuple[tuple[str, Any], ...], Effect | None] = {}

    def of(self, change: Change) -> Effect | None:
        """What `change` does; None where the recipe cannot be changed so, or nothing is known any more."""
        return self.of_fields(change.recipe) if change.recipe else None

    def of_fields(self, fields: tuple[tuple[str, Any], ...]) -> Effect | None:
        """The effect of several fields at once."""
        if fields not in self._known:
            self._known[fields] = self._predicted(fields) if len(self._known) < _MOST else None
        return self._known[fields]

    def best_together(self) -> tuple[tuple[tuple[str, Any], ...], Effect] | None:
        """Of the changes predicted so far, the first few (gentlest first) that fit together; None where one fits alone
        or all together do not."""
        useful = [(f, e) for f, e in self._known.items() if e is not None and e.after_bytes < 0.995 * e.before_bytes]
        if self.room is None or not useful or any(e.fits for _, e in useful):
            return None
        taken: tuple[tuple[str, Any], ...] = ()
        for fields, _ in sorted(useful, key=lambda pair: (cost(pair[0]), pair[1].after_bytes)):
            if taken and {name for name, _ in taken} & {name for name, _ in fields}:
                continue
            both = self._predicted((*taken, *fields)) if taken else None
            if taken and both is None:
                continue
            taken = (*taken, *fields)
            if both is not None and both.fits:
                return taken, both
        return None

    def _predicted(self, fields: tuple[tuple[str, Any], ...]) -> Effect | None:
        changed: dict[str, Any] = {}
        for name, value in fields:
            if value == "half":
                now = changed.get(name, getattr(self.recipe, name))
                if now < 2:
                    return None
                changed[name] = now // 2
                if name == "batch":
                    changed["accumulation"] = self.recipe.accumulation * 2
            else:
                changed[name] = value
        try:
            recipe = self.recipe.changed(**changed)
            report = predict(recipe, self.card)
            verdict = fits(recipe, self.card, self.room) if self.room else None
        except UserError:  # not a combination that exists
            return None
        before, after = self.base.peak_bytes, report.peak_bytes
        if before is None or after is None:
            return None
        if self.room is None:
            return Effect(before, after, verdict)
        return Effect(before, after, verdict, self.room.what, self.room.for_torch)


def cost(fields: tuple[tuple[str, Any], ...]) -> int:
    """How much a change costs, as an order: nothing, some time, another step, the bus, other data."""
    order = ("attention", "activation", "loss", "expandable_segments", "checkpoint", "optimizer", "batch", "precision")
    known = [order.index(name) if name in order else len(order) + (name == "seq") for name, _ in fields]
    return max(known)


def shares(report: Report) -> dict[str, float]:
    """Of what is alive at the peak (or at the failure): the shares of states, activations, logits, and of the
    activations those that attention made itself."""
    holdings = report.failure.alive if report.failure else report.alive
    total = sum(h.nbytes for h in holdings)
    if not total:
        return {}
    sums = {"states": 0, "activation": 0, "logits": 0, "attention": 0}
    for h in holdings:
        if h.category in ("parameter", "gradient", "optimizer state"):
            sums["states"] += h.nbytes
        elif h.category in ("activation", "temporary"):
            head = h.module in ("", "lm_head", "embed_out") and h.phase in ("forward", "backward", "recompute")
            sums["logits" if head else "activation"] += h.nbytes
            sums["attention"] += h.nbytes if h.module.endswith(".attn") else 0
    return {name: size / total for name, size in sums.items()}
