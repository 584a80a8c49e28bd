"""Optimizers that step a block's weights in one flat piece instead of tensor by tensor, with everything on the card.

An optimizer of a few operations for each tensor asks the processor to launch these for every tensor: GPT-2 XL has 580.
For an optimizer that treats each number by itself (Adam, SGD), the weights of a block may as well lie in one piece of
memory and step as one tensor, some fifty in all, with the same arithmetic::

    optimizer = FlatSteps(stepping.by_block(model), make, clip=1.0)
    loss.backward(); optimizer.step(); optimizer.zero_grad()      # as any other optimizer

    steps = BlocksInBackward(stepping.by_block(model), make)      # loss.backward() also steps, block by block

(FSDP1's ``FlatParameter`` and DeepSpeed's flat groups are the same idea.) One thing differs with states in 8 bits:
every tensor begins at a run of 64 numbers, so that no scale is shared by two of them, but the states of small tensors,
which torchao by itself keeps in float32, are quantised with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .stepping import GradientsOnHost, Group, InBackward, Make
from .units import UserError


class FlatSteps(GradientsOnHost):
    """An optimizer for weights whose states are on the card, that steps flat pieces.

    groups, make, clip, most, window: as for `labkit.stepping.GradientsOnHost`, whose groups and pieces it uses.
    gradients_on_host: gradients wait on the host; else (usual) on the card, as parts of one flat tensor for each
    group. ``p.grad`` is then a part of it: `zero_grad` sets it to zero and never to None.
    """

    def __init__(
        self, groups: Sequence[Sequence[torch.nn.Parameter]], make: Make, *, gradients_on_host: bool = False,
        clip: float | None = None, most: int = 2**25, **how: Any,
    ):  # fmt: skip
        self._gradients_on_host = gradients_on_host
        super().__init__(groups, make, clip=clip, most=most, **how)
        if not gradients_on_host:
            for p, part in self._buffer.items():
                p.grad = part

    def _group(self, members: list[torch.nn.Parameter], make: Make, most: int) -> Group:
        return Group(members, make, most, wait_on="host" if self._gradients_on_host else "card")

    def _arrived(self, p: torch.Tensor) -> None:
        if self._gradients_on_host:
            super()._arrived(p)
            return
        part = self._buffer[p]
        if p.grad is not part:  # somebody set it to None
            part.copy_(p.grad)  # type: ignore[arg-type]
            p.grad = part
        self._waiting.add(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Clip by the global norm, and step piece by piece."""
        if not self._gradients_on_host:
            self._norms.zero_()
            for place, group in enumerate(self._groups):
                if group.complete(self._waiting):
                    self._norms[place] = torch.linalg.vector_norm(group.buffer, dtype=torch.float32)
        return super().step(closure)

    def _bring(self, group: Group, place: int) -> Callable[[], torch.Tensor]:
        return super()._bring(group, place) if self._gradients_on_host else lambda: group.waiting[place]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to zero."""
        super().zero_grad(set_to_none)
        if not self._gradients_on_host:
            for group in self._groups:
                group.buffer.zero_()
            for p, part in self._buffer.items():
                p.grad = part


class BlocksInBackward(InBackward):
    """Steps a block's weights in one piece as soon as backward has the last of its gradients, and drops them.

    The gradients of one block are alive at a time. What `labkit.stepping.InBackward` gives up, this gives up too, and
    what replaces the global norm there (`norm_only`, ``scale``) works here.

    groups: lists of parameters that step together (`labkit.stepping.by_block`); the last list, of what is outside the
    blocks, steps one by one, since its gradients arrive far apart. Raises `UserError` when a parameter is in two groups
    or a group has two dtypes, and, in the next backward pass, when only a part of a group got gradients.
    """

    def __init__(self, groups: Sequence[Sequence[torch.nn.Parameter]], make: Make, *, most: int = 2**25):
        *blocks, rest = [list(group) for group in groups]
        chosen = [group for group in [*blocks, *([p] for p in rest)] if group]
        everything = [p for group in chosen for p in group]
        if len(set(everything)) != len(everything):
            raise UserError("a parameter is in two groups: each one must step once")
        self._groups = [Group(group, make, most, wait_on=None) for group in chosen]
        torch.cuda.empty_cache()  # the places that the weights left are of other sizes than what comes next
        self._group_of = {p: group for group in self._groups for p in group.members}
        # of blocks that are not complete: the gradients, and the places of those that have not arrived
        self._there: dict[Group, tuple[torch.Tensor, dict[torch.Tensor, torch.Tensor]]] = {}
        super().__init__((), make)
        self._listen(everything)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One for each group: what a schedule must reach."""
        return [group.optimizer for group in self._groups]

    @torch.no_grad()
    def _arrived(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        if self._squares is not None:
            super()._arrived(p)
            return
        group = self._group_of[p]  # type: ignore[index]
        if group not in self._there:
            buffer = torch.zeros_like(group.flat)
            self._there[group] = buffer, group.parts_of(buffer)
        buffer, missing = self._there[group]
        if p not in missing:
            raise group.incomplete(len(group.members) - len(missing))
        missing.pop(p).copy_(p.grad)
        p.grad = None
        if missing:
            return
        del self._there[group]
        if self.scale is not None:
            buffer.mul_(self.scale)
        for piece, gradient in zip(group.pieces, buffer.split(group.most), strict=True):
            piece.grad = gradient
        group.optimizer.step()
        for piece in group.pieces:
            piece.grad = None
