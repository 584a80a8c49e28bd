"""Why a backend of `scaled_dot_product_attention` does not run, for `labkit.attention`.

On a GPU PyTorch's own checks tell, for a card that is not here the rules that memory is predicted with
(`labkit.memory.attention`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import machine

if TYPE_CHECKING:
    import torch

BACKENDS = ("cudnn", "flash", "efficient", "math")
# of each: its name in torch.nn.attention.SDPBackend
NAMES = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


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


def in_training(*tensors: torch.Tensor) -> bool:
    """Whether a call with these tensors is part of training."""
    import torch

    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def short(dtype: torch.dtype) -> str:
    """``"bfloat16"``, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def on_this_card(
    watched: Callable[[], str], query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool
) -> Choice:
    """What runs on this GPU: `watched` makes the call and tells which backend answered, PyTorch's checks why not the
    others."""
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
    ran = watched() if any(able.values()) else None
    could = tuple(b for b in BACKENDS if able[b] and b != ran)
    return Choice(ran, could, refused, torch.cuda.get_device_name(query.device), "measured")


def _said_by_pytorch(backend: str, run: Callable[[], Any]) -> str:
    """Why `backend` refuses. PyTorch warns of its reasons when no other may run; asked by ``can_use_..(debug=True)`` it
    writes them past Python, to the process's standard error."""

    def attempt() -> None:
        try:
            run()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise

    with _only(backend):
        said = warned(attempt)
    return reasons(said).get(backend) or "refuses, and PyTorch says no reason"


def warned(function: Callable[[], Any]) -> list[str]:
    """What Python's warnings say while `function` runs, in order; nothing is shown."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in said]


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


def predicted(card: machine.Card, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool) -> Choice:
    """What would run on `card`. Reasons are found by asking: with which changes would the rule take this backend?"""
    import torch

    from .memory.attention import choose

    grad = in_training(query, key, value)
    dtype = short(query.dtype)
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
