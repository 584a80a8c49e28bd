"""Which kernel `scaled_dot_product_attention` would run on a card, and what it keeps.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``attention.cpp`` (PyTorch 2.8 to 2.13).
"""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def choose(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    *,
    cudnn: bool,
    grouped: bool = False,
) -> str:
    """``cudnn``, ``flash``, ``efficient`` or ``math`` for query, key and value ``(batch, heads, seq, head_size)``.

    `grouped`: key and value have fewer heads than the query, and the caller allowed it.
    """
    major, minor = capability
    half = query.dtype in _HALVES
    size = query.shape[-1]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if any(t.dim() != 4 or t.stride(-1) != 1 or t.shape[-2] == 0 for t in (query, key, value)):
        return "math"
    if size != key.shape[-1] or key.shape[1] != value.shape[1]:
        return "math"
    if query.shape[1] != key.shape[1] and not (grouped and query.shape[1] % key.shape[1] == 0):
        return "math"
    enabled, same = torch.backends.cuda, size == value.shape[-1]
    native = query.dtype is not torch.bfloat16 or major >= 8
    if enabled.cudnn_sdp_enabled() and cudnn and major in (9, 10) and half and same:
        limit = 256 if major == 9 else 128
        rows = min(query.shape[-2], key.shape[-2])
        if size % 8 == 0 and size <= limit and rows > 1 and (mask is None or not mask.requires_grad):
            return "cudnn"
    if enabled.flash_sdp_enabled() and major >= 8 and half and same and size <= 256 and mask is None:
        consumer = (major, minor) in ((8, 6), (8, 9), (12, 0))  # too little shared memory for the widest backward
        if not (grad and consumer and (size > 224 or (size > 192 and dropout > 0))):
            return "flash"
    if enabled.mem_efficient_sdp_enabled() and not grouped and native and query.dtype in (torch.float32, *_HALVES):
        alignment = (8 if half else 4) if major >= 8 or half else 1
        if size % alignment == 0 and value.shape[-1] % alignment == 0:
            return "efficient"
    return "math"


class Attention:
    """`scaled_dot_product_attention` as the dispatcher of a card with `capability` would run it."""

    def __init__(self, capability: tuple[int, int], *, cudnn: bool = True):
        self.capability = capability
        self.cudnn = cudnn

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        grouped = enable_gqa and key.shape[-3] != query.shape[-3]
        kind = choose(
            self.capability, query, key, value, attn_mask, dropout_p, is_causal, cudnn=self.cudnn, grouped=grouped
        )
        if grouped and kind == "math":  # cuDNN and flash read each key and value for a group of queries
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = _additive(attn_mask, query)
        if kind == "cudnn":
            return _first(
                aten._scaled_dot_product_cudnn_attention(
                    query, key, value, attn_mask, needs, dropout_p, is_causal, False, scale=scale
                )
            )
        if kind == "flash":
            size = query.shape[-1]
            pad = -size % 8
            if pad:
                query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
            out = _first(
                aten._scaled_dot_product_flash_attention(
                    query, key, value, dropout_p, is_causal, False, scale=scale if scale is not None else size**-0.5
                )
            )
            return out[..., :size] if pad else out
        if kind == "efficient":
            if attn_mask is not None:
                attn_mask = _expanded(_aligned(attn_mask), query, key)
            return _first(
                aten._scaled_dot_product_efficient_attention(
                    query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale
                )
            )
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale
        )[0]


def _first(results: Any) -> Any:
    """The attention itself; the other results die in the order in which the C++ caller's tuple drops them."""
    out, others = results[0], list(results[1:])
    del results
    while others:
        del others[0]
    return out


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """``convert_boolean_attn_mask`` in attention.cpp: zero where a key counts, minus infinity elsewhere."""
    zero, out = (torch.scalar_tensor(v, dtype=query.dtype, device=query.device) for v in (0.0, -math.inf))
    return torch.where(mask, zero, out)


def _expanded(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """``pad_bias`` in attention.cpp: the last dimension of a mask is padded to a multiple of 8 and sliced back."""
    last = mask.shape[-1]
    if last % 8 == 0:
        return mask
    return torch.nn.functional.pad(mask, (0, 8 - last % 8))[..., :last]
