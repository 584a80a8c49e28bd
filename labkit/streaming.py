"""Optimizer states that wait in the host's memory and step on the card, a piece at a time.

An optimizer's states are read and written once for each step, however many tokens a step has. So they need not lie on
the card: for each piece of the weights they come over the bus, step there, and go back, while the next piece's come::

    optimizer = StatesOnHost(stepping.by_block(model), make, clip=1.0)
    loss.backward(); optimizer.step(); optimizer.zero_grad()      # as any other optimizer

The step is the one that ``make``'s optimizer makes, bit for bit. It costs two crossings of the states, both directions
at once: with 8-bit states 2 bytes for each parameter and direction. Micro-batches share it: gradients wait on the card
in one flat piece of memory, so accumulation costs nothing beyond computing. (DeepSpeed's ZeRO-Offload and torchao's
`CPUOffloadOptimizer` keep the states on the host too, but step there, with the host's arithmetic.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .flat import FlatSteps
from .stepping import Group, Make, pinned

LEAST = 4096  # numbers: a smaller tensor (a step's count, a table of codes) stays where it is


class StatesOnHost(FlatSteps):
    """An optimizer for weights on the card whose states are in pinned host memory between their steps.

    groups, make, clip, most, window, gradients_on_host: as for `labkit.flat.FlatSteps`, which it is. At most two
    pieces' states (``most`` numbers each) are on the card, and what is still leaving.

    `param_groups`, ``norm``, `state_dict` are those of `FlatSteps`; states in a `state_dict` are on the host.
    """

    def __init__(self, groups: Sequence[Sequence[torch.nn.Parameter]], make: Make, **how: Any):
        super().__init__(groups, make, **how)
        self._back: Any = torch.cuda.Stream(self._norms.device) if self._norms.is_cuda else None
        self._parked: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._going: deque[tuple[list[torch.Tensor], Any]] = deque()

    def step(self, closure: Any = None) -> Any:
        """Clip by the global norm, and step piece by piece, the next piece's states under way."""
        loss = super().step(closure)
        self._let_states_go(0)
        return loss

    def _bring(self, group: Group, place: int) -> Callable[[], torch.Tensor]:
        gradient = super()._bring(group, place)
        states = self._states(group, place)
        key = (self._groups.index(group), place)
        host = self._parked.get(key)
        if host is None:
            return gradient
        coming = self._fetch_all(host)

        def result() -> torch.Tensor:
            arrived = iter(coming())
            for name, state in states.items():
                states[name] = _moved(state, lambda t: next(arrived))
            return gradient()

        return result

    def _stepped(self, group: Group, place: int) -> None:
        """Send the states of a piece that has stepped back to the host."""
        states, key = self._states(group, place), (self._groups.index(group), place)
        leaving = [t for state in states.values() for t in _large(state)]
        if key not in self._parked:
            self._parked[key] = [pinned(t.numel(), t).view(t.shape) for t in leaving]
        left = None
        if self._back is not None:
            self._back.wait_stream(torch.cuda.current_stream(self._norms.device))
        with torch.cuda.stream(self._back):
            for there, t in zip(self._parked[key], leaving, strict=True):
                there.copy_(t, non_blocking=True)
            if self._back is not None:
                left = self._back.record_event()
        host = iter(self._parked[key])
        for name, state in states.items():
            states[name] = _moved(state, lambda t: next(host))
        self._going.append((leaving, left))
        del leaving
        self._let_states_go(1)

    def _let_states_go(self, most: int) -> None:
        """Drop what has left until `most` pieces' states are still leaving; whoever gets their memory waits."""
        while len(self._going) > most:
            _, left = self._going.popleft()
            if left is not None:
                torch.cuda.current_stream(self._norms.device).wait_event(left)

    @staticmethod
    def _states(group: Group, place: int) -> dict[str, Any]:
        states: dict[str, Any] = group.optimizer.state[group.pieces[place]]
        return states

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizers inside, in order, on the host."""
        if self._back is not None:
            self._back.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned."""
        for number, (group, state) in enumerate(zip(self._groups, state_dict["optimizers"], strict=True)):
            group.optimizer.load_state_dict(state)  # puts them on the card
            for place in range(len(group.pieces)):
                self._parked.pop((number, place), None)
                if self._states(group, place):
                    self._stepped(group, place)
        self._let_states_go(0)


def _large(state: Any) -> Iterator[torch.Tensor]:
    """The large tensors in a value of an optimizer's state, also those inside a tensor subclass (torchao's)."""
    if isinstance(state, torch.Tensor):
        if hasattr(state, "__tensor_flatten__"):
            for name in state.__tensor_flatten__()[0]:
                yield from _large(getattr(state, name))
        elif state.numel() >= LEAST:
            yield state


def _moved(state: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value of an optimizer's state with `_large` tensors replaced by ``move(tensor)``, in the same order."""
    if not isinstance(state, torch.Tensor):
        return state
    if hasattr(state, "__tensor_flatten__"):
        names, context = state.__tensor_flatten__()
        inside = {name: _moved(getattr(state, name), move) for name in names}
        return type(state).__tensor_unflatten__(inside, context, state.shape, state.stride())  # type: ignore[attr-defined]
    return move(state) if state.numel() >= LEAST else state
