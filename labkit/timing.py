"""Time: warm-up, CUDA events, medians with spread, the noise floor, and the ceilings that nothing can beat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .machine import device as default_device
from .results import Timing

if TYPE_CHECKING:
    import torch


def time_step(
    step: Callable[[], Any],
    *,
    device: torch.device | str | None = None,
    warmup: int = 2,
    repeats: int = 30,
    least: int = 5,
    max_seconds: float = 2.0,
    noise: float = 0.01,
) -> Timing:
    """Seconds of one call of `step`: the median over up to `repeats` calls after `warmup` uncounted ones.

    On a card each call lies between two CUDA events and the host waits only at the end, so that launches overlap as in
    training. It stops after `least` calls once the interquartile range is below `noise` of the median, or `max_seconds`
    have passed. The first call of all is reported apart (``first_seconds``), as the cold one.
    """
    import torch

    device = torch.device(device) if device is not None else default_device()
    on_card = device.type == "cuda"

    def wait() -> None:
        if on_card:
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    step()
    wait()
    first = time.perf_counter() - start
    for _ in range(max(0, warmup - 1)):
        step()
    wait()
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < repeats:
        seconds += _batch(step, min(least, repeats - len(seconds)), on_card)
        if time.perf_counter() - start > max_seconds or (
            len(seconds) >= least and _spread(seconds) < noise * statistics.median(seconds)
        ):
            break
    return Timing(
        median_seconds=statistics.median(seconds),
        spread_seconds=_spread(seconds),
        repeats=len(seconds),
        first_seconds=first,
        clock="cuda events" if on_card else "host",
    )


def _batch(step: Callable[[], Any], count: int, on_card: bool) -> list[float]:
    if not on_card:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return seconds
    import torch

    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _spread(seconds: list[float]) -> float:
    """Interquartile range; the full range of fewer than four values."""
    if len(seconds) < 4:
        return max(seconds) - min(seconds)
    low, _, high = statistics.quantiles(seconds, n=4)
    return high - low


def noise_floor(device: torch.device | str | None = None) -> Timing:
    """The time of doing nothing, measured as everything else is: what a difference must exceed to mean anything."""
    return time_step(lambda: None, device=device, warmup=3, repeats=100, least=100)


@dataclass(frozen=True)
class Ceiling:
    """The best rate seen of one kind of work: ``rate`` in FLOP/s (a product) or bytes/s (a copy, read plus written)."""

    name: str
    rate: float
    unit: str
    timing: Timing


def product_ceiling(dtype: torch.dtype, size: int, device: torch.device | str | None = None) -> Ceiling:
    """A ``(size, size) @ (size, size)`` product of random numbers in `dtype`: 2 size^3 operations."""
    import torch

    device = torch.device(device) if device is not None else default_device()
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    timing = time_step(lambda: torch.mm(a, b, out=out), device=device, warmup=5)
    return Ceiling(
        f"{str(dtype).removeprefix('torch.')} product {size}", 2 * size**3 / timing.median_seconds, "FLOP/s", timing
    )


def copy_ceiling(nbytes: int, device: torch.device | str | None = None) -> Ceiling:
    """A copy of `nbytes` inside the device, counted as read plus written; make it several times the last cache."""
    import torch

    device = torch.device(device) if device is not None else default_device()
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    timing = time_step(lambda: target.copy_(source), device=device, warmup=3)
    return Ceiling(f"copy {nbytes >> 20} MiB", 2 * nbytes / timing.median_seconds, "bytes/s", timing)
