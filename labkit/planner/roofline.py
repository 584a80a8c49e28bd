"""How long a training step takes on a card: counted work against the card's ceilings, with measured efficiencies.

Every kernel takes its operations over the card's rate and its bytes over the card's bandwidth, each at the share of the
data sheet's figure that was measured for its kind; the host needs some time to launch it. Card and host work side by
side, so a phase lasts about as long as the slower of the two. Copies over the bus hide behind the phase that they run
beside, as far as it lasts. The shares and the host's times (`Rates`) are fitted to steps measured on one card
(bench/plan_fit.py) and carried over to others by their data sheets: an estimate there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from . import counting
from .counting import ATTENTION, BACKWARD, FORWARD, PLAIN, PRODUCT, PRODUCT32, Kernels
from .shape import Shape

if TYPE_CHECKING:
    from ..machine import Card
    from ..recipes import Recipe


# bytes in a second that AdamW moves on the host of a desktop's card, where two channels of DDR4-3200 carry 51 GB/s at
# most (JEDEC JESD79-4): an assumption. The measured rate is that of a server with many channels
DESKTOP = 30e9


@dataclass(frozen=True)
class Rates:
    """What was measured: shares of the data sheet's ceilings by kind of kernel, and seconds that the host needs.

    ``kernel_seconds``: the shortest time of a kernel; ``forward_launch``, ``backward_launch``: the host's time for each
    kernel; ``segment_launch``: for each checkpointed segment more, ``chunk_launch``: for each chunk of the loss;
    ``step_seconds``: for each step; ``single_tensor``, ``bitsandbytes_tensor``, ``torchao_tensor``: for each tensor
    that an optimizer steps by itself, by its kind; ``rounding_tensor``: more where it rounds stochastically;
    ``hooked_tensor``: for each gradient that leaves, or is used, while backward runs. ``compiled_traffic`` and
    ``compiled_kernels``: what the compiler leaves of the plain kernels' bytes and number; ``compiled_block``: the
    host's time for a compiled block. ``host_adam_bytes``: what the host's own step reads and writes in a second.
    ``sharpness``: how nearly a phase lasts as long as the slower of card and host (infinite: exactly).
    """

    product: float = 0.62
    product32: float = 0.75
    attention: float = 0.45
    bandwidth: float = 0.72
    optimizer: float = 0.6
    bus: float = 0.9
    kernel_seconds: float = 4e-6
    forward_launch: float = 26e-6
    backward_launch: float = 15e-6
    segment_launch: float = 1.8e-3
    chunk_launch: float = 1e-3
    step_seconds: float = 1.7e-3
    single_tensor: float = 15e-6
    bitsandbytes_tensor: float = 65e-6
    torchao_tensor: float = 580e-6
    rounding_tensor: float = 150e-6
    hooked_tensor: float = 100e-6
    compiled_traffic: float = 0.45
    compiled_kernels: float = 0.45
    compiled_block: float = 250e-6
    host_adam_bytes: float = 75e9
    sharpness: float = 3.5


@dataclass(frozen=True)
class Optimizer:
    """One kind of optimizer: bytes that it moves for each parameter, by the bytes of a weight (w), gradient (g) and
    state; kernels for each tensor, or the name in `Rates` of what each tensor costs the host."""

    traffic: tuple[float, float]  # bytes for each parameter: times the bytes of a weight, and fixed
    tensor: str | None = None


# foreach: nine passes over parameter, gradient, states and a temporary copy (torch/optim/adamw.py,
# _multi_tensor_adamw); fused: each is read once, and all but the gradient written (fused_adam_utils.cuh)
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer((20, 0)),
    "adamw-fused": Optimizer((7, 0)),
    "adamw-forloop": Optimizer((20, 0), "single_tensor"),
    "sgd": Optimizer((3, 0)),
    "sgd-momentum": Optimizer((8, 0)),
    "adam8bit": Optimizer((3, 4), "bitsandbytes_tensor"),
    "adamw8bit": Optimizer((3, 4), "torchao_tensor"),
    "adamw4bit": Optimizer((3, 2), "torchao_tensor"),
}
_SINGLE = {"adamw-forloop": 12, "sgd": 1, "sgd-momentum": 2}  # kernels for each tensor, stepped one by one


@dataclass(frozen=True)
class Times:
    """Where the seconds of a step go. ``card`` and ``host`` are what each is busy in the phase, ``seconds`` how long
    the phase lasts; ``bus_seconds`` is what copies over the bus add."""

    phases: dict[str, tuple[float, float]]  # forward, recompute, backward, loss head, optimizer: card, host
    bus_seconds: float
    seconds: float
    product_seconds: float  # of the card's: in matrix products and attention


def estimate(recipe: Recipe, card: Card, rates: Rates | None = None, shape: Shape | None = None) -> Times:
    """The time of one optimizer step of `recipe` on `card`, by phase."""
    r = rates or measured_rates()
    s = shape or Shape.of(recipe)
    kernels = counting.work(recipe, card.name).at(recipe.batch)
    return Estimator(recipe, card, r, s).times(kernels)


class Estimator:
    """The arithmetic of `estimate` for one recipe on one card."""

    def __init__(self, recipe: Recipe, card: Card, rates: Rates, shape: Shape):
        self.recipe, self.card, self.rates, self.shape = recipe, card, rates, shape
        self.compiled = recipe.compile

    def times(self, kernels: Kernels) -> Times:
        """All phases of one step."""
        recipe, r = self.recipe, self.rates
        ahead, back = kernels.phase == FORWARD, kernels.phase == BACKWARD
        phases = {
            "forward": self._phase(kernels.where(ahead & kernels.in_block), r.forward_launch),
            "backward": self._phase(kernels.where(back & kernels.in_block), r.backward_launch),
        }
        head_f = self._phase(kernels.where(ahead & ~kernels.in_block), r.forward_launch)
        head_b = self._phase(kernels.where(back & ~kernels.in_block), r.backward_launch)
        phases["loss head"] = head_f[0] + head_b[0], head_f[1] + head_b[1]
        phases["recompute"] = 0.0, 0.0
        if recipe.checkpoint:
            segments = math.ceil(self.shape.layers / recipe.checkpoint)
            card, host = phases["forward"]
            phases["recompute"] = card, host + segments * r.segment_launch
        if recipe.loss == "chunked":  # each chunk is a segment of its own, whose recomputation was counted
            phases["loss head"] = phases["loss head"][0], phases["loss head"][1] + chunks(recipe) * r.chunk_launch
        times = recipe.accumulation
        phases = {name: (card * times, host * times) for name, (card, host) in phases.items()}
        added = times - (not recipe.in_place)  # whose gradients have their place from the start
        if added:
            adding = 3 * self.shape.parameters * self.shape.gradient_bytes(recipe)
            phases["backward"] = phases["backward"][0] + added * self._moving(adding), phases["backward"][1]
        if recipe.gradients != "card" or recipe.offload.endswith("gradients"):
            card, host = phases["backward"]
            phases["backward"] = card, host + times * self.shape.tensors * r.hooked_tensor
        phases["optimizer"] = self._optimizer()
        bus = self._bus(phases)
        passes = [name for name in phases if name != "optimizer"]
        # the scaler asks whether gradients are finite before the step; bitsandbytes waits for every tensor's step
        if recipe.precision in ("amp-fp16", "fp16") or recipe.optimizer == "adam8bit":
            groups = [passes, ["optimizer"]]
        else:
            groups = [[*passes, "optimizer"]]
        seconds = sum(self._together([phases[name] for name in group]) for group in groups)
        products = self._products(kernels) * times
        return Times(phases, bus, seconds + r.step_seconds + bus, products)

    def _products(self, kernels: Kernels) -> float:
        some = kernels.where(kernels.kind != PLAIN)
        again = 1.0 + (some.in_block & (some.phase == FORWARD)) * bool(self.recipe.checkpoint)
        return float((self._seconds(some) * some.count * again).sum())

    def _together(self, phases: list[tuple[float, float]]) -> float:
        """Card and host work side by side: the longer of the two, and a little more where they are alike."""
        card, host, p = sum(c for c, _ in phases), sum(h for _, h in phases), self.rates.sharpness
        longer = max(card, host)
        return longer * ((card / longer) ** p + (host / longer) ** p) ** (1 / p) if longer else 0.0

    def _phase(self, kernels: Kernels, launch: float) -> tuple[float, float]:
        r, count = self.rates, kernels.count
        card = self._seconds(kernels)
        plain = kernels.kind == PLAIN
        compiled = self.compiled == "whole" or (self.compiled == "blocks" and bool(kernels.in_block.any()))
        if compiled:
            traffic = np.where(plain, r.compiled_traffic, 1.0)
            count = count * np.where(plain, r.compiled_kernels, 1.0)
            card = np.maximum(card * traffic, r.kernel_seconds)
        host = float(count.sum()) * launch
        if compiled:
            host = float(count.sum()) * r.kernel_seconds + self.shape.layers * r.compiled_block
        return float((card * count).sum()), host

    def _seconds(self, kernels: Kernels) -> np.ndarray:
        r, card = self.rates, self.card
        rate = np.empty(len(kernels.kind))
        for kind, ceiling in (
            (PRODUCT, card.half_flops * r.product), (PRODUCT32, card.fp32_flops * r.product32),
            (ATTENTION, card.half_flops * r.attention), (PLAIN, math.inf),
        ):  # fmt: skip
            rate[kernels.kind == kind] = ceiling
        moving = kernels.nbytes / (card.bandwidth_bytes * r.bandwidth)
        # a sum, not the larger one: small matrices reach a smaller share of the card's rate, and these are those that
        # move many bytes for an operation
        return np.maximum(kernels.flops / rate + moving, r.kernel_seconds)

    def _moving(self, nbytes: float) -> float:
        return nbytes / (self.card.bandwidth_bytes * self.rates.optimizer)

    def _optimizer(self) -> tuple[float, float]:
        """The optimizer's own step: the card's and the host's seconds."""
        recipe, r, shape = self.recipe, self.rates, self.shape
        if recipe.offload.startswith("optimizer"):
            host = min(r.host_adam_bytes, DESKTOP) if self.card.name.startswith("rtx") else r.host_adam_bytes
            return 0.0, shape.parameters * 28 / host  # fp32 AdamW, beside the card's backward pass
        how = OPTIMIZERS[recipe.optimizer]
        weight = shape.weight_bytes(recipe)
        nbytes = shape.parameters * (how.traffic[0] * weight + how.traffic[1])
        if recipe.precision == "amp-fp16":
            nbytes += shape.parameters * 2 * weight  # gradients are divided by the scale
        if recipe.precision == "fp16":
            nbytes += shape.parameters * (how.traffic[0] * (4 - weight) + 8)  # a master copy in fp32
        if recipe.clip is not None:
            nbytes += shape.parameters * 3 * shape.gradient_bytes(recipe)
        gradients = recipe.gradients
        one_by_one = gradients not in ("card", "host")
        most = 2**25 if recipe.flat or recipe.offload.startswith("states") else 2**24
        pieces = shape.pieces(most) if recipe.in_pieces else shape.tensors
        host = pieces * getattr(r, how.tensor) if how.tensor else 0.0
        host += pieces * r.rounding_tensor * recipe.stochastic_rounding
        if how.tensor is None and one_by_one:
            host = shape.tensors * 4 * r.single_tensor
        if recipe.optimizer in _SINGLE and how.tensor:
            host *= _SINGLE[recipe.optimizer]
        return self._moving(nbytes) + pieces * r.kernel_seconds, host

    def _bus(self, phases: dict[str, tuple[float, float]]) -> float:
        """What copies over the bus, and work on the host, add to the step beyond what hides behind its phases."""
        recipe, r, shape = self.recipe, self.rates, self.shape
        bus = self.card.bus_bytes * r.bus
        offload, added = recipe.offload, 0.0
        lasting = {name: max(card, host) for name, (card, host) in phases.items()}
        backward = lasting["backward"] + lasting["recompute"]
        gradients = shape.parameters * shape.gradient_bytes(recipe)
        if recipe.gradients == "host":
            down, up = gradients * recipe.accumulation, gradients * recipe.accumulation
            added += max(0.0, down / bus - backward) + max(0.0, up / bus - lasting["optimizer"])
        if offload.startswith("states"):  # in both directions at once, beside the steps of other pieces
            added += max(0.0, shape.state_bytes(recipe) / bus - lasting["optimizer"])
        if offload.startswith("optimizer"):
            weights = shape.parameters * shape.weight_bytes(recipe)
            added += max(0.0, (gradients + weights) / bus - backward / recipe.accumulation)
        if offload.endswith("activations"):
            moved = shape.activation_bytes(recipe) * recipe.accumulation
            added += max(0.0, moved / bus - lasting["forward"]) + max(0.0, moved / bus - backward)
        return added


def chunks(recipe: Recipe) -> int:
    """In how many pieces a chunked loss is computed."""
    return recipe.loss_chunks


@cache
def measured_rates() -> Rates:
    """The committed rates."""
    return Rates(**_file()["rates"])


@cache
def provenance() -> dict[str, Any]:
    """Where the rates come from: card, driver, versions, date, rows, and how well they describe them."""
    return {key: value for key, value in _file().items() if key != "rates"}


def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("rates.json").read_text("utf-8"))
    found["rates"] = {f.name: found["rates"][f.name] for f in fields(Rates)}
    return found
