"""`measure` without a card: the CUDA path on a faked allocator, the predicted path through its real predictor."""

import gc
import sys
import weakref

import pytest
import torch

from labkit import machine, measuring, results
from labkit.measuring import _bisect, forget, largest, measure, sweep
from labkit.results import Peaks, Report
from labkit.units import GiB, MiB, UserError


class Block:
    """Memory of the faked card: counted until nothing refers to it."""

    def __init__(self, card, nbytes):
        card.take(nbytes)
        weakref.finalize(self, card.give, nbytes)


class Card:
    """A card of 8 GiB: enough of torch.cuda for `measure`, with a counter instead of memory."""

    total_memory, name, major, minor = 8 * GiB, "Faked", 9, 0

    def __init__(self, monkeypatch):
        self.held = self.peak = 0
        self.fraction = 1.0
        self.notice = None
        fakes = {
            "current_device": lambda: 0,
            "get_device_properties": lambda *_: self,
            "get_device_name": lambda *_: self.name,
            "device_count": lambda: 1,
            "memory_allocated": lambda *_: self.held,
            "memory_reserved": lambda *_: self.held,
            "memory_stats": lambda *_: {
                f"{n}_bytes.all.peak": self.peak for n in ("allocated", "requested", "reserved")
            },
            "reset_peak_memory_stats": lambda *_: setattr(self, "peak", self.held),
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (self.total_memory - self.held - 500 * MiB, self.total_memory),
            "get_per_process_memory_fraction": lambda *_: self.fraction,
            "set_per_process_memory_fraction": lambda f, *_: setattr(self, "fraction", f),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(machine, "has_gpu", lambda: True)
        monkeypatch.setattr(machine, "nvml", lambda: None)
        monkeypatch.setattr(measuring, "warm_workspaces", lambda *_: None)
        monkeypatch.setattr(measuring._Observer, "_instance", None)
        attach = lambda notice: setattr(self, "notice", notice)  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)

    def take(self, nbytes):
        if self.held + nbytes > self.fraction * self.total_memory:
            self.notice(0, nbytes, self.total_memory, 0)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / MiB:.2f} MiB. More text.\nAnd more."
            )
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def give(self, nbytes):
        self.held -= nbytes


@pytest.fixture
def card(monkeypatch):
    gc.collect()
    return Card(monkeypatch)


def test_peaks_of_the_first_and_of_the_steady_step(card):
    def experiment(device):
        weights, state = Block(card, GiB), []

        def step():
            work = Block(card, GiB)
            if not state:
                state.append(Block(card, 256 * MiB))
            return 1.5 if weights and work else None

        return step

    report = measure(experiment, repeats=0, trace=False)
    assert report.ok and report.source == "measured" and report.card == "Faked" and report.loss == 1.5
    assert report.first.allocated_bytes == report.steady.allocated_bytes == 2 * GiB + 256 * MiB
    assert (
        report.steady.device_bytes == report.steady.reserved_bytes - GiB + 500 * MiB
    )  # read after the step's work went
    assert report.leftover_bytes == 0 and card.held == 0
    assert report.provenance["card"] == "Faked"


def hungry(card, *, cycle=False, keep=None):
    """An experiment that runs out of memory at its second block of 1 GiB, leaving behind what it is told to."""

    def experiment(device):
        weights = Block(card, 256 * MiB)

        def step():
            blocks = [weights]
            if cycle:
                blocks.append(blocks)
            for _ in range(20):
                blocks.append(Block(card, GiB))
                if keep is not None:
                    keep.append(blocks[-1])

        return step

    return experiment


def test_out_of_memory_is_a_report_with_the_allocators_own_words(card):
    report = measure(hungry(card), budget="2GiB", trace=False)
    failure = report.failure
    assert report.status == "oom" and not report.fits("80GiB") and report.budget_bytes == 2 * GiB
    assert failure.wanted_bytes == GiB and failure.free_bytes == 768 * MiB
    assert failure.message == "CUDA out of memory. Tried to allocate 1024.00 MiB. More text."
    assert card.fraction == 1.0  # the budget is lifted


@pytest.mark.parametrize("cycle", [False, True])
def test_after_running_out_everything_is_back(card, cycle):
    for _ in range(3):
        report = measure(hungry(card, cycle=cycle), budget="2GiB")
        assert report.leftover_bytes == 0 and card.held == 0


def test_what_does_not_come_back_is_reported(card):
    keep = []
    report = measure(hungry(card, keep=keep), budget="2GiB")
    assert report.leftover_bytes == GiB  # the block of the first pass; it left no room for another in the second
    assert "left behind" in str(measure(lambda device: lambda: keep.append(Block(card, MiB)), repeats=0, trace=False))


def test_a_traceback_kept_by_the_interpreter_does_not_hold_memory(card, monkeypatch):
    def outer():
        block = Block(card, GiB)
        try:
            Block(card, 99 * GiB)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError("again") from error
        return block

    card.notice = lambda *_: None
    try:
        outer()
    except torch.OutOfMemoryError as error:
        monkeypatch.setattr(sys, "last_exc", error, raising=False)
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert card.held == GiB
    assert measuring.release() == 0


def test_cycles_are_collected_only_where_something_is_left(card, monkeypatch):
    collected = []
    monkeypatch.setattr(measuring.gc, "collect", lambda: collected.append(1) or 0)
    block = Block(card, GiB)
    measuring.release(floor=GiB)
    assert not collected
    measuring.release(floor=GiB - 1)
    assert collected
    del block


def test_other_errors_are_not_swallowed_and_lift_the_budget(card):
    def broken(device):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        measure(broken, budget="2GiB")
    assert card.fraction == 1.0


def sized(card):
    def experiment(device, batch=8, seq=64):
        block = Block(card, batch * seq * 4 * MiB)
        return lambda: block is None

    return experiment


def test_the_nearest_that_fits_is_found_by_bisection(card):
    assert measure(sized(card), budget="1GiB").failure.nearest == ("batch 4 (1.00 GiB)",)
    assert measure(sized(card), budget="128MiB", batch=1).failure.nearest == ("seq 32 (128.0 MiB)",)
    assert measure(sized(card), budget="2MiB", batch=1, seq=1).failure.nearest == ()
    assert card.held == 0


def test_largest(card):
    assert largest(sized(card), budget="1GiB") == 4
    assert largest(sized(card), budget="1GiB", most=3) == 3
    assert largest(sized(card), budget="100MiB") == 0
    assert largest(sized(card), budget="1GiB", size="seq", batch=1) == 256


def test_sweep_takes_every_combination(card):
    reports = sweep(sized(card), budget="8GiB", batch=[1, 2], seq=(16, 32), repeats=0)
    assert [(r.settings["batch"], r.settings["seq"]) for r in reports] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    assert [r.peak_bytes // MiB for r in reports] == [64, 128, 128, 256]


def test_bisection_needs_no_more_probes_than_it_must():
    for best in range(8):
        asked = []
        assert _bisect(lambda n, best=best, asked=asked: asked.append(n) or n <= best, 0, 8) == best
        assert len(asked) == 3


def test_mistakes_are_one_clear_sentence(card):
    with pytest.raises(UserError, match="has no size 'bach': it takes batch, seq"):
        measure(sized(card), bach=2)
    with pytest.raises(UserError, match="it takes only a device"):
        measure(lambda device: None, batch=2)
    with pytest.raises(UserError, match="must return a function step"):
        measure(lambda device: 3, repeats=0)
    with pytest.raises(UserError, match="function of a device"):
        measure("gpt2")
    with pytest.raises(UserError, match="larger than this card"):
        measure(sized(card), budget="9GiB")
    with pytest.raises(UserError, match="on='tpu'"):
        measure(sized(card), on="tpu")
    with pytest.raises(UserError, match="<lambda> cannot be called with a device .*too many positional"):
        measure(lambda: 0)
    with pytest.raises(UserError, match="these sizes: missing a required argument: 'batch'"):
        measure(lambda device, batch: 0)
    with pytest.raises(UserError, match="name of a preset .*rtx4090.* not 5"):
        measure(sized(card), card=5)
    for repeats in ("a", -3, 2.5, True):
        with pytest.raises(UserError, match="repeats must be a whole number"):
            measure(sized(card), repeats=repeats)


def test_forget_empties_every_frame_of_a_chain():
    kept = []

    def inner():
        probe = Probe()
        kept.append(weakref.ref(probe))
        raise ValueError

    def outer():
        try:
            inner()
        except ValueError as error:
            raise KeyError from error

    try:
        outer()
    except KeyError as error:
        caught = error
    gc.collect()
    assert kept[0]() is not None
    forget(caught)
    gc.collect()
    assert kept[0]() is None


class Probe:
    pass


def test_reports_are_published_to_an_open_lesson(card, monkeypatch):
    seen = []
    monkeypatch.setattr(results, "listeners", [seen.append])
    report = measure(sized(card), repeats=0, trace=False, batch=1)
    measure(sized(card), repeats=0, trace=False, batch=1, record=False)
    largest(sized(card), budget="1GiB")
    assert seen == [report]


def test_on_the_processor_time_and_loss_are_real():
    def experiment(device):
        assert device.type == "cpu"
        x = torch.ones(64, 64)
        return lambda: (x @ x).mean()

    report = measure(experiment, on="cpu", repeats=5)
    assert report.source == "cpu" and report.loss == 64.0 and report.timing.clock == "host"
    assert report.steady is None and report.peak_bytes is None


def test_a_fresh_process_measures_a_function_that_only_exists_here():
    factor = 3.0

    def experiment(device, size=8):
        x = torch.full((size, size), factor)
        return lambda: x.mean()

    report = measure(experiment, on="cpu", isolate=True, size=16, repeats=3)
    assert report.loss == 3.0 and report.settings == {"size": 16} and report.source == "cpu"


def test_a_fresh_process_that_dies_is_an_error_with_its_last_words():
    def experiment(device):
        import os

        print("goodbye", flush=True)
        os._exit(7)

    with pytest.raises(RuntimeError, match=r"code 7(.|\n)*goodbye"):
        measure(experiment, on="cpu", isolate=True)


def test_without_a_card_the_same_function_is_predicted(monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda: False)

    def experiment(device, batch=2):
        layer = torch.nn.Linear(1024, 1024, device=device)
        x = torch.randn(batch, 1024, device=device)

        def step():
            layer(x).sum().backward()
            layer.zero_grad(set_to_none=True)

        return step

    report = measure(experiment, batch=4)
    weights = 4 * 1024 * 1025
    assert report.source == "predicted" and report.settings == {"batch": 4} and isinstance(report.steady, Peaks)
    assert 2 * weights < report.steady.requested_bytes - 65 * MiB < 2 * weights + MiB
    assert report.timing is None and isinstance(report, Report)
