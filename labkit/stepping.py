"""When the optimizer steps, and where gradients wait for it: in backward, or on the host until all of them are known.

An optimizer's usual step needs every gradient at once. Two ways round it::

    steps = stepping.InBackward(model.parameters(), make)           # loss.backward() also steps
    steps = stepping.GradientsOnHost(stepping.by_block(model), make, clip=1.0)
    loss.backward(); steps.step(); steps.zero_grad()                # as any other optimizer

``make(parameters)`` returns the `torch.optim.Optimizer` that really steps. `InBackward` steps with each gradient as
soon as it is there and drops it: nothing is left that could be summed over micro-batches, and no norm over all
gradients exists before the first weights have changed. `GradientsOnHost` sends each gradient to the host instead; the
step brings them back, some at a time, when the norm over all is known.
"""

from __future__ import annotations

import abc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from .models import blocks
from .units import MiB, UserError, parse_size

ALIGNED = 64  # numbers: where a parameter begins in its group's memory, for kernels that load 16 bytes at once
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def by_block(model: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """The trainable parameters of `model`, one list for each transformer block and one for all others; a shared
    parameter comes once. Raises `UserError` for a model without a list of blocks."""
    groups = [[p for p in block.parameters() if p.requires_grad] for block in blocks(model)]
    inside = {p for group in groups for p in group}
    return [*groups, [p for p in model.parameters() if p.requires_grad and p not in inside]]


def clip_coefficient(norm: torch.Tensor, clip: float) -> torch.Tensor:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients of this global `norm` by."""
    return (clip / (norm + 1e-6)).clamp(max=1.0)


class _Arriving(abc.ABC):
    """Calls ``_arrived(parameter)`` of its owner when a gradient is complete. Hooks hold their owner weakly: a strong
    reference would make a circle through C++ that Python's collector does not see."""

    def _listen(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        owner = weakref.ref(self)

        def arrived(p: torch.Tensor) -> None:
            found = owner()
            if found is not None:
                found._arrived(p)

        self._handles = [p.register_post_accumulate_grad_hook(arrived) for p in parameters]

    @abc.abstractmethod
    def _arrived(self, p: torch.Tensor) -> None:
        """What happens to a complete gradient, ``p.grad``."""

    def remove(self) -> None:
        """Take the hooks off: from now on backward does what it always does."""
        for handle in self._handles:
            handle.remove()


# ------------------------------------------------------------------------------------------------ in backward


class InBackward(_Arriving):
    """Steps with each gradient while backward runs, and drops it. One gradient is alive at a time.

    What it gives up: sums of gradients over micro-batches, and clipping by the global norm. What can replace the
    latter: `clip_each` bounds the norm of each tensor's gradient by itself (another direction of the step), and
    `norm_only` makes a first backward pass that only computes the global norm (the same step, for twice the
    computing)::

        with steps.norm_only() as norm:
            loss_of(batch).backward()
        steps.scale = stepping.clip_coefficient(norm(), 1.0)
        loss_of(batch).backward()          # steps, every gradient times `scale`
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], make: Make, *, clip_each: float | None = None):
        self._optimizers = {p: make([p]) for p in parameters if p.requires_grad}
        self._clip_each = clip_each
        self._squares: list[torch.Tensor] | None = None
        self.scale: torch.Tensor | None = None
        self._listen(self._optimizers)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One for each parameter: what a schedule must reach."""
        return list(self._optimizers.values())

    @contextmanager
    def norm_only(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Inside, backward steps nothing and notes norms; yields a function that returns the global one (float32)."""
        squares = self._squares = []
        try:
            yield lambda: torch.stack(squares).sum().sqrt()
        finally:
            self._squares = None

    @torch.no_grad()
    def _arrived(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        if self._squares is not None:
            self._squares.append(torch.linalg.vector_norm(p.grad, dtype=torch.float32).square())
        else:
            if self._clip_each is not None:
                torch.nn.utils.clip_grad_norm_([p], self._clip_each)
            if self.scale is not None:
                p.grad.mul_(self.scale)
            self._optimizers[p].step()  # type: ignore[index]
        p.grad = None


# ------------------------------------------------------------------------------------------------ on the host


class GradientsOnHost(_Arriving, torch.optim.Optimizer):
    """An optimizer whose gradients wait in the host's memory. On the card remain weights, states and what is under way.

    groups: lists of parameters that come back and step together (`by_block`). The weights of a group move into one
    piece of memory, of which the parameters become parts: one copy and one step serve them all. So the optimizer must
    treat each number by itself, as Adam and SGD do.
    clip: the global norm that gradients are scaled to when they exceed it, exactly as
    `torch.nn.utils.clip_grad_norm_` does; ``norm`` is the last one found, a float32 tensor.
    most: numbers that step at once; a larger group is cut, since an optimizer's temporary copies have this size.
    window: bytes (or ``"64MiB"``) of gradients that may wait on the card for their copy; computing waits when the bus
    is more than this behind.

    Backward may run several times before a step (accumulation): what waits is fetched, added to and sent again, in the
    parameters' own dtype, as PyTorch accumulates. `param_groups` are those of the optimizers inside, so a scheduler of
    `torch.optim.lr_scheduler` works. Raises `UserError` when a parameter is in two groups, a group has two dtypes, or
    a step finds gradients for a part of a group only.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        make: Make,
        *,
        clip: float | None = None,
        most: int = 2**24,
        window: int | str = 64 * MiB,
    ):
        chosen = [list(group) for group in groups if group]
        everything = [p for group in chosen for p in group]
        if len(set(everything)) != len(everything):
            raise UserError("a parameter is in two groups: each one must step once")
        self._groups: list[Any] = [self._group(group, make, most) for group in chosen]
        torch.cuda.empty_cache()  # the places that the weights left are of other sizes than what comes next
        self._buffer: dict[Any, torch.Tensor] = {p: part for group in self._groups for p, part in group.buffer_parts()}
        self._clip = clip
        self._window = parse_size(window) if window != 0 else 0
        self._place: dict[Any, int] = {p: place for place, p in enumerate(everything)}
        self._norms = torch.zeros(len(everything), device=everything[0].device)
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._leaving_bytes = 0
        self._waiting: set[Any] = set()  # parameters whose gradient is on the host
        self._stream: Any = torch.cuda.Stream(self._norms.device) if self._norms.is_cuda else None
        self._norm, self._has_norm = torch.zeros((), device=self._norms.device), False
        self._listen(everything)

    def _group(self, members: list[torch.nn.Parameter], make: Make, most: int) -> Group:
        return Group(members, make, most)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers inside."""
        return [part for group in self._groups for part in group.optimizer.param_groups]

    @property
    def norm(self) -> torch.Tensor | None:
        """The global norm that the last step found, overwritten by the next one."""
        return self._norm if self._has_norm else None

    @property
    def host_bytes(self) -> int:
        """Bytes of gradients that the host holds."""
        return sum(group.buffer.nbytes for group in self._groups if group.wait_on == "host")

    @torch.no_grad()
    def _arrived(self, p: torch.Tensor) -> None:
        grad, host = p.grad, self._buffer[p]
        assert grad is not None
        if p in self._waiting:
            grad += self._fetch(host)()
        self._norms[self._place[p]] = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self._waiting.add(p)
        p.grad = None
        left = None
        if self._stream is None:
            host.copy_(grad)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(grad.device))
            with torch.cuda.stream(self._stream):
                host.copy_(grad, non_blocking=True)
                left = self._stream.record_event()
        self._leaving.append((grad, left))
        self._leaving_bytes += grad.numel() * grad.element_size()
        self._let_go(self._window)

    def _let_go(self, window: int) -> None:
        """Drop the oldest gradients until `window` bytes are left; whoever gets their memory waits for the copy."""
        while self._leaving_bytes > window:
            grad, left = self._leaving.popleft()
            if left is not None:
                torch.cuda.current_stream(grad.device).wait_event(left)
            self._leaving_bytes -= grad.numel() * grad.element_size()

    def _fetch(self, host: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start the copy to the card, after all that this stream still sends; the result waits for it."""
        coming = self._fetch_all([host])
        return lambda: coming()[0]

    def _fetch_all(self, host: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """`_fetch` for some tensors that are needed together."""
        here = [torch.empty(part.shape, dtype=part.dtype, device=self._norms.device) for part in host]
        current = None if self._stream is None else torch.cuda.current_stream(self._norms.device)
        if current is not None:
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for to, part in zip(here, host, strict=True):
                to.copy_(part, non_blocking=True)
            arrived = None if current is None else self._stream.record_event()

        def result() -> list[torch.Tensor]:
            if arrived is not None:
                torch.cuda.current_stream(self._norms.device).wait_event(arrived)
            return here

        return result

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Bring the gradients back group by group, the next group's copy under way; clip and step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._let_go(0)
        self._has_norm = True
        self._norm.copy_(torch.linalg.vector_norm(self._norms))
        coefficient = None if self._clip is None else clip_coefficient(self._norm, self._clip)
        ready = [group for group in self._groups if group.complete(self._waiting)]
        pieces = [(group, place) for group in ready for place in range(len(group.pieces))]
        coming = self._bring(*pieces[0]) if pieces else None
        for number, (group, place) in enumerate(pieces):
            assert coming is not None
            grad = coming()
            if number + 1 < len(pieces):
                coming = self._bring(*pieces[number + 1])
            if coefficient is not None:
                grad.mul_(coefficient)
            group.pieces[place].grad = grad
            group.optimizer.step()
            group.pieces[place].grad = None
            self._stepped(group, place)
        return loss

    def _bring(self, group: Group, place: int) -> Callable[[], torch.Tensor]:
        """Start bringing what a piece needs to step; the result waits for it and is the piece's gradient."""
        return self._fetch(group.waiting[place])

    def _stepped(self, group: Group, place: int) -> None:
        """What happens after a piece has stepped."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that wait."""
        self._waiting.clear()
        self._norms.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizers inside, in order."""
        return {"optimizers": [group.optimizer.state_dict() for group in self._groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned."""
        for group, state in zip(self._groups, state_dict["optimizers"], strict=True):
            group.optimizer.load_state_dict(state)


class Group:
    """Parameters in one flat piece of memory; `pieces` of it are what steps, `buffer` is where gradients wait: on the
    host, or on the card with ``wait_on="card"``; None without."""

    def __init__(
        self,
        members: list[torch.nn.Parameter],
        make: Make,
        most: int,
        *,
        wait_on: Literal["host", "card"] | None = "host",
    ):
        first = members[0]
        if any(p.dtype != first.dtype or p.device != first.device for p in members):
            raise UserError("the parameters of a group must have one dtype and lie on one device")
        self.members, self._starts, count = members, [], 0
        for p in members:
            self._starts.append(count)
            count += -(-p.numel() // ALIGNED) * ALIGNED
        flat = torch.zeros(count, dtype=first.dtype, device=first.device)
        for p, part in zip(members, self._parts(flat), strict=True):
            part.copy_(p.detach())
            p.data = part
        self.flat, self.count, self.most = flat, count, most
        self.pieces = [torch.nn.Parameter(piece) for piece in flat.split(most)]
        self.optimizer = make(self._stepped())
        self.buffer: torch.Tensor | None = None
        self.wait_on = wait_on
        if wait_on is not None:  # one allocation: PyTorch rounds each piece of pinned memory up to a power of two
            self.buffer = pinned(count, first) if wait_on == "host" else torch.zeros_like(flat)
            self.waiting = self.buffer.split(most)

    def _stepped(self) -> list[torch.nn.Parameter]:
        """What the optimizer is made for."""
        return self.pieces

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[start : start + p.numel()].view(p.shape) for start, p in zip(self._starts, self.members, strict=True)
        ]

    def parts_of(self, flat: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
        """Each parameter with its place in a tensor of the group's size."""
        return dict(zip(self.members, self._parts(flat), strict=True))

    def buffer_parts(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter with the place of its gradient."""
        return () if self.buffer is None else self.parts_of(self.buffer).items()

    def complete(self, waiting: set[Any]) -> bool:
        """Whether all gradients are there; False where none is."""
        there = sum(p in waiting for p in self.members)
        if there and there < len(self.members):
            raise self.incomplete(there)
        return there > 0

    def incomplete(self, there: int) -> UserError:
        """The error of a step that finds gradients for only so many members."""
        return UserError(
            f"{len(self.members) - there} of {len(self.members)} parameters that step together got no gradient: "
            "freeze them before, or put them into a group of their own"
        )


def pinned(count: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros in the host's memory, of `like`'s dtype, page-locked where `like` is on a card."""
    return torch.zeros(count, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
