"""Saved tensors on the host and in fewer bits: equal gradients, each storage once, weights left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import labkit as lab
from labkit import offload
from labkit.units import MiB, UserError


def small_gpt2(device: str = "cpu", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 64, **changes}
    with torch.device(device):
        return lab.models.gpt2("gpt2", attention="sdpa", bos_token_id=0, eos_token_id=0, **sizes).train()


def gradients(
    model: torch.nn.Module, hooks: AbstractContextManager[Any], device: str = "cpu", steps: int = 1
) -> list[torch.Tensor]:
    for _ in range(steps):
        model.zero_grad()
        torch.manual_seed(1)
        tokens = torch.randint(0, 300, (4, 64)).to(device)
        with hooks:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("window", [0, 100_000, 64 * MiB], ids=["none", "some", "all"])
def test_prefetching_gives_the_same_gradients_to_the_last_bit(window: int) -> None:
    model = small_gpt2()
    wanted = gradients(model, nullcontext())
    hooks = offload.Prefetching(model, window=window, least_bytes=1024)
    assert equal(gradients(model, hooks, steps=3), wanted)
    assert hooks.count > 30


def test_backward_finds_what_it_needs_next_fetched_already() -> None:
    fetched, asked = [], []

    class Watched(offload.Prefetching):
        def _fetch(self, saved: Any) -> None:
            if saved.here is None:
                fetched.append(saved.index)
            super()._fetch(saved)

        def _get(self, saved: Any) -> torch.Tensor:
            asked.append((saved.index, saved.here is not None))
            return super()._get(saved)

    x = torch.randn(64, 64, requires_grad=True)  # 16 KiB each
    with Watched(window=2 * 64 * 64 * 4, least_bytes=1):
        y = x
        for _ in range(8):
            y = y.exp() * 0.1
    y.sum().backward()
    assert fetched == [5, 4, 3, 2, 1, 0]  # the last two never left the card
    assert asked == [(7, True), (6, True), (5, True), (4, True), (3, True), (2, True), (1, True), (0, True)]


def test_what_waits_is_let_go_at_once_and_fetched_before_backward_asks() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    wanted = torch.autograd.grad((x.exp() * 0.1).exp().sin().sum(), x)[0]
    hooks = offload.Prefetching(window=64 * MiB, least_bytes=1)
    with hooks:
        y = (x.exp() * 0.1).exp().sin()
    saved = [reference() for reference in hooks._order]
    assert len(saved) == 2 and all(one.here is not None for one in saved)  # the window holds them all
    hooks.let_go()
    assert all(one.here is None for one in saved) and hooks._leaving_bytes == 0
    hooks.fetch()
    assert all(one.here is not None for one in saved)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)


def test_fetching_ahead_keeps_to_the_window() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    hooks = offload.Prefetching(window=2 * 64 * 64 * 4, least_bytes=1)
    with hooks:
        y = (x.exp() * 0.1).exp().exp().exp().sin()
    hooks.let_go()
    hooks.fetch()
    assert [reference().here is not None for reference in hooks._order] == [False, False, True, True]
    y.sum().backward()
    assert x.grad is not None and hooks._edge == 0


def test_two_graphs_at_once_get_their_own_back() -> None:
    hooks = offload.Prefetching(window=64 * 64 * 4, least_bytes=1)
    x = torch.randn(64, 64, requires_grad=True)
    with hooks:
        first, second = x.exp().exp().exp(), (2 * x).sin().exp()
    (one,) = torch.autograd.grad(first.sum(), x)
    (two,) = torch.autograd.grad(second.sum(), x)
    assert torch.equal(one, torch.autograd.grad(x.exp().exp().exp().sum(), x)[0])
    assert torch.equal(two, torch.autograd.grad((2 * x).sin().exp().sum(), x)[0])


def test_buffers_of_one_step_serve_the_next() -> None:
    model = small_gpt2()
    hooks = offload.Prefetching(model, window=0, least_bytes=1024)
    gradients(model, hooks)
    held, taken = hooks.host_bytes, hooks.taken_bytes
    assert 0 < held <= taken
    gradients(model, hooks, steps=2)
    assert hooks.host_bytes == held and hooks.taken_bytes == 3 * taken


def test_buffers_come_back_when_a_graph_is_dropped_without_backward() -> None:
    model = small_gpt2()
    hooks = offload.Prefetching(model, window=0, least_bytes=1024)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    for _ in range(3):
        with hooks:
            loss = model(input_ids=tokens, labels=tokens).loss
        held = hooks.host_bytes
        del loss
        gc.collect()
    assert hooks.host_bytes == held == sum(n * len(b) for n, b in hooks._free.items())


def test_a_storage_is_taken_once_and_weights_never() -> None:
    weight = torch.nn.Parameter(torch.randn(96, 32))
    x = torch.randn(64, 32, requires_grad=True)
    hooks = offload.Prefetching([weight], least_bytes=1)
    with hooks:
        y = torch.nn.functional.linear(x, weight)  # saves x and a view of the weight
        q, k, v = y.split(32, dim=1)  # three views of one storage, each saved by a product
        ((q * k).exp() * v).sum()
    assert hooks.count == 3  # x, y, and the result of exp; not the weight
    assert hooks.taken_bytes == 4 * (64 * 32 + 64 * 96 + 64 * 32)


def test_small_and_foreign_tensors_stay() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    hooks = offload.Prefetching(least_bytes=MiB)
    with hooks:
        x.exp().sum()
    assert hooks.count == 0


def test_what_was_written_to_is_saved_again() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def run(hooks: AbstractContextManager[Any]) -> torch.Tensor:
        x.grad = None
        with hooks:
            y = x * 1
            a = y.detach() * x  # saves y's storage
            y.detach().mul_(2)  # writes to it
            b = y.detach() * x  # and saves what it is now
        with pytest.raises(RuntimeError) if isinstance(hooks, nullcontext) else nullcontext():
            (a + b).sum().backward()  # without hooks autograd refuses: what it saved is gone
        return x.grad if x.grad is not None else torch.zeros(())

    run(nullcontext())
    copied = run(offload.Prefetching(window=0, least_bytes=1))
    assert torch.allclose(copied, 3 * x.detach())


def test_backward_twice_through_one_graph() -> None:
    model = small_gpt2()
    tokens = torch.zeros(4, 64, dtype=torch.long)
    with torch.random.fork_rng(), offload.Prefetching(model, window=0, least_bytes=1024):
        loss = model(input_ids=tokens, labels=tokens).loss
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert equal(list(first), list(second))


def test_a_prediction_says_what_prefetching_saves() -> None:
    def step_with(device: torch.device, away: bool = False) -> Callable[[], None]:
        with device:
            layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())] * 8)
            x = torch.randn(8192, 256)  # 8 MiB, saved twice by each layer
        hooks = offload.Prefetching(layers, window="16MiB") if away else nullcontext()

        def step() -> None:
            with hooks:
                loss = layers(x).sum()
            loss.backward()
            layers.zero_grad()

        return step

    kept = lab.measure(step_with, card="h200", repeats=0, record=False).steady
    away = lab.measure(step_with, card="h200", repeats=0, record=False, away=True).steady
    assert kept and away
    assert 60 * MiB < kept.requested_bytes - away.requested_bytes < 16 * 8 * MiB


@pytest.mark.parametrize(("to", "most"), [("bfloat16", 2e-2), ("float16", 3e-3), ("int8", 4e-2)])
def test_compressed_gradients_are_close_but_not_equal(to: str, most: float) -> None:
    model = small_gpt2()
    wanted = gradients(model, nullcontext())
    hooks = offload.Compressed(to, model, least_bytes=1024)
    found = gradients(model, hooks)
    off = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
    assert 0 < off < most, off
    share = {"bfloat16": 0.5, "float16": 0.5, "int8": (256 + 4) / (4 * 256)}[to]
    assert hooks.stored_bytes == pytest.approx(share * hooks.taken_bytes, rel=1e-3)


def test_compression_error_is_that_of_the_format() -> None:
    x = torch.randn(1000, 7)  # not a multiple of a block
    for to, most in (("bfloat16", 2**-8), ("float16", 2**-11), ("int8", None)):
        saved = offload._Small(x.flatten(), offload.KINDS[to])
        off = (saved.restored().view_as(x) - x).abs()
        bound = x.abs() * most if most else torch.full_like(x, float(x.abs().max()) / 127 / 2)
        assert bool((off <= 1.0001 * bound).all()), to
        assert off.max() > 0


def test_compression_leaves_what_it_could_not_shrink() -> None:
    hooks = offload.Compressed("bfloat16", least_bytes=1)
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with hooks:
        torch.nn.functional.dropout(x.exp(), 0.5).sum()
    assert hooks.count == 0


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UserError, match="bfloat16, float16, int8"):
        offload.Compressed("int4")


def test_hooks_that_hold_their_model_go_with_the_step() -> None:
    class Holding:
        def __init__(self, model: torch.nn.Module):
            self.parameters = list(model.parameters())
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(lambda p: self.parameters.index(p))

    def made(drop: bool) -> tuple[Callable[[], None], weakref.ref[Holding]]:
        model = torch.nn.Linear(4, 4)
        holding = Holding(model)

        def step() -> None:
            holding.parameters.clear()

        if drop:
            offload.drop_hooks_with(step, model)
        return step, weakref.ref(holding)

    for drop in (False, True):
        step, held = made(drop)
        assert held() is not None
        del step
        gc.collect()
        assert (held() is None) is drop  # without it the circle stays: should this ever fail, PyTorch has changed


@pytest.mark.gpu
def test_streams_give_the_same_gradients_and_a_lower_peak() -> None:
    model = small_gpt2("cuda", n_layer=8, n_embd=256, vocab_size=300)

    def peak(hooks: AbstractContextManager[Any]) -> tuple[list[torch.Tensor], int]:
        gradients(model, hooks, "cuda", steps=2)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found = gradients(model, hooks, "cuda", steps=3)
        torch.cuda.synchronize()
        return [g.cpu() for g in found], torch.cuda.max_memory_allocated()

    wanted, without = peak(nullcontext())
    for window in (0, "1MiB", "64MiB"):
        found, high = peak(offload.Prefetching(model, window=window, least_bytes=4096))
        assert equal(found, wanted), window
        if window == 0:
            assert high < without - 5 * MiB


@pytest.mark.gpu
def test_copies_that_wait_for_the_end_of_forward_give_the_same_gradients() -> None:
    model = small_gpt2("cuda", n_layer=8, n_embd=256, vocab_size=300)
    wanted = gradients(model, nullcontext(), "cuda", steps=2)
    hooks = offload.Prefetching(model, window="1GiB", least_bytes=4096)

    def after_the_blocks(module: torch.nn.Module, inputs: Any, hidden: torch.Tensor) -> None:
        hooks.let_go()
        hidden.register_hook(lambda gradient: hooks.fetch())

    model.transformer.ln_f.register_forward_hook(after_the_blocks)
    assert equal(gradients(model, hooks, "cuda", steps=3), wanted)
    assert hooks.count > 0
