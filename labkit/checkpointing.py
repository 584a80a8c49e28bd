"""Gradient checkpointing of a model's blocks: both readings of "every N layers", and what a segment may keep.

Every function changes a model in place and returns it. Blocks outside training, or where no gradient is wanted, run as
they are. Keyword arguments beyond those named go to `torch.utils.checkpoint.checkpoint`, which this module calls
without re-entering autograd unless told otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .models import blocks
from .units import UserError

# Operators by what they are, as they arrive below autograd (PyTorch's native_functions.yaml)
KINDS = {
    "products": ("mm", "addmm", "bmm", "baddbmm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
}


class Segment(torch.nn.Module):
    """Consecutive blocks behind one checkpoint: after the forward pass only the first one's input is kept, and backward
    runs the forward of all of them again.

    `members` take ``(hidden, *args, **kwargs)`` and return ``hidden`` ``(batch, seq, width)`` or a tuple that starts
    with it; `how` are arguments of `torch.utils.checkpoint.checkpoint`.
    """

    def __init__(self, members: list[torch.nn.Module], **how: Any):
        super().__init__()
        self.members = torch.nn.ModuleList(members)
        self.how = {"use_reentrant": False, **how}

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return self._run(hidden, *args, **kwargs)
        if self.how["use_reentrant"]:  # takes no keyword arguments for the function
            found = checkpoint(functools.partial(self._run, **kwargs), hidden, *args, **self.how)
        else:
            found = checkpoint(self._run, hidden, *args, **self.how, **kwargs)
        assert isinstance(found, torch.Tensor)
        return found

    def _run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for member in self.members:
            out = member(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden


def segments(model: torch.nn.Module, every: int, **how: Any) -> torch.nn.Module:
    """The first reading: every `every` consecutive blocks of `model` become one checkpointed `Segment`.

    All blocks are computed twice, whatever `every` is; ``layers / every`` inputs stay in memory, and the inside of
    `every` blocks is there at once during backward. Raises `UserError` for an impossible `every`, and for a model
    without a list of blocks.
    """
    layers = _blocks(model, every)
    members = [list(layers[start : start + every]) for start in range(0, len(layers), every)]
    return _put(model, layers, [Segment(some, **how) for some in members])


def one_in(model: torch.nn.Module, every: int, **how: Any) -> torch.nn.Module:
    """The second reading: one block in `every` (the first, and each `every`-th after it) is a `Segment` of its own.

    The others keep everything. Only ``ceil(layers / every)`` blocks are computed twice. This is what ``every_n_layers``
    means in ``PreTrainedModel.activation_checkpointing_enable`` (transformers 5.24). Raises as `segments`.
    """
    layers = _blocks(model, every)
    wrapped = [Segment([layer], **how) if place % every == 0 else layer for place, layer in enumerate(layers)]
    return _put(model, layers, wrapped)


def keeping(*kinds: str) -> Callable[[], Any]:
    """A ``context_fn`` that makes checkpointing selective: results of operators of these `KINDS` are kept, all others
    are computed again. With no kind everything is computed again.

    An operator that draws random numbers (attention with dropout, on a card) is computed again all the same. Were it
    kept, the recomputation would skip its draw, and every later dropout of the segment would draw another mask than in
    the forward pass. Raises `UserError` for an unknown kind.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"unknown kind of operator {kind!r}: {', '.join(KINDS)}")
    wanted = {name for kind in kinds for name in KINDS[kind]}

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator._schema.name.removeprefix("aten::")
        keep = name in wanted and not draws(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an ``OpOverload`` takes numbers from the random generator. PyTorch tags what may; a dropout
    probability of 0 says that it does not."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    probability = kwargs.get("dropout_p", args[place] if place < len(args) else 0.0)
    return bool(probability)


def _blocks(model: torch.nn.Module, every: int) -> torch.nn.ModuleList:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UserError(f"every must be a whole number of at least 1, not {every!r}")
    return blocks(model)


def _put(model: torch.nn.Module, layers: torch.nn.ModuleList, modules: list[torch.nn.Module]) -> torch.nn.Module:
    """`modules` in the place of `layers`, which the model keeps holding."""
    while len(layers):
        del layers[-1]
    layers.extend(modules)
    return model
