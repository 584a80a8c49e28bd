"""Weights of fp16 with an fp32 copy that really steps, on the card or in the host's memory, and the scale of the loss.

fp16 has no numbers between 0 and 6e-8, and around 1 its numbers lie 1e-3 apart: small gradients vanish, and so do small
updates. So the loss is multiplied by a large scale before backward, and the optimizer keeps a *master copy* of the
weights in fp32 (Micikevicius et al. 2018, arXiv:1710.03740)::

    optimizer = Masters(stepping.by_block(model), make, on_host=True, gradients_on_host=True, clip=1.0)
    optimizer.scaled(loss).backward(); optimizer.step(); optimizer.zero_grad()

The card then holds 2 bytes of weight for each parameter, plus 2 of gradient unless those leave at once, plus masters
and states unless they are on the host. No bf16 is needed: it is the way for Turing cards (RTX 20, T4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .stepping import GradientsOnHost, Group, Make, clip_coefficient

SCALE, LEAST_SCALE, GROW_AFTER = 2.0**16, 1.0, 2000  # as torch.amp.GradScaler: doubled after so many clean steps


class Masters(GradientsOnHost):
    """An optimizer for fp16 weights whose fp32 master copies step.

    on_host: masters and states are in the host's memory and step there (`make` makes an optimizer for the processor);
    else on the card.
    gradients_on_host: gradients go to the host as they arrive, else they wait on the card as usual.
    groups, clip, most, window: as for `GradientsOnHost`, which it is; accumulation and clipping by the global norm work
    in all four cases. ``loss_scale`` is what `scaled` multiplies a loss by. A step whose gradients overflowed changes
    nothing and halves it, as `torch.amp.GradScaler` does; ``skipped`` counts those.
    """

    def __init__(
        self, groups: Sequence[Sequence[torch.nn.Parameter]], make: Make, *, on_host: bool, gradients_on_host: bool,
        clip: float | None = None, scale: float = SCALE, **how: Any,
    ):  # fmt: skip
        self._on_host, self._at_once = on_host, gradients_on_host
        self.loss_scale, self.skipped, self._clean = scale, 0, 0
        super().__init__(groups, make, clip=clip, **how)
        if not gradients_on_host:
            self.remove()

    def _group(self, members: list[torch.nn.Parameter], make: Make, most: int) -> Group:
        return _MasterGroup(members, make, most, on_host=self._on_host, buffer=self._on_host or self._at_once)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call ``backward`` on."""
        return loss * self.loss_scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the masters with the unscaled, clipped gradients, and round them to the weights; or, where a gradient
        overflowed, halve the scale."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._at_once:
            self._note_gradients()
        self._let_go(0)
        self._has_norm = True
        self._norm.copy_(torch.linalg.vector_norm(self._norms)).div_(self.loss_scale)
        if not torch.isfinite(self._norm).item():
            self.loss_scale, self._clean = max(LEAST_SCALE, self.loss_scale / 2), 0
            self.skipped += 1
            return loss
        factor: Any = 1 / self.loss_scale
        if self._clip is not None:
            factor = factor * clip_coefficient(self._norm, self._clip)
        if self._on_host:
            factor = float(factor)
        ready = [group for group in self._groups if group.complete(self._waiting)]
        for group, gradients in self._gradients(ready):
            for place, gradient in enumerate(gradients):
                group.masters[place].grad = gradient.mul_(factor)
                del gradient  # else it would live while the next one is made
                group.optimizer.step()
                group.masters[place].grad = None
                self._round(group, place)
        if self._stream is not None:
            torch.cuda.current_stream(self._norms.device).wait_stream(self._stream)
        self._clean += 1
        if self._clean % GROW_AFTER == 0:
            self.loss_scale *= 2
        return loss

    def _note_gradients(self) -> None:
        """The norm of each gradient that waits on the card."""
        for p, place in self._place.items():
            if p.grad is not None:
                self._norms[place] = torch.linalg.vector_norm(p.grad, dtype=torch.float32)
                self._waiting.add(p)

    def _gradients(self, ready: list[Any]) -> Iterator[tuple[Any, Iterator[torch.Tensor]]]:
        """Each group with the scaled gradients of its pieces in fp32, where the masters are."""
        if self._on_host and not self._at_once:
            for group in ready:
                self._send(group)
        if self._on_host and self._stream is not None:
            self._stream.synchronize()  # the processor reads what the card has sent
        for group in ready:
            if self._on_host:
                yield group, (part.float() for part in group.waiting)
            elif self._at_once:
                yield group, (self._fetch(part)().float() for part in group.waiting)
            else:
                yield group, iter(group.gathered())

    def _send(self, group: Any) -> None:
        """Copy a group's gradients to the host and let the card's go."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._norms.device))
        with torch.cuda.stream(self._stream):
            for p, host in group.buffer_parts():
                host.copy_(p.grad, non_blocking=True)

    def _round(self, group: Any, place: int) -> None:
        """A piece of the weights becomes its master, rounded to fp16; from the host through the gradients' buffer."""
        if not self._on_host:
            group.pieces[place].copy_(group.masters[place])
            return
        group.waiting[place].copy_(group.masters[place])
        with torch.cuda.stream(self._stream):
            group.pieces[place].copy_(group.waiting[place], non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, wherever they wait."""
        super().zero_grad(set_to_none)
        for p in self._place:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizers inside, the master copies and the scale."""
        masters = [[master.detach() for master in group.masters] for group in self._groups]
        return {**super().state_dict(), "masters": masters, "loss_scale": self.loss_scale}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned."""
        super().load_state_dict(state_dict)
        self.loss_scale = state_dict["loss_scale"]
        for group, masters in zip(self._groups, state_dict["masters"], strict=True):
            for place, (master, saved) in enumerate(zip(group.masters, masters, strict=True)):
                master.copy_(saved)
                group.pieces[place].copy_(saved)


class _MasterGroup(Group):
    """A group whose pieces have fp32 masters; these step."""

    def __init__(self, members: list[torch.nn.Parameter], make: Make, most: int, *, on_host: bool, buffer: bool):
        self._place: Any = "cpu" if on_host else members[0].device
        super().__init__(members, make, most, wait_on="host" if buffer else None)

    def _stepped(self) -> list[torch.nn.Parameter]:
        self.masters = [torch.nn.Parameter(p.detach().to(self._place, torch.float32)) for p in self.pieces]
        return self.masters

    def gathered(self) -> Sequence[torch.Tensor]:
        """The members' gradients in fp32, one after another as the weights lie, in pieces; the members' own go."""
        flat = torch.zeros(self.count, device=self.members[0].device)
        for p, part in zip(self.members, self._parts(flat), strict=True):
            assert p.grad is not None
            part.copy_(p.grad)
            p.grad = None
        return flat.split(self.most)
