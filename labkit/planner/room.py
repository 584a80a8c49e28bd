"""How much memory a plan may take, and what a recipe needs: predicted, with a margin for what a prediction misses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ..units import MiB, UserError, show_bytes
from .shape import Shape, stamp

if TYPE_CHECKING:
    from ..machine import Card
    from ..recipes import Recipe

# of a reserved peak that was predicted exactly: the farthest of 394 recipes in bench/results/memory.md and
# memory-fresh.md is off by 4.4 %, 95 of 100 by nothing
MARGIN = 0.02
# a compiled block's peak was above its prediction by 265 MiB at most (bench/results/memory-experiments.md, compiled
# what=blocks, and lesson 12's rows in data/reference)
COMPILED_REST = 320 * MiB  # not of 16-bit weights: 21 such rows of plan-h200.jsonl and 5 of the experiments
COMPILED_MARGIN = 0.05  # of a reserved peak where segments do not expand: lesson 12's rows are off by 3.3 % at most
# torchao's compiled step of one tensor keeps temporary copies that the prediction does not know: up to 8 bytes for each
# number of the largest tensor beyond it (data/reference/plan-h200.jsonl, adamw8bit with gradients=card)
TEMPORARY = 9
# what was reserved, over an estimate of what is allocated: the farthest both ways in data/reference, where segments
# expand, where they do and a whole loss meets checkpointing, and where they do not
HOPE = 1.0  # times the least that was found, 0.98, with `MARGIN`
EXPANDED, UNEVEN, SCATTERED = 1.06, 1.25, 1.37
_STATES = {"adamw": 2, "adamw-fused": 2, "adamw-forloop": 2, "sgd": 0, "sgd-momentum": 1}  # in weights' bytes


@dataclass(frozen=True)
class Room:
    """What PyTorch's allocator may reserve (``limit_bytes``) on ``card``, and the host's memory where it is known."""

    card: Card
    budget_bytes: int | None
    host_bytes: int | None = None

    @property
    def limit_bytes(self) -> int:
        """The budget, but never more than the card leaves beside the largest CUDA context known."""
        free = self.card.memory_bytes - self.card.context_band[1]
        return free if self.budget_bytes is None else min(self.budget_bytes, free)

    def fits(self, need: Need) -> bool:
        """Whether a recipe surely fits: by the upper end of its prediction, and in the host's memory."""
        return need.worst_bytes <= self.limit_bytes and self.hosts(need)

    def may_fit(self, need: Need) -> bool:
        """Whether an exact prediction may say that it fits."""
        return need.hope_bytes <= self.limit_bytes and self.hosts(need)

    def hosts(self, need: Need) -> bool:
        """Whether the host has what it takes, as far as is known."""
        return self.host_bytes is None or need.host_bytes <= self.host_bytes

    def __str__(self) -> str:
        if self.budget_bytes is not None:
            return f"{show_bytes(self.limit_bytes)} for PyTorch, as the budget says"
        context = show_bytes(self.card.context_band[1])
        return (
            f"{show_bytes(self.limit_bytes)} for PyTorch: {show_bytes(self.card.memory_bytes)} less a CUDA context of "
            f"up to {context}"
        )


@dataclass(frozen=True)
class Need:
    """The predicted peaks of a recipe, of its worse step, and what it takes of the host's memory; ``worst_bytes`` is
    what it may reserve by the upper end of what is known about the prediction's error, which is small if ``exact``."""

    allocated_bytes: int
    reserved_bytes: int
    host_bytes: int
    worst_bytes: int
    hope_bytes: int = 0  # what ``worst_bytes`` of an exact prediction may come down to
    exact: bool = False


def need(recipe: Recipe, card: Card) -> Need:
    """What `recipe` needs on `card`, from a few shallow runs on ghosts. Raises `UserError` for one that cannot run."""
    return _need(recipe, card.name, stamp(recipe.model))


@lru_cache(maxsize=4096)
def _need(recipe: Recipe, card: str, stamped: int) -> Need:
    from ..memory.estimate import estimate

    found = estimate(recipe, card=card)
    peaks = (found.first, found.steady)
    reserved = max(p.reserved_bytes for p in peaks)
    allocated = max(p.allocated_bytes for p in peaks)
    uneven = recipe.checkpoint and recipe.loss == "full"
    high = SCATTERED if not recipe.expandable_segments else UNEVEN if uneven else EXPANDED
    worst = int(max(high, found.band[1] if recipe.compile == "whole" else 1.0) * allocated) + _unseen(recipe)
    hope = int(HOPE * allocated) + _unseen(recipe)
    return Need(allocated, reserved, found.host.total_bytes, worst, hope)


def _unseen(recipe: Recipe) -> int:
    """Bytes that a prediction may miss."""
    compiled = COMPILED_REST if recipe.compile == "blocks" and recipe.precision not in ("bf16", "fp16") else 0
    if recipe.optimizer not in ("adamw8bit", "adamw4bit") or recipe.in_pieces:
        return compiled
    return compiled + TEMPORARY * Shape.of(recipe).largest


def exact_need(recipe: Recipe, card: Card) -> Need:
    """The same from a prediction of the whole step, at the model's full depth: seconds, where `need` takes a part of
    one. What a prediction is known to miss is added all the same."""
    return _exact(recipe, card.name, stamp(recipe.model))


@lru_cache(maxsize=256)
def _exact(recipe: Recipe, card: str, stamped: int) -> Need:
    from .. import memory

    # where gradients wait in a place of their own, another micro-batch brings no more than a copy of one of them, and
    # not even that where the place is on the card and was there for the first
    apart = recipe.accumulation > 1 and (recipe.gradients == "host" or recipe.in_place)
    alike = recipe.changed(accumulation=1 if apart else min(2, recipe.accumulation))
    report = memory.predict_recipe(alike, card=card)
    assert report.first is not None
    assert report.steady is not None
    peaks = (report.first, report.steady)
    added = Shape.of(recipe).largest * Shape.of(recipe).gradient_bytes(recipe) * (apart and recipe.gradients == "host")
    allocated, reserved = (added + max(getattr(p, f"{k}_bytes") for p in peaks) for k in ("allocated", "reserved"))
    high = 1 + (MARGIN if recipe.compile == "none" or recipe.expandable_segments else COMPILED_MARGIN)
    if recipe.compile == "whole" and report.band_bytes is not None:
        high = report.band_bytes[1] / report.steady.allocated_bytes
    worst = int(reserved * high) + _unseen(recipe)
    return Need(allocated, reserved, _need(recipe, card, stamped).host_bytes, worst, reserved, True)


def least_bytes(recipe: Recipe, shape: Shape) -> int:
    """What cannot be avoided: weights, gradients and states on the card, without activations."""
    weight = shape.weight_bytes(recipe)
    if recipe.offload.startswith("optimizer"):
        return int(shape.parameters * weight * (1 if recipe.offload.endswith("gradients") else 2))
    states = {"adam8bit": 2.0, "adamw8bit": 2.0, "adamw4bit": 1.0}.get(recipe.optimizer)
    if states is None:
        states = _STATES[recipe.optimizer] * (4.0 if recipe.precision == "fp16" else weight)
    states = 0.0 if recipe.offload.startswith("states") else states
    master = 4 if recipe.precision == "fp16" else 0
    waiting = weight if recipe.gradients == "card" else 0
    return int(shape.parameters * (weight + waiting + states + master))


def rough_bytes(recipe: Recipe, shape: Shape) -> float:
    """A guess of a recipe's peak from shapes alone, to put candidates in order before anything is predicted."""
    tokens, stored = recipe.batch * recipe.seq, recipe.changed(checkpoint=0, offload="none")
    kept = shape.activation_bytes(stored) * (0.1 if recipe.offload.endswith("activations") else 1.0)
    if recipe.checkpoint:
        inputs = shape.activation_bytes(recipe) / recipe.checkpoint
        inputs *= 0.1 if recipe.offload.endswith("activations") else 1.0
        kept = inputs + shape.activation_bytes(stored) * recipe.checkpoint / shape.layers
    pieces = 1 if recipe.loss == "full" else recipe.loss_chunks
    logits = tokens * shape.vocabulary * (12 if recipe.precision == "fp32" else 14) / pieces
    sums = 3 * shape.ends * shape.weight_bytes(recipe) if pieces > 1 else 0
    static = least_bytes(recipe, shape)
    gone = shape.parameters * shape.weight_bytes(recipe) if recipe.gradients == "card" else 0
    before = static - min(gone, static // 2)  # at the loss, gradients are still to come
    return max(before + kept + logits, static + kept / shape.layers) + sums


def host_memory(size: int | str | None) -> int | None:
    """Bytes of host memory that a user named. Raises `UserError`."""
    from ..units import parse_size

    if size is None:
        return None
    try:
        return parse_size(size)
    except UserError as error:
        raise UserError(f"host memory: {error}") from None
