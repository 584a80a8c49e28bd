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
) -> str:
    """``cudnn``, ``flash``, ``efficient`` or ``math`` for query, key and value ``(batch, heads, seq, head_size)``."""
    major = capability[0]
    half = query.dtype in _HALVES
    size = query.shape[-1]
    same_size = size == key.shape[-1] == value.shape[-1]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    shaped = query.dim() == key.dim() == value.dim() == 4 and min(query.shape[-2], key.shape[-2]) > 0
    dense = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    equal_heads = query.shape[1] == key.shape[1] == value.shape[1] if shaped else False
    bf16_fine = query.dtype is not torch.bfloat16 or major >= 8
    if not shaped or not dense:
        return "math"
    if (cudnn and major in (9, 10) and half and same_size and size % 8 == 0 and size <= (256 if not grad and major == 9 else 128)
            and query.shape[-2] > 1 and key.shape[-2] > 1 and equal_heads
            and (mask is None or not mask.requires_grad)):  # fmt: skip
        return "cudnn"
    if half and same_size and size <= 256 and mask is None and major >= 8 and bf16_fine and equal_heads:
        if not (grad and size > 192 and dropout > 0 and major == 8 and capability[1] in (6, 9)):
            return "flash"
    tensor_cores = major >= 8 or (major >= 7 and half)
    alignment = max(4 if major >= 8 else 1, (8 if half else 4) if tensor_cores else 1)
    if bf16_fine and major >= 5 and size % alignment == 0 and value.shape[-1] % alignment == 0 and equal_heads:
        if query.dtype in (torch.float32, *_HALVES) and size == key.shape[-1]:
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
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        kind = choose(self.capability, query, key, value, attn_mask, dropout_p, is_causal, cudnn=self.cudnn)
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if kind != "math" and attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.full((), -math.inf, dtype=query.dtype, device=query.device))
        if kind == "cudnn":
            if attn_mask is not None:
                attn_mask = _expanded(attn_mask, query, key)
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
                attn_mask = _aligned(_expanded(attn_mask, query, key))
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


def _expanded(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """``pad_bias``: the last dimension of the mask is padded to a multiple of 16 and sliced back."""
    last = mask.shape[-1]
    if last % 16 == 0:
        return mask
    return torch.nn.functional.pad(mask, (0, 16 - last % 16))[..., :last]
