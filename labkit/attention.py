"""Which kernel `scaled_dot_product_attention` really ran, and why the others would not.

PyTorch has one call for attention and several programs behind it: cuDNN's, flash, memory-efficient, and plain operators
(math). Nothing says which one was taken. `watch` looks at the operator that was dispatched; `explain` asks, for given
tensors, what runs on this card and what each other kernel refuses: PyTorch's own checks on a GPU, the rules that memory
is predicted with (`labkit.memory.attention`) for a card that is not here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import machine
from .units import UserError

if TYPE_CHECKING:
    import torch

BACKENDS = ("cudnn", "flash", "efficient", "math")
# of each: its name in torch.nn.attention.SDPBackend
NAMES = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
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


@dataclass(frozen=True)
class Choice:
    """What runs for given tensors on ``card``: ``ran`` is one of `BACKENDS`, or None where nothing may run.

    ``refused`` says for each backend that cannot why; ``could`` are those that could and are further down the list.
    ``source`` is ``measured`` (this card really ran it) or ``predicted``.
    """

    ran: str | None
    could: tuple[str, ...]
    refused: dict[str, str]
    card: str
    source: str = "predicted"

    def word(self, backend: str) -> str:
        """One cell of a table: ``runs``, ``could run``, or why `backend` refuses."""
        if backend == self.ran:
            return "runs"
        return "could run" if backend in self.could else self.refused[backend]

    def __str__(self) -> str:
        lines = [f"{self.ran or 'no kernel'} runs    {self.source} · {self.card}"]
        return "\n".join([*lines, *(f"  {b:9s} {self.word(b)}" for b in BACKENDS if b != self.ran)])


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
        return _on_this_card(query, key, value, mask, dropout, causal)
    return _by_rule(machine.preset(card), query, key, value, mask, dropout, causal)


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
        dtype=_short(query.dtype),
        mask_shape=None if attn_mask is None else tuple(attn_mask.shape),
        mask_dtype=None if attn_mask is None else _short(attn_mask.dtype),
        dropout=float(dropout_p),
        causal=bool(is_causal),
        grad=_in_training(query, key, value),
    )


def _in_training(*tensors: torch.Tensor) -> bool:
    import torch

    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------- why not the others


def _on_this_card(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool) -> Choice:
    import torch
    from torch.backends import cuda
    from torch.nn.functional import scaled_dot_product_attention

    def run() -> Any:
        return scaled_dot_product_attention(query, key, value, mask, dropout, causal)

    params = cuda.SDPAParams(query, key, value, mask, dropout, causal, False)
    able = {
        "cudnn": cuda.can_use_cudnn_attention(params),
        "flash": cuda.can_use_flash_attention(params),
        "efficient": cuda.can_use_efficient_attention(params),
        "math": cuda.math_sdp_enabled(),
    }
    switched_on = _switched_on()
    refused = {b: _said_by_pytorch(b, run) if switched_on[b] else "switched off" for b in BACKENDS if not able[b]}
    ran = None
    if any(able.values()):
        with watch() as calls:
            run()
        ran = calls[0].backend
    could = tuple(b for b in BACKENDS if able[b] and b != ran)
    return Choice(ran, could, refused, torch.cuda.get_device_name(query.device), "measured")


def _said_by_pytorch(backend: str, run: Callable[[], Any]) -> str:
    """Why `backend` refuses. PyTorch warns of its reasons when no other may run; asked by ``can_use_..(debug=True)`` it
    writes them past Python, to the process's standard error."""
    with _only(backend), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
    return reasons([str(w.message) for w in said]).get(backend) or "refuses, and PyTorch says no reason"


def reasons(messages: list[str]) -> dict[str, str]:
    """Backend -> reason, from what PyTorch warns of when it finds no kernel (``select_sdp_backend`` in sdp_utils.cpp):
    a line ``"Flash attention kernel not used because:"``, then the reason, for each of the three."""
    titles = {
        "Memory efficient kernel": "efficient",
        "Flash attention kernel": "flash",
        "cuDNN attention kernel": "cudnn",
    }
    found: dict[str, str] = {}
    backend = None
    for message in messages:
        text = message.split(" (Triggered internally")[0].split(". Got ")[0].strip().rstrip(".")
        title, asked, _ = text.partition(" not used because")
        if asked:
            backend = titles.get(title)
        elif backend is not None:
            found[backend] = f"{found[backend]}; {text}" if backend in found else text
    return found


def _switched_on() -> dict[str, bool]:
    """Which backends may run here, as ``sdpa_kernel`` and ``torch.backends.cuda`` have it."""
    from torch.backends import cuda

    return {
        "cudnn": cuda.cudnn_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def _by_rule(card: machine.Card, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool) -> Choice:
    """Reasons found by asking: with which changes of its arguments would the rule take this backend?"""
    import torch

    from .memory.attention import choose

    grad = _in_training(query, key, value)
    dtype = _short(query.dtype)
    sizes = (query.shape[-1], value.shape[-1])

    def rule(backend: str, changes: list[str]) -> bool:
        q, k, v = query, key, value
        if "shapes" in changes:
            q, k, v = (torch.empty((1, 1, 128, t.shape[-1]), dtype=t.dtype, device="meta") for t in (q, k, v))
        if "head size" in changes:
            q, k, v = (torch.empty((*t.shape[:-1], 64), dtype=t.dtype, device="meta") for t in (q, k, v))
        if "dtype" in changes:
            q, k, v = (torch.empty_strided(t.shape, t.stride(), dtype=torch.float16, device="meta") for t in (q, k, v))
        for t in (q, k, v):
            if t is not query and t is not key and t is not value:
                t.requires_grad_(grad)
        capability = {"cudnn": (9, 0)}.get(backend, (8, 0)) if "card" in changes else card.capability
        with _only(backend):
            found = choose(
                capability, q, k, v, None if "mask" in changes else mask, 0.0 if "dropout" in changes else dropout,
                causal, cudnn=True,
            )  # fmt: skip
        return found == backend

    why = {
        "card": f"{card.sm}: "
        + ("PyTorch prefers it on sm_90 and sm_100 only" if card.capability[0] >= 8 else "too old"),
        "dtype": f"takes no {dtype}",
        "mask": "takes no mask",
        "dropout": "takes no such dropout",
        "head size": f"head size {sizes[0]}" + (f" and {sizes[1]}" if sizes[0] != sizes[1] else ""),
        "shapes": "needs 4 dimensions, as many heads in key and value as in query, and more than one token",
    }
    refused, able = {}, []
    for backend, on in _switched_on().items():
        if not on:
            refused[backend] = "switched off"
        elif backend == "math" or rule(backend, []):
            able.append(backend)
        else:
            needed = list(why)
            for change in why:
                fewer = [c for c in needed if c != change]
                if rule(backend, fewer):
                    needed = fewer
            refused[backend] = "; ".join(why[c] for c in needed)
    ran = able[0] if able else None
    return Choice(ran, tuple(able[1:]), refused, card.name)


@contextmanager
def _only(backend: str) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, NAMES[backend])):
        yield
