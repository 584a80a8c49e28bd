"""What an operator's schema says about its results: views, arguments written to, or something new."""

from __future__ import annotations

from typing import Any

import torch

from ..units import UserError

aten = torch.ops.aten
VIEW, INPLACE, FUNCTIONAL = 0, 1, 2
RANDOM = {
    aten.randint.low, aten.randint.default, aten.randint_like.default, aten.randperm.default, aten.multinomial.default,
    aten.bernoulli.default, aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default,
}  # fmt: skip
DRAWN = {aten.randint.low, aten.randint.default, aten.randperm.default, aten.multinomial.default}
# operators that take host tensors next to those on the GPU: indices, lengths, seeds of attention's dropout
MIXING = {
    getattr(getattr(aten, name), overload)
    for name in (
        "copy_", "copy", "index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_",
        "_pack_padded_sequence", "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
        "_flash_attention_backward", "_efficient_attention_backward", "_cudnn_attention_backward",
    )
    if hasattr(aten, name)
    for overload in getattr(aten, name).overloads()
}  # fmt: skip
_SHARING = {aten._unsafe_view.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default,
            aten._reshape_alias.default}  # fmt: skip


class PredictionError(UserError):
    """The prediction cannot go on: an operator has no rule, or the experiment needs values that only a run has."""


def kind_of(func: Any) -> int:
    """Whether `func` gives views, writes to its arguments, or makes new tensors."""
    schema = func._schema
    if func in _SHARING:
        return VIEW
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return INPLACE
    if any(r.alias_info is not None for r in schema.returns):
        return VIEW
    return FUNCTIONAL


def returned(func: Any) -> list[tuple[int, str]]:
    """Which arguments an in-place operator returns (position and name), as its schema says."""
    schema = func._schema
    places = []
    for result in schema.returns:
        for position, argument in enumerate(schema.arguments):
            info = argument.alias_info
            if (
                info is not None
                and info.is_write
                and result.alias_info is not None
                and info.before_set & result.alias_info.before_set
            ):
                places.append((position, argument.name))
                break
        else:
            raise PredictionError(f"operator {func} writes to its arguments and returns something new: no rule for it")
    return places


def first_tensor(args: Any) -> Any:
    """The first tensor among `args`, or in a list that stands there."""
    for x in args:
        if isinstance(x, torch.Tensor):
            return x
        if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor):
            return x[0]
    return None
