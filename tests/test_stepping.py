"""Optimizers that step in backward, or whose gradients wait on the host, against PyTorch's usual step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import labkit as lab
from labkit import stepping


def network(dtype: torch.dtype = torch.float32) -> Any:
    """Two blocks of a GPT-2 with a small vocabulary; embedding and head share their weight."""
    torch.manual_seed(0)
    small = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return lab.models.gpt2("gpt2", attention="sdpa", **small, **off, **ends).to(dtype).train()


def tokens(count: int = 4) -> torch.Tensor:
    return torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(1))


def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(
    steps_of: Callable[[Any], Any],
    *,
    clip: float | None = None,
    micro_batches: int = 1,
    steps: int = 3,
    scheduled: bool = False,
) -> tuple[Any, list[float]]:
    """A network after some steps by `steps_of(network)`, and the norms that `clip` saw."""
    model, parts, norms = network(), tokens().chunk(micro_batches), []
    optimizer = steps_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) if scheduled else None
    for _ in range(steps):
        for part in parts:
            (model(input_ids=part, labels=part).loss / len(parts)).backward()
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        if clip is None and getattr(optimizer, "norm", None) is not None:
            norms.append(float(optimizer.norm))
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
    return model, norms


def plain(model: Any) -> Any:
    return make(list(model.parameters()))


def farthest(a: Any, b: Any) -> float:
    """The largest difference between two networks' weights."""
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("scheduled", [False, True])
def test_gradients_on_the_host_step_as_usual(micro_batches: int, scheduled: bool) -> None:
    """Clipping (to a third of the norm), accumulation and a schedule give the same weights."""
    how = {"micro_batches": micro_batches, "scheduled": scheduled}
    usual, norms = trained(plain, clip=0.3, **how)
    found, same = trained(lambda m: stepping.GradientsOnHost(stepping.by_block(m), make, clip=0.3), **how)
    assert min(norms) > 0.6  # it does clip
    assert same == pytest.approx(norms, rel=1e-5)
    assert farthest(usual, found) < 4e-6  # sums in another order; which one depends on the processor
    moved, _ = trained(plain, **how)
    assert farthest(usual, moved) > 1e-5  # without clipping it is another training


def test_gradients_on_the_host_accumulate_in_the_dtype_of_the_weights() -> None:
    """Two micro-batches in bfloat16: bit for bit what PyTorch accumulates."""
    first, second = network(torch.bfloat16), network(torch.bfloat16)
    host = stepping.GradientsOnHost(stepping.by_block(second), make, most=1000)
    for model in (first, second):
        for part in tokens().chunk(2):
            model(input_ids=part, labels=part).loss.backward()
    assert all(p.grad is None for p in second.parameters())
    assert host.host_bytes == sum(2 * -(-p.numel() // 64) * 64 for p in second.parameters())
    make(list(first.parameters())).step()
    host.step()
    assert farthest(first, second) == 0


def test_a_step_without_new_gradients_changes_nothing() -> None:
    model, before = network(), network()
    host = stepping.GradientsOnHost(stepping.by_block(model), make)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    host.zero_grad()
    host.step()
    assert farthest(model, before) == 0 and float(host.norm) == 0


def test_a_state_travels() -> None:
    """Half of a training, its state loaded into a new optimizer, and the other half: the weights of the whole."""
    whole, _ = trained(lambda m: stepping.GradientsOnHost(stepping.by_block(m), make), steps=2)
    model, kept = network(), {}
    for _ in range(2):
        host = stepping.GradientsOnHost(stepping.by_block(model), make)
        if kept:
            host.load_state_dict(kept)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        host.step()
        kept = host.state_dict()
        host.remove()
    assert farthest(model, whole) == 0


def test_two_backward_passes_clip_exactly_and_each_clipped_does_not() -> None:
    usual, _ = trained(plain, clip=0.3)
    model = network()
    steps = stepping.InBackward(model.parameters(), make)
    assert len(steps.optimizers) == len(list(model.parameters()))
    for _ in range(3):
        with steps.norm_only() as norm:
            model(input_ids=tokens(), labels=tokens()).loss.backward()
        steps.scale = stepping.clip_coefficient(norm(), 0.3)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert farthest(usual, model) < 2e-6

    other = network()
    each = stepping.InBackward(other.parameters(), make, clip_each=0.3)
    for _ in range(3):
        other(input_ids=tokens(), labels=tokens()).loss.backward()
    assert each.scale is None and farthest(usual, other) > 1e-4


def test_a_step_in_backward_is_the_usual_one_without_clipping() -> None:
    usual, _ = trained(plain)
    model = network()
    steps = stepping.InBackward(model.parameters(), make)
    for _ in range(3):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert farthest(usual, model) == 0
    steps.remove()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "steps_of",
    [
        lambda m: stepping.InBackward(m.parameters(), make),
        lambda m: stepping.GradientsOnHost(stepping.by_block(m), make),
    ],
)
def test_nothing_stays_in_memory(steps_of: Callable[[Any], Any]) -> None:
    model = network()
    steps = steps_of(model)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    seen = weakref.ref(model), weakref.ref(steps)
    del model, steps
    gc.collect()
    assert [reference() for reference in seen] == [None, None]


def test_groups() -> None:
    model = network()
    groups = stepping.by_block(model)
    assert [len(group) for group in groups] == [12, 12, 4]  # a shared embedding, positions, the last norm
    assert sum(len(g) for g in groups) == len(list(model.parameters()))
    with pytest.raises(lab.UserError, match="two groups"):
        stepping.GradientsOnHost([groups[0], groups[0]], make)
    with pytest.raises(lab.UserError, match="one dtype"):
        stepping.GradientsOnHost(
            [[torch.nn.Parameter(torch.zeros(3, dtype=t)) for t in (torch.half, torch.float)]], make
        )
    model.transformer.wpe.requires_grad_(False)
    assert [len(group) for group in stepping.by_block(model)] == [12, 12, 3]


def test_half_a_group_does_not_step() -> None:
    model = network()
    host = stepping.GradientsOnHost(stepping.by_block(model), make)
    model.transformer.h[0].mlp(torch.randn(1, 4, 32)).sum().backward()
    with pytest.raises(lab.UserError, match="got no gradient"):
        host.step()
