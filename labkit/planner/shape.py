"""A model's sizes, from its configuration: what the planner's arithmetic needs beside counted kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..recipes import Recipe


@dataclass(frozen=True)
class Shape:
    """``parameters`` in ``tensors`` tensors, in ``layers`` blocks of ``width``; ``ends``: parameters outside them;
    ``largest``: numbers of the largest tensor."""

    layers: int
    width: int
    parameters: int
    tensors: int
    ends: int
    vocabulary: int
    largest: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> Shape:
        """The shape of a recipe's model. Raises `UserError` for a configuration that makes no model."""
        plain = Recipe.of(model=recipe.model, batch=1, seq=1)
        return _shape(plain, stamp(recipe.model))

    def state_bytes(self, recipe: Recipe) -> float:
        """Bytes of the optimizer's states: quantised ones with their scales in fp32, one for each block."""
        each = {"adam8bit": 2 + 8 / 256, "adamw8bit": 2 + 8 / 64, "adamw4bit": 1 + 8 / 64, "sgd": 0.0}
        moments = 1 if recipe.optimizer == "sgd-momentum" else 2
        return self.parameters * each.get(recipe.optimizer, moments * self.weight_bytes(recipe))

    def pieces(self, most: int) -> int:
        """In how many pieces of `most` numbers `stepping.GradientsOnHost` and `streaming.StatesOnHost` step."""
        block = (self.parameters - self.ends) / self.layers
        return self.layers * math.ceil(block / most) + math.ceil(self.ends / most)

    def weight_bytes(self, recipe: Recipe) -> int:
        """Bytes of one weight on the card."""
        return 2 if recipe.precision in ("bf16", "fp16") else 4

    def gradient_bytes(self, recipe: Recipe) -> int:
        """Bytes of one gradient on the card: those of its weight."""
        return self.weight_bytes(recipe)

    def activation_bytes(self, recipe: Recipe) -> float:
        """About what the blocks keep for backward in one micro-batch, in bytes: what offloading it moves.

        34 numbers of 16 bits for each of ``width`` and token with fused attention and one GELU kernel (Korthikanti et
        al. 2022, arXiv:2205.05198, table 2, without the attention matrices and dropout masks).
        """
        if recipe.checkpoint:
            return recipe.batch * recipe.seq * self.width * (2 if recipe.precision != "fp32" else 4) * self.layers
        per_value = {"fp32": 2.0, "bf16": 1.0, "fp16": 1.0}.get(recipe.precision, 1.25)
        gelu = 56 if recipe.activation == "gelu_new" else 0
        return recipe.batch * recipe.seq * self.width * (34 * per_value + gelu) * self.layers


def stamp(model: str) -> int:
    """What changes when a folder's configuration is written anew: what is remembered of it must then be forgotten."""
    file = Path(model, "config.json")
    return file.stat().st_mtime_ns if file.is_file() else 0


@lru_cache(maxsize=64)
def _shape(recipe: Recipe, stamped: int) -> Shape:
    import torch

    from .. import models

    configuration = recipe.config()
    with torch.device("meta"):
        network = models.causal_lm(configuration, device="meta")
    sizes = {p: p.numel() for p in network.parameters()}
    inside = set(models.blocks(network).parameters())
    return Shape(
        layers=int(configuration.num_hidden_layers),
        width=int(configuration.hidden_size),
        parameters=sum(sizes.values()),
        tensors=len(sizes),
        ends=sum(count for p, count in sizes.items() if p not in inside),
        vocabulary=int(configuration.vocab_size),
        largest=max(sizes.values()),
    )
