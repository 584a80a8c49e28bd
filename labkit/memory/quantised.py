"""bitsandbytes' operators on ghosts: what their CUDA kernels allocate, step by step.

Source: ``bitsandbytes/backends/cuda/ops.py`` and ``backends/default/ops.py`` (0.50). Outliers of 8-bit products are
taken to be absent: how many there are, only values tell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .ghosts import GPU, aten

OUTLIERS = "8-bit layers: columns with outliers, which only values show, were taken to be absent"
CUSTOM_KERNEL_ROWS = 16  # of 4-bit products: for so few a kernel of its own, else the weight is unpacked first


def rules() -> dict[Any, Callable[..., Any]]:
    """Operator -> rule (see rules.py); empty while nothing has imported bitsandbytes, which takes over a second."""
    if "bitsandbytes" not in sys.modules:
        return {}
    ops = torch.ops.bitsandbytes
    table: dict[Any, Callable[..., Any]] = {
        getattr(ops, name).default: rule
        for name, rule in (
            ("optimizer_update_32bit", _nothing),
            ("optimizer_update_8bit_blockwise", _nothing),
            ("int8_vectorwise_quant", _rowwise),
            ("int8_double_quant", _both_ways),
            ("int8_mixed_scaled_mm", _mixed_product),
            ("int8_scaled_mm", _product),
            ("int8_mm_dequant", _dequantised),
            ("gemm_4bit", _product_4bit),
        )
        if hasattr(ops, name)  # gemm_4bit came with 0.50
    }
    return table


def _nothing(ghosts: Any, func: Any, args: Any, kwargs: Any) -> None:
    return None


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name, defaults included."""
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | kwargs


def _empty(ghosts: Any, size: Any, dtype: torch.dtype) -> Any:
    return ghosts.run(aten.empty.memory_format, (list(size),), {"dtype": dtype, "device": GPU})


def _rowwise(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    a, threshold = given["A"], given["threshold"]
    if a.get_device() != 0:
        return NotImplemented
    stats = _empty(ghosts, [a.numel() // a.shape[-1]], torch.float32)
    out = _empty(ghosts, a.shape, torch.int8)
    columns = None
    if threshold > 0:
        ghosts.notes[OUTLIERS] = None
        size = ghosts.run(aten.abs.default, (a,), {})
        found = ghosts.run(aten.ge.Scalar, (size, threshold), {})
        del size
        ghosts.run(aten.any.default, (found,), {})
        columns = _empty(ghosts, [0], torch.int64)
    return out, stats, columns


def _both_ways(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    a, threshold = given["A"], given["threshold"]
    if a.get_device() != 0:
        return NotImplemented
    run = ghosts.run
    rows, row_stats, columns = _rowwise(
        ghosts, torch.ops.bitsandbytes.int8_vectorwise_quant.default, (a, threshold), {}
    )
    size = run(aten.abs.default, (a,), {})
    mask = None
    if threshold > 0:
        mask = run(aten.ge.Scalar, (size, threshold), {})
    highest = run(aten.amax.default, (size, [0]), {})
    stats = run(aten._to_copy.default, (highest,), {"dtype": torch.float32})
    del size, highest
    if mask is not None:
        a = run(aten.masked_fill.Scalar, (a, mask, 0.0), {})
    scaled = run(aten.mul.Tensor, (a, 127.0), {})
    quotient = run(aten.div.Tensor, (scaled, run(aten.unsqueeze.default, (stats, 0), {})), {})
    del scaled
    rounded = run(aten.round.default, (quotient,), {})
    del quotient
    return rows, run(aten._to_copy.default, (rounded,), {"dtype": torch.int8}), row_stats, stats, columns


def _mixed_product(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    a = given["A"]
    if a.get_device() != 0:
        return NotImplemented
    none = _empty(ghosts, [0], a.dtype)
    return _scaled(ghosts, given["CA"], given["CB"], a.dtype, given["bias"]), none


def _product(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    if given["A"].get_device() != 0:
        return NotImplemented
    return _scaled(ghosts, given["A"], given["B"], given["dtype"] or torch.float16, given["bias"])


def _dequantised(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    if given["A"].get_device() != 0:
        return NotImplemented
    return _to_half(ghosts, given["A"], given["dtype"] or torch.float16)


def _scaled(ghosts: Any, a: Any, b: Any, dtype: torch.dtype, bias: Any) -> Any:
    sums = _empty(ghosts, (*a.shape[:-1], b.shape[0]), torch.int32)
    return _to_half(ghosts, sums, dtype)


def _to_half(ghosts: Any, sums: Any, dtype: torch.dtype) -> Any:
    """The kernel writes float16; another dtype is a copy more."""
    out = _empty(ghosts, sums.shape, torch.float16)
    return out if dtype is torch.float16 else ghosts.run(aten._to_copy.default, (out,), {"dtype": dtype})


def _product_4bit(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    a, shape = given["A"], given["shapeB"]
    if a.get_device() != 0:
        return NotImplemented
    rows = a.numel() // a.shape[-1]
    if rows <= CUSTOM_KERNEL_ROWS:
        return _empty(ghosts, (*a.shape[:-1], shape[0]), a.dtype)
    if given["absmax_8bit"] is not None:
        scales = _empty(ghosts, given["absmax_8bit"].shape, torch.float32)
        scales = ghosts.run(aten.add.Tensor, (scales, given["absmax_offset"]), {})
    weight = _empty(ghosts, shape, a.dtype)
    flat = ghosts.run(aten.reshape.default, (a, [rows, a.shape[-1]]), {})
    turned = ghosts.run(aten.t.default, (weight,), {})
    if given["bias"] is None:
        out = ghosts.run(aten.mm.default, (flat, turned), {})
    else:
        out = ghosts.run(aten.addmm.default, (given["bias"], flat, turned), {})
    return ghosts.run(aten.view.default, (out, [*a.shape[:-1], shape[0]]), {})
