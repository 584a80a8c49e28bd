"""The peers that train in a plain loop: this course's recipes, torchao and Liger with transformers' model, DeepSpeed.

Every adapter is ``train(trial, probe)``. All have the same weights, tokens, learning rate and weight decay, and clip
the gradients to a norm of 1 where the peer can.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from peers_trial import Probe, Trial

DECAY, CLIP = 0.01, 1.0
Make = Callable[[list[Any], float], tuple[Any, bool]]
BLOCKS = 256  # different sequences; a longer run begins again


@functools.cache
def tokens(seq: int) -> Any:
    """Bytes of the standard library as token ids, ``(BLOCKS, seq)``."""
    from labkit import data

    return data.byte_blocks(seq=seq, count=BLOCKS)


def rate(trial: Trial) -> float:
    """The constant learning rate. At 1e-4 without a warm-up GPT-2 XL's loss jumps in its first steps, which does not
    matter for speed but would hide everything else where losses are compared."""
    return 3e-5 if trial.kind == "loss" else 1e-4


def batches(trial: Trial, device: Any) -> Iterator[list[Any]]:
    """The micro-batches of each step, without end."""
    import torch

    there, place = tokens(trial.seq).to(device), 0
    while True:
        parts = []
        for _ in range(trial.case.accumulation):
            rows = torch.arange(place, place + trial.batch, device=device) % BLOCKS
            parts.append(there[rows])
            place += trial.batch
        yield parts


def model_of(trial: Trial, device: Any, *, precision: str = "fp32", activation: str = "gelu_new") -> Any:
    """The model as transformers has it, in train mode, without dropout; its weights are the same in every dtype."""
    from labkit import capstone, models
    from labkit.recipes import Recipe
    from labkit.steps import WEIGHTS

    recipe = Recipe.of(model=trial.case.model, seq=trial.seq, dropout=0.0, activation=activation)
    network = models.causal_lm(recipe.config(trial.layers), device=device, dtype=WEIGHTS.get(precision))
    capstone.draw_weights(network)
    return network.train()


def ours(trial: Trial, probe: Probe) -> None:
    """``how``: fields of a `labkit.Recipe`, see `recipe_of`."""
    from labkit import capstone, steps

    recipe = recipe_of(trial)
    network = steps.network_of(recipe, recipe.config(trial.layers), probe.device, prepare=capstone.draw_weights)
    step = steps.step_of(network, [], recipe, lr=rate(trial), every_loss=True)
    for parts in batches(trial, probe.device):
        if probe.done(step(parts)):
            return


def recipe_of(trial: Trial) -> Any:
    """The recipe of one of this course's trials: no dropout, and gradients clipped unless it says otherwise."""
    from labkit.recipes import Recipe

    case = trial.case
    sizes = {"model": case.model, "batch": trial.batch, "seq": trial.seq, "accumulation": case.accumulation}
    return Recipe.of(**{"dropout": 0.0, "clip": CLIP, **case.how, **sizes})


def loop(trial: Trial, probe: Probe) -> None:
    """Hugging Face's model in a plain loop. ``how``: ``precision`` as in a recipe, ``optimizer`` (a key of
    `OPTIMIZERS`), ``checkpoint`` (Hugging Face's own, all blocks), ``compile`` (each block), ``activation``, ``loss``:
    ``own``, ``liger`` (its fused linear cross-entropy) or ``chunked`` (labkit's)."""
    import torch

    from labkit import compiling
    from labkit.steps import CASTS

    how, device = trial.case.how, probe.device
    precision = how.get("precision", "bf16")
    network = model_of(trial, device, precision=precision, activation=how.get("activation", "gelu_new"))
    if how.get("checkpoint", True):
        network.gradient_checkpointing_enable()
    if how.get("compile"):
        compiling.compile_blocks(network)
    optimizer, clips = OPTIMIZERS[how["optimizer"]](list(network.parameters()), rate(trial))
    loss_of, cast = losses(how.get("loss", "own")), CASTS.get(precision)
    for parts in batches(trial, device):
        found = []
        for part in parts:
            with torch.autocast(device.type, dtype=cast, enabled=cast is not None):
                loss = loss_of(network, part) / len(parts)
            loss.backward()
            found.append(loss.detach())
            del loss
        if clips:
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if probe.done(torch.stack(found).sum()):
            return


def losses(name: str) -> Callable[[Any, Any], Any]:
    """The mean loss of a batch of tokens, by name."""
    if name == "chunked":
        from labkit.losses import chunked_loss

        return lambda network, part: chunked_loss(network, part, 8)
    if name == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()

        def loss(network: Any, part: Any) -> Any:
            hidden = network.transformer(input_ids=part).last_hidden_state
            return fused(network.lm_head.weight, hidden[:, :-1].flatten(0, 1), part[:, 1:].flatten())

        return loss
    if name != "own":
        raise ValueError(f"loss {name!r} is not one of own, liger, chunked")
    return lambda network, part: network(input_ids=part, labels=part).loss


def _offloaded(gradients: bool) -> Make:
    def make(parameters: list[Any], lr: float) -> tuple[Any, bool]:
        import torch
        from torchao.optim import CPUOffloadOptimizer

        how = {"offload_gradients": gradients, "lr": lr, "weight_decay": DECAY}
        return CPUOffloadOptimizer(parameters, torch.optim.AdamW, **how), False

    return make


def _bitsandbytes(name: str) -> Make:
    def make(parameters: list[Any], lr: float) -> tuple[Any, bool]:
        import bitsandbytes

        return getattr(bitsandbytes.optim, name)(parameters, lr=lr, weight_decay=DECAY), True

    return make


def _fused(parameters: list[Any], lr: float) -> tuple[Any, bool]:
    import torch

    return torch.optim.AdamW(parameters, lr=lr, weight_decay=DECAY, fused=True), True


# what makes the optimizer, and whether gradients can be clipped before it steps: torchao takes them as they arrive
OPTIMIZERS: dict[str, Make] = {
    "adamw": _fused,
    "offload": _offloaded(False),
    "offload+gradients": _offloaded(True),
    "adamw8bit": _bitsandbytes("AdamW8bit"),
    "paged-adamw8bit": _bitsandbytes("PagedAdamW8bit"),
}

# what a launcher would set for one process
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def build_deepspeed() -> None:
    """Compile its AdamW for the processor, once for a machine. What goes wrong shows when it is used."""
    import contextlib

    with contextlib.suppress(Exception):
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)


def deepspeed(trial: Trial, probe: Probe) -> None:
    """``how``: ``stage`` 2 or 3 (then the weights are on the host, too), ``bucket`` numbers that wait for the host."""
    how, device = trial.case.how, probe.device
    for name, value in {**ALONE, "MASTER_PORT": str(20000 + os.getpid() % 30000)}.items():
        os.environ.setdefault(name, value)
    import deepspeed as ds

    network = model_of(trial, device, precision="bf16", activation=how.get("activation", "gelu_new"))
    network.gradient_checkpointing_enable()
    engine, *_ = ds.initialize(
        model=network, model_parameters=network.parameters(), config=deepspeed_settings(trial, how)
    )
    for parts in batches(trial, device):
        total: Any = 0.0
        for part in parts:
            loss = engine(input_ids=part, labels=part).loss
            engine.backward(loss)
            engine.step()
            total = total + loss.detach() / len(parts)
            del loss
        if probe.done(total):
            return


def deepspeed_settings(trial: Trial, how: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration: bf16 with fp32 masters, states and gradients on the host."""
    host, bucket = {"device": "cpu", "pin_memory": True}, how.get("bucket", 50_000_000)
    zero: dict[str, Any] = {
        "stage": how["stage"], "offload_optimizer": host, "reduce_bucket_size": bucket, "overlap_comm": True,
        "contiguous_gradients": True, "allgather_bucket_size": bucket,
    }  # fmt: skip
    if how["stage"] == 3:
        zero |= {
            "offload_param": host, "stage3_max_live_parameters": 4 * bucket, "stage3_prefetch_bucket_size": bucket,
            "stage3_max_reuse_distance": 4 * bucket, "stage3_param_persistence_threshold": 100_000,
        }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": trial.batch,
        "gradient_accumulation_steps": trial.case.accumulation,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": rate(trial), "weight_decay": DECAY}},
        "zero_optimization": zero,
    }
