"""What only a real card can show. `make test-gpu` runs these; without a card they are skipped and counted."""

import gc
import time

import pytest
import torch

import labkit as lab
from labkit import machine, measuring
from labkit.recipes import Recipe
from labkit.units import GiB, MiB

pytestmark = pytest.mark.gpu


def layers(device, width=1024, depth=8, batch=64, fail=False):
    """A small stack of linear layers; with `fail` its step asks for more than any budget here allows."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(batch, width, device=device)

    def step():
        loss = model(x).square().mean()
        if fail:
            hold = [torch.empty(64 * MiB, dtype=torch.uint8, device=device) for _ in range(64)]
            return hold
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def test_a_budget_is_a_real_cap_and_is_lifted():
    with lab.budget("1GiB"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GiB, dtype=torch.uint8, device="cuda")
        kept = torch.empty(GiB // 2, dtype=torch.uint8, device="cuda")
    more = torch.empty(2 * GiB, dtype=torch.uint8, device="cuda")
    assert kept.numel() + more.numel() == GiB // 2 + 2 * GiB
    del kept, more
    measuring.release()


def test_two_hundred_failures_leave_nothing_behind():
    lab.measure(layers, budget="512MiB", fail=True)
    before = measuring.release()
    gc.freeze()  # what the libraries made is not searched for cycles two hundred times
    for n in range(200):
        report = lab.measure(layers, budget="512MiB", fail=True, trace=n % 20 == 0, nearest=False)
        assert report.status == "oom" and report.leftover_bytes < MiB
    gc.unfreeze()
    assert measuring.release() - before < MiB


def test_a_cycle_a_hook_and_a_traceback_do_not_hold_memory():
    def experiment(device):
        block = torch.empty(256 * MiB, dtype=torch.uint8, device=device)
        circle = [block]
        circle.append(circle)
        layer = torch.nn.Linear(8, 8, device=device)
        layer.register_forward_hook(lambda *_: circle and None)  # holds the circle, changes nothing

        def step():
            layer(torch.ones(8, 8, device=device)).sum().backward()
            return torch.empty(4 * GiB, dtype=torch.uint8, device=device)

        return step

    report = lab.measure(experiment, budget="1GiB")
    assert report.status == "oom" and report.failure.wanted_bytes == 4 * GiB and report.leftover_bytes == 0


def test_what_an_experiment_leaves_behind_is_reported():
    kept = []

    def experiment(device):
        kept.append(torch.empty(32 * MiB, dtype=torch.uint8, device=device))
        return lambda: None

    assert lab.measure(experiment, repeats=0, trace=False).leftover_bytes == 32 * MiB
    kept.clear()
    measuring.release()


def test_what_lives_before_an_experiment_is_said_and_is_no_workspace():
    somebody = torch.ones(64 * MiB, dtype=torch.uint8, device="cuda")

    def experiment(device):
        weight = torch.randn(256, 256, device=device, requires_grad=True)
        return lambda: (weight @ weight).sum().backward()

    report = lab.measure(experiment, repeats=0)
    assert any(note.startswith("64.0 MiB were alive") for note in report.notes), report.notes
    assert report.held_by()["workspace"] <= 66 * MiB
    del somebody
    assert not lab.measure(experiment, repeats=0).notes


def test_the_failing_phase_module_and_the_living_are_named():
    report = lab.measure(Recipe.of(attention="eager"), budget="8GiB")
    failure = report.failure
    assert report.status == "oom" and failure.phase in ("forward", "backward")
    assert "transformer" in failure.module or "lm_head" in failure.module or "block" in failure.module
    alive = sum(h.nbytes for h in failure.alive)
    allocated = 8 * GiB - failure.free_bytes
    assert alive == pytest.approx(allocated, rel=0.03)
    assert failure.nearest and failure.nearest[0].startswith("batch")
    with lab.budget("8GiB"):  # the kernel lives on
        assert float(torch.ones(10, device="cuda").sum()) == 10


@pytest.mark.parametrize(
    "fields",
    [
        {"batch": 2, "seq": 512},
        {"batch": 4, "seq": 512, "precision": "amp-bf16", "checkpoint": 2},
        {"batch": 2, "seq": 256, "precision": "bf16", "optimizer": "adam8bit", "loss": "chunked"},
    ],
)
def test_measured_and_predicted_agree(fields):
    recipe = Recipe.of(**fields)
    measured = lab.measure(recipe, repeats=0, trace=False)
    predicted = lab.measure(recipe, card="h200", trace=False)
    assert measured.source == "measured" and predicted.source == "predicted"
    for when in ("first", "steady"):
        real, guess = getattr(measured, when), getattr(predicted, when)
        assert guess.allocated_bytes == pytest.approx(real.allocated_bytes, rel=0.02)
        assert guess.requested_bytes == pytest.approx(real.requested_bytes, rel=0.01)


def test_attribution_sums_to_the_peak_and_is_not_slow():
    recipe = Recipe.of(batch=4, seq=512)
    report = lab.measure(recipe, repeats=10)
    attributed = sum(h.nbytes for h in report.alive)
    assert attributed + report.unattributed_bytes == pytest.approx(report.steady.allocated_bytes, rel=1e-3)
    assert abs(report.unattributed_bytes) < 0.03 * report.steady.allocated_bytes
    assert max(report.timeline.totals) == pytest.approx(attributed, rel=1e-3)
    assert {"forward", "backward", "optimizer"} <= set(report.timeline.phases)

    step = recipe.experiment()(torch.device("cuda"))
    for _ in range(3):
        step()
    torch.cuda.synchronize()

    def seconds(run):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def traced():
        with lab.memory.Tracer().adopt(step):
            torch.cuda.synchronize()
            return seconds(step)

    plain = sorted(seconds(step) for _ in range(5))[2]
    slow = sorted(traced() for _ in range(5))[2]
    print(f"\ntracer: step {plain * 1e3:.1f} ms, traced {slow * 1e3:.1f} ms, {slow / plain:.2f} times")
    assert slow < 3 * plain


def test_a_fresh_process_gives_the_same_bytes():
    recipe = Recipe.of(batch=1, seq=256)
    here = lab.measure(recipe, repeats=0, trace=False)
    there = lab.measure(recipe, repeats=0, trace=False, isolate=True)
    assert there.source == "measured"  # workspaces that other tests left in this process are not in the other
    assert abs(there.steady.requested_bytes - here.steady.requested_bytes) <= 2 * MiB


def test_the_context_is_reported_apart_and_lies_in_the_band():
    report = lab.measure(layers, repeats=5)
    low, high = machine.PRESETS["h200"].context_band
    assert low <= report.context_bytes <= high
    assert report.steady.device_bytes == report.context_bytes + report.steady.reserved_bytes


def test_a_clock_that_does_not_wait_is_wrong_and_events_are_not():
    a = torch.randn(8192, 8192, device="cuda")
    torch.mm(a, a)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.mm(a, a)
    naive = time.perf_counter() - start
    honest = lab.time_step(lambda: torch.mm(a, a)).median_seconds
    assert naive < honest / 5
