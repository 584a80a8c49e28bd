"""The capstone: what training a whole model inside a small card takes, one switch at a time.

`training` is an experiment for `labkit.measure`; its switches are the fields of a `labkit.Recipe`, and its step is that
of `labkit.steps`. What it adds: the same weights in every dtype, so that losses can be compared, and its ladders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from . import data, machine, models, steps
from .losses import loss_in_place as loss_in_place
from .measuring import measure
from .recipes import Recipe
from .units import UserError

DEPTHS = (2, 4)  # blocks of the models that `peak_bytes` predicts: with fewer, less than a window of gradients leaves
# what `training` starts from, where that is not what `Recipe` starts from
START: dict[str, Any] = {
    "model": "gpt2-xl", "batch": 4, "attention": "eager", "dropout": 0.0, "loss_chunks": 16,
}  # fmt: skip
# GPT-2 XL from a first try to a step that fits 8 GiB, one change at a time
LADDER: dict[str, dict[str, Any]] = {
    "fp32, AdamW": {},
    "fused attention": {"attention": "sdpa"},
    "autocast to bf16": {"precision": "amp-bf16"},
    "8-bit states": {"optimizer": "adamw8bit"},
    "16-bit weights, rounded stochastically": {"precision": "bf16", "stochastic_rounding": True},
    "every block checkpointed": {"checkpoint": 1},
    "loss in 16 chunks": {"loss": "chunked"},
    "gradients wait on the host": {"gradients": "host"},
    "fused GELU": {"activation": "gelu_pytorch_tanh"},
    "blocks compiled": {"compile": True},
    "the head's gradient summed in place": {"loss": "in place"},
    "states wait there instead": {"gradients": "card", "offload": "states"},
}
# A step that no card of 8 GB takes as it is, the switches of the usual lists, and the orders in which two of them go
TASK: dict[str, Any] = {"model": "gpt2-medium", "batch": 8, "seq": 1024}
SWITCHES: dict[str, dict[str, Any]] = {
    "smaller batch": {"batch": 2, "accumulation": 4},
    "autocast": {"precision": "amp-bf16"},
    "checkpointing": {"checkpoint": 1},
    "8-bit states": {"optimizer": "adamw8bit"},
    "offload": {"gradients": "host"},
    "fused attention": {"attention": "sdpa"},
    "chunked loss": {"loss": "chunked"},
    "compile": {"compile": True},
}
ORDERS: dict[str, tuple[str, ...]] = {
    "checklist": (
        "smaller batch", "autocast", "checkpointing", "8-bit states", "offload", "fused attention", "compile",
    ),
    "log": ("checkpointing", "smaller batch", "offload", "autocast"),
}  # fmt: skip


def training(
    device: Any, *, layers: int | None = None, lr: float = 1e-4, **switches: Any
) -> Callable[..., torch.Tensor]:
    """A step on random tokens, `accumulation` times ``(batch, seq)``, with the same random weights whatever the dtype.

    `switches` are fields of a `Recipe`; those that are not given are those of `START`, then a recipe's own. `layers`
    overrides the depth. No dropout, so that losses can be compared. Raises `UserError` for a combination that does not
    exist.
    """
    device, recipe = torch.device(device), Recipe.of(**{**START, **switches})
    torch.manual_seed(0)
    configuration = recipe.config(layers)
    network = steps.network_of(recipe, configuration, device, prepare=draw_weights)
    count = recipe.accumulation * recipe.batch
    tokens = data.random_tokens(count, recipe.seq, vocab=configuration.vocab_size, device=device)
    return steps.step_of(network, tokens.split(recipe.batch), recipe, lr=lr, every_loss=True)


def peak_bytes(model: str, *, card: str | None = None, **switches: Any) -> int:
    """The predicted steady peak (allocated) of `training` with these switches, in bytes.

    A model's blocks repeat, so its peak is linear in their number: two models of `DEPTHS` blocks are predicted instead
    of a deep one. A model with few blocks is predicted as it is.
    """
    layers = int(models.config(model).num_hidden_layers)
    found = []
    depths = list(DEPTHS) if layers > 2 * DEPTHS[1] else [layers]
    for depth in depths:
        how: dict[str, Any] = {"card": card or machine.preset().name, "trace": False, "nearest": False, "record": False}
        report = measure(training, stateless=True, repeats=0, model=model, layers=depth, **how, **switches)
        assert report.steady is not None
        found.append(report.steady.allocated_bytes)
    if len(found) == 1:
        return found[0]
    slope = (found[1] - found[0]) / (depths[1] - depths[0])
    return round(found[0] + slope * (layers - depths[0]))


def step_of(network: Any, parts: Any, *, lr: float = 1e-4, **switches: Any) -> Callable[..., torch.Tensor]:
    """`labkit.steps.step_of` for any network and micro-batches: `switches` are the fields of a `Recipe` that concern a
    step. The step returns the mean loss. Raises `UserError` as `training` does."""
    recipe = Recipe.of(**{**START, **switches, "accumulation": max(1, len(parts))})
    return steps.step_of(network, parts, recipe, lr=lr, every_loss=True)


def rung(name: str) -> dict[str, Any]:
    """The switches of `LADDER` up to and with `name`, gradients clipped to a norm of 1. Raises `UserError`."""
    if name not in LADDER:
        raise UserError(f"{name!r} is not one of {', '.join(LADDER)}")
    switches: dict[str, Any] = {"clip": 1.0}
    for step, change in LADDER.items():
        switches |= change
        if step == name:
            break
    return switches


def switched(on: Collection[str]) -> tuple[str, dict[str, Any]]:
    """`TASK` with these `SWITCHES` on: the name that its rows have, and its arguments for `training`."""
    names = [name for name in SWITCHES if name in on]
    arguments = dict(TASK)
    for name in names:
        arguments |= SWITCHES[name]
    return f"orders: {', '.join(names) or 'nothing'}", arguments


def draw_weights(model: torch.nn.Module) -> None:
    """GPT-2's initialisation, drawn in float32 tensor by tensor and rounded: the same weights in every dtype."""
    layers = len(models.blocks(model))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                deviation = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02
                p.copy_(torch.empty(p.shape, device=p.device).normal_(0.0, deviation))
