"""The training step of a recipe, in plain PyTorch: model, optimizer and the loop around them, every switch in the open.

`network_of` builds the model, `step_of` the step function for any model and batches. `labkit.Recipe` and lesson 12
both run these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from . import compiling, models, optimizers, stepping
from .checkpointing import segments
from .flat import BlocksInBackward, FlatSteps
from .losses import chunked_loss, loss_in_place
from .masters import Masters
from .offload import Prefetching, drop_hooks_with
from .streaming import StatesOnHost
from .units import UserError

if TYPE_CHECKING:
    from .recipes import Recipe

WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of the others: float32
CASTS = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


def network_of(
    recipe: Recipe, configuration: Any, device: torch.device, *, prepare: Callable[[Any], None] | None = None
) -> Any:
    """The recipe's model with random weights, made on `device` in their final dtype, in train mode, compiled and
    checkpointed as the recipe says. `prepare` is called with it before that."""
    dtype = WEIGHTS.get(recipe.precision, torch.float32)
    network = models.causal_lm(configuration, device=device, dtype=dtype, attention=recipe.attention).train()
    if prepare is not None:
        prepare(network)
    if recipe.compile == "blocks":
        compiling.compile_blocks(network)
    if recipe.checkpoint:
        segments(network, recipe.checkpoint, preserve_rng_state=recipe.dropout > 0)
    if recipe.compile == "whole":
        (network if recipe.loss == "full" else network.base_model).compile()
    return network


def step_of(
    network: Any, parts: Sequence[torch.Tensor], recipe: Recipe, *, lr: float = 1e-4, every_loss: bool = False,
    backward_only: bool = False,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """The step function for `network` on the micro-batches `parts`, or on those that it is called with: ``step()``,
    ``step(parts)``.

    Of `recipe` it takes what concerns a step; the network comes as it is (see `network_of`). The result is the mean
    loss of the micro-batches with `every_loss`, else the last one's share of it. With `backward_only` nothing steps and
    gradients stay. ``step.optimizer`` is what steps, ``step.hooks`` what keeps activations on the host (or None).
    """
    usual, parameters = parts, list(network.parameters())
    device, cast = parameters[0].device, CASTS.get(recipe.precision)
    optimizer: Any = optimizer_of(network, recipe, lr=lr)
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "amp-fp16")
    scaled = optimizer.scaled if recipe.precision == "fp16" else scaler.scale
    hooks = Prefetching(keep=network) if recipe.offload.endswith("activations") else None
    in_backward = isinstance(optimizer, stepping.InBackward)
    clips = recipe.gradients != "card" or recipe.precision == "fp16" or recipe.in_place
    clip = None if clips else recipe.clip  # else the optimizer does

    def loss_of(part: torch.Tensor, count: int) -> torch.Tensor:
        with torch.autocast(device.type, dtype=cast, enabled=cast is not None), hooks or nullcontext():
            if recipe.loss == "chunked":
                return chunked_loss(network, part, recipe.loss_chunks) / count
            if recipe.loss == "in-place":
                scale = optimizer.loss_scale / count if recipe.precision == "fp16" else 1.0
                return loss_in_place(network, part, recipe.loss_chunks, scale) / count
            return network(input_ids=part, labels=part).loss / count  # type: ignore[no-any-return]

    def step(fresh: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        parts = usual if fresh is None else fresh
        if recipe.gradients == "two-backward-passes":
            assert recipe.clip is not None
            with optimizer.norm_only() as norm:
                loss_of(parts[0], 1).backward()
            optimizer.scale = stepping.clip_coefficient(norm(), recipe.clip)
        losses = []
        for part in parts:
            loss = loss_of(part, len(parts))
            scaled(loss).backward()
            if every_loss:
                losses.append(loss.detach())
        if in_backward:
            optimizer.scale = None  # of this step alone
        elif not backward_only:
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum() if every_loss else loss.detach()

    step.tokens = sum(part.numel() for part in parts)  # type: ignore[attr-defined]
    step.optimizer, step.hooks = optimizer, hooks  # type: ignore[attr-defined]
    if recipe.offload.startswith("optimizer") and recipe.precision != "fp16":
        drop_hooks_with(step, network)
    return step


def optimizer_of(network: Any, recipe: Recipe, *, lr: float = 1e-4) -> Any:
    """What steps for this recipe: a `torch.optim.Optimizer`, or a `labkit.stepping.InBackward`."""
    away = recipe.offload.startswith("optimizer")
    if away and recipe.precision != "fp16":
        from torchao.optim import CPUOffloadOptimizer

        send = recipe.offload == "optimizer+gradients"
        return CPUOffloadOptimizer(network.parameters(), torch.optim.AdamW, offload_gradients=send, lr=lr)
    make = optimizers.maker(recipe.optimizer, stochastic_rounding=recipe.stochastic_rounding, lr=lr)
    if recipe.precision == "fp16":
        return Masters(
            stepping.by_block(network), optimizers.adamw_on_host(lr) if away else make, on_host=away, clip=recipe.clip,
            gradients_on_host=recipe.gradients == "host" or recipe.offload == "optimizer+gradients",
        )  # fmt: skip
    if recipe.offload.startswith("states"):
        on_host = recipe.gradients == "host"
        return StatesOnHost(stepping.by_block(network), make, gradients_on_host=on_host, clip=recipe.clip)
    if recipe.flat and recipe.gradients == "card":
        return FlatSteps(stepping.by_block(network), make, clip=recipe.clip)
    if recipe.flat:
        return BlocksInBackward(stepping.by_block(network), make)
    if recipe.gradients == "host":
        return stepping.GradientsOnHost(stepping.by_block(network), make, clip=recipe.clip)
    if recipe.gradients != "card":
        each = recipe.clip if recipe.gradients == "in-backward-each-clipped" else None
        return stepping.InBackward(network.parameters(), make, clip_each=each)
    return make(network.parameters())


def training_step(
    recipe: Recipe, configuration: Any, device: torch.device, *, lr: float = 1e-4
) -> Callable[..., torch.Tensor]:
    """Model, optimizer and random tokens of `recipe` on `device`, and the step function on them; every micro-batch has
    the same tokens. Raises `UserError` when the process has other segments than the recipe asks for."""
    from . import data

    if device.type == "cuda":
        _check_segments(recipe)
    network = network_of(recipe, configuration, device)
    tokens = data.random_tokens(recipe.batch, recipe.seq, vocab=configuration.vocab_size, device=device)
    return step_of(network, [tokens] * recipe.accumulation, recipe, lr=lr)


def _check_segments(recipe: Recipe) -> None:
    """PyTorch reads its variable once, when it takes its first memory: a recipe cannot turn it on later."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    there = "expandable_segments:true" in settings.lower().replace(" ", "")
    if recipe.expandable_segments and not there:
        raise UserError(
            "expandable segments are chosen before Python starts: set PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
