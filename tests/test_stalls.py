"""The meters of a loop: what it waits for, and what a trace says of the gaps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from labkit import machine
from labkit.stalls import StallMeter, Stalls, Utilisation, gaps


def slow(count: int, seconds: float) -> Iterator[int]:
    for number in range(count):
        time.sleep(seconds)
        yield number


def test_waiting_and_working_are_told_apart() -> None:
    starved, fed = StallMeter("cpu"), StallMeter("cpu")
    assert list(starved(slow(6, 0.03))) == list(range(6))
    for _ in fed(slow(6, 0.0)):
        time.sleep(0.03)
    a, b = starved.result(), fed.result()
    assert a.steps == b.steps == 5
    assert a.waited > 0.9 and a.idle is None and a.stalled == a.waited
    assert b.waited < 0.3 and b.seconds >= 5 * 0.03
    assert a.first_seconds >= 0.03 and a.step_seconds == a.seconds / 5


def test_a_loop_that_runs_ahead_of_the_card_waits_for_free() -> None:
    assert Stalls(10, 1.0, 0.8, 0.1, 0.0).stalled == pytest.approx(0.1)
    assert Stalls(10, 1.0, 0.1, 0.6, 0.0).stalled == pytest.approx(0.1)  # idle for another reason
    assert Stalls(10, 1.0, 0.3, None, 0.0).stalled == pytest.approx(0.3)


@pytest.mark.parametrize("count", [0, 1])
def test_one_batch_is_no_measurement(count: int) -> None:
    meter = StallMeter("cpu")
    assert len(list(meter(range(count)))) == count
    with pytest.raises(ValueError, match="two batches"):
        meter.result()


def test_utilisation_is_none_without_a_card_and_a_mean_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvml", lambda: None)
    with Utilisation() as used:
        pass
    assert used.mean is None
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=40),
    )
    monkeypatch.setattr(machine, "nvml", lambda: library)
    with Utilisation(every_seconds=0.01, settle_seconds=0.02) as used:
        time.sleep(0.2)
    assert used.mean == pytest.approx(0.4) and len(used.samples) > 2


def test_a_card_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: Any) -> None:
        raise RuntimeError("not supported")

    library = SimpleNamespace(
        NVMLError=RuntimeError, nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetUtilizationRates=refuse
    )
    monkeypatch.setattr(machine, "nvml", lambda: library)
    with Utilisation(every_seconds=0.01, settle_seconds=0.0) as used:
        time.sleep(0.05)
    assert used.mean is None


def test_a_trace_names_what_the_card_waits_for() -> None:
    def load() -> None:
        with record_function("load"):
            time.sleep(0.03)

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(3):
            with record_function("step"):
                torch.ones(10) + 1
            load()
        with record_function("step"):
            time.sleep(0.001)
    found = gaps(trace, least_seconds=0.01, busy=lambda event: event.name == "step")
    assert [gap.during for gap in found] == ["load"] * 3
    assert all(0.025 < gap.seconds < 0.5 for gap in found)
    assert gaps(trace, least_seconds=5, busy=lambda event: event.name == "step") == []


def event(name: str, start: int, end: int, device: DeviceType) -> Any:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=False)


def test_overlapping_kernels_leave_no_gap_and_the_innermost_name_counts() -> None:
    card, host = DeviceType.CUDA, DeviceType.CPU
    events = [
        event("a", 1000, 9000, card), event("b", 2000, 3000, card), event("c", 20_000, 21_000, card),
        event("outer", 0, 30_000, host), event("loader", 9500, 19_000, host), event("short", 10_000, 11_000, host),
        event("d", 40_000, 41_000, card),
    ]  # fmt: skip
    found = gaps(SimpleNamespace(events=lambda: events), least_seconds=1e-3)
    assert [(round(g.seconds, 4), g.during) for g in found] == [(0.019, "(no operation of PyTorch)"), (0.011, "loader")]
    assert found[1].start_seconds == pytest.approx(0.009)


@pytest.mark.gpu
def test_on_a_card_the_idle_time_is_the_loaders() -> None:
    a = torch.randn(2048, 2048, device="cuda")

    def step() -> None:
        for _ in range(20):
            a @ a

    step()
    starved, ahead = StallMeter(), StallMeter()
    for _ in starved(slow(8, 0.05)):
        step()
    for _ in ahead(slow(30, 0.0)):
        step()
    assert starved.result().stalled > 0.5
    assert ahead.result().stalled < 0.1
