"""The optimizers that a recipe can name, as functions of parameters: ``make(parameters)`` returns what really steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .units import UserError

Make = Callable[[Any], torch.optim.Optimizer]
BLOCK = 64  # values that share a scale in torchao's states: GPT-2's embedding (50257 x 1600) divides by it, not by 256
TORCHAO = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit"}
HOWS: dict[str, dict[str, Any]] = {
    "adamw": {"foreach": True},
    "adamw-fused": {"fused": True},
    "adamw-forloop": {"foreach": False},
}
NAMES = (*HOWS, "sgd", "sgd-momentum", "adam8bit", *TORCHAO)


def maker(optimizer: str, *, stochastic_rounding: bool = False, lr: Any = 1e-4) -> Make:
    """A function of parameters that makes the optimizer of this name, one of `NAMES`: PyTorch's own, bitsandbytes'
    (``adam8bit``) or torchao's (``adamw8bit``, ``adamw4bit``), AdamW with a weight decay of 0.01.

    Raises `UserError` for another name, for stochastic rounding of those that have none, and when bitsandbytes is
    needed and missing.
    """
    if optimizer not in NAMES:
        raise UserError(f"optimizer {optimizer!r} is not one of {', '.join(NAMES)}")
    if optimizer in TORCHAO:
        from torchao import optim

        kind = getattr(optim, TORCHAO[optimizer])
        how = {"block_size": BLOCK, "bf16_stochastic_round": stochastic_rounding}
        return lambda parameters: kind(parameters, lr=lr, **how)
    if stochastic_rounding:
        raise UserError(f"optimizer {optimizer} does not round stochastically: take {' or '.join(TORCHAO)}")
    if optimizer == "adam8bit":
        try:
            import bitsandbytes
        except ImportError as error:
            raise UserError("optimizer adam8bit needs bitsandbytes: pip install bitsandbytes") from error
        return lambda parameters: bitsandbytes.optim.Adam8bit(parameters, lr=lr)
    if optimizer in HOWS:
        return lambda parameters: torch.optim.AdamW(parameters, lr=lr, **HOWS[optimizer])
    momentum = 0.9 if optimizer == "sgd-momentum" else 0.0
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, foreach=True)


def make_optimizer(name: str, parameters: Any, lr: float = 1e-4) -> torch.optim.Optimizer:
    """The optimizer that a recipe's field names, on `parameters`. Raises `UserError` as `maker` does."""
    return maker(name, lr=lr)(parameters)


def adamw_on_host(lr: float = 1e-4) -> Make:
    """AdamW for parameters in the host's memory: PyTorch's one kernel for the processor."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, fused=True)
