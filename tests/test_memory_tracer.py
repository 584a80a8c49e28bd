"""The tracer on real runs: here on the processor, where every number can be worked out."""

import pytest
import torch

from labkit import memory
from labkit.memory import Tracer
from labkit.memory.attribution import Rows, blocks
from labkit.units import MiB


def stack(device, width=512, depth=4, batch=2048):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(batch, width, device=device)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


@pytest.fixture(scope="module")
def traced():
    step = stack("cpu")
    step()
    with Tracer(device="cpu") as tracer:
        tracer.adopt(step)
        step()
    return tracer


def test_what_was_alive_before_is_counted(traced):
    parameters = 4 * (512 * 512 + 512) * 4
    held = {}
    for holding in traced.alive_at_peak():
        held[holding.category] = held.get(holding.category, 0) + holding.nbytes
    assert held["parameter"] == parameters
    assert held["optimizer state"] == 2 * parameters + 8 * 4  # and a counter for each parameter, on the host
    assert sum(held.values()) == traced.peak_bytes


def test_the_peak_is_that_of_the_loss(traced):
    """Input, four outputs, the square, then gradients, of 2048 x 512 floats each: the last output's, the last
    product's and, while it is made, another of that size."""
    parameters = 4 * (512 * 512 + 512) * 4
    activations = traced.peak_bytes - 3 * parameters
    assert 7 * 4 * MiB <= activations <= 9.1 * 4 * MiB


def test_phases_come_from_autograd_and_the_optimizer(traced):
    assert set(traced.phase_peaks()) >= {"forward", "backward", "optimizer"}
    assert max(traced.phase_peaks().values()) == traced.peak_bytes
    timeline = traced.timeline()
    assert max(timeline.totals) == traced.peak_bytes
    phases = [p for i, p in enumerate(timeline.phases) if i == 0 or timeline.phases[i - 1] != p]
    assert phases[:3] == ["forward", "backward", "optimizer"]


def test_modules_are_found_without_touching_the_step(traced):
    recorder = traced.recorder
    born = {recorder.places[p] for p in recorder.births}
    for layer in range(4):
        assert ("forward", str(layer)) in born and ("backward", str(layer)) in born


def test_a_real_run_and_a_prediction_agree_on_what_is_held():
    real, steps = stack("cpu"), 2
    for _ in range(steps):
        real()
    with Tracer(device="cpu") as tracer:
        tracer.adopt(real)
        real()
    counted = {}
    for holding in tracer.alive_at_peak():
        counted[holding.category] = counted.get(holding.category, 0) + holding.nbytes
    predicted = memory.predict(stack, card="h200").held_by()
    assert predicted["parameter"] == counted["parameter"]
    assert predicted["optimizer state"] == counted["optimizer state"] - 8 * 4
    assert predicted["activation"] == pytest.approx(counted["activation"], rel=0.001)


def test_nothing_is_hooked_when_no_tracer_is_active(traced):
    from torch.nn.modules import module

    assert not module._global_forward_hooks and not module._global_forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_results_are_the_same_with_and_without_a_tracer():
    torch.manual_seed(0)
    plain = stack("cpu")
    losses = [plain().item() for _ in range(3)]
    torch.manual_seed(0)
    watched = stack("cpu")
    with Tracer(device="cpu") as tracer:
        tracer.adopt(watched)
        assert [watched().item() for _ in range(3)] == losses


def test_a_failure_under_the_tracer_still_takes_the_hooks_off():
    from torch.nn.modules import module

    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), Tracer(device="cpu"):
        fails()
    assert not module._global_forward_hooks


def test_blocks_are_the_innermost_members_of_the_module_lists():
    plain = {
        "": "Model", "wte": "Embedding", "h": "ModuleList", "h.0": "Block", "h.1": "Block", "ln_f": "LayerNorm",
        "lm_head": "Linear",
    }  # fmt: skip
    assert blocks(plain) == ["h.0", "h.1"]
    segmented = {
        "h": "ModuleList", "h.0": "Segment", "h.0.members": "ModuleList", "h.0.members.0": "Block",
        "h.1": "Segment", "h.1.members": "ModuleList", "h.1.members.0": "Block",
    }  # fmt: skip
    assert blocks(segmented) == ["h.0.members.0", "h.1.members.0"]
    rows = Rows(plain)
    named = {path: rows.labels[rows("forward", path)] for path in plain}
    assert named["wte"] == "embedding" and named["h.1"] == "block 1" and named["ln_f"] == "final norm"
    assert named["lm_head"] == named[""] == "head and loss"
    assert rows.labels[rows("forward", "h.1.mlp.act")] == "block 1"
    assert rows.labels[rows("optimizer", "")] == "optimizer"
