"""A training step as data: `Recipe` names every switch that lessons, planner, command line and results share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .models import blocks as blocks
from .units import UserError

if TYPE_CHECKING:
    import torch

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "amp-fp16", "amp-bf16", "bf16"),
    "attention": ("eager", "sdpa"),
    "optimizer": ("adamw", "adamw-fused", "adamw-forloop", "sgd", "sgd-momentum", "adam8bit"),
    "loss": ("full", "chunked"),
    "activation": ("gelu_new", "gelu_pytorch_tanh"),
}
MOST_LAYERS = 1000
# what a number of a recipe may be: beyond it, a prediction or a run would not end
LIMITS = {"batch": (1, 2**16), "seq": (1, 2**20), "checkpoint": (0, MOST_LAYERS), "accumulation": (1, 2**16)}
LOSS_CHUNKS = 8


@dataclass(frozen=True)
class Recipe:
    """One training step of a causal language model.

    ``batch`` sequences of ``seq`` tokens in each of ``accumulation`` micro-batches; ``checkpoint`` 0 stores every
    activation, N >= 1 makes every N consecutive blocks one checkpointed segment. `CHOICES` lists the values of the
    other fields. Construct with `Recipe.of` to have the values checked.
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

    @classmethod
    def of(cls, **fields: Any) -> Recipe:
        """A checked recipe. Raises `UserError` naming the field and what it may be."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise UserError(f"unknown field {name!r}: a recipe has {', '.join(known)}")
        recipe = cls(**fields)
        for name, allowed in CHOICES.items():
            if getattr(recipe, name) not in allowed:
                raise UserError(f"{name} {getattr(recipe, name)!r} is not one of {', '.join(allowed)}")
        for name, (least, most) in LIMITS.items():
            value = getattr(recipe, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UserError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        if not isinstance(recipe.model, str) or not recipe.model:
            raise UserError(f"model must be a name or a folder, not {recipe.model!r}")
        if (
            isinstance(recipe.dropout, bool)
            or not isinstance(recipe.dropout, (int, float))
            or not 0 <= recipe.dropout < 1
        ):
            raise UserError(f"dropout must lie in [0, 1), not {recipe.dropout!r}")
        return recipe

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

    def __str__(self) -> str:
        default = Recipe()
        extra = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name not in ("model", "batch", "seq") and getattr(self, f.name) != getattr(default, f.name)
        ]
        return " ".join([self.model, f"{self.batch}x{self.seq}", *extra])

    def config(self) -> Any:
        """The model's configuration with this recipe's activation and dropout. Raises `UserError` when ``seq`` is
        beyond the model's positions, and for a model of absurd size."""
        from . import models

        configuration = models.config(self.model)
        limit = models.positions(configuration)
        if limit is not None and self.seq > limit:
            raise UserError(f"seq {self.seq} is beyond the {limit} positions of {self.model}")
        layers = getattr(configuration, "num_hidden_layers", None)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise UserError(f"{self.model} has {layers} layers: at most {MOST_LAYERS} are supported")
        vocab = getattr(configuration, "vocab_size", None)
        if not isinstance(vocab, int) or vocab < 1:
            raise UserError(f"{self.model} has a vocabulary of {vocab!r}: at least one token is needed")
        configuration.use_cache = False
        return models.adapt(configuration, activation=self.activation, dropout=self.dropout)

    def experiment(self) -> Callable[[torch.device], Callable[[], torch.Tensor]]:
        """This recipe as an experiment: a function of a device that builds everything and returns ``step()``."""
        configuration = self.config()

        def build(device: torch.device) -> Callable[[], torch.Tensor]:
            return _training_step(self, configuration, device)

        build.__name__ = str(self)
        return build


def _training_step(recipe: Recipe, configuration: Any, device: torch.device) -> Callable[[], torch.Tensor]:
    """Builds model, optimizer and data of `recipe` on `device`; the returned step is the plain loop of the lessons."""
    import torch

    from . import data, models

    device = torch.device(device)
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    model = models.causal_lm(configuration, device=device, dtype=dtype, attention=recipe.attention).train()
    if recipe.checkpoint:
        checkpoint_segments(model, recipe.checkpoint)
    optimizer = make_optimizer(recipe.optimizer, model.parameters())
    tokens = data.random_tokens(recipe.batch, recipe.seq, vocab=configuration.vocab_size, device=device)
    cast = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}.get(recipe.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "amp-fp16")

    def loss_of_micro_batch() -> torch.Tensor:
        with torch.autocast(device.type, dtype=cast, enabled=cast is not None):
            if recipe.loss == "chunked":
                return chunked_loss(model, tokens) / recipe.accumulation
            return model(input_ids=tokens, labels=tokens).loss / recipe.accumulation

    def step() -> torch.Tensor:
        for _ in range(recipe.accumulation):
            loss = loss_of_micro_batch()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = recipe.tokens  # type: ignore[attr-defined]
    return step


def make_optimizer(name: str, parameters: Any, lr: float = 1e-4) -> torch.optim.Optimizer:
    """The optimizer that a recipe's field names. Raises `UserError` when bitsandbytes is needed and missing."""
    import torch

    if name == "adam8bit":
        try:
            import bitsandbytes
        except ImportError as error:
            raise UserError("optimizer adam8bit needs bitsandbytes: pip install bitsandbytes") from error
        return bitsandbytes.optim.Adam8bit(parameters, lr=lr)
    if name in ("sgd", "sgd-momentum"):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9 if name == "sgd-momentum" else 0.0, foreach=True)
    how: dict[str, dict[str, Any]] = {
        "adamw": {"foreach": True},
        "adamw-fused": {"fused": True},
        "adamw-forloop": {"foreach": False},
    }
    if name not in how:
        raise UserError(f"optimizer {name!r} is not one of {', '.join(CHOICES['optimizer'])}")
    return torch.optim.AdamW(parameters, lr=lr, **how[name])


def checkpoint_segments(model: torch.nn.Module, every: int) -> torch.nn.Module:
    """Make every `every` consecutive blocks of `model` one non-reentrant checkpointed segment, in place.

    Only the input of a segment stays in memory after the forward pass; backward runs the segment's forward again. This
    is `labkit.checkpointing.segments`.
    """
    from .checkpointing import segments

    return segments(model, every)


def chunked_loss(model: Any, tokens: torch.Tensor, chunks: int = LOSS_CHUNKS) -> torch.Tensor:
    """Mean next-token cross-entropy of `tokens` ``(batch, seq)`` without ever holding all logits.

    The shifted hidden states ``(batch * (seq - 1), width)`` are cut into `chunks`; each goes through
    head -> float32 -> cross-entropy inside its own checkpoint, so that one chunk of logits is alive at a time.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    hidden = model.base_model(input_ids=tokens).last_hidden_state
    head = model.get_output_embeddings()

    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(h).float(), y, reduction="sum")

    h, y = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    parts = [
        checkpoint(part, *pair, use_reentrant=False) for pair in zip(h.chunk(chunks), y.chunk(chunks), strict=True)
    ]
    return torch.stack(parts).sum() / y.numel()
