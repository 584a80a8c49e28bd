"""Which kernel `scaled_dot_product_attention` really ran, and why the others would not (see refusals.py).

PyTorch has one call for attention and several programs behind it: cuDNN's, flash, memory-efficient, and plain operators
(math). Nothing says which one was taken. `watch` looks at the operator that was dispatched; `explain` asks, for given
tensors, what runs on this card and what each other kernel refuses: PyTorch's own checks on a GPU, the rules that memory
is predicted with (`labkit.memory.attention`) for a card that is not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import machine
from .refusals import BACKENDS, Choice, in_training, on_this_card, predicted, reasons, short, warned
from .units import UserError

if TYPE_CHECKING:
    import torch

# the operator that a call ends in -> backend; math is made of ordinary operators, and of them only it takes the last
OPERATORS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_attention_math": "math",
    "_safe_softmax": "math",
}
OTHER = "another"  # a backend that PyTorch has for other devices
__all__ = ["BACKENDS", "OPERATORS", "OTHER", "Call", "Choice", "explain", "reasons", "warned", "watch"]


@dataclass(frozen=True)
class Call:
    """One call of `scaled_dot_product_attention`: what it was given, and the backend and operator that answered.

    ``query``, ``key``, ``value`` and ``mask_shape`` (None without a mask) are shapes; ``grad`` says whether the call
    was part of training.
    """

    backend: str  # one of BACKENDS, or OTHER
    operator: str
    query: tuple[int, ...]  # (batch, heads, seq, head_size)
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    mask_shape: tuple[int, ...] | None
    mask_dtype: str | None
    dropout: float
    causal: bool
    grad: bool

    @property
    def mask(self) -> str:
        """The mask in words: ``"bool (2, 1, 64, 64)"``, or ``"none"``."""
        return f"{self.mask_dtype} {self.mask_shape}" if self.mask_shape is not None else "none"

    def on(self, card: str | None = None, dtype: str | None = None) -> Choice:
        """What the card preset `card` would run for this call, if its tensors were laid out densely (in `dtype`)."""
        import torch

        kind = getattr(torch, dtype or self.dtype)
        shapes = (self.query, self.key, self.value)
        query, key, value = (torch.empty(shape, dtype=kind, device="meta", requires_grad=self.grad) for shape in shapes)
        mask = None
        if self.mask_shape is not None:
            mask = torch.empty(self.mask_shape, dtype=getattr(torch, str(self.mask_dtype)), device="meta")
        with torch.enable_grad():
            return explain(
                query, key, value, mask, dropout=self.dropout, causal=self.causal, card=card or machine.preset().name
            )


@contextmanager
def watch() -> Iterator[list[Call]]:
    """Inside the block every call of `scaled_dot_product_attention` is noted, in the list that the block is given.

    Works on a GPU, on the processor, and within a prediction. What a checkpoint recomputes in backward, and what runs
    inside a compiled function, is not seen.
    """
    from torch.nn.functional import scaled_dot_product_attention
    from torch.overrides import TorchFunctionMode

    calls: list[Call] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is not scaled_dot_product_attention:
                return func(*args, **kwargs)
            with _operators() as seen:
                out = func(*args, **kwargs)
            calls.append(_call(seen, *args, **kwargs))
            return out

    with Watching():
        yield calls


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    card: str | None = None,
) -> Choice:
    """What runs for `query`, `key` and `value` ``(batch, heads, seq, head_size)`` and `mask`, and why not the others.

    Tensors on a GPU: it runs there once, and PyTorch's checks give the reasons. Otherwise, or for a `card` preset: what
    that card would run (its values do not matter: meta tensors will do). Gradients count: tensors that require one are
    judged as in training. Raises `UserError` for tensors that do not go together.
    """
    import torch

    tensors = [query, key, value, *([] if mask is None else [mask])]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        raise UserError("query, key and value must be tensors (batch, heads, seq, head_size), and mask one or None")
    if len({t.device.type for t in tensors}) > 1:
        raise UserError(f"the tensors lie on different devices: {', '.join(str(t.device) for t in tensors)}")
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if any(t.dim() < 2 for t in tensors[:3]):
        raise UserError("query, key and value need at least the dimensions (seq, head_size)")
    if query.is_cuda and card is None:
        return _measured(query, key, value, mask, dropout, causal)
    return predicted(machine.preset(card), query, key, value, mask, dropout, causal)


# ---------------------------------------------------------------------------------------------- what was dispatched


@contextmanager
def _operators() -> Iterator[list[str]]:
    """The names of the operators of `OPERATORS` (and their likes) that are dispatched inside the block."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    whole = torch.ops.aten.scaled_dot_product_attention.default
    seen: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is whole:  # in inference mode it arrives in one piece
                with self:
                    return func.decompose(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            if name in OPERATORS or name.startswith("_scaled_dot_product"):
                seen.append(name)
            return func(*args, **(kwargs or {}))

    with Listening():
        yield seen


def _call(
    seen: list[str],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Call:
    operator = seen[0] if seen else ""
    return Call(
        backend=OPERATORS.get(operator, OTHER),
        operator=operator,
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=short(query.dtype),
        mask_shape=None if attn_mask is None else tuple(attn_mask.shape),
        mask_dtype=None if attn_mask is None else short(attn_mask.dtype),
        dropout=float(dropout_p),
        causal=bool(is_causal),
        grad=in_training(query, key, value),
    )


def _measured(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool) -> Choice:
    from torch.nn.functional import scaled_dot_product_attention

    def watched() -> str:
        with watch() as calls:
            scaled_dot_product_attention(query, key, value, mask, dropout, causal)
        return calls[0].backend

    return on_this_card(watched, query, key, value, mask, dropout, causal)
