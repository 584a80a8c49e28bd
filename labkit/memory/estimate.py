"""A quick estimate of a recipe's memory, for ranking many: two short models stand for a deep one.

A model's blocks repeat, so at a fixed place of the step (the loss, the last block's backward, the first block's, the
optimizer) the bytes alive are a straight line in depth. Two short runs on tensors without data give it; where the peak
is follows from the largest of the places. (In the batch they are no straight line: kernels change with the size of
their work.) What does not depend on the batch, the optimizer's step, is followed by itself, and what gradients add in
further micro-batches is known. The short runs are remembered: another optimizer or more micro-batches cost little.

`labkit.memory.predict_recipe` is what is held to measured bytes; this is held to it (tests/test_memory_estimate.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from .. import data, machine, stepping, steps
from ..results import Peaks
from ..units import MiB
from .host import HostMemory, host_memory
from .kernels import Chip, chip
from .prediction import Run
from .workspaces import workspaces

if TYPE_CHECKING:
    from ..recipes import Recipe

BAND = (0.94, 1.06)  # of the exact prediction's allocated peak; tests/test_memory_estimate.py holds a grid to it
LEAVING = 64 * MiB  # window of labkit.stepping.GradientsOnHost
WINDOW = 512 * MiB  # twice what labkit.offload.Prefetching holds on the card
COMPILED_BAND = (0.9, 1.2)
ROUNDING = 1.0  # allocated over requested: below 1.01 in data/reference/memory-h200.jsonl above 4 GiB
FRAGMENTED, EXPANDABLE = 1.07, 1.025  # reserved over allocated, medians there; of one in ten it is 1.2 and more
Key = tuple[str, str]


@dataclass(frozen=True)
class Estimate:
    """The peaks of the first and of a later step, what the host keeps, and how far the exact prediction may lie from
    the allocated peak, as factors (of ``reserved`` a few per cent more)."""

    first: Peaks
    steady: Peaks
    host: HostMemory
    band: tuple[float, float] = BAND

    @property
    def allocated_bytes(self) -> int:
        """The larger of both peaks."""
        return max(self.first.allocated_bytes, self.steady.allocated_bytes)


def estimate(recipe: Recipe, *, card: str | None = None) -> Estimate:
    """The memory that `recipe` would use on `card`, quickly. Raises as `labkit.memory.predict_recipe` does."""
    preset = machine.preset(card)
    which = chip(preset.name, preset.capability)
    layers = int(recipe.config().num_hidden_layers)
    if _separable(recipe):
        plain, gone = _plain(recipe), 0.0
        if recipe.checkpoint and recipe.offload.endswith("activations"):  # few inputs do not fill the window
            plain = plain.changed(offload="states" if recipe.offload.startswith("states") else "none")
            gone = max(0.0, _inputs(recipe, layers) - WINDOW)
        found = _deep(plain, which, False, 0, layers, recipe.batch, recipe.accumulation > 1) - gone
        *stepping_, states = _stepping(_bare(recipe), which, layers)
        first, steady = max(found, stepping_[0]), max(found + states, stepping_[1])
    else:
        alike = recipe.changed(batch=1, accumulation=min(2, recipe.accumulation), expandable_segments=False)
        first, steady = (_deep(alike, which, True, step, layers, recipe.batch) for step in (0, 1))
    fixed = sum(workspaces(preset.capability))
    scattered = EXPANDABLE if recipe.expandable_segments else FRAGMENTED

    def peaks(requested: float) -> Peaks:
        allocated = requested * ROUNDING + fixed
        return Peaks(int(allocated), int(requested + fixed), int(allocated * scattered))

    host = host_memory(recipe)
    return Estimate(peaks(first), peaks(steady), host, COMPILED_BAND if recipe.compile != "none" else BAND)


def _plain(recipe: Recipe) -> Recipe:
    """The recipe that stands for all with the same forward and backward: without what concerns the optimizer alone."""
    return recipe.changed(
        batch=1, accumulation=1, optimizer="adamw", stochastic_rounding=False, expandable_segments=False, clip=None,
    )  # fmt: skip


def _inputs(recipe: Recipe, layers: int) -> float:
    """Bytes of the inputs of all checkpointed segments in one micro-batch."""
    each = 2 if recipe.precision in steps.WEIGHTS else 4
    return layers / recipe.checkpoint * recipe.batch * recipe.seq * recipe.config().hidden_size * each


def _bare(recipe: Recipe) -> Recipe:
    """The recipe that stands for all with the same optimizer and weights."""
    precision = "fp32" if recipe.precision.startswith("amp") else recipe.precision
    return recipe.changed(
        batch=1, accumulation=1, precision=precision, loss="full", loss_chunks=8, compile="none",
        offload="states" if recipe.offload.startswith("states") else "none",
        attention="eager", expandable_segments=False, seq=8, dropout=0.0,
        checkpoint=recipe.checkpoint if recipe.gradients == "host" else 0,
    )  # fmt: skip


def _separable(recipe: Recipe) -> bool:
    """Whether the optimizer steps after backward, with all gradients and by itself."""
    return (
        recipe.precision != "fp16"
        and not recipe.offload.startswith("optimizer")
        and recipe.gradients in ("card", "host")
    )


def _deep(recipe: Recipe, which: Chip, whole: bool, step: int, layers: int, batch: int, again: bool = False) -> float:
    """Bytes at the highest place of a step: the line through the short runs, at this depth. `again`: in a
    pass that adds to gradients that are there."""
    depths = _depths(recipe, layers, batch)
    ends = [_profile(recipe, which, whole, depth, batch).places[step] for depth in depths]
    shared = set.intersection(*(set(end) for end in ends))
    if recipe.offload.endswith(
        "activations"
    ):  # the shorter model's blocks beyond its middle are other ones in the deeper
        shared = {key for key in shared if _number(key[1]) < -(-depths[0] // 2)}
    beyond = (lambda key: 0.0) if whole else _beyond(recipe, layers, again)
    return max(_line(depths, [float(end[key]) for end in ends], layers) + beyond(key) for key in shared)


def _beyond(recipe: Recipe, layers: int, again: bool) -> Callable[[Key], float]:
    """What is alive at a place beyond what the short models show: gradients on their way to the host (the window of
    `stepping.GradientsOnHost`, once there are as many), and `again` those of earlier passes that the first pass has
    not made yet, with the one that is being added."""
    first, second = (_parameter_bytes(recipe, depth) for depth in (1, 2))
    block = second[0] - first[0]
    total, largest = first[0] + (layers - 1) * block, first[1]

    def nbytes(key: Key) -> float:
        phase, place = key
        back = phase in ("backward", "recompute")
        if recipe.gradients == "host":
            return (min(float(LEAVING), float(block * layers)) + largest * again) * back
        if not again or recipe.in_place:  # one piece of memory, from the start
            return 0.0
        if not back or place.startswith("last-") or place.endswith(("lm_head", "norm", "ln_f")):
            return float(total - back * (_number(place) + 1) * block)
        return float(largest)

    return nbytes


@lru_cache(maxsize=256)
def _parameter_bytes(recipe: Recipe, layers: int) -> tuple[int, int]:
    """Bytes of all weights, and of the largest."""
    plain = recipe.changed(compile="none", checkpoint=0)
    network = steps.network_of(plain, recipe.config(layers), torch.device("meta"))
    sizes = [p.numel() * p.element_size() for p in network.parameters()]
    return sum(sizes), max(sizes)


def _depths(recipe: Recipe, layers: int, batch: int) -> list[int]:
    """Of the short models: one and two blocks, or segments, or as many as fill the window of the hooks twice; the
    model's own where it has no more."""
    every = least = max(1, recipe.checkpoint)
    if recipe.offload.endswith("activations"):
        width = recipe.config().hidden_size
        saved = 34 * width * batch * recipe.seq * (1 if recipe.precision in steps.WEIGHTS else 2)
        least = -(-(int(WINDOW / saved) + 2) // every) * every
    first = max(every, least)
    return [first, first + every] if layers > first + every else [layers]


def _line(places: list[int], values: list[float], at: int) -> float:
    """The value at `at` of the line through those at `places`, one or two of them."""
    if len(places) == 1:
        return values[0]
    return values[0] + (at - places[0]) * (values[1] - values[0]) / (places[1] - places[0])


def offloaded(recipe: Recipe) -> tuple[list[int], float]:
    """Bytes of the buffers that activations on the host take in the short model, at the recipe's batch, and bytes of
    all other blocks' buffers, each rounded up to a power of two."""
    from .host import pinned

    layers, which = int(recipe.config().num_hidden_layers), chip("h200", (9, 0))
    plain = _plain(recipe.changed(gradients="card", clip=None))  # where gradients go changes nothing here
    depths = _depths(plain, layers, recipe.batch)
    found = [list(_profile(plain, which, False, depth, recipe.batch).buffers.elements()) for depth in depths]
    sums = [float(sum(map(pinned, sizes))) for sizes in found]
    return found[0], _line(depths, sums, layers) - sums[0]


@dataclass(frozen=True)
class Profile:
    """A short run: the most bytes alive at each place of its first and second step, bytes alive when each began, and
    the buffers that activations took on the host."""

    places: tuple[dict[Key, int], ...]
    alive: tuple[int, ...]
    buffers: Counter[int]


class _Short(Run):
    """A run that ends after a step or two, whether or not they stand for later ones."""

    def __init__(self, which: Chip, last_step: int):
        super().__init__(which, stateless=True)
        self.last_step = last_step

    def _settled(self) -> bool:
        return False


@lru_cache(maxsize=1024)
def _profile(recipe: Recipe, which: Chip, whole: bool, layers: int, batch: int) -> Profile:
    """The recipe's model with so many blocks: two steps if `whole`, else forward and backward once."""
    configuration = recipe.config(layers)
    hooks: list[Any] = []

    def build(device: torch.device) -> Callable[[], Any]:
        if whole:
            whole_step = steps.training_step(recipe.changed(batch=batch), configuration, device)
            hooks.append(whole_step.hooks)  # type: ignore[attr-defined]
            return whole_step
        network, vocab = steps.network_of(recipe, configuration, device), configuration.vocab_size
        tokens = data.random_tokens(batch, recipe.seq, vocab=vocab, device=device)
        step: Any = steps.step_of(network, [tokens], recipe, backward_only=True)
        if isinstance(step.optimizer, stepping.GradientsOnHost):
            step.optimizer._window = 0  # a few blocks do not fill it: no straight line; `_beyond` puts it back
        hooks.append(step.hooks)
        return step  # type: ignore[no-any-return]

    return _followed(build, which, 2 if whole else 1, hooks)


@lru_cache(maxsize=1024)
def _stepping(recipe: Recipe, which: Chip, layers: int) -> tuple[float, float, float]:
    """Bytes at the peak of the optimizer's first and second step, gradients included, and bytes of the states that
    stay, at this depth: the line through two short models."""
    every = max(1, recipe.checkpoint)
    depths = [every, 2 * every] if layers > 2 * every else [layers]
    found = [_stepping_of(recipe, which, depth) for depth in depths]
    first, second = ([float(max(one.places[step].values())) for one in found] for step in (0, 1))
    states = [float(one.alive[1] - one.alive[0]) for one in found]
    return _line(depths, first, layers), _line(depths, second, layers), _line(depths, states, layers)


def _stepping_of(recipe: Recipe, which: Chip, layers: int) -> Profile:
    configuration = recipe.config(layers)

    def build(device: torch.device) -> Callable[[], None]:
        network = steps.network_of(recipe.changed(compile="none"), configuration, device)
        parameters, optimizer = list(network.parameters()), steps.optimizer_of(network, recipe)

        def step() -> None:
            for p in parameters:
                p.grad = torch.empty_like(p)
                if isinstance(optimizer, stepping.GradientsOnHost):
                    optimizer._arrived(p)
            if recipe.clip is not None and recipe.gradients == "card":
                torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return _followed(build, which, 2, [])


def _followed(
    build: Callable[[torch.device], Callable[[], Any]], which: Chip, last_step: int, hooks: list[Any]
) -> Profile:
    run = _Short(which, last_step)
    run.play(build)
    recorder, places, alive = run.recorder, [], []
    names = [_key(phase, module) for phase, module in recorder.places]
    deepest = max((int(key[1][1:]) for key in names if key[1][:1] == "#"), default=0)
    total, start = 0, 0
    for end in run.starts:
        highest: dict[Key, int] = {}
        for position in range(start, end):
            event = recorder.events[position]
            total += recorder.sizes[event] if event >= 0 else -recorder.sizes[~event]
            for key in _ends(names[recorder.where[position]], deepest):
                if total > highest.get(key, 0):
                    highest[key] = total
        start = end
        places.append(highest)
        alive.append(total)
    buffers = Counter(hooks[0].buffers) if hooks and hooks[0] is not None else Counter()
    return Profile(tuple(places[1:]), tuple(alive), buffers)


def _key(phase: str, module: str) -> Key:
    """A place as the phase and either ``#`` with the number of the block, or the module outside of blocks."""
    found = re.search(r"\.(\d+)(\.|$)", module)
    return phase, f"#{found[1]}" if found else module


def _number(place: str) -> int:
    """How far a block is from its end, as `_ends` counts; 0 for what is no block."""
    found = re.fullmatch(r"(?:first\+|last-)(\d+)", place)
    return int(found[1]) if found else 0


def _ends(key: Key, deepest: int) -> list[Key]:
    """A block by its distance from both ends: what is the last one differs with the depth."""
    phase, place = key
    if place[:1] != "#":
        return [key]
    number = int(place[1:])
    return [(phase, f"first+{number}"), (phase, f"last-{deepest - number}")]
