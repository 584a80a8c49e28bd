"""What a recipe keeps in the host's memory: gradients, master copies and states, or activations, pinned or not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .. import models

if TYPE_CHECKING:
    from ..recipes import Recipe

ALIGNED = 64  # numbers (labkit.stepping.ALIGNED, without importing PyTorch for it)
TORCHAO_LEAST = 4096  # numbers: smaller parameters stay on the card (torchao/optim/cpu_offload.py, minimal_size)
PIECE = 2**24  # numbers that step at once (labkit.stepping.GradientsOnHost, most)
LEAST = 4096  # numbers: a smaller tensor of states stays on the card (labkit.streaming.LEAST)


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host: pinned (page-locked: they cannot be swapped out) and pageable."""

    pinned_bytes: int = 0
    pageable_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.pinned_bytes + self.pageable_bytes


def pinned(nbytes: int) -> int:
    """What PyTorch takes for a pinned block of `nbytes`: the next power of two
    (aten/src/ATen/core/CachingHostAllocator.h)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def host_memory(recipe: Recipe) -> HostMemory:
    """What `recipe` keeps on the host between and during its steps, from the shapes of its parameters; activations from
    the short models of `labkit.memory.estimate`. Python, libraries and the data come on top."""
    if recipe.offload == "none" and recipe.gradients != "host":
        return HostMemory()
    if recipe.offload.endswith("activations"):
        from .estimate import offloaded

        sizes, extra = offloaded(recipe)
        sent = HostMemory(int(sum(map(pinned, sizes)) + extra))
    else:
        sent = HostMemory()
    away = recipe.offload.startswith("optimizer")
    width = 2 if recipe.precision in ("bf16", "fp16") else 4
    if away and recipe.precision != "fp16":
        moved = [n for n in _parameters(recipe) if n >= TORCHAO_LEAST]
        return HostMemory(2 * sum(pinned(n * width) for n in moved), 2 * width * sum(moved))
    if not away and recipe.gradients != "host" and not recipe.offload.startswith("states"):
        return sent
    groups = _groups(recipe)
    buffers = sum(pinned(n * width) for n in groups) if away or recipe.gradients == "host" else 0
    if recipe.offload.startswith("states"):
        pieces = [min(2 * PIECE, n - start) for n in groups for start in range(0, n, 2 * PIECE)]
        buffers += sum(pinned(nbytes) for n in pieces for nbytes in _states(recipe.optimizer, n, width))
    if away:  # masters and two moments in fp32, and the gradient of the piece that steps
        return HostMemory(buffers, 12 * sum(groups) + 4 * min(PIECE, max(groups)))
    return HostMemory(sent.pinned_bytes + buffers)


def _states(optimizer: str, n: int, width: int) -> list[int]:
    """Bytes of each tensor that `labkit.streaming` keeps for a piece of `n` numbers of `width` bytes."""
    bits, shared = {"adamw8bit": (8, 64), "adamw4bit": (4, 64), "adam8bit": (8, 256)}.get(optimizer, (0, 1))
    quantised = bits and n >= TORCHAO_LEAST and (n % shared == 0 or optimizer == "adam8bit")
    if not quantised:
        kept = [n * width] if optimizer == "sgd-momentum" else [n * (4 if optimizer == "adam8bit" else width)] * 2
        return kept if n >= LEAST else []
    scales = -(-n // shared)
    return [n * bits // 8, *([4 * scales] if scales >= LEAST else [])] * 2


def _parameters(recipe: Recipe) -> list[int]:
    block, rest, layers = _shapes(recipe.model)
    return [*block * layers, *rest]


def _groups(recipe: Recipe) -> list[int]:
    """Numbers of each group of `labkit.stepping.by_block`: a checkpointed segment is one block there."""
    block, rest, layers = _shapes(recipe.model)
    one, every = _aligned(block), max(1, recipe.checkpoint)
    segments = [min(every, layers - start) for start in range(0, layers, every)]
    return [*(count * one for count in segments), _aligned(rest)]


def _aligned(numbers: Iterable[int]) -> int:
    return sum(-(-n // ALIGNED) * ALIGNED for n in numbers)


@lru_cache(maxsize=32)
def _shapes(model: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Numbers of every parameter of a block, of every other parameter, and how many blocks there are."""
    configuration: Any = models.config(model)
    layers = int(configuration.num_hidden_layers)
    network = models.causal_lm(models.adapt(configuration, layers=1), device="meta", attention="eager")
    block = tuple(p.numel() for p in models.blocks(network)[0].parameters())
    inside = {id(p) for p in models.blocks(network)[0].parameters()}
    return block, tuple(p.numel() for p in network.parameters() if id(p) not in inside), layers
