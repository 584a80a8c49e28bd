"""`measure`: one experiment -> one `Report`, measured on a GPU, predicted without one. Out of memory is a Report too.

A measurement takes separate passes. Peaks come from steps that nothing watches: the first, and the fourth (steady).
Time comes from steps after them. Who held what comes from one more step under the tracer, and the difference between
its peak and the true one is reported as unattributed.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import machine, memory
from .recipes import Recipe
from .results import Failure, Peaks, Report, publish
from .timing import time_step
from .units import MiB, UserError, parse_size, show_bytes

if TYPE_CHECKING:
    import torch

Experiment = Callable[..., Callable[[], Any]]
STEADY_STEP = 4
LITTLE = 64 * 1024  # bytes beside the workspaces that are not worth a collection: libraries keep a few hundred
_OPTIONS = ("name", "repeats", "trace", "nearest", "isolate", "card", "on", "record", "stateless")


def measure(
    experiment: Experiment | Recipe,
    *,
    budget: int | str | None = None,
    name: str | None = None,
    repeats: int = 20,
    trace: bool = True,
    nearest: bool = True,
    isolate: bool = False,
    card: str | None = None,
    on: str | None = None,
    record: bool = True,
    stateless: bool = False,
    **sizes: Any,
) -> Report:
    """Run `experiment` and report its memory, its time and where the memory went.

    An experiment is a function ``experiment(device, **sizes)`` that builds everything and returns ``step()``, or a
    `Recipe`. With a GPU it really runs there, under `budget` (bytes or ``"8GiB"``; None: the whole card). Without one,
    or when a `card` preset is named, the same function runs on fake tensors and its memory is predicted. ``on="cpu"``
    really runs it on the processor, for its time and its loss.

    `repeats` bounds the timed steps (0: no time); `trace` adds the attribution pass; `nearest` looks for the largest
    ``batch`` (or ``seq``) that fits when memory runs out; `isolate` measures in a fresh process; `record` writes the
    report to the open lesson's ledger, if a lesson is open; `stateless` promises that from the second step on every
    step does the same, as a recipe's does: a prediction then takes a third less time.
    Raises `UserError` for sizes that the experiment does not take, for an impossible budget and for a wrong option.
    """
    run = _Run.of(experiment, name, sizes)
    limit = None if budget is None else parse_size(budget)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 0:
        raise UserError(f"repeats must be a whole number of at least 0, not {repeats!r}")
    if card is not None and not isinstance(card, str):
        raise UserError(f"card must be the name of a preset ({', '.join(machine.PRESETS)}), not {card!r}")
    if on not in (None, "cpu", "cuda"):
        raise UserError(f"on={on!r}: measure runs on 'cuda', on 'cpu', or where it finds itself (None)")
    if on == "cuda" and not machine.has_gpu():
        raise UserError("on='cuda': PyTorch finds no CUDA card here; leave it out to have the memory predicted")
    if isolate:
        from .isolated import measure_in_process

        options = {"repeats": repeats, "trace": trace, "nearest": nearest, "card": card, "on": on}
        report = measure_in_process(run.build, name=run.name, budget=limit, settings=run.settings, **options)
        return publish(report) if record else report
    if on == "cpu":
        report = _on_cpu(run, repeats)
    elif card is not None or not machine.has_gpu():
        report = replace(run.predicted(card, limit, trace, stateless), provenance=machine.provenance())
    else:
        with machine.budget(limit):
            report = _on_card(run, limit, repeats, trace)
    if report.failure and nearest:
        found = _nearest(run, limit, card)
        report = replace(report, failure=replace(report.failure, nearest=found))
    return publish(report) if record else report


def sweep(experiment: Experiment | Recipe, *, budget: int | str | None = None, **axes: Any) -> list[Report]:
    """`measure` for every combination of the sizes given as lists: ``sweep(baseline, batch=[1, 2, 4], seq=512)``.

    Keywords of `measure` (``trace``, ``repeats``, ``card``) pass through; the attribution pass and the search for the
    nearest fit are off unless asked for.
    """
    options: dict[str, Any] = {"trace": False, "nearest": False}
    options |= {key: axes.pop(key) for key in _OPTIONS if key in axes}
    lists = {k: list(v) if isinstance(v, Iterable) and not isinstance(v, str) else [v] for k, v in axes.items()}
    rows = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    return [measure(experiment, budget=budget, **options, **row) for row in rows]


def largest(
    experiment: Experiment | Recipe, *, budget: int | str, size: str = "batch", most: int = 1024, **options: Any
) -> int:
    """The largest value of `size` that fits `budget`, by doubling and bisection; 0 when not even 1 fits."""

    def fits(value: int) -> bool:
        settings = {"repeats": 0, "trace": False, "nearest": False, "record": False, **options, size: value}
        return measure(experiment, budget=budget, **settings).ok

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    return _bisect(fits, low, min(high, most + 1))


@dataclass(frozen=True)
class _Run:
    """An experiment with its sizes bound: ``build(device) -> step``, and what can be varied."""

    name: str
    build: Experiment
    settings: dict[str, Any]
    vary: Callable[..., _Run]
    recipe: Recipe | None = None

    def predicted(self, card: str | None, limit: int | None, trace: bool, stateless: bool = False) -> Report:
        """The prediction; of a recipe it is known that every step does the same, which saves time."""
        if self.recipe is not None:
            report = memory.predict_recipe(self.recipe, card=card, budget_bytes=limit, trace=trace)
        else:
            report = memory.predict(self.build, card=card, budget_bytes=limit, trace=trace, stateless=stateless)
        return replace(report, name=self.name, settings=self.settings)

    @classmethod
    def of(cls, experiment: Experiment | Recipe, name: str | None, sizes: dict[str, Any]) -> _Run:
        def vary(**changes: Any) -> _Run:
            return cls.of(experiment, name, {**sizes, **changes})

        if isinstance(experiment, Recipe):
            recipe = experiment.changed(**sizes)
            return cls(name or str(recipe), recipe.experiment(), recipe.to_dict(), vary, recipe)
        if not callable(experiment):
            raise UserError(
                f"an experiment is a function of a device that returns step(), not {type(experiment).__name__}"
            )
        signature = inspect.signature(experiment)
        parameters = signature.parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        names = [p for p in list(parameters)[1:] if parameters[p].kind is not inspect.Parameter.VAR_KEYWORD]
        for size in sizes:
            if not anything and size not in names:
                takes = f"it takes {', '.join(names)}" if names else "it takes only a device"
                raise UserError(f"{_name(experiment)} has no size {size!r}: {takes}")
        try:
            signature.bind("a device", **sizes)
        except TypeError as error:
            raise UserError(f"{_name(experiment)} cannot be called with a device and these sizes: {error}") from None
        defaults = {n: parameters[n].default for n in names if parameters[n].default is not inspect.Parameter.empty}
        settings = {
            k: v for k, v in {**defaults, **sizes}.items() if isinstance(v, (int, float, str, bool, type(None)))
        }
        return cls(name or _name(experiment), functools.partial(experiment, **sizes), settings, vary)


def _name(experiment: Any) -> str:
    return getattr(experiment, "__name__", type(experiment).__name__)


def _build(run: _Run, device: torch.device) -> Callable[[], Any]:
    step = run.build(device)
    if not callable(step):
        raise UserError(f"{run.name} must return a function step(), not {type(step).__name__}")
    return step


# ---------------------------------------------------------------------------------------------- on a card


def _on_card(run: _Run, limit: int | None, repeats: int, trace: bool) -> Report:
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    warm_workspaces(device)
    before = release(_held_workspaces(device) + LITTLE)
    report, oom = _passes(run, device, limit, repeats, trace)
    after = release(before)
    if oom and trace:
        report, after = _explained(run, device, report, before)
    return replace(report, leftover_bytes=max(0, after - before), provenance=machine.provenance())


def _passes(run: _Run, device: torch.device, limit: int | None, repeats: int, trace: bool) -> tuple[Report, bool]:
    """All passes of one experiment. In its own frame, so that nothing it made outlives the return."""
    import torch

    report = Report(
        name=run.name,
        status="ok",
        source="measured",
        card=torch.cuda.get_device_name(device),
        budget_bytes=limit,
        settings=run.settings,
    )
    observer = _Observer.attached()
    held = _held_workspaces(device)
    if foreign := torch.cuda.memory_allocated() - held:
        note = f"{show_bytes(foreign)} were alive on the card before this experiment: they count in its peaks, too"
        report = replace(report, notes=(note,) if foreign > MiB else ())
    try:
        torch.cuda.reset_peak_memory_stats()
        step = _build(run, device)
        tokens = getattr(step, "tokens", None)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        first = _peaks()
        for _ in range(STEADY_STEP - 2):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = _loss(step())
        steady = _peaks()
        timing = time_step(step, device=device, repeats=repeats, warmup=1) if repeats else None
        report = replace(report, first=first, steady=steady, timing=timing, tokens=tokens, loss=loss)
        if steady.device_bytes is not None:
            report = replace(report, context_bytes=steady.device_bytes - steady.reserved_bytes)
        if trace:
            report = _attributed(report, step, held)
        return report, False
    except torch.OutOfMemoryError as error:
        failure = observer.failure(error, limit)
        forget(error)
        return replace(report, status="oom", failure=failure), True


def _attributed(report: Report, step: Callable[[], Any], workspace: int) -> Report:
    with memory.Tracer(workspace=workspace).adopt(step) as tracer:
        step()
    assert report.steady is not None
    return replace(
        report,
        phase_peaks=tracer.phase_peaks(),
        alive=tracer.alive_at_peak(),
        timeline=tracer.timeline(),
        unattributed_bytes=report.steady.allocated_bytes - tracer.peak_bytes,
    )


def _explained(run: _Run, device: torch.device, report: Report, before: int) -> tuple[Report, int]:
    """The same failure once more under the tracer: in which phase and module, and who was alive."""
    failure = report.failure
    assert failure is not None
    tracer = memory.Tracer(building=True, workspace=_held_workspaces(device))
    if _fails(run, device, tracer):
        phase, module = tracer.where()
        failure = replace(failure, phase=phase, module=module, alive=tracer.alive_now())
        report = replace(report, failure=failure, timeline=tracer.timeline())
    else:
        notes = (*report.notes, "the failure did not come again under the tracer: its place is not known")
        report = replace(report, notes=notes)
    del tracer
    return report, release(before)


def _fails(run: _Run, device: torch.device, tracer: memory.Tracer) -> bool:
    import torch

    try:
        with tracer:
            step = _build(run, device)
            tracer.adopt(step, survey=False)
            for _ in range(STEADY_STEP):
                tracer.begin_step()
                step()
    except torch.OutOfMemoryError as error:
        forget(error)
        return True
    return False


def _peaks() -> Peaks:
    import torch

    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    allocated, requested, reserved = (stats[f"{n}_bytes.all.peak"] for n in ("allocated", "requested", "reserved"))
    return Peaks(allocated, requested, reserved, machine.device_bytes())


@functools.cache
def warm_workspaces(device: torch.device) -> None:
    """Let cuBLAS take its workspaces in this thread and in autograd's, so that they count as held before any build.

    Once for each device: the workspaces stay.
    """
    import torch

    for dtype in (torch.float32, torch.float16):
        x = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
        b = torch.randn(64, device=device, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, x, b).sum().backward()
        (x.view(4, 16, 64) @ x.view(4, 64, 16)).sum().backward()
    torch.cuda.synchronize(device)


def _held_workspaces(device: torch.device) -> int:
    """The part of what is allocated before a build that is cuBLAS'; more than its workspaces is somebody's tensors."""
    import torch

    from .memory.workspaces import workspaces

    return min(torch.cuda.memory_allocated(), sum(workspaces(torch.cuda.get_device_capability(device))))


def release(floor: int = 0) -> int:
    """Collect cycles, hand cached segments back to the driver, and return the bytes still allocated.

    Where no more than `floor` bytes are allocated, there is nothing to collect: one collection takes 0.2 s once
    transformers and a compiler are loaded.
    """
    import torch

    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(last, torch.OutOfMemoryError):  # the interpreter keeps the last traceback, and with it every frame
        forget(last)
    for _ in range(3):  # finalisers of one pass can free more
        if torch.cuda.memory_allocated() <= floor or not gc.collect():
            break
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def forget(error: BaseException | None) -> None:
    """Empty the frames that an exception and those behind it keep alive."""
    waiting, seen = [error], set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        waiting += [error.__cause__, error.__context__]


class _Observer:
    """What the allocator itself says at the moment it gives up, before anything is unwound."""

    _instance: _Observer | None = None  # PyTorch has no call to detach an observer, so there is one for the process

    def __init__(self) -> None:
        self.wanted = self.allocated = self.reserved = 0

    @classmethod
    def attached(cls) -> _Observer:
        import torch

        if cls._instance is None:
            cls._instance = cls()
            attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
            attach(cls._instance._notice)
        cls._instance.wanted = cls._instance.allocated = cls._instance.reserved = 0
        return cls._instance

    def _notice(self, device: int, wanted: int, device_total: int, device_free: int) -> None:
        import torch

        self.wanted = wanted
        self.allocated, self.reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    def failure(self, error: BaseException, limit: int | None) -> Failure:
        import torch

        message = str(error).splitlines()[0]
        wanted = self.wanted or _size_in(message, r"Tried to allocate ([\d.]+ \w+)")
        ceiling = limit if limit is not None else torch.cuda.get_device_properties(0).total_memory
        return Failure(
            phase="other",
            module="",
            wanted_bytes=wanted,
            free_bytes=max(0, ceiling - self.allocated),
            scattered_bytes=max(0, self.reserved - self.allocated),
            message=message,
        )


def _size_in(message: str, pattern: str) -> int:
    match = re.search(pattern, message)
    return parse_size(match[1]) if match else 0


def _loss(value: Any) -> float | None:
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) else None


# ------------------------------------------------------------------------------------------- on the processor


def _on_cpu(run: _Run, repeats: int) -> Report:
    import torch

    step = _build(run, torch.device("cpu"))
    timing = time_step(step, device="cpu", warmup=1, repeats=max(1, repeats), least=3)
    report = Report(name=run.name, status="ok", source="cpu", card="processor", settings=run.settings, timing=timing)
    return replace(report, tokens=getattr(step, "tokens", None), loss=_loss(step()), provenance=machine.provenance())


# ------------------------------------------------------------------------------------------- what would fit


def _nearest(run: _Run, limit: int | None, card: str | None) -> tuple[str, ...]:
    """The largest batch, else the longest sequence, that fits where the failing one does not."""
    for size in ("batch", "seq"):
        value = run.settings.get(size)
        if not isinstance(value, int) or isinstance(value, bool) or value < 2:
            continue
        peaks: dict[int, Report] = {}

        def fits(candidate: int, size: str = size, peaks: dict[int, Report] = peaks) -> bool:
            smaller = run.vary(**{size: candidate})
            if card is not None or not machine.has_gpu():
                report = smaller.predicted(card, limit, trace=False)
            else:
                with machine.budget(limit):
                    report = _fitting(smaller, limit)
            peaks[candidate] = report
            return report.ok

        best = _bisect(fits, 0, value)
        if best:
            return (f"{size} {best} ({show_bytes(peaks[best].peak_bytes)})",)
    return ()


def _fitting(run: _Run, limit: int | None) -> Report:
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    report, _ = _passes(run, device, limit, repeats=0, trace=False)
    release(_held_workspaces(device) + LITTLE)
    return report


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest value in ``[low, high)`` that fits, given that `low` does (or is 0) and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
