"""16-bit products on the processor: the numbers of a product rounded once, forward and backward."""

from __future__ import annotations

import pytest
import torch

from labkit import halves

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(33, 65).to(dtype), torch.randn(65, 17).to(dtype)
    with halves.fast_products():
        got = a @ b
    exact = a.double() @ b.double()
    assert got.dtype is dtype
    assert float(((got.double() - exact) / exact).abs().max()) <= 1.01 * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", HALVES)
def test_a_layer_and_its_gradients_agree_with_pytorch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(16, 8), torch.randn(4, 16)

    def gradient() -> torch.Tensor:
        layer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = layer(x).float().square().sum()
        loss.backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    wanted = gradient()
    with halves.fast_products():
        got = gradient()
    assert got.dtype is torch.float32
    assert float((got - wanted).norm() / wanted.norm()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALVES)
def test_attention_agrees_with_pytorch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        q, k, v = (torch.randn(1, 2, 8, 16).to(dtype).requires_grad_() for _ in range(3))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.float().sum().backward()
        assert q.grad is not None
        return out.detach(), q.grad

    wanted = run()
    with halves.fast_products():
        got = run()
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype is dtype
        assert float((a.float() - b.float()).abs().max()) < 4 * torch.finfo(dtype).eps


def test_overflow_stays_overflow() -> None:
    big = torch.full((2, 64), 40.0, dtype=torch.float16)
    with halves.fast_products():
        assert bool((big @ big.t()).isinf().all())  # 64 * 1600 > 65504


def test_other_types_are_left_alone() -> None:
    a = torch.randn(8, 8)
    wanted = a @ a
    with halves.fast_products():
        assert torch.equal(a @ a, wanted)
        assert (a.double() @ a.double()).dtype is torch.float64


def test_nothing_is_done_for_a_gpu() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    with halves.fast_products("cuda"):
        assert _get_current_dispatch_mode() is None
    with halves.fast_products():
        assert _get_current_dispatch_mode() is not None
