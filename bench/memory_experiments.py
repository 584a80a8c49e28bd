"""Experiments of the lessons' kinds, in plain PyTorch: what predictions are held against beside the recipes.

    python bench/memory_experiments.py measure --out rows.jsonl [--only offload,compiled]      (needs a CUDA card)
    python bench/memory_experiments.py predict [--only save_on_cpu] [--truth rows.jsonl]
    python bench/memory_experiments.py report                                         (writes bench/results)

Each is measured in a forked child with a fresh allocator (see memory_truth.py): peaks of the first and the fourth step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import apart

from labkit import data, models
from labkit.recipes import blocks, checkpoint_segments, chunked_loss, make_optimizer

KINDS: dict[str, Callable[..., Any]] = {}
CASTS = {"amp-fp16": "float16", "amp-bf16": "bfloat16"}


def kind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register an experiment by its name."""
    KINDS[function.__name__] = function
    return function


def parts(device, *, model="gpt2", batch=4, seq=512, precision="amp-bf16", attention="sdpa", dropout=0.1,
          activation="gelu_new", layers=None):  # fmt: skip
    """A model in training mode, its tokens, and a function that gives the context of its forward pass."""
    import torch

    changes: dict[str, Any] = {"use_cache": False, "activation_function": activation}
    changes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    if layers:
        changes["n_layer"] = layers
    configuration = models.config(model, **changes)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    made = models.causal_lm(configuration, device=device, dtype=dtype, attention=attention).train()
    tokens = data.random_tokens(batch, seq, vocab=configuration.vocab_size, device=device)
    cast = getattr(torch, CASTS[precision]) if precision in CASTS else None

    def forward():
        return torch.autocast(torch.device(device).type, dtype=cast, enabled=cast is not None)

    return made, tokens, forward


def plain_step(model, tokens, forward, optimizer, around=contextlib.nullcontext, loss=None):
    """The loop of the lessons; `around` is one more context for the forward pass."""

    def step():
        with forward(), around():
            value = loss(model, tokens) if loss is not None else model(input_ids=tokens, labels=tokens).loss
        value.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return value.detach()

    step.tokens = tokens.numel()
    return step


def adamw(model, name="adamw"):
    return make_optimizer(name, [p for p in model.parameters() if p.requires_grad])


# saved tensors ---------------------------------------------------------------------------------------------------


@kind
def save_on_cpu(device, *, pin=True, optimizer="adamw", checkpoint=0, **sizes):
    import torch

    model, tokens, forward = parts(device, **sizes)
    if checkpoint:
        checkpoint_segments(model, checkpoint)
    around = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pin)
    return plain_step(model, tokens, forward, adamw(model, optimizer), around)


@kind
def cast_saved(device, *, to="bfloat16", optimizer="adamw", **sizes):
    """Saved float32 tensors that are no parameters are kept in 16 bit."""
    import torch

    model, tokens, forward = parts(device, **sizes)
    small = getattr(torch, to)

    def pack(x):
        if x.dtype is torch.float32 and not isinstance(x, torch.nn.Parameter) and x.numel() > 1024:
            return x.to(small), x.dtype
        return x, None

    def unpack(packed):
        return packed[0] if packed[1] is None else packed[0].to(packed[1])

    around = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, unpack)
    return plain_step(model, tokens, forward, adamw(model, optimizer), around)


@kind
def int8_saved(device, *, optimizer="adamw", **sizes):
    """Saved floating-point tensors are kept as int8 with one scale a row."""
    import torch

    model, tokens, forward = parts(device, **sizes)

    def pack(x):
        if not x.is_floating_point() or isinstance(x, torch.nn.Parameter) or x.numel() < 4096:
            return x
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        return (x / scale).round().to(torch.int8), scale, x.dtype

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        values, scale, dtype = packed
        return values.to(dtype) * scale

    around = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, unpack)
    return plain_step(model, tokens, forward, adamw(model, optimizer), around)


@kind
def side_stream(device, *, optimizer="adamw", ahead=1, **sizes):
    """Block by block: what a block saves leaves on a second stream and comes back before its backward begins."""
    import torch

    model, tokens, forward = parts(device, **sizes)
    away, back = torch.cuda.Stream(device), torch.cuda.Stream(device)
    main = torch.cuda.current_stream(device)
    kept: list[dict[int, Any]] = [{} for _ in blocks(model)]

    def offloaded(index, block):
        call = block.forward

        def pack(x):
            if not x.is_floating_point() or isinstance(x, torch.nn.Parameter) or x.numel() < 65536:
                return x
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            away.wait_stream(main)
            with torch.cuda.stream(away):
                host.copy_(x, non_blocking=True)
            x.record_stream(away)
            kept[index][id(host)] = host
            return host, x.device

        def fetch(number):
            if 0 <= number < len(kept):
                with torch.cuda.stream(back):
                    back.wait_stream(away)
                    for key, host in list(kept[number].items()):
                        if not isinstance(host, tuple):
                            kept[number][key] = (host.to(device, non_blocking=True), back.record_event())

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            copy, event = kept[index].pop(id(packed[0]))
            main.wait_event(event)
            copy.record_stream(main)
            return copy

        def run(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = call(*args, **kwargs)
            first = out[0] if isinstance(out, tuple) else out
            first.register_hook(lambda grad: [fetch(index - i) for i in range(ahead + 1)] and None)
            return out

        block.forward = run

    for index, block in enumerate(blocks(model)):
        offloaded(index, block)
    return plain_step(model, tokens, forward, adamw(model, optimizer))


# checkpoints -----------------------------------------------------------------------------------------------------


@kind
def reentrant(device, *, optimizer="adamw", **sizes):
    from torch.utils.checkpoint import checkpoint

    model, tokens, forward = parts(device, **sizes)
    for block in blocks(model):

        def run(hidden, *args, call=block.forward, **kwargs):
            return checkpoint(lambda h: call(h, *args, **kwargs), hidden, use_reentrant=True)

        block.forward = run
    return plain_step(model, tokens, forward, adamw(model, optimizer))


@kind
def selective(device, *, optimizer="adamw", save="products", **sizes):
    """Checkpointed blocks that keep the results of matrix products, or also of attention."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    model, tokens, forward = parts(device, **sizes)
    keep = {aten.mm.default, aten.addmm.default, aten.bmm.default}
    if save == "attention":
        keep = {
            aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        }  # fmt: skip

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return plain_step(model, tokens, forward, adamw(model, optimizer))


# optimizers ------------------------------------------------------------------------------------------------------


@kind
def in_backward(device, *, optimizer="adamw-forloop", checkpoint=0, **sizes):
    model, tokens, forward = parts(device, **sizes)
    if checkpoint:
        checkpoint_segments(model, checkpoint)
    each = {p: make_optimizer(optimizer, [p]) for p in model.parameters()}

    def hook(p):
        each[p].step()
        each[p].zero_grad(set_to_none=True)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return plain_step(model, tokens, forward, None)


@kind
def bnb(device, *, name="PagedAdamW8bit", **sizes):
    import bitsandbytes

    model, tokens, forward = parts(device, **sizes)
    return plain_step(model, tokens, forward, getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-4))


@kind
def torchao_optimizer(device, *, name="AdamW8bit", **sizes):
    from torchao import optim

    model, tokens, forward = parts(device, **sizes)
    how = {"bf16_stochastic_round": True} if name == "_AdamW" else {}
    return plain_step(model, tokens, forward, getattr(optim, name)(model.parameters(), lr=1e-4, **how))


@kind
def cpu_offload(device, *, gradients=False, **sizes):
    import torch
    from torchao.optim import CPUOffloadOptimizer

    model, tokens, forward = parts(device, **sizes)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=gradients, lr=1e-4)
    return plain_step(model, tokens, forward, optimizer)


@kind
def stochastic_rounding(device, **sizes):
    """16-bit weights, the update in float32, rounded to 16 bit with a random carry."""
    import torch

    model, tokens, forward = parts(device, **{**sizes, "precision": "bf16"})
    state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}

    def rounded(x):
        bits = x.view(torch.int32) + torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
        return (bits & -65536).view(torch.float32).bfloat16()

    class Optimizer:
        @torch.no_grad()
        def step(self):
            for p, (m, v) in state.items():
                g = p.grad.float()
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.copy_(rounded(p.float() - 1e-4 * m.float() / (v.float().sqrt() + 1e-8) + 0 * g))

        def zero_grad(self, set_to_none=True):
            for p in state:
                p.grad = None

    return plain_step(model, tokens, forward, Optimizer())


# quantised layers --------------------------------------------------------------------------------------------------


def linear_model(device, *, batch=4, seq=512, dtype="bfloat16", layers=12, width=768, heads=12):
    """A Llama-shaped model of GPT-2's size: its layers are ``nn.Linear``, which bitsandbytes replaces."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    configuration = LlamaConfig(
        vocab_size=50257, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(configuration, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    tokens = data.random_tokens(batch, seq, vocab=50257, device=device)
    return model, tokens


def quantised(model, bits, device):
    import bitsandbytes
    import torch

    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and "lm_head" not in path:
            parent = model.get_submodule(path.rpartition(".")[0])
            if bits == 8:
                new = bitsandbytes.nn.Linear8bitLt(module.in_features, module.out_features, bias=False,
                                                   has_fp16_weights=False, threshold=6.0)  # fmt: skip
                new.weight = bitsandbytes.nn.Int8Params(module.weight.data, requires_grad=False)
            else:
                new = bitsandbytes.nn.Linear4bit(module.in_features, module.out_features, bias=False,
                                                 compute_dtype=torch.bfloat16, quant_type="nf4")  # fmt: skip
                new.weight = bitsandbytes.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            setattr(parent, path.rpartition(".")[2], new)
    return model.to(device)


@kind
def quantised_forward(device, *, bits=8, dtype="float16", **sizes):
    import torch

    model, tokens = linear_model(device, dtype=dtype, **sizes)
    model = quantised(model, bits, device).eval()

    def step():
        with torch.no_grad():
            return model(input_ids=tokens, labels=tokens).loss

    return step


@kind
def quantised_lora(device, *, bits=4, dtype="bfloat16", checkpoint=False, **sizes):
    import peft

    model, tokens = linear_model(device, dtype=dtype, **sizes)
    model = quantised(model, bits, device)
    for p in model.parameters():
        p.requires_grad_(False)
    wanted = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "up_proj"])
    model = peft.get_peft_model(model, wanted).to(device).train()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return plain_step(model, tokens, contextlib.nullcontext, adamw(model))


# attention and loss ------------------------------------------------------------------------------------------------


@kind
def attention_call(device, *, backend="flash", batch=4, heads=12, seq=1024, size=64, dtype="bfloat16", mask="",
                   causal=True, dropout=0.0, backward=True):  # fmt: skip
    """`scaled_dot_product_attention` alone, one backend forced or several allowed."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    every = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
             "math": SDPBackend.MATH, "cudnn": SDPBackend.CUDNN_ATTENTION}  # fmt: skip
    chosen = [every[name] for name in backend.split("+")] if backend else list(every.values())
    qkv = [torch.randn(batch, heads, seq, size, device=device, dtype=getattr(torch, dtype), requires_grad=backward)
           for _ in range(3)]  # fmt: skip
    given = None
    if mask == "bool":
        given = torch.ones(batch, 1, seq, seq, dtype=torch.bool, device=device).tril()
    elif mask == "float":
        given = torch.zeros(batch, 1, seq, seq, dtype=getattr(torch, dtype), device=device)

    def step():
        with sdpa_kernel(chosen):
            out = torch.nn.functional.scaled_dot_product_attention(
                *qkv, attn_mask=given, dropout_p=dropout, is_causal=causal and given is None
            )
        if backward:
            out.sum().backward()
            for t in qkv:
                t.grad = None

    return step


@kind
def flex(device, *, batch=4, heads=12, seq=1024, size=64, dtype="bfloat16", window=0):
    """`flex_attention`, compiled, causal or with a sliding window."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    qkv = [torch.randn(batch, heads, seq, size, device=device, dtype=getattr(torch, dtype), requires_grad=True)
           for _ in range(3)]  # fmt: skip

    def allowed(b, h, q, k):
        return (q >= k) & (q - k < window) if window else q >= k

    mask = create_block_mask(allowed, None, None, seq, seq, device=device)
    compiled = torch.compile(flex_attention)

    def step():
        out = compiled(*qkv, block_mask=mask)
        out.sum().backward()
        for t in qkv:
            t.grad = None

    return step


@kind
def mistral(device, *, batch=2, seq=1024, window=256, attention="sdpa", precision="bf16", layers=6, width=768):
    import torch
    from transformers import AutoModelForCausalLM, MistralConfig

    configuration = MistralConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=4, sliding_window=window, max_position_embeddings=8192,
        use_cache=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(configuration, dtype=dtype, attn_implementation=attention).train()
    tokens = data.random_tokens(batch, seq, vocab=32000, device=device)
    return plain_step(model, tokens, contextlib.nullcontext, adamw(model))


@kind
def loss_chunks(device, *, chunks=4, optimizer="adamw", **sizes):
    model, tokens, forward = parts(device, **sizes)
    return plain_step(model, tokens, forward, adamw(model, optimizer), loss=lambda m, t: chunked_loss(m, t, chunks))


@kind
def partial_autocast(device, *, off="mlp", optimizer="adamw", **sizes):
    """Autocast around the model, switched off in one module of each block."""
    import torch

    model, tokens, forward = parts(device, **{**sizes, "precision": "amp-fp16"})
    for block in blocks(model):
        module = getattr(block, off)
        call = module.forward

        def run(hidden, *args, call=call, **kwargs):
            with torch.autocast(hidden.device.type, enabled=False):
                return call(hidden.float(), *args, **kwargs)

        module.forward = run
    return plain_step(model, tokens, forward, adamw(model, optimizer))


# compiled steps ----------------------------------------------------------------------------------------------------


@kind
def compiled(device, *, what="model", optimizer="adamw", checkpoint=0, loss="full", **sizes):
    """The whole model compiled, or each block, or the block's checkpointed segments."""
    import torch

    model, tokens, forward = parts(device, **sizes)
    opt = adamw(model, optimizer)
    if what == "blocks":
        for block in blocks(model):
            block.compile()
    if checkpoint:
        checkpoint_segments(model, checkpoint)
    run = torch.compile(model) if what == "model" else model
    return plain_step(run, tokens, forward, opt, loss=chunked_loss if loss == "chunked" else None)


# what is measured --------------------------------------------------------------------------------------------------


def chosen() -> list[dict[str, Any]]:
    """The experiments of the reference file: random sizes, drawn once with a fixed seed."""
    rng = random.Random(7)

    def sizes(**fixed: Any) -> dict[str, Any]:
        return {
            "batch": rng.choice((1, 2, 3, 4, 5, 8)), "seq": rng.choice((128, 200, 256, 384, 512, 768, 1000, 1024)),
            "precision": rng.choice(("fp32", "amp-fp16", "amp-bf16", "bf16")), "dropout": rng.choice((0.0, 0.1)),
            "attention": rng.choice(("sdpa", "sdpa", "eager")),
            "activation": rng.choice(("gelu_new", "gelu_pytorch_tanh")), **fixed,
        }  # fmt: skip

    rows: list[dict[str, Any]] = []
    for _ in range(4):
        rows.append({"kind": "save_on_cpu", "pin": rng.random() < 0.7, "checkpoint": rng.choice((0, 0, 1)), **sizes()})
        rows.append({"kind": "cast_saved", "to": rng.choice(("bfloat16", "float16")),
                     **sizes(precision=rng.choice(("fp32", "amp-bf16")))})  # fmt: skip
        rows.append({"kind": "reentrant", **sizes()})
        rows.append({"kind": "selective", "save": rng.choice(("products", "attention")), **sizes()})
        rows.append({"kind": "in_backward", "optimizer": rng.choice(("adamw-forloop", "adamw-fused", "adamw", "sgd",
                     "adam8bit")), "checkpoint": rng.choice((0, 1)), **sizes()})  # fmt: skip
    for name in ("PagedAdamW8bit", "PagedAdam8bit", "PagedAdamW32bit", "AdamW8bit", "Adam8bit"):
        rows.append({"kind": "bnb", "name": name, **sizes()})
    for _ in range(2):
        rows.append({"kind": "int8_saved", **sizes()})
        rows.append({"kind": "side_stream", **sizes()})
        rows.append({"kind": "stochastic_rounding", **sizes()})
        rows.append({"kind": "partial_autocast", "off": rng.choice(("mlp", "attn")), **sizes()})
        rows.append({"kind": "loss_chunks", "chunks": rng.choice((2, 4, 16)), **sizes()})
        rows.append({"kind": "cpu_offload", "gradients": False, **sizes()})
        rows.append({"kind": "cpu_offload", "gradients": True, **sizes()})
    rows.append({"kind": "torchao_optimizer", "name": "AdamW8bit", **sizes()})
    rows.append({"kind": "torchao_optimizer", "name": "AdamW4bit", **sizes()})
    rows.append({"kind": "torchao_optimizer", "name": "_AdamW", **sizes(precision="bf16")})
    for bits, dtype in ((8, "float16"), (4, "bfloat16")):
        rows.append({"kind": "quantised_forward", "bits": bits, "dtype": dtype, "batch": 2, "seq": 512})
        rows.append({"kind": "quantised_lora", "bits": bits, "dtype": dtype, "batch": 2, "seq": 512})
        rows.append({"kind": "quantised_lora", "bits": bits, "dtype": dtype, "batch": 4, "seq": 768,
                     "checkpoint": True})  # fmt: skip
    for backend in ("flash", "efficient", "math", "cudnn", "", "efficient+math"):
        rows.append({"kind": "attention_call", "backend": backend, "seq": rng.choice((512, 777, 1024, 2048))})
    for mask in ("bool", "float"):
        for backend in ("efficient", "", "math", "flash+efficient"):
            rows.append({"kind": "attention_call", "backend": backend, "mask": mask, "seq": rng.choice((512, 777))})
    rows.append({"kind": "attention_call", "backend": "efficient", "dtype": "float32", "seq": 777})
    rows.append({"kind": "attention_call", "backend": "math", "dtype": "float16", "dropout": 0.1, "seq": 640})
    rows.append({"kind": "attention_call", "backend": "flash", "causal": False, "backward": False, "seq": 4096})
    for window, attention in ((256, "sdpa"), (256, "eager"), (4096, "sdpa"), (128, "sdpa")):
        rows.append({"kind": "mistral", "window": window, "attention": attention, "seq": rng.choice((512, 1024))})
    return rows


def chosen_compiled() -> list[dict[str, Any]]:
    """Compiled steps for the band of the estimate."""
    rng = random.Random(11)
    rows: list[dict[str, Any]] = []
    for i in range(30):
        what = ("model", "blocks")[i % 2]
        rows.append({
            "kind": "compiled", "what": what, "model": "gpt2" if i % 5 else "gpt2-medium",
            "layers": rng.choice((4, 4, 12)) if i % 5 else 6,
            "checkpoint": rng.choice((0, 0, 1)), "loss": rng.choice(("full", "full", "chunked")),
            "batch": rng.choice((1, 2, 4, 8)), "seq": rng.choice((256, 512, 1000, 1024)),
            "precision": rng.choice(("fp32", "amp-fp16", "amp-bf16", "bf16")), "dropout": rng.choice((0.0, 0.1)),
            "attention": rng.choice(("sdpa", "sdpa", "eager")),
            "activation": rng.choice(("gelu_new", "gelu_pytorch_tanh")),
        })  # fmt: skip
    for seq, window in ((1024, 0), (2048, 0), (2048, 256)):
        rows.append({"kind": "flex", "seq": seq, "window": window})
    rows.sort(key=lambda row: (row.get("what") == "model", row.get("layers", 0)))
    return rows


def experiment_of(row: dict[str, Any]) -> Callable[..., Any]:
    """The experiment of one row of `chosen`."""
    fields = dict(row)
    build = functools.partial(KINDS[fields.pop("kind")], **fields)
    build.__name__ = name_of(row)  # type: ignore[attr-defined]
    return build


def report(truth: Path, out: Path) -> None:
    """Predict every measured row and write the errors by kind, and of every row, as a table."""
    import statistics

    from labkit import memory

    rows = [json.loads(line) for line in truth.read_text().splitlines()]
    rows = [row for row in rows if row["status"] == "ok"]
    found = []
    for row in rows:
        start = time.process_time()
        predicted = memory.predict(experiment_of(row["experiment"]), card="h200", trace=False)
        seconds = time.process_time() - start
        errors = {
            (step, name): getattr(getattr(predicted, step), f"{name}_bytes") / row[step][f"{name}_bytes"] - 1
            for step in ("first", "steady")
            for name in ("allocated", "requested", "reserved")
        }
        inside = None
        if predicted.band_bytes:
            low, high = predicted.band_bytes
            inside = low <= row["steady"]["allocated_bytes"] <= high
        found.append((row, predicted, errors, inside, seconds))
        print(name_of(row["experiment"]), f"{errors['steady', 'allocated']:+.2%}", inside, flush=True)
    first = rows[0]
    lines = [
        "# Predictions of experiments beside the recipes",
        "",
        f"{len(rows)} experiments measured on {first['card']} ({first['capability']}, PyTorch "
        f"{first['versions']['torch']}, {first['date']}), each in a fresh process, and predicted without a GPU: "
        "`python bench/memory_experiments.py report`. Errors are predicted "
        "minus measured, in per cent; the worst of the first and the steady step.",
        "",
        "| kind | rows | allocated, median | allocated, worst | requested, worst | reserved, worst | in the band |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label in dict.fromkeys(row["experiment"]["kind"] for row in rows):
        these = [entry for entry in found if entry[0]["experiment"]["kind"] == label]

        def worst(name: str, these: list[Any] = these) -> float:
            return max((e[2][step, name] for e in these for step in ("first", "steady")), key=abs)

        middle = statistics.median(abs(e[2][step, "allocated"]) for e in these for step in ("first", "steady"))
        banded = [e[3] for e in these if e[3] is not None]
        band = f"{sum(banded)} of {len(banded)}" if banded else ""
        lines.append(f"| {label} | {len(these)} | {100 * middle:.2f} | {100 * worst('allocated'):+.2f} | "
                     f"{100 * worst('requested'):+.2f} | {100 * worst('reserved'):+.2f} | {band} |")  # fmt: skip
    lines += ["", "| experiment | allocated, first | allocated, steady | band | measured, steady |",
              "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for row, predicted, errors, inside, _ in found:
        band = ""
        if inside is not None:
            low, high = (bound / 2**20 for bound in predicted.band_bytes)
            band = f"{low:.0f} to {high:.0f} MiB" + ("" if inside else ", missed")
        lines.append(f"| {name_of(row['experiment'])} | {100 * errors['first', 'allocated']:+.2f} | "
                     f"{100 * errors['steady', 'allocated']:+.2f} | {band} | "
                     f"{row['steady']['allocated_bytes'] / 2**20:.0f} MiB |")  # fmt: skip
    out.write_text("\n".join(lines) + "\n")


def name_of(row: dict[str, Any]) -> str:
    return " ".join(str(v) if k == "kind" else f"{k}={v}" for k, v in row.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "predict", "report", "one"))
    parser.add_argument("--set", choices=("plain", "compiled"), default="plain")
    parser.add_argument("--only", help="kinds, separated by commas")
    parser.add_argument("--out")
    parser.add_argument("--row", help="of `one`: the experiment as JSON")
    parser.add_argument("--truth", help="measured rows to compare with")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=80)
    arguments = parser.parse_args()
    if arguments.what == "one":
        measure_here(json.loads(arguments.row), arguments.out)
        return
    if arguments.what == "report":
        root = Path(__file__).resolve().parents[1]
        truth = Path(arguments.truth or root / "data/reference/memory-h200-experiments.jsonl")
        report(truth, Path(arguments.out or root / "bench/results/memory-experiments.md"))
        return
    rows = chosen() if arguments.set == "plain" else chosen_compiled()
    if arguments.only:
        rows = [r for r in rows if r["kind"] in arguments.only.split(",")]
    if arguments.what == "measure":
        compiles = arguments.set == "compiled" or arguments.only == "torchao_optimizer"
        (measure_apart if compiles else measure)(rows, arguments)
    else:
        predict(rows, arguments)


def measure(rows: list[dict[str, Any]], arguments: Any) -> None:
    """Every row in a forked child of a parent without CUDA; one JSON line each."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import memory_truth

    memory_truth.import_without_cuda()
    context = multiprocessing.get_context("fork")
    start = time.time()
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        shared = pool.submit(memory_truth.provenance).result()
    waiting, running, count = list(rows), {}, {"ok": 0}
    while waiting or running:
        while waiting and len(running) < arguments.jobs and time.time() - start < arguments.limit_s:
            row = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, row))
            process.start()
            sender.close()
            running[process] = (row, receiver, time.time())
        if not running:
            break
        for process, (row, receiver, _) in list(running.items()):
            if not receiver.poll(0.02):
                continue
            try:
                found = receiver.recv()
            except EOFError:
                found = {"status": "error", "message": "the process died"}
            process.join()
            del running[process]
            count[found["status"]] = count.get(found["status"], 0) + 1
            if found["status"] != "ok":
                print(name_of(row), found["status"], found.get("message", "")[:300], flush=True)
            with open(arguments.out, "a") as out:
                out.write(json.dumps({"experiment": row, **found, **shared}) + "\n")
    print(f"{count} of {len(rows)} in {time.time() - start:.0f} s; {len(waiting)} not begun", flush=True)


def _child(sender: Any, row: dict[str, Any]) -> None:
    import memory_truth

    start = time.time()
    try:
        found = memory_truth.measure_experiment(experiment_of(row))
    except Exception as error:
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        found = {"status": "error", "message": f"{type(error).__name__}: {error} ({last.name})"[:600]}
    sender.send({**found, "process_seconds": round(time.time() - start, 2)})


def measure_apart(rows: list[dict[str, Any]], arguments: Any) -> None:
    """Every row in a process of its own from the start: compilers look for the card while they are imported."""
    done = apart.run(
        rows, lambda row: ["one", "--out", arguments.out, "--row", json.dumps(row)],
        jobs=arguments.jobs, seconds=arguments.limit_s, name=name_of,
    )  # fmt: skip
    raise SystemExit(not done)


def measure_here(row: dict[str, Any], out: str) -> None:
    """One row in this process; one JSON line."""
    import memory_truth

    start = time.time()
    found = memory_truth.measure_experiment(experiment_of(row))
    found["process_seconds"] = round(time.time() - start, 2)
    with open(out, "a") as lines:
        lines.write(json.dumps({"experiment": row, **found, **memory_truth.provenance()}) + "\n")


def predict(rows: list[dict[str, Any]], arguments: Any) -> None:
    """Every row on ghosts, beside its truth if there is one."""
    import traceback

    from labkit import memory
    from labkit.units import show_bytes

    truth = {}
    if arguments.truth:
        for line in Path(arguments.truth).read_text().splitlines():
            row = json.loads(line)
            truth[name_of(row["experiment"])] = row
    for row in rows:
        start = time.perf_counter()
        name = name_of(row)
        try:
            report = memory.predict(experiment_of(row), card="h200", trace=False)
        except Exception as error:
            print(f"{name}\n    {type(error).__name__}: {str(error)[:300]}", flush=True)
            if "-v" in os.environ.get("LABKIT_DEBUG", ""):
                traceback.print_exc()
            continue
        seconds = time.perf_counter() - start
        text = f"{name}\n    {show_bytes(report.first.allocated_bytes)} {show_bytes(report.steady.allocated_bytes)}"
        text += f" ({seconds:.1f} s) {'; '.join(report.notes)}"
        if name in truth and truth[name]["status"] == "ok":
            for step in ("first", "steady"):
                for counter in ("allocated", "requested", "reserved"):
                    found, real = (getattr(getattr(report, step), f"{counter}_bytes"),
                                   truth[name][step][f"{counter}_bytes"])  # fmt: skip
                    text += f"\n      {step} {counter} {(found / real - 1) * 100:+.2f} % ({found - real:+,d} bytes)"
        elif name in truth:
            text += f"\n      measured: {truth[name]['status']} {truth[name].get('message', '')[:200]}"
        print(text, flush=True)


if __name__ == "__main__":
    main()
