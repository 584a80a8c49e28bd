"""The monitors see what is wrong inside a model, and blame the right module."""

from __future__ import annotations

import math

import pytest
import torch

from labkit import monitors


class Block(torch.nn.Module):
    """Two layers with code of the block's own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.between = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.between)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), torch.nn.LayerNorm(4))


def test_lost_sorts_values_by_what_fp16_makes_of_them() -> None:
    values = torch.tensor([0.0, 1.0, 2.0**-20, 2.0**-26, 1e6], dtype=torch.float64)
    found = monitors.lost(values)
    assert (found.zero, found.subnormal, found.overflow) == (0.25, 0.25, 0.25)
    assert monitors.lost(values, scale=2.0**-10).zero == 0.5  # 2^-20 goes under as well
    assert monitors.lost(values, torch.bfloat16) == monitors.Lost(0.0, 0.0, 0.0)
    assert monitors.lost(torch.zeros(3)) == monitors.Lost(0.0, 0.0, 0.0)


def test_lost_knows_the_edges_of_fp16() -> None:
    """2^-24 is the smallest number, half of it rounds to zero (ties to even), 2^-14 is the smallest normal one."""
    for value, zero, subnormal in ((2.0**-24, 0, 1), (2.0**-25, 1, 0), (2.0**-14, 0, 0), (2.0**-15, 0, 1)):
        found = monitors.lost(torch.tensor([value], dtype=torch.float64))
        assert (found.zero, found.subnormal) == (zero, subnormal), value
    assert monitors.lost(torch.tensor([65504.0])).overflow == 0
    assert monitors.lost(torch.tensor([65520.0])).overflow == 1


def test_exponents_leave_out_what_has_none() -> None:
    values = torch.tensor([0.0, -8.0, 0.5, math.inf, math.nan])
    assert sorted(monitors.exponents(values).tolist()) == [-1.0, 3.0]
    assert monitors.exponents([values, values[1:3]]).numel() == 4
    assert monitors.exponents(torch.ones(1000), most=100).numel() == 100
    assert monitors.exponents([]).numel() == 0


def test_gradient_norms_are_those_of_each_layer() -> None:
    net = model()
    net(torch.randn(3, 4)).square().sum().backward()
    norms = monitors.gradient_norms(net)
    assert list(norms) == ["0.first", "0.second", "1"]
    layer = net[0].first
    wanted = math.sqrt(sum(float(p.grad.double().square().sum()) for p in layer.parameters()))
    assert norms["0.first"] == pytest.approx(wanted)
    assert monitors.gradient_norms(net, scale=4.0)["0.first"] == pytest.approx(wanted / 4)
    total = math.sqrt(sum(n**2 for n in norms.values()))
    assert total == pytest.approx(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)), rel=1e-5)


def test_gradient_norms_tell_zero_from_absent() -> None:
    net = model()
    net[0].first.weight.grad = torch.zeros(4, 4)
    assert monitors.gradient_norms(net) == {"0.first": 0.0}


def test_watch_sees_every_output() -> None:
    net = model()
    with monitors.watch(net) as seen:
        out = net(torch.randn(64, 4))
    assert set(seen.activations) == {"0.first", "0.second", "0", "1", "(model)"}
    found = seen.activations["1"]
    assert found.rms == pytest.approx(float(out.detach().square().mean().sqrt()), rel=1e-5)
    assert found.largest == float(out.detach().abs().max())
    assert found.finite and found.zero_share == 0 and len(found.exponents) == out.numel()
    assert seen.trouble is None
    assert not any(m._forward_hooks for m in net.modules())  # nothing stays behind


def test_watch_blames_the_module_that_made_it() -> None:
    net = model()
    net[0].second.bias.data[1] = math.inf
    with monitors.watch(net) as seen:
        net(torch.randn(2, 4))
    assert seen.trouble == monitors.Trouble("forward", "0.second", "output", "inf")
    assert str(seen.trouble) == "inf in forward: output of 0.second"


def test_watch_tells_code_between_modules_from_modules() -> None:
    net = model()
    net[0].between = math.nan
    with monitors.watch(net) as seen:
        net(torch.randn(2, 4))
    assert seen.trouble == monitors.Trouble("forward", "0.second", "input", "nan")


def test_watch_finds_what_overflows_only_in_backward() -> None:
    net = model()
    with monitors.watch(net) as seen:
        (net(torch.randn(2, 4)).sum() * math.inf).backward()
    assert seen.trouble is not None
    assert (seen.trouble.phase, seen.trouble.what) == ("backward", "gradient")
    assert seen.trouble.module in ("1", "(model)")


def test_watch_leaves_results_alone() -> None:
    net, x = model(), torch.randn(2, 4)
    wanted = net(x)
    with monitors.watch(net):
        assert torch.equal(net(x), wanted)


def test_the_first_trouble_stays() -> None:
    net = model()
    with monitors.watch(net) as seen:
        net(torch.full((1, 4), math.nan))
        first = seen.trouble
        net(torch.full((1, 4), math.inf))
    assert first is not None and seen.trouble is first
    assert (first.module, first.what) == ("0.first", "input")
