"""One dispatch mode that sees every operator of a run, real or ghostly, and records what is born and what dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..results import Holding, Timeline
from . import attribution
from .recorder import Recorder
from .whereabouts import Whereabouts, found_in, states_of


class Tracer(TorchDispatchMode):
    """``with Tracer() as tracer: step()``: who held how much memory, by phase, module and category.

    `device` restricts it to storages of that kind (``"cuda"``; ``None``: CUDA if there is a card, else every device).
    ``adopt(step)`` names the modules, parameters and optimizers that a step function holds, and counts what is alive
    already. `building`: what comes first is the build, and ``begin_step()`` will say when a step begins. `workspace`
    are bytes that libraries held before, which no operator shows. Nothing is patched while no tracer is active.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        building: bool = False,
        workspace: int = 0,
        run: Callable[..., Any] | None = None,
        recorder: Recorder | None = None,
    ):
        super().__init__()
        self.recorder = recorder or Recorder()
        self.whereabouts = Whereabouts(self.recorder)
        self._run = run
        self._kind = device or ("cuda" if torch.cuda.is_available() else None)
        self._depth = 0
        self._building = building or run is not None
        self._workspace = workspace
        self._failed: tuple[int, int] | None = None  # events and place when memory ran out, before anything unwound

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against compilation costs more than a ghost operator

    def adopt(self, step: Callable[..., Any], *, survey: bool | None = None) -> Tracer:
        """Find modules, optimizers and tensors in `step`'s closure; `survey` (default: on a real run) also registers
        every live tensor that Python's garbage collector knows. Call it before entering."""
        modules = found_in(step, (torch.nn.Module,))
        optimizers = [o for _, o in found_in(step, (torch.optim.Optimizer,))]
        ranked = sorted(modules, key=lambda pair: -sum(1 for _ in pair[1].modules()))
        for rank, (name, module) in enumerate(ranked):
            self.whereabouts.adopt(module, "" if rank == 0 else name)
        self.whereabouts.optimizers.extend(o for o in optimizers if o not in self.whereabouts.optimizers)
        if survey if survey is not None else self._run is None:
            self._survey([m for _, m in modules])
            self.whereabouts.forget()
            if self._depth and not self._building:
                self.begin_step()  # what was there before is no part of the step
        self.name_parameters()
        return self

    def name_parameters(self) -> None:
        """Say of every adopted parameter, buffer, gradient and optimizer state what it is."""
        recorder = self.recorder
        for path, module in self.whereabouts.owned():
            for parameter in module.parameters(recurse=False):
                recorder.name((parameter.data,), "parameter", path)
                recorder.name((parameter.grad,), "gradient", path)
            recorder.name(module.buffers(recurse=False), "parameter", path)
        for optimizer in self.whereabouts.optimizers:
            for state in states_of(optimizer):
                recorder.name((v for v in state.values() if isinstance(v, torch.Tensor)), "optimizer state")

    def begin_step(self) -> None:
        """A training step begins."""
        self.whereabouts.begin_step()
        self.recorder.mark("step")

    def end_step(self) -> None:
        """The training step is over."""
        self.whereabouts.end_step()

    def __enter__(self) -> Any:
        if self._depth == 0:
            self.whereabouts.__enter__()
            if not self._building:
                self.begin_step()
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if self._depth == 0:
            self.whereabouts.__exit__()
            if self._run is None:
                self.name_parameters()
                self.recorder.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.whereabouts.update()
        if self._run is not None:
            return self._run(func, args, kwargs or {})
        try:
            out = func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self._failed = self._failed or (len(self.recorder.events), self.recorder.here)
            raise
        self._see(out)
        return out

    def _see(self, out: Any) -> None:
        if isinstance(out, (tuple, list)):
            for item in out:
                self._see(item)
        elif type(out) in (torch.Tensor, torch.nn.Parameter) and out.layout is torch.strided and self._ours(out):
            storage = out.untyped_storage()
            if storage._cdata not in self.recorder.by_pointer and storage.nbytes():
                self.recorder.watch(storage)

    def _ours(self, tensor: torch.Tensor) -> bool:
        return self._kind is None or tensor.device.type == self._kind

    def _survey(self, modules: list[Any]) -> None:
        """Register storages that exist already: of modules, gradients, optimizer states, then whatever the garbage
        collector knows."""
        import gc
        import warnings

        recorder = self.recorder
        recorder.here = recorder.place("build", "")
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            for module in modules:
                for name, parameter in module.named_parameters():
                    recorder.here = recorder.place("build", name.rpartition(".")[0])
                    self._see((parameter.data, parameter.grad))
                for name, buffer in module.named_buffers():
                    recorder.here = recorder.place("build", name.rpartition(".")[0])
                    self._see(buffer)
            recorder.here = recorder.place("optimizer", "")
            for optimizer in self.whereabouts.optimizers:
                for state in states_of(optimizer):
                    self._see(tuple(v for v in state.values() if isinstance(v, torch.Tensor)))
            recorder.here = recorder.place("build", "")
            for thing in gc.get_objects():
                if type(thing) is torch.Tensor:
                    self._see(thing)

    def where(self) -> tuple[str, str]:
        """The phase and module of the last operator, or of the one that ran out of memory."""
        return self.recorder.places[self._failed[1] if self._failed else self.recorder.here]

    def alive_now(self) -> tuple[Holding, ...]:
        """Who is alive after the last event, or was when memory ran out, largest first."""
        return self._with_workspace(attribution.alive(self.recorder, self._end()))

    @property
    def events(self) -> list[int]:
        """Births (an identity) and deaths (its complement), in order."""
        return self.recorder.events

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, without rounding, workspaces included."""
        return attribution.peak(self.recorder)[0] + self._workspace

    def timeline(self, columns: int = 160) -> Timeline:
        """Who held how much through the last step, up to the failure if memory ran out in it."""
        starts = [at for label, at in self.recorder.marks if label == "step" and at < self._end()]
        span, extra = (starts[-1] if starts else 0, self._end()), (("workspace", self._workspace),)
        return attribution.timeline(self.recorder, self.whereabouts.modules, columns=columns, span=span, extra=extra)

    def alive_at_peak(self) -> tuple[Holding, ...]:
        """Who was alive at the peak, largest first."""
        return self._with_workspace(attribution.alive(self.recorder, attribution.peak(self.recorder)[1]))

    def _end(self) -> int:
        return self._failed[0] if self._failed else len(self.recorder.events)

    def _with_workspace(self, alive: tuple[Holding, ...]) -> tuple[Holding, ...]:
        held = (*alive, Holding("", "workspace", "build", self._workspace)) if self._workspace else alive
        return tuple(sorted(held, key=lambda h: -h.nbytes))

    def phase_peaks(self) -> dict[str, int]:
        """The most bytes alive at once in each phase, workspaces included."""
        peaks = attribution.phase_peaks(self.recorder)
        return {phase: nbytes + self._workspace for phase, nbytes in peaks.items()}
