"""The capstone's training step with every switch that the course has taught: a whole model inside a small card.

`training` is an experiment for `labkit.measure`. Its switches have the names of the recipe vocabulary
(`labkit.recipes.Recipe`) where there is one; the rest are those that lesson 12 adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from . import compiling, data, models, stepping
from .checkpointing import segments
from .offload import drop_hooks_with
from .recipes import chunked_loss
from .units import UserError

PRECISIONS = ("fp32", "amp-bf16", "bf16")
OPTIMIZERS = ("adamw", "adamw8bit", "adamw4bit")
GRADIENTS = ("card", "host", "in backward", "in backward, each clipped", "two backward passes")
LOSSES = ("full", "chunked", "in place")
OFFLOADS = ("none", "optimizer", "optimizer+gradients")
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
CHUNKS = 16  # of the loss
BLOCK = 64  # values that share a scale in torchao's states: GPT-2's embedding (50257 x 1600) divides by it, not by 256


def training(
    device: Any,
    *,
    model: str = "gpt2-xl",
    batch: int = 4,
    seq: int = 1024,
    precision: str = "fp32",
    attention: str = "eager",
    checkpoint: int = 0,
    optimizer: str = "adamw",
    stochastic_rounding: bool = False,
    loss: str = "full",
    loss_chunks: int = CHUNKS,
    gradients: str = "card",
    offload: str = "none",
    activation: str = "gelu_new",
    compile: bool = False,
    accumulation: int = 1,
    clip: float | None = None,
    layers: int | None = None,
    lr: float = 1e-4,
) -> Callable[[], torch.Tensor]:
    """A step on random tokens, `accumulation` times ``(batch, seq)``, with the same random weights whatever the dtype.

    `gradients` is one of `GRADIENTS`: where they wait, and when the optimizer steps. `offload` is one of `OFFLOADS`
    (torchao's `CPUOffloadOptimizer`). `loss` is one of `LOSSES`: the model's own, `chunked_loss` or `loss_in_place`.
    `compile` compiles each block; `layers` overrides the depth. No dropout, so that losses can be compared. Raises
    `UserError` for a combination that does not exist.
    """
    device = torch.device(device)
    torch.manual_seed(0)
    configuration = models.config(model, use_cache=False)
    models.adapt(configuration, layers=layers, activation=activation, dropout=0.0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    network = models.causal_lm(configuration, device=device, dtype=dtype, attention=attention).train()
    draw_weights(network)
    tokens = data.random_tokens(accumulation * batch, seq, vocab=configuration.vocab_size, device=device)
    if compile:
        compiling.compile_blocks(network)
    if checkpoint:
        segments(network, checkpoint)
    return step_of(
        network, tokens.split(batch), precision=precision, optimizer=optimizer, stochastic_rounding=stochastic_rounding,
        loss=loss, loss_chunks=loss_chunks, gradients=gradients, offload=offload, clip=clip, lr=lr,
    )  # fmt: skip


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


class _Head(torch.autograd.Function):
    """Mean cross-entropy of ``hidden @ weight.T``: both gradients are made in the forward pass, chunk by chunk, and the
    weight's is one tensor that every chunk adds to. (The idea is that of Liger-Kernel's fused linear cross-entropy.)"""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunks: int
    ) -> torch.Tensor:
        count, total = targets.numel(), torch.zeros((), dtype=torch.float32, device=hidden.device)
        for_hidden, for_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        parts = zip(hidden.chunk(chunks), targets.chunk(chunks), for_hidden.chunk(chunks), strict=True)
        for h, y, out in parts:
            scores = torch.log_softmax((h @ weight.T).float(), dim=1)
            place = y.unsqueeze(1)
            total -= scores.gather(1, place).sum()
            scores.exp_()  # softmax: less 1 at the target it is the gradient of the logits
            scores.scatter_add_(1, place, torch.full_like(place, -1, dtype=scores.dtype))
            slope = scores.div_(count).to(h.dtype)
            del scores
            torch.mm(slope, weight, out=out)
            for_weight.addmm_(slope.T, h)
            del slope  # else it would live through the next chunk
        ctx.for_hidden, ctx.for_weight = for_hidden, for_weight
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # type: ignore[override]
        for_hidden, for_weight = ctx.for_hidden, ctx.for_weight
        del ctx.for_hidden, ctx.for_weight
        return for_hidden.mul_(grad), for_weight.mul_(grad), None, None


def loss_in_place(model: Any, tokens: torch.Tensor, chunks: int = CHUNKS) -> torch.Tensor:
    """What `chunked_loss` computes, with the head's gradient summed in place: autograd's own sum over chunks holds
    three tensors of its size at a time. Nothing is computed twice. Not under autocast, and not twice through a graph.
    """
    hidden = model.base_model(input_ids=tokens).last_hidden_state
    head = model.get_output_embeddings()
    found: torch.Tensor = _Head.apply(hidden[:, :-1].flatten(0, 1), head.weight, tokens[:, 1:].flatten(), chunks)
    return found


def maker(optimizer: str, *, stochastic_rounding: bool = False, lr: Any = 1e-4) -> stepping.Make:
    """A function of parameters that makes the optimizer of this name, one of `OPTIMIZERS` (torchao's for 8 and 4 bits).

    Raises `UserError` for another name, and for stochastic rounding of PyTorch's own AdamW, which has none.
    """
    if optimizer not in OPTIMIZERS:
        raise UserError(f"optimizer {optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    if optimizer == "adamw":
        if stochastic_rounding:
            raise UserError("torch.optim.AdamW does not round stochastically: take adamw8bit or adamw4bit")
        return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    from torchao import optim

    kind = optim.AdamW8bit if optimizer == "adamw8bit" else optim.AdamW4bit
    how = {"block_size": BLOCK, "bf16_stochastic_round": stochastic_rounding}
    return lambda parameters: kind(parameters, lr=lr, **how)


def step_of(
    network: Any,
    parts: Any,
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
    stochastic_rounding: bool = False,
    loss: str = "full",
    loss_chunks: int = CHUNKS,
    gradients: str = "card",
    offload: str = "none",
    clip: float | None = None,
    lr: float = 1e-4,
) -> Callable[[], torch.Tensor]:
    """The step function for `network` on the micro-batches `parts`, or on those that it is called with: ``step()``,
    ``step(parts)``. ``step.optimizer`` is what steps. The arguments are those of `training`."""
    for name, value, allowed in (
        ("precision", precision, PRECISIONS), ("gradients", gradients, GRADIENTS), ("offload", offload, OFFLOADS),
        ("loss", loss, LOSSES),
    ):  # fmt: skip
        if value not in allowed:
            raise UserError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    in_backward = gradients.startswith(("in backward", "two"))
    if len(parts) > 1 and (in_backward or offload == "optimizer+gradients"):
        raise UserError("accumulation needs gradients that last longer than one backward pass")
    if clip is not None and (gradients == "in backward" or offload != "none"):
        raise UserError("the norm of all gradients is not known when this step begins: it cannot clip by it")
    make = maker(optimizer, stochastic_rounding=stochastic_rounding, lr=lr)
    parameters, usual = list(network.parameters()), parts
    steps: Any
    if offload != "none":
        steps = _on_host(network, optimizer, stochastic_rounding, offload, lr)
    elif gradients == "host":
        steps = stepping.GradientsOnHost(stepping.by_block(network), make, clip=clip)
    elif in_backward:
        each = clip if gradients.endswith("each clipped") else None
        steps = stepping.InBackward(parameters, make, clip_each=each)
    else:
        steps = make(parameters)
    device = parameters[0].device

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "amp-bf16"):
            if loss == "full":
                found: torch.Tensor = network(input_ids=part, labels=part).loss
                return found
            return {"chunked": chunked_loss, "in place": loss_in_place}[loss](network, part, loss_chunks)

    def step(fresh: Any = None) -> torch.Tensor:
        parts = usual if fresh is None else fresh
        if gradients.startswith("two"):
            with steps.norm_only() as norm:
                loss_of(parts[0]).backward()
            steps.scale = stepping.clip_coefficient(norm(), 1.0 if clip is None else clip)
        losses = []
        for part in parts:
            value = loss_of(part) / len(parts)
            value.backward()
            losses.append(value.detach())
        if not in_backward:
            if clip is not None and gradients == "card":
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            steps.step()
            steps.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    step.tokens = sum(part.numel() for part in parts)  # type: ignore[attr-defined]
    step.optimizer = steps  # type: ignore[attr-defined]
    if offload != "none":
        drop_hooks_with(step, network)
    return step


def _on_host(network: Any, optimizer: str, stochastic_rounding: bool, offloaded: str, lr: float) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    if optimizer != "adamw" or stochastic_rounding:
        raise UserError("states on the host are those of torch.optim.AdamW here")
    gradients = offloaded == "optimizer+gradients"
    return CPUOffloadOptimizer(network.parameters(), torch.optim.AdamW, offload_gradients=gradients, lr=lr)
