"""fp16 weights with fp32 master copies: the same training as in fp32, wherever masters and gradients are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import labkit as lab
from labkit import optimizers, stepping
from labkit.masters import LEAST_SCALE, Masters

PLACES = [(False, False), (False, True), (True, False), (True, True)]
OFF = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def network(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return lab.models.gpt2("gpt2", bos_token_id=0, eos_token_id=0, **shape, **OFF).to(dtype).train()


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))


def make(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def loss_of(model: Any, part: torch.Tensor) -> torch.Tensor:
    """The model's own loss; a processor has no fp16 kernels for some of it, so that float32 copies compute."""
    weights = {name: p.float() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, (), {"input_ids": part, "labels": part}, tie_weights=True).loss


def masters(model: Any, on_host: bool = True, gradients_on_host: bool = True, **how: Any) -> Masters:
    groups = stepping.by_block(model)
    return Masters(groups, make, on_host=on_host, gradients_on_host=gradients_on_host, most=1024, **how)


def usual_training(steps: int, clip: float) -> torch.Tensor:
    model = network(torch.float16).float()
    optimizer = make(model.parameters())
    for _ in range(steps):
        for part in tokens().split(2):
            (loss_of(model, part) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("on_host", "gradients_on_host"), PLACES)
def test_masters_train_as_fp32_does(on_host: bool, gradients_on_host: bool) -> None:
    """Clipped, two micro-batches: gradients are those of fp16, and the masters follow fp32 closely."""
    model = network(torch.float16)
    start = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    optimizer = masters(model, on_host, gradients_on_host, clip=0.5)
    for _ in range(4):
        for part in tokens().split(2):
            optimizer.scaled(loss_of(model, part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.norm is not None and float(optimizer.norm) > 0.6  # it does clip
    found = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    usual = usual_training(4, clip=0.5)
    assert (found - usual).norm() < 0.02 * (usual - start).norm()
    assert all(p.grad is None for p in model.parameters()) and optimizer.skipped == 0


def test_an_overflow_changes_nothing_and_halves_the_scale() -> None:
    model = network(torch.float16)
    optimizer = masters(model, scale=2.0**30)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.scaled(loss_of(model, tokens())).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped == 1 and optimizer.loss_scale == 2.0**29
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    for _ in range(20):
        optimizer.scaled(loss_of(model, tokens())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert LEAST_SCALE < optimizer.loss_scale < 2.0**29 and optimizer.skipped < 20
    assert not torch.equal(next(model.parameters()), before[0])


def test_small_updates_are_not_lost() -> None:
    """A step of 1e-5 on weights around 1, whose neighbours in fp16 lie 1e-3 apart: a hundred of them show."""
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = Masters([[p]], lambda q: torch.optim.SGD(q, lr=1e-5), on_host=True, gradients_on_host=False)
    for _ in range(100):
        optimizer.scaled(p.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(p.detach().float(), torch.tensor(1 - 1e-3), atol=3e-4)


def test_states_travel_with_their_masters() -> None:
    one, two = network(torch.float16), network(torch.float16)
    first, second = masters(one), masters(two)
    for _ in range(3):
        first.scaled(loss_of(one, tokens())).backward()
        first.step()
        first.zero_grad()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer, model in ((first, one), (second, two)):
        optimizer.scaled(loss_of(model, tokens())).backward()
        optimizer.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)


def test_on_the_host_nothing_stays_on_the_card() -> None:
    """Predicted for GPT-2 at 2 blocks: without masters and two moments the peak is 12 bytes a parameter lower, and
    gradients that leave at once lower it again."""
    from labkit import memory
    from labkit.recipes import Recipe

    recipe = Recipe.of(batch=1, seq=8, precision="fp16", clip=1.0, dropout=0.0)
    parameters = sum(p.numel() for p in lab.models.causal_lm(recipe.config(2), device="meta").parameters())
    found = []
    for offload in ("none", "optimizer", "optimizer+gradients"):
        build = recipe.changed(offload=offload).experiment(layers=2)
        report = memory.predict(build, card="h200", stateless=True, trace=False)
        assert report.steady is not None
        found.append(report.steady.requested_bytes / parameters)
    assert found[0] - found[1] >= 11.9 and found[2] <= found[1] < 9


def test_the_host_s_optimizer_is_adamw() -> None:
    found = optimizers.adamw_on_host(1e-3)([torch.nn.Parameter(torch.ones(2))])
    assert isinstance(found, torch.optim.AdamW) and found.defaults["fused"]
