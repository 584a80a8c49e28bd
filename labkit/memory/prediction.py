"""The prediction: an experiment run on ghosts, its events replayed through the allocator, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import machine
from ..results import Failure, Holding, Peaks, Report, Timeline
from ..units import UserError
from . import attribution
from .allocator import Allocator, Block, OutOfMemory
from .compiled import rewrite
from .engine import Accumulation
from .expandable import ExpandableAllocator
from .ghosts import GPU, Ghosts, PredictionError, aten, lay_to_rest
from .kernels import Chip, chip, plan
from .recorder import Recorder
from .regions import Regions
from .rules import rules
from .semantics import cuda_semantics
from .standin import stand_in
from .threads import alone
from .tracer import Tracer
from .workspaces import workspaces

if TYPE_CHECKING:
    from ..recipes import Recipe

METHOD = "1"  # of predicting; raised when the same experiment would give other numbers
STEADY_STEP = 4
BAND = (0.9, 1.2)  # of a compiled steady peak: the farthest of 31 in bench/results/memory-experiments.md is +19 %
COMPILED = "torch.compile: an estimate; which kernels the compiler fuses, and in which order they run, is not modelled"


def predict(
    experiment: Callable[[torch.device], Callable[[], Any]],
    *,
    card: str | None = None,
    budget_bytes: int | None = None,
    name: str = "",
    trace: bool = True,
    expandable: bool = False,
    stateless: bool = False,
    on_fake_cuda: bool = False,
) -> Report:
    """The memory that `experiment` would use on `card`, without a GPU.

    `experiment` is a function of a device that builds everything and returns ``step()``. The peaks are those of the
    first and of the fourth step. Under `budget_bytes` an allocation that does not fit gives a report with status
    ``oom``. `trace` adds the timeline, the holdings at the peak and the peaks by phase. `expandable`: as with
    ``expandable_segments:True``. `stateless` promises that every step does the same, which saves time.
    `on_fake_cuda` needs a GPU: tensors without data on the device ``cuda:0``, so that PyTorch's own dispatcher decides
    what CUDA runs; nothing is computed there. It serves to check the prediction without a GPU, operator by operator.
    Models and tensors that the experiment made and that are kept elsewhere hold nothing but nan or zero afterwards,
    and cannot be trained.

    Raises `PredictionError` when an operator has no rule, `UserError` for `on_fake_cuda` without a GPU.
    """
    preset = machine.preset(card)
    if on_fake_cuda and not machine.has_gpu():
        raise UserError("on_fake_cuda needs a GPU: PyTorch finds no CUDA card here")
    run = Run(chip(preset.name, preset.capability), stateless=stateless, on_fake_cuda=on_fake_cuda)
    run.play(experiment)
    return report(run, preset, budget_bytes=budget_bytes, name=name or getattr(experiment, "__name__", "experiment"),
                  trace=trace, expandable=expandable)  # fmt: skip


def predict_recipe(
    recipe: Recipe, *, card: str | None = None, budget_bytes: int | None = None, trace: bool = False
) -> Report:
    """The memory that one training step of `recipe` would use on `card` (see `predict`), its fields as settings.

    The last recipes are remembered, so that the same one under another budget costs a replay only; not those whose
    model is a folder or comes from a hub, as these may change.
    Raises `UserError` for a recipe that cannot be built.
    """
    preset = machine.preset(card)
    which = chip(preset.name, preset.capability)
    fixed = "/" not in recipe.model and not Path(recipe.model).is_dir()
    run = (_remembered if fixed else _recipe_run)(recipe.changed(expandable_segments=False), which)
    found = report(run, preset, budget_bytes=budget_bytes, name=str(recipe), trace=trace,
                   expandable=recipe.expandable_segments)  # fmt: skip
    return replace(found, settings=recipe.to_dict())


def _recipe_run(recipe: Recipe, chip: Chip) -> Run:
    run = Run(chip, stateless=True)
    run.play(recipe.experiment())
    return run


_remembered = lru_cache(maxsize=8)(_recipe_run)


class Run:
    """One experiment's event stream: the build and `STEADY_STEP` training steps.

    With `stateless` (a step that does the same every time, as a recipe's does) the second step stands for the later
    ones if it left exactly those blocks alive that it found. Without it the third step stands for the fourth if, on
    top of that, it repeated the second event by event. `without` leaves out corrections of this package by name
    (``autocast``, ``dropout``, ``attention``, ``sums``, ``kernels``), to see what each is worth.
    """

    last_step = STEADY_STEP

    def __init__(
        self,
        chip: Chip,
        *,
        stateless: bool = False,
        without: frozenset[str] = frozenset(),
        on_fake_cuda: bool = False,
    ):
        self.chip = chip
        self.on_fake_cuda = on_fake_cuda
        self.stateless = stateless
        self.without = without
        self.recorder = Recorder()
        self._accumulation = Accumulation()
        table: dict[Any, Callable[..., Any]] = {**rules(), aten.add.Tensor: self._accumulation}
        if "sums" in without:
            del table[aten.add.Tensor]
        plans = _no_plan if "kernels" in without else partial(plan, chip=chip)
        gpu = torch.device("cuda", 0) if on_fake_cuda else GPU
        cache = _shapes(chip, "kernels" in without, on_fake_cuda)
        self.ghosts = Ghosts(self.recorder, table, plans, cache, gpu)
        self.ghosts.held["cublasLt", False] = -1  # the main thread's is there from the start
        self.tracer = Tracer(run=self.ghosts.run, recorder=self.recorder)
        self.regions = self.ghosts.regions = Regions(self.recorder, self.tracer)
        self.tokens: int | None = None
        self.starts: list[int] = []  # of each step, in events; the last entry is the end

    def play(self, experiment: Callable[..., Any]) -> None:
        """Build the experiment and run its steps on ghosts; waits for a prediction in another thread."""
        with alone():
            self._play(experiment)

    def _play(self, experiment: Callable[..., Any]) -> None:
        recorder = self.recorder
        if self.on_fake_cuda:
            semantics: AbstractContextManager[None] = nullcontext()
        else:
            semantics = cuda_semantics(self.chip.capability, without=self.without)
        step = None
        try:
            with stand_in(self.ghosts, cuda=self.on_fake_cuda), semantics, self.tracer:
                if "sums" not in self.without:
                    self._accumulation.calibrate()
                recorder.clear()
                step = experiment(self.ghosts.gpu)
                if not callable(step):
                    raise PredictionError("the experiment must return its step function")
                self.tracer.adopt(step, survey=False)
                self.tokens = getattr(step, "tokens", None)
                while len(self.starts) < self.last_step:
                    self.starts.append(len(recorder.events))
                    self.tracer.begin_step()
                    step()
                    self.tracer.name_parameters()
                    self.tracer.end_step()
                    start, end = self.starts[-1], len(recorder.events)
                    if self._settled():
                        break
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note("(in a prediction: no GPU and no values, a stand-in takes the place of both)")
            raise
        finally:
            step = None
            self.tracer.whereabouts.optimizers.clear()
            if recorder.stop():
                lay_to_rest()
        recorder.cut(end)
        if self.regions.used:
            steps = len(self.starts)
            moved = rewrite(self.regions, [*self.starts, end, *recorder.emptied])
            self.starts, end, recorder.emptied = moved[:steps], moved[steps], moved[steps + 1 :]
            start = self.starts[-1]
        while len(self.starts) < self.last_step:
            self.starts.append(len(recorder.events))
            recorder.repeat(start, end)
        self.starts.append(len(recorder.events))

    def _settled(self) -> bool:
        """Whether the step that just ended stands for those that follow."""
        done, recorder = len(self.starts), self.recorder
        if done < (2 if self.stateless else 3):
            return False
        last = recorder.relative(self.starts[-1], len(recorder.events))
        if last is None:
            return False
        return self.stateless or last == recorder.relative(self.starts[-2], self.starts[-1])


@lru_cache
def _shapes(chip: Chip, bare: bool, on_fake_cuda: bool = False) -> dict[Any, Any]:
    """Shapes of results by the shapes of arguments: facts that hold from one prediction to the next."""
    return {}


def _no_plan(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    return None


def report(
    run: Run,
    preset: machine.Card,
    *,
    budget_bytes: int | None = None,
    name: str = "",
    trace: bool = True,
    expandable: bool = False,
) -> Report:
    """The report of a run: its events replayed through the allocator, under a budget if there is one."""
    recorder = run.recorder
    fixed = workspaces(preset.capability)
    notes = [*run.ghosts.notes, *([COMPILED] if run.regions.used else [])]
    if not preset.measured:
        notes.append(
            f"predictions for {preset.name} ({preset.sm}) follow PyTorch's source; none was checked on a real one"
        )
    common: dict[str, Any] = {
        "name": name, "source": "predicted", "card": preset.name, "budget_bytes": budget_bytes, "tokens": run.tokens,
        "context_bytes": preset.context_bytes, "notes": tuple(notes), "method": METHOD,
    }  # fmt: skip
    allocator = (ExpandableAllocator if expandable else Allocator)(budget_bytes)
    blocks: dict[int, Block] = {}
    peaks: list[Peaks] = []
    position = 0
    try:
        _hold(allocator, fixed)
        for end in run.starts:
            position = _play(recorder, position, end, allocator, blocks)
            peaks.append(Peaks(*allocator.peaks()))
            allocator.reset_peaks()
    except _Ended as ended:
        where = ended.position
        phase, module = recorder.places[recorder.where[where]] if recorder.where else ("build", "")
        cause = ended.cause
        failure = Failure(
            phase=phase, module=module, wanted_bytes=cause.wanted_bytes, free_bytes=cause.free_bytes,
            scattered_bytes=cause.scattered_bytes, alive=_with(attribution.alive(recorder, where), fixed),
            message=f"{cause.wanted_bytes} bytes wanted in {phase}{f' of {module}' if module else ''}",
        )  # fmt: skip
        begin = max((start for start in run.starts if start <= where), default=0)
        timeline = _timeline(run, (begin, where), sum(fixed)) if trace else None
        return Report(status="oom", failure=failure, timeline=timeline, **common)
    span = (run.starts[-2], run.starts[-1])
    details: dict[str, Any] = {}
    if trace:
        _, at = attribution.peak(recorder, span)
        extra = sum(fixed)
        details = {
            "alive": _with(attribution.alive(recorder, at), fixed),
            "phase_peaks": {k: v + extra for k, v in attribution.phase_peaks(recorder, span).items()},
            "timeline": _timeline(run, span, extra),
        }
    if run.regions.used:
        details["band_bytes"] = tuple(int(share * peaks[-1].allocated_bytes) for share in BAND)
    return Report(status="ok", first=peaks[1], steady=peaks[-1], **details, **common)


class _Ended(Exception):
    def __init__(self, position: int, cause: OutOfMemory):
        super().__init__(str(cause))
        self.position, self.cause = position, cause


def _hold(allocator: Allocator, fixed: tuple[int, ...]) -> None:
    for size in fixed:
        try:
            allocator.take(size)
        except OutOfMemory as error:
            raise _Ended(0, error) from None


def _play(recorder: Recorder, start: int, end: int, allocator: Allocator, blocks: dict[int, Block]) -> int:
    sizes, events, stream = recorder.sizes, recorder.events, recorder.streams.get
    emptied = {at for at in recorder.emptied if start <= at < end}
    for position in range(start, end):
        if position in emptied:
            allocator.empty_cache()
        event = events[position]
        if event >= 0:
            try:
                blocks[event] = allocator.take(sizes[event], stream(event, 0))
            except OutOfMemory as error:
                raise _Ended(position, error) from None
        else:
            allocator.give(blocks.pop(~event))
    return end


def _with(alive: tuple[Holding, ...], fixed: tuple[int, ...]) -> tuple[Holding, ...]:
    held = (*alive, Holding("", "workspace", "build", sum(fixed), len(fixed)))
    return tuple(sorted(held, key=lambda h: -h.nbytes))


def _timeline(run: Run, span: tuple[int, int], extra: int) -> Timeline:
    return attribution.timeline(run.recorder, run.tracer.whereabouts.modules, span=span, extra=(("workspace", extra),))
