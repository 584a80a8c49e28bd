"""Tokens and text that every machine has: random tokens, and the source of Python's own standard library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def random_tokens(batch: int, seq: int, *, vocab: int = 50257, device: torch.device | str = "cpu") -> torch.Tensor:
    """Random token ids ``(batch, seq)``, int64, on `device`. Memory and speed do not depend on their values."""
    import torch

    return torch.randint(0, vocab, (batch, seq), device=device)
