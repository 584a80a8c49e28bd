"""Is the card waiting for data? `StallMeter` times waits, `Utilisation` asks the driver, `gaps` reads a trace."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from . import machine

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Stalls:
    """Where the time of a loop went. ``waited_seconds``: the loop stood in ``next(loader)``. ``idle_seconds``: the card
    had nothing to do between one step's work and the next one's (None without a card). ``seconds``: all of it, first
    batch excluded."""

    steps: int
    seconds: float
    waited_seconds: float
    idle_seconds: float | None
    first_seconds: float

    @property
    def waited(self) -> float:
        """The share of the loop's time in which it waited for the loader."""
        return self.waited_seconds / self.seconds

    @property
    def idle(self) -> float | None:
        """The share of the loop's time in which the card waited for the loop, whatever the reason."""
        return None if self.idle_seconds is None else self.idle_seconds / self.seconds

    @property
    def stalled(self) -> float:
        """What the loader costs: the share in which the loop waited, but on a card no more than its idle share, since
        a loop that runs ahead of the card may wait for free."""
        return self.waited if self.idle is None else min(self.waited, self.idle)

    @property
    def step_seconds(self) -> float:
        """Seconds from one batch to the next."""
        return self.seconds / self.steps


class StallMeter:
    """Wraps a loader: ``for batch in meter(loader): step(batch)``, then ``meter.result()``.

    The first batch starts the workers and warms everything up; it is reported apart (``first_seconds``). On a card
    the idle time comes from two events a step, one at the end of its work and one at the beginning of the next, so that
    nothing is synchronised before the end.
    """

    def __init__(self, device: torch.device | str | None = None):
        import torch

        self.device = torch.device(device) if device is not None else machine.device()
        self._waits: list[float] = []
        self._first = self._total = 0.0
        self._events: list[tuple[Any, Any]] = []

    def __call__(self, loader: Iterable[T]) -> Iterator[T]:
        on_card = self.device.type == "cuda"
        begin = time.perf_counter()
        batches = iter(loader)
        end = object()
        batch = next(batches, end)
        self._first = time.perf_counter() - begin
        start: float | None = None
        while batch is not end:
            yield batch  # type: ignore[misc]
            if start is None:  # the first step is not counted either
                self._wait()
                start = time.perf_counter()
            before = self._event() if on_card else None
            asked = time.perf_counter()
            batch = next(batches, end)
            waited = time.perf_counter() - asked
            if batch is not end:
                self._waits.append(waited)
                if on_card:
                    self._events.append((before, self._event()))
        self._wait()
        self._total = time.perf_counter() - start if start is not None else 0.0

    def result(self) -> Stalls:
        """What was measured. Raises `ValueError` when there were fewer than two batches: the first is the warm-up."""
        if not self._waits:
            raise ValueError("a stall meter needs at least two batches: the first one is the warm-up")
        idle = sum(a.elapsed_time(b) for a, b in self._events) / 1e3 if self._events else None
        return Stalls(len(self._waits), self._total, sum(self._waits), idle, self._first)

    def _event(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


class Utilisation:
    """Asks the driver, from a second thread, in which share of the time some kernel ran: what nvidia-smi shows.

    ``with Utilisation() as used: ...``, then ``used.mean`` (a fraction; None without a card, or when the driver does
    not say). The driver averages over up to a second (NVML, nvmlUtilization_t), so the first second is not counted:
    let it run for two or more.
    """

    def __init__(self, every_seconds: float = 0.1, settle_seconds: float = 1.0):
        self.every, self.settle = every_seconds, settle_seconds
        self.samples: list[float] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def mean(self) -> float | None:
        """The mean share over all samples."""
        return statistics.fmean(self.samples) if self.samples else None

    def __enter__(self) -> Utilisation:
        library = machine.nvml()
        if library is not None:
            self._thread = threading.Thread(target=self._watch, args=(library,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, library: Any) -> None:
        handle = machine.nvml_card(library)
        if self._done.wait(self.settle):
            return
        while not self._done.wait(self.every):
            try:
                self.samples.append(library.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            except library.NVMLError:  # a virtual card, or a slice of one, may not say
                return


@dataclass(frozen=True)
class Gap:
    """A time in which the card had nothing to do: from ``start_seconds`` on, ``seconds`` long; ``during`` is what the
    processor was at for most of it (the innermost operation that covers at least half)."""

    start_seconds: float
    seconds: float
    during: str


def gaps(profile: Any, *, least_seconds: float = 1e-3, busy: Callable[[Any], bool] | None = None) -> list[Gap]:
    """The gaps in the trace of a ``torch.profiler.profile``, longest first: no kernel, copy or set ran for at least
    `least_seconds`. `busy` says which events keep the device busy, when that is something else."""
    from torch.autograd import DeviceType

    events = [e for e in profile.events() if e.time_range.elapsed_us() > 0]
    if busy is None:

        def busy(event: Any) -> bool:
            return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)

    work = sorted((e.time_range.start, e.time_range.end) for e in events if busy(e))
    host = [e for e in events if e.device_type == DeviceType.CPU and not busy(e)]
    origin = min((e.time_range.start for e in events), default=0)
    found, until = [], None
    for start, end in work:
        if until is not None and start - until >= 1e6 * least_seconds:
            found.append(Gap((until - origin) / 1e6, (start - until) / 1e6, _covering(host, until, start)))
        until = end if until is None else max(until, end)
    return sorted(found, key=lambda gap: -gap.seconds)


def _covering(events: list[Any], start: float, end: float) -> str:
    """The shortest event that covers at least half of the time from `start` to `end`."""

    def covered(event: Any) -> float:
        return min(event.time_range.end, end) - max(event.time_range.start, start)

    enough = [e for e in events if covered(e) >= (end - start) / 2]
    return min(enough, key=lambda e: e.time_range.elapsed_us()).name if enough else "(no operation of PyTorch)"
