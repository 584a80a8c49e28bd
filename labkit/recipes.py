"""A training step as data: `Recipe` names every switch that lessons, planner, command line and results share."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .models import blocks as blocks
from .units import UserError

if TYPE_CHECKING:
    import torch

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "amp-fp16", "amp-bf16", "bf16", "fp16"),
    "attention": ("eager", "sdpa"),
    "optimizer": (
        "adamw", "adamw-fused", "adamw-forloop", "sgd", "sgd-momentum", "adam8bit", "adamw8bit", "adamw4bit",
    ),
    "loss": ("full", "chunked", "in-place"),
    "activation": ("gelu_new", "gelu_pytorch_tanh"),
    "gradients": ("card", "host", "in-backward", "in-backward-each-clipped", "two-backward-passes"),
    "offload": ("none", "activations", "states", "states+activations", "optimizer", "optimizer+gradients"),
    "compile": ("none", "blocks", "whole"),
}  # fmt: skip
MOST_LAYERS = 1000
# what a number of a recipe may be: beyond it, a prediction or a run would not end
LIMITS = {
    "batch": (1, 2**16), "seq": (1, 2**20), "checkpoint": (0, MOST_LAYERS), "accumulation": (1, 2**16),
    "loss_chunks": (1, 2**10),
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """One training step of a causal language model.

    ``batch`` sequences of ``seq`` tokens in each of ``accumulation`` micro-batches; ``checkpoint`` 0 stores every
    activation, N >= 1 makes every N consecutive blocks one checkpointed segment; ``loss_chunks`` parts of a loss that
    is not ``full``; ``clip`` the global norm that gradients are scaled down to (None: as they are). ``gradients`` says
    where they wait, or that the optimizer steps while backward runs; ``offload`` what lies in the host's memory: with
    ``states`` they step on the card, with ``optimizer`` on the host. ``flat`` makes a block's weights one tensor for
    the optimizer (`labkit.flat`; with states or gradients on the host they are one anyway).
    ``precision`` ``fp16`` has fp16 weights and an fp32 master copy. `CHOICES` lists the values of the other fields.
    Construct with `Recipe.of` to have values and combinations checked.
    """

    model: str = "gpt2"
    batch: int = 8
    seq: int = 1024
    precision: str = "fp32"
    attention: str = "sdpa"
    checkpoint: int = 0
    optimizer: str = "adamw"
    loss: str = "full"
    activation: str = "gelu_new"
    accumulation: int = 1
    dropout: float = 0.1
    loss_chunks: int = 8
    gradients: str = "card"
    clip: float | None = None
    stochastic_rounding: bool = False
    offload: str = "none"
    compile: str = "none"
    expandable_segments: bool = False
    flat: bool = False

    @classmethod
    def of(cls, **fields: Any) -> Recipe:
        """A checked recipe. Raises `UserError` naming the field and what it may be, or what to do instead of a
        combination that does not work (`conflict`)."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise UserError(f"unknown field {name!r}: a recipe has {', '.join(known)}")
        recipe = cls(**{name: _spelled(name, value) for name, value in fields.items()})
        recipe._check_values()
        wrong = conflict(recipe)
        if wrong is not None:
            raise UserError(wrong)
        return recipe

    def _check_values(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UserError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        for name in ("stochastic_rounding", "expandable_segments", "flat"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.model, str) or not self.model:
            raise UserError(f"model must be a name or a folder, not {self.model!r}")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise UserError(f"dropout must lie in [0, 1), not {self.dropout!r}")
        if self.clip is not None and (not _is_number(self.clip) or not 0 < self.clip < math.inf):
            raise UserError(f"clip must be a norm above 0, or none, not {self.clip!r}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return dataclasses.asdict(self)

    def changed(self, **fields: Any) -> Recipe:
        """A checked copy with some fields changed."""
        return Recipe.of(**{**self.to_dict(), **fields})

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch * self.seq * self.accumulation

    @property
    def in_place(self) -> bool:
        """Whether gradients have a place of their own on the card, from the start of the first step."""
        return self.gradients == "card" and (self.flat or self.offload.startswith("states"))

    @property
    def in_pieces(self) -> bool:
        """Whether the optimizer steps flat pieces of weights, not tensors."""
        return self.flat or self.gradients == "host" or self.offload.startswith("states")

    def __str__(self) -> str:
        default, said = Recipe(), []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            silent = f.name in ("model", "batch", "seq") or (f.name == "loss_chunks" and self.loss == "full")
            if not silent and value != getattr(default, f.name):
                said.append(f.name if value is True else f"{f.name}={value}")
        return " ".join([self.model, f"{self.batch}x{self.seq}", *said])

    def config(self, layers: int | None = None) -> Any:
        """The model's configuration with this recipe's activation and dropout, `layers` deep if given. Raises
        `UserError` when ``seq`` is beyond the model's positions, and for a model of absurd size."""
        from . import models

        configuration = models.config(self.model)
        limit = models.positions(configuration)
        if limit is not None and self.seq > limit:
            raise UserError(f"seq {self.seq} is beyond the {limit} positions of {self.model}")
        deep = getattr(configuration, "num_hidden_layers", None)
        if isinstance(deep, int) and deep > MOST_LAYERS:
            raise UserError(f"{self.model} has {deep} layers: at most {MOST_LAYERS} are supported")
        vocab = getattr(configuration, "vocab_size", None)
        if not isinstance(vocab, int) or vocab < 1:
            raise UserError(f"{self.model} has a vocabulary of {vocab!r}: at least one token is needed")
        configuration.use_cache = False
        return models.adapt(configuration, layers=layers, activation=self.activation, dropout=self.dropout)

    def experiment(self, layers: int | None = None) -> Callable[[torch.device], Callable[[], torch.Tensor]]:
        """This recipe as an experiment: a function of a device that builds everything and returns ``step()``. `layers`
        overrides the model's depth."""
        configuration = self.config(layers)

        def build(device: torch.device) -> Callable[[], torch.Tensor]:
            import torch

            from . import steps

            return steps.training_step(self, configuration, torch.device(device))

        build.__name__ = str(self)
        return build


def conflict(recipe: Recipe | Mapping[str, Any]) -> str | None:
    """Why the switches of a recipe (or its fields) do not work together and what to do instead, in one sentence; None
    if they do."""
    if not isinstance(recipe, Recipe):
        recipe = Recipe(**{name: _spelled(name, value) for name, value in recipe.items()})
    return next((text for holds, text in CONFLICTS if holds(recipe)), None)


def _on_host(r: Recipe) -> bool:
    return r.offload.startswith("optimizer")


def _states_away(r: Recipe) -> bool:
    return r.offload.startswith("states")


def _in_backward(r: Recipe) -> bool:
    return r.gradients not in ("card", "host")


CONFLICTS: tuple[tuple[Callable[[Recipe], bool], str], ...] = (
    (
        lambda r: r.gradients == "in-backward" and r.clip is not None,
        "gradients=in-backward cannot clip: the norm of all gradients is not known when the first weights change; use "
        "two-backward-passes, in-backward-each-clipped or host",
    ),
    (
        lambda r: _on_host(r) and r.precision != "fp16" and r.clip is not None,
        "an optimizer on the host cannot clip by the norm of all gradients, which it takes as they arrive; use "
        "precision=fp16, whose master copy can, or gradients=host",
    ),
    (
        lambda r: _in_backward(r) and r.gradients != "in-backward" and r.clip is None,
        "this value of gradients is a way to clip: give clip, such as 1.0, or use in-backward",
    ),
    (
        lambda r: r.accumulation > 1 and (_in_backward(r) or (_on_host(r) and r.offload.endswith("gradients")
                                                              and r.precision != "fp16")),
        "accumulation needs gradients that last longer than one backward pass: use gradients=card or host",
    ),
    (
        lambda r: _on_host(r) and r.gradients != "card",
        "offload decides already where gradients wait: use gradients=card with an optimizer on the host",
    ),
    (
        lambda r: _states_away(r) and r.precision in ("fp16", "amp-fp16"),
        "with offload=states the gradients are not where a scale for fp16 looks for them: use bf16 or amp-bf16, or "
        "precision=fp16 with offload=optimizer, whose master copy steps on the host",
    ),
    (
        lambda r: _states_away(r) and _in_backward(r),
        "a step in backward would send every state over the bus in the middle of computing: use gradients=card or host "
        "with offload=states",
    ),
    (
        lambda r: _states_away(r) and r.optimizer == "sgd",
        "sgd has no states that could wait on the host: use offload=none",
    ),
    (
        lambda r: r.flat and (r.precision == "fp16" or _on_host(r) or _states_away(r) or r.gradients == "host"),
        "master copies, and states and gradients on the host, are in flat pieces already, and torchao's optimizer on "
        "the host takes tensors: leave flat off",
    ),
    (
        lambda r: r.flat and r.precision == "amp-fp16",
        "with flat steps the gradients are not where a scale for fp16 looks for them: use bf16 or amp-bf16",
    ),
    (
        lambda r: r.flat and r.gradients == "in-backward-each-clipped",
        "flat steps do not see single tensors, which this clips: use two-backward-passes or gradients=card",
    ),
    (
        lambda r: r.flat and r.compile == "whole",
        "compiled whole, backward returns all gradients at once, not into their places: use compile=blocks",
    ),
    (
        lambda r: _on_host(r) and r.optimizer != "adamw",
        "states on the host are those of torch.optim.AdamW: use optimizer=adamw, or offload=none",
    ),
    (
        lambda r: _on_host(r) and r.precision == "amp-fp16",
        "an optimizer on the host gets gradients before amp-fp16 has unscaled them: use precision=fp16, which keeps an "
        "fp32 master copy",
    ),
    (
        lambda r: r.precision in ("amp-fp16", "fp16") and _in_backward(r),
        "a step in backward changes weights before it is known whether a later gradient overflows in fp16: use "
        "gradients=card, or host with precision=fp16",
    ),
    (
        lambda r: r.precision == "amp-fp16" and r.gradients == "host",
        "the gradient scaler of amp-fp16 looks for gradients on the card: use precision=fp16, whose own scale works "
        "with gradients=host",
    ),
    (
        lambda r: r.loss == "in-place" and r.precision.startswith("amp"),
        "loss=in-place makes its gradients by itself, out of autocast's sight: use loss=chunked, or 16-bit weights",
    ),
    (
        lambda r: r.stochastic_rounding and r.optimizer not in ("adamw8bit", "adamw4bit"),
        "this optimizer does not round stochastically: use adamw8bit or adamw4bit",
    ),
    (
        lambda r: r.stochastic_rounding and r.precision != "bf16",
        "stochastic rounding is for weights in bf16: use precision=bf16, or leave it off",
    ),
    (
        lambda r: r.offload.endswith("activations") and (r.compile == "whole" or (r.compile == "blocks"
                                                                                  and not r.checkpoint)),
        "the compiler decides by itself what backward keeps, so hooks that send it to the host do not go with it: use "
        "compile=blocks with checkpoint=1, whose segments' inputs they can send, or compile=none",
    ),
    (
        lambda r: r.compile == "whole" and (r.gradients != "card" or r.offload.endswith("gradients")),
        "compiled whole, backward returns all gradients at once and none can leave early: use compile=blocks",
    ),
)  # fmt: skip


def _spelled(name: str, value: Any) -> Any:
    """A value as `CHOICES` spells it: rows of lesson 12 have spaces and commas, and compile=True for its blocks."""
    if name == "compile" and isinstance(value, bool):
        return "blocks" if value else "none"
    if name in CHOICES and isinstance(value, str):
        return re.sub("[ ,]+", "-", value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checkpoint_segments(model: torch.nn.Module, every: int) -> torch.nn.Module:
    """Make every `every` consecutive blocks of `model` one non-reentrant checkpointed segment, in place.

    Only the input of a segment stays in memory after the forward pass; backward runs the segment's forward again. This
    is `labkit.checkpointing.segments`.
    """
    from .checkpointing import segments

    return segments(model, every)


def __getattr__(name: str) -> Any:
    """``chunked_loss``, ``loss_in_place`` and ``make_optimizer``, where PyTorch is imported only when they are used."""
    if name in ("chunked_loss", "loss_in_place"):
        from . import losses

        return getattr(losses, name)
    if name == "make_optimizer":
        from .optimizers import make_optimizer

        return make_optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
