"""What several lessons train and score with: a plain training loop, held-out loss, and the spread over seeds."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .units import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class History:
    """What a training run did: the loss of each step in nats a token, the norm of its gradients before clipping (None
    where none was asked for), and how many steps a `GradScaler` skipped."""

    losses: tuple[float, ...]
    gradient_norms: tuple[float | None, ...]
    skipped: int = 0

    @property
    def steps(self) -> int:
        """Batches that were seen."""
        return len(self.losses)

    def final(self, last: int = 10) -> float:
        """Mean loss of the `last` steps: one batch alone is noise. nan when one of them was not finite."""
        tail = self.losses[-last:]
        return statistics.fmean(tail) if all(map(math.isfinite, tail)) else math.nan


@dataclass(frozen=True)
class Spread:
    """One number from several seeds."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises `UserError` when there is no value."""
        found = tuple(float(v) for v in values)
        if not found:
            raise UserError("a spread needs at least one value")
        return cls(found)

    @property
    def mean(self) -> float:
        """Their mean."""
        return statistics.fmean(self.values)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)

    def overlaps(self, other: Spread) -> bool:
        """Whether the two ranges have a value in common: then the seeds alone can explain the difference."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        digits = 4 if self.high - self.low < 0.01 else 3 if self.high - self.low < 0.1 else 2
        many = f"{len(self.values)} seeds" if len(self.values) > 1 else "1 seed"
        return f"{self.mean:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f}, {many})"

    __repr__ = __str__


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[torch.Tensor],
    *,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    clip: float | None = None,
    schedule: Any = None,
    watch: Callable[[int, Any], None] | None = None,
) -> History:
    """Train the causal language model on `batches` of tokens ``(batch, seq)``, one optimizer step each.

    `autocast` is the 16-bit dtype of an autocast context around the forward pass (None: none); `scaler` a
    ``torch.amp.GradScaler``; `clip` bounds the global gradient norm (unscaled first); `schedule` is stepped after each
    step; ``watch(step, model)`` is called after backward, before gradients are dropped. A loss that is not finite is
    recorded, not raised.
    """
    import torch

    device = next(model.parameters()).device
    model.train()
    losses, norms, skipped = [], [], 0
    for number, tokens in enumerate(batches):
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        (scaler.scale(loss) if scaler else loss).backward()
        norm = None
        if clip is not None:
            if scaler:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if watch is not None:
            watch(number, model)
        if scaler:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before  # it lowers the scale exactly when it skips
        else:
            optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        norms.append(norm)
    return History(tuple(float(x) for x in losses), tuple(None if n is None else float(n) for n in norms), skipped)


def evaluate(model: Any, blocks: torch.Tensor, *, autocast: torch.dtype | None = None, batch: int = 4) -> float:
    """Mean next-token loss of the causal language model on `blocks` ``(count, seq)``, in nats a token.

    Logits are scored in float32, `batch` blocks at a time, and dropped at once. The model's mode is restored.
    """
    import torch

    device = next(model.parameters()).device
    was_training, total, tokens = model.training, 0.0, 0
    model.eval()
    try:
        with torch.no_grad():
            for part in blocks.split(batch):
                part = part.to(device)
                with torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext():
                    logits = model(input_ids=part, use_cache=False).logits[:, :-1]
                targets = part[:, 1:].flatten()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
                total, tokens = total + float(loss), tokens + targets.numel()
    finally:
        model.train(was_training)
    return total / tokens


def perplexity(loss: float) -> float:
    """``exp(loss)``: as uncertain as a fair choice among so many tokens. inf where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf
