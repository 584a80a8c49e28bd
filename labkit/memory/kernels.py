"""What CUDA kernels allocate besides their results, in order: plans, by operator.

A dispatch mode sees an operator's results and nothing of what its kernel takes and gives back meanwhile. A plan is a
tuple of steps: ``("out", i)`` the i-th result is allocated, ``("take", nbytes)`` a block of the kernel's own,
``("give", k)`` the k-th of these is freed, ``("hold", name, nbytes)`` a block that the thread keeps for good. A result
that a plan does not name is not on the GPU. Every formula was compared with the allocator's history on an H200
(PyTorch 2.11, CUDA 13.0); the source it comes from stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..units import UserError
from .workspaces import LT_WORKSPACE

aten = torch.ops.aten
Plan = tuple[tuple[Any, ...], ...]
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Chip:
    """What plans depend on: compute capability, streaming multiprocessors, threads that one of them holds."""

    capability: tuple[int, int]
    processors: int
    threads: int


# Streaming multiprocessors by card preset: NVIDIA's data sheets and whitepapers
_PROCESSORS = {
    "rtx2070": 36, "t4": 40, "rtx3060-12gb": 28, "rtx3090": 82, "rtx4090": 128, "a100-40gb": 108, "a100-80gb": 108,
    "h100": 132, "h200": 132,
}  # fmt: skip
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}


def chip(name: str, capability: tuple[int, int]) -> Chip:
    """The chip of a card preset. Raises `UserError` for one whose processors are not listed here."""
    if name not in _PROCESSORS:
        raise UserError(f"card {name!r} has no entry in labkit/memory/kernels.py (streaming multiprocessors)")
    return Chip(capability, _PROCESSORS[name], _THREADS.get(capability, 2048))


def plan(func: Any, args: Any, kwargs: Any, out: Any, chip: Chip) -> Plan | None:
    """The plan of `func`; None when its results are all that it allocates, in order."""
    rule = _PLANS.get(func)
    return None if rule is None else rule(args, kwargs, out, chip)


def _sum(args: Any, kwargs: Any, out: torch.Tensor, chip: Chip) -> Plan | None:
    return _reduced(args[0], args[1] if len(args) > 1 else None, out, chip)


def _norm(args: Any, kwargs: Any, out: torch.Tensor, chip: Chip) -> Plan | None:
    return _reduced(args[0], args[2] if len(args) > 2 else kwargs.get("dim"), out, chip)


def _reduced(x: torch.Tensor, over: Any, out: torch.Tensor, chip: Chip) -> Plan | None:
    """Reductions that are split over thread blocks: ``setReduceConfig`` in aten/src/ATen/native/cuda/Reduce.cuh."""
    dims = sorted({d % x.dim() for d in over}) if over else list(range(x.dim()))
    if x.numel() == 0 or not x.is_contiguous():
        return None
    kept = [d for d in range(x.dim()) if d not in dims and x.shape[d] > 1]
    reduced = [d for d in dims if x.shape[d] > 1]
    casts = x.dtype != out.dtype and not (out.dtype is torch.float32 and x.dtype in _HALVES)
    steps: list[tuple[Any, ...]] = [("out", 0)]
    if casts:
        steps.append(("take", x.numel() * out.dtype.itemsize))
    size = _reduction(x, kept, reduced, chip) if reduced else None
    if size is not None:
        first = int(casts)
        steps += [("take", size[0]), ("take", size[1]), ("give", first + 1), ("give", first)]
    if casts:
        steps.append(("give", 0))
    return tuple(steps) if len(steps) > 1 else None


def _reduction(x: torch.Tensor, kept: list[int], reduced: list[int], chip: Chip) -> tuple[int, int] | None:
    outputs = prod(x.shape[d] for d in kept)
    inputs = prod(x.shape[d] for d in reduced)
    accumulator = 8 if x.dtype in (torch.float64, torch.int64, torch.int32, torch.bool) else 4
    inner = not kept or max(reduced) > max(kept)
    vector, block_limit = 1, 512
    if inner:
        dim0, dim1 = inputs, outputs
        flat = len(kept) == 0 or reduced == list(range(reduced[0], reduced[-1] + 1))
        if dim0 > 128 and flat and not kept:
            dim0 //= 4
    else:
        dim0, dim1 = outputs, inputs
        vector = 4
        while vector > 1 and (outputs % vector or x.storage_offset() % vector):
            vector //= 2
        dim0 //= vector
    most = block_limit // vector
    power0, power1 = (min(_power(d), most) for d in (dim0, dim1))
    width = min(power0, 32)
    height = min(power1, most // width)
    width = min(power0, most // height)
    step_input, step_output = 1, 1
    if inner:
        step_input *= width
    else:
        step_output *= width
    values = -(-inputs // step_input)
    if values < min(height * 16, 256):
        return None
    step_input *= height
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    target = chip.processors * (chip.threads // (width * height))
    if values < 256 or grid > target:
        return None
    parts = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    if parts <= 1:
        return None
    size = accumulator * outputs * parts
    if not inner:
        size *= width * vector
    return size, 4 * grid


def _power(n: int) -> int:
    """The largest power of two up to `n`."""
    return 1 << (max(n, 1).bit_length() - 1)


def _softmax_backward(args: Any, kwargs: Any, out: torch.Tensor, chip: Chip) -> Plan:
    """``tmp = grad * output``: aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out."""
    dtype = torch.result_type(args[0], args[1])
    return ("out", 0), ("take", args[0].numel() * dtype.itemsize), ("give", 0)


def _native_dropout(args: Any, kwargs: Any, out: Any, chip: Chip) -> Plan | None:
    """The mask comes first: aten/src/ATen/native/cuda/Dropout.cu."""
    return ("out", 1), ("out", 0)


def _cast_first(args: Any, kwargs: Any, out: torch.Tensor, chip: Chip) -> Plan | None:
    """A cumulative sum of bools or small integers makes an int64 copy of its input."""
    if args[0].dtype == out.dtype:
        return None
    return ("out", 0), ("take", args[0].numel() * out.dtype.itemsize), ("give", 0)


def _cudnn(args: Any, kwargs: Any, out: Any, chip: Chip) -> Plan:
    """aten/src/ATen/native/transformers/cuda/attention.cu, _cudnn_attention_forward; cuDNN asks for 256 bytes."""
    order = [i for i in (6, 7, 0, 1) if i < len(out) and isinstance(out[i], torch.Tensor)]
    return (*(("out", i) for i in order), ("take", 256), ("give", 0))


def _cudnn_backward(args: Any, kwargs: Any, out: Any, chip: Chip) -> Plan:
    """An fp32 accumulator of the query's gradient, a softmax sum for each row, and 256 bytes: measured. A gradient that
    is not laid out as the result is copied."""
    batch, heads, seq, size = args[1].shape
    rows = batch * heads * seq
    steps = ("out", 0), ("out", 1), ("out", 2), ("take", rows * (4 * size + 4) + 256), ("give", 0)
    return _around(steps, [args[0]] if args[0].stride() != args[4].stride() else [])


def _around(steps: Plan, tensors: list[torch.Tensor]) -> Plan:
    """`steps` while copies of `tensors` are held."""
    n = len(tensors)
    moved = (("give", s[1] + n) if s[0] == "give" else s for s in steps)
    copies = (("take", t.numel() * t.element_size()) for t in tensors)
    return (*copies, *moved, *(("give", i) for i in range(n)))


def _misplaced(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Those of shape ``(batch, heads, seq, size)`` that do not lie in memory as ``(batch, seq, heads, size)``: the
    kernels' callers copy them (attention_backward.cu, ``contiguous()`` of the transposed tensor)."""
    return [t for t in tensors if not t.transpose(1, 2).is_contiguous()]


def _flash(args: Any, kwargs: Any, out: Any, chip: Chip) -> Plan:
    """aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_fwd: result, log-sum-exp, random state;
    several splits of the keys (without dropout) keep partial results."""
    batch, heads, seq, size = args[0].shape
    steps: list[tuple[Any, ...]] = [("out", 0), ("out", 1)]
    state: list[tuple[Any, ...]] = [("out", i) for i in (6, 7) if isinstance(out[i], torch.Tensor)]
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    if dropout:
        return (*steps, *state, ("take", 16), ("give", 0))
    splits = _flash_splits(batch, heads, seq, args[1].shape[2], size, chip)
    if splits == 1:
        return (*steps, *state)
    rows = 4 * splits * batch * heads * seq
    return (*steps, ("take", rows), ("take", rows * -(-size // 32) * 32), *state, ("give", 0), ("give", 1))


def _flash_splits(batch: int, heads: int, seq: int, keys: int, size: int, chip: Chip) -> int:
    """``num_splits_heuristic`` in flash_api.cpp."""
    block_n = 256 if size <= 64 else (128 if size <= 128 else 64)
    blocks = -(-keys // block_n)
    work = batch * heads * -(-seq // 64)
    most = min(128, chip.processors * 2, blocks)
    if work >= 0.8 * chip.processors * 2:
        return 1
    efficiencies = []
    for n in range(1, most + 1):
        if n != 1 and -(-blocks // n) == -(-blocks // (n - 1)):
            efficiencies.append(0.0)
            continue
        waves = work * n / (chip.processors * 2)
        efficiencies.append(waves / -(-waves // 1))
    best = max(efficiencies)
    for n, efficiency in enumerate(efficiencies, start=1):
        if efficiency >= 0.85 * best:
            return n
    return 1


def _flash_backward(args: Any, kwargs: Any, out: Any, chip: Chip) -> Plan:
    """mha_bwd in flash_api.cpp: softmax sums over rows rounded to 128, an fp32 accumulator of the query's gradient."""
    batch, heads, seq, size = args[1].shape
    rows = batch * heads * (-(-seq // 128) * 128)
    padded = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    steps: list[tuple[Any, ...]] = [("out", 0), ("out", 1), ("out", 2)]
    steps += [("take", 4 * rows), ("take", 4 * rows * padded), ("give", 1), ("give", 0)]
    if args[2].shape[1] != heads:  # gradients of keys and values for every head, summed up for each group
        wide = batch * heads * args[2].shape[2] * size * args[1].element_size()
        steps[3:3] = [("take", wide), ("take", wide)]
        steps[-2:] = [("give", 3), ("give", 2), ("give", 1), ("give", 0)]
    return _around(tuple(steps), _misplaced(args[0], args[4]))


def _efficient(args: Any, kwargs: Any, out: Any, chip: Chip) -> Plan:
    """The random seed and offset are on the host: attention.cu, _efficient_attention_forward. Heads wider than 128 in
    half precision are summed up in float32."""
    value = args[2]
    steps: list[tuple[Any, ...]] = [("out", 0), ("out", 1)] if out[1].numel() else [("out", 0)]
    if value.shape[-1] > 128 and value.dtype in _HALVES:
        steps += [("take", 4 * out[0].numel()), ("give", 0)]
    return tuple(steps)


def _efficient_backward(args: Any, kwargs: Any, out: Any, chip: Chip) -> Plan:
    """attention_backward.cu, _efficient_attention_backward: in float32 the row sums ``delta`` come from a full-size
    product; the workspace is `workspace_size()` of mem_eff_attention/kernel_backward.h."""
    q = args[1]
    batch, heads, seq, size = q.shape
    rows = batch * heads * seq
    half = q.dtype in _HALVES
    height = 64 if size <= 64 else 128
    width = 128 if half and 64 < size <= 128 else 64
    tiles = -(-seq // height) * -(-size // width) * (16 + 4 * height * width)
    if half and size > 128:  # the gradients of keys and values are summed up in float32 as well
        tiles += 2 * 4 * (-(-args[2].shape[2] // 64) * 64) * -(-size // 128) * 128
    workspace = batch * heads * tiles
    full = rows * args[3].shape[-1] * 4
    steps: list[tuple[Any, ...]] = [("out", i) for i in range(3)]
    if len(out) > 3 and isinstance(out[3], torch.Tensor) and out[3].numel():
        steps.append(("out", 3))
    if q.dtype is torch.float32:
        steps += [("take", full), ("take", 4 * rows), ("take", 4 * rows), ("give", 1), ("give", 0)]
        steps += [("take", workspace), ("give", 2), ("give", 3)]
    else:
        steps += [("take", 4 * rows), ("take", workspace), ("give", 0), ("give", 1)]
    return _around(tuple(steps), _misplaced(args[0]))


def _embedding_backward(args: Any, kwargs: Any, out: torch.Tensor, chip: Chip) -> Plan | None:
    """Beyond 3072 tokens these are sorted, and sums of ten rows each kept in float32:
    aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu; what CUB takes was measured."""
    tokens, rows = args[1].numel(), args[2]
    if tokens <= 3072:
        return None
    indices, segments = 8 * tokens, min(tokens, rows)
    parts = tokens // 10 + segments
    width = -(-out.shape[1] // 32) * 32
    return (
        ("take", indices), ("take", indices),
        ("take", indices), ("take", 16895 + 65 * tokens // 4), ("give", 3), ("give", 2),
        ("out", 0),
        ("take", indices), ("take", 8), ("take", indices), ("take", 1279), ("give", 7), ("give", 6),
        ("take", 8 * segments), ("take", 8 * segments), ("take", 1279), ("give", 10),
        ("take", 8), ("take", 8 * parts), ("take", 4 * parts * width),
        *(("give", k) for k in (13, 12, 11, 9, 8, 5, 4, 1, 0)),
    )  # fmt: skip


def _addmm(args: Any, kwargs: Any, out: torch.Tensor, chip: Chip) -> Plan | None:
    """With a vector as bias cuBLASLt is used, whose workspace each thread keeps: aten/src/ATen/native/cuda/Blas.cpp."""
    if args[0].dim() == 1 and out.dim() == 2:
        return ("out", 0), ("hold", "cublasLt", LT_WORKSPACE)
    return None


_PLANS: dict[Any, Callable[[Any, Any, Any, Chip], Plan | None]] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.linalg_vector_norm.default: _norm,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.native_dropout.default: _native_dropout,
    aten.cumsum.default: _cast_first,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.addmm.default: _addmm,
}
