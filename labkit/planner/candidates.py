"""Which recipes are worth trying on a card: every combination of the switches that the card and the request allow.

What is left out has a reason that does not depend on memory or speed: formats that the card only emulates, 16-bit
weights that would lose small updates (no master copy, no stochastic rounding), kernels that another choice beats in
everything (eager attention, the unfused GELU, AdamW with temporary copies).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import machine
from ..recipes import Recipe, conflict

if TYPE_CHECKING:
    from ..machine import Card

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_TOKENS = 2**17  # of one micro-batch: beyond it no card of the presets gets faster
STEP_TOKENS = 2**15  # of a step of several micro-batches, where the batch is free: the optimizer's share is small then
CHECKPOINTS = (0, 1)


@dataclass(frozen=True)
class Family:
    """How weights, gradients and states are kept: ``fields`` of a recipe, under a ``name``."""

    name: str
    fields: dict[str, Any]
    losses: tuple[tuple[str, int], ...] = (("full", 8), ("chunked", 8))
    checkpoints: tuple[int, ...] = CHECKPOINTS
    compiles: bool = True


def plain(model: str, *, batch: int, seq: int, **fixed: Any) -> Recipe:
    """What most people start with: fp32, AdamW, nothing switched on."""
    return Recipe.of(**{"model": model, "batch": batch, "seq": seq, **fixed})


def families(card: Card) -> list[Family]:
    """The ways to keep weights and states that make sense on `card`, the gentlest first."""
    bf16 = machine.native_dtypes(card.capability)["bf16"].native
    amp = "amp-bf16" if bf16 else "amp-fp16"
    ones = [
        Family("fp32 AdamW", {"precision": "fp32", "optimizer": "adamw-fused"}, compiles=False),
        Family("autocast", {"precision": amp, "optimizer": "adamw-fused"}),
        Family("autocast, 8-bit states", {"precision": amp, "optimizer": "adam8bit"}),
    ]
    in_place = (("in-place", 16),)  # no slower than the whole loss, and 16-bit weights are for small rooms
    if bf16:
        weights = {"precision": "bf16", "stochastic_rounding": True, "optimizer": "adamw8bit"}
        ones += [
            Family("16-bit weights, 8-bit states", weights, in_place),
            Family("16-bit weights, 8-bit states on the host", {**weights, "offload": "states"}, in_place),
            Family(
                "16-bit weights, states and blocks' inputs on the host",
                {**weights, "offload": "states+activations"},
                in_place,
                (1,),
            ),
            Family("16-bit weights, gradients on the host", {**weights, "gradients": "host"}, in_place, (1,)),
            Family("16-bit weights, stepped in backward", {**weights, "gradients": "in-backward"}, in_place, (1,)),
        ]
    if bf16:
        for what in ("optimizer", "optimizer+gradients"):
            ones.append(
                Family(f"autocast, {what} on the host", {"precision": amp, "optimizer": "adamw", "offload": what},
                       compiles=False)
            )  # fmt: skip
    for what in ("optimizer", "optimizer+gradients"):
        fields = {"precision": "fp16", "optimizer": "adamw", "offload": what}
        ones.append(Family(f"fp16 weights, {what} and fp32 master on the host", fields, in_place, compiles=False))
    return ones


def candidates(
    card: Card, *, model: str, batch: int, seq: int, compile: bool = True, **fixed: Any
) -> Iterator[tuple[str, Recipe]]:
    """Every structure worth trying, with its family's name, at `batch` sequences. `fixed` are fields that the user
    wants as they are; `compile` whether compiled blocks are tried."""
    for family in families(card):
        compiles = ("none", "blocks") if compile and family.compiles else ("none",)
        kept = ("none", "activations") if family.fields.get("offload") is None else (family.fields["offload"],)
        seen = set()
        for (loss, chunks), every, compiled, offload in itertools.product(
            family.losses, family.checkpoints, compiles, kept
        ):
            if offload == "activations" and (every or compiled != "none" or "gradients" in family.fields):
                continue  # a checkpointed block keeps so little that moving it gains nothing
            fields = {
                "model": model, "batch": batch, "seq": seq, "attention": "sdpa", "activation": "gelu_pytorch_tanh",
                **family.fields, "loss": loss, "loss_chunks": chunks, "checkpoint": every, "compile": compiled,
                "offload": offload, "expandable_segments": True, **fixed,
            }  # fmt: skip
            if conflict(fields) is None:
                recipe = Recipe.of(**fields)
                if recipe not in seen:
                    seen.add(recipe)
                    yield family.name, recipe


def several(recipe: Recipe) -> Recipe | None:
    """The same micro-batch as often as `STEP_TOKENS` ask for; None where that is once, or not possible."""
    times = STEP_TOKENS // (recipe.batch * recipe.seq)
    fields = {**recipe.to_dict(), "accumulation": times}
    return Recipe.of(**fields) if times > 1 and conflict(fields) is None else None


def splits(batch: int) -> list[tuple[int, int]]:
    """Ways to take `batch` sequences in a step: sequences in a micro-batch, and micro-batches; the largest first."""
    return [(size, batch // size) for size in range(batch, 0, -1) if batch % size == 0]
