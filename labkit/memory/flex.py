"""`flex_attention` on ghosts: what its compiled kernels keep and allocate.

Source: ``torch/_inductor/kernel/flex/flex_attention.py``: the result and a log-sum-exp a row; backward takes a sum a
row and makes the gradients of query, key and value. Uncompiled it is refused: all scores would be made, by code that
exists for debugging.
"""

from __future__ import annotations

from typing import Any

import torch

from .ghosts import PredictionError

_library = torch.library.Library("labkit", "DEF")
_library.define("flex(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)")
_library.define(
    "flex_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums) -> "
    "(Tensor, Tensor, Tensor)"
)


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _flex_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_library.impl("flex", _flex, "Meta")
_library.impl("flex_backward", _flex_backward, "Meta")


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        out, sums = torch.ops.labkit.flex(query, key, value)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        return torch.ops.labkit.flex_backward(grad, *ctx.saved_tensors)


def compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    **_: Any,
) -> Any:
    """What stands for ``torch.compile(flex_attention)``."""
    out, sums = _Flex.apply(query, key, value)
    return (out, sums) if return_lse else out


def uncompiled(query: torch.Tensor, *args: Any, original: Any, compiling: Any, **kwargs: Any) -> Any:
    """What stands for `flex_attention` itself: its kernels inside compiled code, else refused."""
    if query.get_device() != 0:
        return original(query, *args, **kwargs)
    if compiling():
        return compiled(query, *args, **kwargs)
    raise PredictionError("flex_attention without torch.compile makes all scores: compile it, as on a card")
