"""Which ways to train GPT-2 are held against each other, the most important first, and the search for the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from peers_trial import Case, Trial

OURS = "this course"
ROOMY = {"expandable_segments": True}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
BEST: dict[str, Any] = {  # lesson 12's recipe
    "precision": "bf16", "checkpoint": 1, "activation": "gelu_pytorch_tanh", "loss": "in-place", "loss_chunks": 16,
    "optimizer": "adamw8bit", "stochastic_rounding": True, "gradients": "host", "compile": "blocks",
}  # fmt: skip
RESIDENT = {**BEST, "gradients": "card"}
FLAT = {**RESIDENT, "flat": True}  # a block's weights step as one tensor
STATES = {**RESIDENT, "offload": "states"}  # they wait on the host and step on the card piece by piece
INPUTS = {**RESIDENT, "offload": "states+activations"}  # the inputs of checkpointed segments, too
FAST = {"compile": True, "activation": "gelu_pytorch_tanh"}
LIGER = {"optimizer": "adamw8bit", "loss": "liger", **FAST}
CHECKPOINTED = {"gradient_checkpointing": True}
LADDER = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
GAIN = 1.03  # a larger batch that brings less than this is not the way to more speed


def cases() -> list[Case]:
    """All of them, in order."""
    (first8, later8), (first24, later24) = _xl(8), _xl(24)
    return [*first8, *first24, *_small(), *later8, *later24, *_medium()]


def _ours(variant: str, how: Mapping[str, Any], **more: Any) -> Case:
    expandable = how.get("expandable_segments", False)
    return Case(OURS, variant, dict(how), environment=EXPANDABLE if expandable else {}, **more)


def _xl(cap: float) -> tuple[list[Case], list[Case]]:
    """GPT-2 XL, what matters most and the rest. In 8 GiB weights and gradients of 16 bits leave nothing for states."""
    tight = cap < 16
    at: dict[str, Any] = {"cap_gib": cap}
    away = {**at, "batch": 16 if tight else 64}
    eight: dict[str, Any] = {**at, "batch": 1 if tight else 16}
    full: dict[str, Any] = {**at, "batch": 2, "accumulation": 4, "ballast": True}
    deep = {"peer": "DeepSpeed", **at, "batch": 8 if tight else 32}
    ours = _ours_xl(tight, at)
    plain = {"precision": "bf16", **CHECKPOINTED}
    paged, bf16 = {"optim": "paged_adamw_8bit"}, {"precision": "bf16"}
    torchao = [
        Case("torchao", "optimizer and gradients on the host", {"optimizer": "offload+gradients"}, **away),
        Case("torchao", "both on the host, fused GELU, compiled blocks, Liger's loss",
             {"optimizer": "offload+gradients", "loss": "liger", **FAST}, **away),
    ]  # fmt: skip
    deepspeed = [
        Case(variant="ZeRO-2, optimizer on the host", how={"stage": 2}, **deep),
        Case(variant="ZeRO-3, weights and optimizer on the host", how={"stage": 3}, **deep),
    ]
    autocast = [
        Case("Trainer", "autocast, adamw_8bit", {**CHECKPOINTED, "optim": "adamw_8bit"},
             **{**eight, "batch": 1 if tight else 4}),
        Case("TRL", "as it comes (autocast), adamw_8bit", {"optim": "adamw_8bit"},
             **{**eight, "batch": 1 if tight else 8}),
        Case("torchao", f"optimizer on the host{', 4 micro-batches' if tight else ''}",
             {"optimizer": "offload", **FAST},
             **{**away, "batch": 4 if tight else 32, "accumulation": 4 if tight else 1}),
    ]  # fmt: skip
    resident = [
        Case("Trainer", "bf16 weights, adamw_8bit", {**plain, "optim": "adamw_8bit"}, **eight),
        Case("TRL", "bf16 weights, adamw_8bit", {**bf16, "optim": "adamw_8bit"}, **eight),
    ]
    if not tight:
        return [
            *ours, *resident, *torchao, Case("Liger", "bf16 weights, 8-bit AdamW, its fused loss", LIGER, **eight),
        ], [
            Case("Unsloth", "full fine-tuning, adamw_8bit", {"optim": "adamw_8bit"}, **eight),
            Case("Trainer", "bf16 weights, adamw_8bit, compiled",
                 {**plain, "optim": "adamw_8bit", "torch_compile": True}, environment=REGIONAL, **eight),
            *deepspeed, *autocast,
        ]  # fmt: skip
    return [
        *ours, *torchao,
        Case("Trainer", "bf16 weights, paged_adamw_8bit, 4 micro-batches", {**plain, **paged}, **full),
        Case("TRL", "bf16 weights, paged_adamw_8bit, 4 micro-batches", {**bf16, **paged}, **full),
        Case("Liger", "bf16 weights, paged 8-bit AdamW, its fused loss, 4 micro-batches",
             {"optimizer": "paged-adamw8bit", "loss": "liger", **FAST}, **full),
    ], [
        *deepspeed, *resident,
        Case("Unsloth", "full fine-tuning, paged_adamw_8bit, 4 micro-batches", paged, **full),
        *autocast,
        _ours("states and gradients on the host", {**STATES, "gradients": "host", **ROOMY}, batch=16, **at),
        _ours("gradients on the host", {**BEST, **ROOMY}, batch=8, search=False, **at),
    ]  # fmt: skip


def _ours_xl(tight: bool, at: dict[str, Any]) -> list[Case]:
    """This course's recipes for GPT-2 XL, all clipped to a norm of 1; some with four micro-batches."""
    if not tight:
        return [
            _ours("all on the card", {**RESIDENT, **ROOMY}, batch=48, **at),
            _ours("states and segments' inputs on the host", {**INPUTS, **ROOMY}, batch=64, **at),
            _ours("states on the host, nothing checkpointed, 4 micro-batches", {**STATES, **ROOMY, "checkpoint": 0},
                  batch=4, accumulation=4, **at),
            _ours("all on the card, nothing checkpointed, 4 micro-batches", {**RESIDENT, **ROOMY, "checkpoint": 0},
                  batch=4, accumulation=4, **at),
            _ours("all on the card, flat steps, nothing checkpointed, 4 micro-batches",
                  {**FLAT, **ROOMY, "checkpoint": 0}, batch=4, accumulation=4, **at),
        ]  # fmt: skip
    four: dict[str, Any] = {"accumulation": 4, **at}
    return [
        _ours("states and segments' inputs on the host, 4 micro-batches", {**INPUTS, **ROOMY}, batch=16, **four),
        _ours("states, gradients and segments' inputs on the host", {**INPUTS, "gradients": "host", **ROOMY},
              batch=32, **at),
        _ours("states and segments' inputs on the host", {**INPUTS, **ROOMY}, batch=16, **at),
        _ours("states on the host, 4 micro-batches", {**STATES, **ROOMY}, batch=8, search=False, **four),
    ]  # fmt: skip


REGIONAL = {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1"}  # 48 blocks as one graph compile for minutes


def _small() -> list[Case]:
    """GPT-2 124M at 8 x 1024: the case of a plain fp32 run that must not be slower in a quarter of its memory."""
    at: dict[str, Any] = {"model": "gpt2", "batch": 8, "search": False}
    small = {**RESIDENT, **ROOMY}
    trainer = {**at, "cap_gib": 8}
    return [
        _ours("gradients on the host", {**BEST, **ROOMY}, **trainer),
        _ours("all on the card", small, **trainer),
        _ours("all on the card, nothing checkpointed", {**small, "checkpoint": 0}, **trainer),
        _ours("all on the card, flat steps, nothing checkpointed", {**small, "flat": True, "checkpoint": 0}, **trainer),
        _ours("all on the card, 32-bit AdamW", {**small, "optimizer": "adamw-fused", "stochastic_rounding": False},
              **trainer),
        Case("PyTorch", "plain fp32", {"precision": "fp32", "optimizer": "adamw", "checkpoint": False},
             **{**at, "cap_gib": None}),
        Case("Trainer", "autocast", {}, **trainer),
        Case("Trainer", "autocast, adamw_8bit, checkpointing", {**CHECKPOINTED, "optim": "adamw_8bit"}, **trainer),
        Case("Trainer", "autocast, compiled", {"torch_compile": True}, **trainer),
        Case("TRL", "as it comes", {}, **trainer),
        Case("TRL", "bf16 weights, adamw_8bit", {"precision": "bf16", "optim": "adamw_8bit"}, **trainer),
        Case("torchao", "optimizer and gradients on the host", {"optimizer": "offload+gradients"},
             **trainer),
        Case("Liger", "bf16 weights, 8-bit AdamW, its fused loss", LIGER, **trainer),
        Case("DeepSpeed", "ZeRO-2, optimizer on the host", {"stage": 2}, **trainer),
        Case("Unsloth", "full fine-tuning, adamw_8bit", {"optim": "adamw_8bit"}, **trainer),
    ]  # fmt: skip


def _medium() -> list[Case]:
    at: dict[str, Any] = {"model": "gpt2-medium", "cap_gib": 8}
    return [
        _ours("all on the card", {**RESIDENT, **ROOMY}, batch=32, **at),
        _ours("all on the card, flat steps", {**FLAT, **ROOMY}, batch=32, **at),
        Case("torchao", "both on the host, fused GELU, compiled blocks, Liger's loss",
             {"optimizer": "offload+gradients", "loss": "liger", **FAST}, batch=32, **at),
        Case("Trainer", "autocast, adamw_8bit, checkpointing", {**CHECKPOINTED, "optim": "adamw_8bit"}, batch=8, **at),
        Case("Trainer", "bf16 weights, adamw_8bit, checkpointing",
             {"precision": "bf16", **CHECKPOINTED, "optim": "adamw_8bit"}, batch=8, **at),
        Case("TRL", "bf16 weights, adamw_8bit", {"precision": "bf16", "optim": "adamw_8bit"}, batch=16, **at),
        Case("Liger", "bf16 weights, 8-bit AdamW, its fused loss", LIGER,
             batch=32, **at),
    ]  # fmt: skip


ADAPTERS = {
    OURS: ("peers_loops", "ours"), "torchao": ("peers_loops", "loop"), "Liger": ("peers_loops", "loop"),
    "PyTorch": ("peers_loops", "loop"), "DeepSpeed": ("peers_loops", "deepspeed"),
    "Trainer": ("peers_trainers", "trainer"), "TRL": ("peers_trainers", "sft"),
    "Unsloth": ("peers_trainers", "unsloth"),
}  # fmt: skip


def compiles(case: Case) -> bool:
    """Whether a first step spends long in the compiler, so that it pays to fill its cache before."""
    how = case.how
    lowbit = case.peer == OURS and "bit" in how.get("optimizer", "")  # torchao's, compiled for every shape of a weight
    return bool(how.get("compile", "none") not in ("none", False) or how.get("torch_compile") or lowbit)


def next_batch(case: Case, known: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The next batch to try of `case`, given the rows of those that were tried (by batch); None: it is known enough.

    From where it begins: downwards until one fits, upwards by doubling until one does not fit or brings no more
    tokens a second; then once between the largest that fits and the smallest that does not.
    """
    if case.batch not in known:
        return case.batch
    broken = [b for b, row in known.items() if row["status"] not in ("ok", "oom")]
    if broken or not case.search:
        return None
    fits = sorted(b for b, row in known.items() if row["status"] == "ok")
    full = sorted(b for b, row in known.items() if row["status"] == "oom")
    if not fits:
        lower = [b for b in LADDER if b < full[0]]
        return lower[len(lower) // 2 if len(full) == 1 else 0] if lower else None
    top, speed = fits[-1], {b: known[b]["tokens_per_second"] for b in fits}
    between = [b for b in LADDER if b > top and (not full or b < full[0])]
    settled = len(fits) > 1 and speed[top] < GAIN * max(v for b, v in speed.items() if b != top)
    if not between or settled:
        return None
    return between[len(between) // 2] if full else next((b for b in between if b >= 2 * top), None)


def losses(cases: list[Case]) -> Iterator[Trial]:
    """The trainings on fixed data, one for each case, all with 4 (GPT-2 XL) or 8 sequences a step: one after another
    where little memory is left."""
    for case in cases:
        count = 4 if case.model == "gpt2-xl" else 8
        batch = 1 if case.ballast or case.batch < 4 else count
        fixed = dataclasses.replace(case, batch=batch, accumulation=count // batch, search=False, ballast=False)
        yield Trial(fixed, batch, kind="loss")
