"""A plan for training a model whole: what a few recipes need, predicted, the gentlest change first."""

from __future__ import annotations

from typing import Any

from . import capstone, machine, models
from .measuring import measure
from .units import parse_size

DEPTHS = (1, 2)
PLANS: dict[str, dict[str, Any]] = {
    "as most people start: autocast, AdamW": {"precision": "amp-bf16"},
    "blocks checkpointed, loss in chunks": {"precision": "amp-bf16", "checkpoint": 1, "loss": "chunked"},
    "16-bit weights, 8-bit states": {
        "precision": "bf16", "stochastic_rounding": True, "optimizer": "adamw8bit", "checkpoint": 1, "loss": "chunked",
    },
    "gradients wait on the host": {
        "precision": "bf16", "stochastic_rounding": True, "optimizer": "adamw8bit", "checkpoint": 1, "loss": "chunked",
        "gradients": "host",
    },
}  # fmt: skip


def peak_bytes(model: str, *, card: str | None = None, **switches: Any) -> int:
    """The predicted steady peak (allocated) of `labkit.capstone.training` with these switches, in bytes.

    A model's blocks repeat, so its peak is linear in their number: two models of `DEPTHS` blocks are predicted instead
    of a deep one. A model with few blocks is predicted as it is.
    """
    layers = int(models.config(model).num_hidden_layers)
    found = []
    depths = list(DEPTHS) if layers > 2 * DEPTHS[1] else [layers]
    for depth in depths:
        how: dict[str, Any] = {"card": card or machine.preset().name, "trace": False, "nearest": False, "record": False}
        report = measure(capstone.training, stateless=True, repeats=0, model=model, layers=depth, **how, **switches)
        assert report.steady is not None
        found.append(report.steady.allocated_bytes)
    if len(found) == 1:
        return found[0]
    slope = (found[1] - found[0]) / (depths[1] - depths[0])
    return round(found[0] + slope * (layers - depths[0]))


def plans(
    model: str, *, budget: int | str, batch: int = 4, seq: int = 1024, card: str | None = None
) -> list[tuple[str, int, bool]]:
    """What a small set of recipes (`PLANS`) needs to train all of `model`, gentlest change first: name, predicted
    peak in bytes, and whether it leaves a tenth of `budget` free. `model` is what `labkit.models.config` takes."""
    limit = parse_size(budget)
    found = []
    for name, switches in PLANS.items():
        peak = peak_bytes(model, card=card, batch=batch, seq=seq, attention="sdpa", **switches)
        found.append((name, peak, peak <= 0.9 * limit))
        if found[-1][2]:
            break
    return found
