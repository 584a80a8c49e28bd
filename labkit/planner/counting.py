"""What a training step does, counted: operations and bytes of every kernel, by phase, from a run on ghosts.

A model's blocks repeat, and each kernel's operations and bytes are linear in the batch: two runs of a model of one
block, with two batches, tell the work of any depth and batch in the same formats (`Work.at`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from .. import machine
from ..memory.kernels import chip
from ..memory.prediction import Run
from ..memory.regions import Regions
from ..memory.schemas import VIEW, kind_of
from ..memory.tracer import Tracer
from ..units import UserError
from .shape import stamp

if TYPE_CHECKING:
    from ..recipes import Recipe

PRODUCT, PRODUCT32, ATTENTION, PLAIN = range(4)  # of 16-bit and of 32-bit matrices; fused attention; all else
FORWARD, BACKWARD = range(2)
DEPTH, BATCHES = 1, (2, 3)  # with one sequence, some copies are views
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_NO_KERNEL = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_local_scalar_dense")
_FEW_ROWS = ("embedding", "gather", "index_select", "nll_loss_forward", "index", "embedding_dense_backward")
Row = tuple[int, int, bool, float, float]  # phase, kind, of a block, operations, bytes


@dataclass(frozen=True)
class Kernels:
    """Kernels as parallel arrays: ``phase`` and ``kind``, ``in_block`` whether a block's, ``count`` how often each
    comes in a step, ``flops`` and ``nbytes`` of one."""

    phase: np.ndarray
    kind: np.ndarray
    in_block: np.ndarray
    count: np.ndarray
    flops: np.ndarray
    nbytes: np.ndarray

    def where(self, mask: np.ndarray) -> Kernels:
        """Those that `mask` selects."""
        return Kernels(*(getattr(self, f.name)[mask] for f in fields(self)))


@dataclass(frozen=True)
class Work:
    """The counted forward and backward pass of a model at one sequence length, in one set of formats."""

    layers: int
    _rows: tuple[tuple[Any, ...], ...]
    _counts: tuple[float, ...]

    def at(self, batch: int) -> Kernels:
        """The kernels of one micro-batch of `batch` sequences through the whole depth."""
        phase, kind, inside, f1, f2, b1, b2 = (np.array(column) for column in zip(*self._rows, strict=True))
        flops, nbytes = f1 + (f2 - f1) * (batch - BATCHES[0]), b1 + (b2 - b1) * (batch - BATCHES[0])
        return Kernels(phase, kind, inside, np.array(self._counts), flops, nbytes)


def work(recipe: Recipe, card: str | None = None) -> Work:
    """The work of `recipe`'s forward and backward pass on `card`, whatever its batch, segments and optimizer (what
    those add is known without counting). Remembered. Raises `UserError` as `Recipe.config` does."""
    known = recipe.to_dict()
    plain: dict[str, Any] = {
        "batch": 1, "checkpoint": 0, "accumulation": 1, "optimizer": "sgd", "compile": "none", "offload": "none",
        "gradients": "card", "stochastic_rounding": False, "clip": None, "expandable_segments": False, "flat": False,
        "cuda_graph": False,
    }  # fmt: skip
    preset = machine.preset(card)
    if recipe.precision == "fp16" and preset.capability >= (8, 0):
        plain["precision"] = "bf16"  # the same kernels, and no master copies to follow
    asked = recipe.changed(**{name: value for name, value in plain.items() if name in known})
    return _work(asked, preset.name, stamp(asked.model))


@lru_cache(maxsize=512)
def _work(recipe: Recipe, card: str, stamped: int) -> Work:
    layers = int(recipe.config().num_hidden_layers)
    depth = min(DEPTH, layers)
    counts = _total(recipe, depth, card)
    return Work(layers, tuple(counts), tuple(n * (layers / depth if row[2] else 1.0) for row, n in counts.items()))


def _total(recipe: Recipe, depth: int, card: str) -> Counter[tuple[Any, ...]]:
    """The kernels of a step of a model of `depth` blocks, each with its work at both batches."""
    first, second = (_counted(recipe.changed(batch=batch), depth, card) for batch in BATCHES)
    if [row[:3] for row in first] != [row[:3] for row in second]:
        raise UserError(f"{recipe.model}: what it runs depends on the batch, so its time cannot be estimated")
    return Counter((*a[:3], a[3], b[3], a[4], b[4]) for a, b in zip(first, second, strict=True))


def _counted(recipe: Recipe, depth: int, card: str) -> list[Row]:
    preset = machine.preset(card)
    run = _Counting(chip(preset.name, preset.capability))
    run.play(recipe.experiment(layers=depth))
    return run.steps[-1]


class _Counting(Run):
    """A run on ghosts that writes down every kernel of forward and backward, step by step."""

    def __init__(self, of: Any):
        super().__init__(of, stateless=True)
        self.tracer = Tracer(run=self._count, recorder=self.recorder)
        self.regions = self.ghosts.regions = Regions(self.recorder, self.tracer)
        self.steps: list[list[Row]] = []
        self._blocks: dict[str, bool] = {}

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self.ghosts.run(func, args, kwargs)
        while len(self.steps) < len(self.starts):
            self.steps.append([])
        phase, module = self.recorder.places[self.recorder.here]
        if self.steps and phase in ("forward", "backward", "recompute") and kind_of(func) != VIEW:
            name = func._schema.name.partition("::")[2]
            if name not in _NO_KERNEL:
                self.steps[-1].append(self._row(name, func, args, kwargs, out, phase, module))
        return out

    def _row(self, name: str, func: Any, args: Any, kwargs: Any, out: Any, phase: str, module: str) -> Row:
        kind, flops = PLAIN, 0.0
        if name in _PRODUCTS or name.startswith(_ATTENTION):
            half = _first(out).element_size() == 2
            kind = ATTENTION if name.startswith(_ATTENTION) else PRODUCT if half else PRODUCT32
            count = flop_registry.get(func._overloadpacket)
            flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
            if kind == ATTENTION and not half:
                kind = PRODUCT32
        read = args[1:] if name in _FEW_ROWS else args
        nbytes = float(sum(_nbytes(t) for t in _tensors((read, tuple(kwargs.values()), out))))
        inside = self._blocks.get(module)
        if inside is None:
            inside = self._blocks[module] = any(part.isdigit() for part in module.split("."))
        return (FORWARD if phase == "forward" else BACKWARD), kind, inside, flops, nbytes


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for item in values:
            yield from _tensors(item)


def _first(values: Any) -> torch.Tensor:
    return next(_tensors(values))


def _nbytes(tensor: torch.Tensor) -> int:
    """What of a tensor lies in the card's memory: an expanded one is as small as what it expands."""
    if tensor.get_device() < 0:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
