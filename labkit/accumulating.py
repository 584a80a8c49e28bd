"""Gradient accumulation that equals one large batch: each micro-batch counts by its tokens, not by its number."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .batching import IGNORED
from .units import UserError

if TYPE_CHECKING:
    import torch


def predicted_tokens(labels: torch.Tensor) -> int:
    """How many tokens of ``labels`` ``(batch, seq)`` a causal model is scored on: those that are not `IGNORED`, without
    the first column, which nothing predicts."""
    return int((labels[:, 1:] != IGNORED).sum())


def accumulate(
    model: Any, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, autocast: torch.dtype | None = None,
    scaler: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Backward of all `micro_batches`, so that the gradients are those of one batch that holds all their texts.

    The loss of each is a sum over its tokens, divided by the tokens of *all*; with a mean of each, a token in a short
    micro-batch would count more than one in a long one. Each is a mapping for the causal language model
    (``input_ids``, ``labels``, ...); transformers (4.46 and later) takes the count as ``num_items_in_batch``. Gradients
    are added to those that are there; the optimizer is the caller's to step. Returns the mean loss of all tokens,
    detached. Raises `UserError` when no token has a label.
    """
    import torch

    device = next(model.parameters()).device
    count = sum(predicted_tokens(batch["labels"]) for batch in micro_batches)
    if not count:
        raise UserError("no token has a label: nothing to learn from in these micro-batches")
    total = torch.zeros((), device=device)
    for batch in micro_batches:
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext():
            loss = model(**inputs, num_items_in_batch=count).loss
        (scaler.scale(loss) if scaler else loss).backward()
        total = total + loss.detach()
    return total
