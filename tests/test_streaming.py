"""States that wait on the host and step on the card, against the same optimizer with its states where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_stepping import farthest, network, tokens

import labkit as lab
from labkit import optimizers, stepping, streaming
from labkit.memory.host import host_memory

SMALL = 2**13  # numbers of a piece: a group of the small network is two of them


def trained(optimizer: str, *, states: bool, steps: int = 3, clip: float | None = 0.3, **how: Any) -> tuple[Any, Any]:
    """A network after some steps of two micro-batches, and what stepped it."""
    model = network()
    make = optimizers.maker(optimizer, lr=1e-2)
    kind: Any = streaming.StatesOnHost if states else stepping.GradientsOnHost
    steps_with = kind(stepping.by_block(model), make, clip=clip, most=SMALL, **how)
    for _ in range(steps):
        for part in tokens().chunk(2):
            (model(input_ids=part, labels=part).loss / 2).backward()
        steps_with.step()
        steps_with.zero_grad()
    return model, steps_with


@pytest.mark.parametrize("optimizer", ["adamw", "adam8bit", "sgd-momentum"])
@pytest.mark.parametrize("gradients_on_host", [False, True])
def test_states_on_the_host_make_the_same_steps(optimizer: str, gradients_on_host: bool) -> None:
    """Clipped, accumulated, in pieces; without clipping it would be another training."""
    usual, first = trained(optimizer, states=False)
    found, second = trained(optimizer, states=True, gradients_on_host=gradients_on_host)
    assert farthest(usual, found) < 4e-6  # norms are summed in another order
    assert float(second.norm) == pytest.approx(float(first.norm), rel=1e-5)
    other, _ = trained(optimizer, states=True, gradients_on_host=gradients_on_host, clip=None)
    assert farthest(usual, other) > 1e-5


@pytest.mark.slow  # the optimizer is compiled
def test_states_in_8_bits_come_and_go_inside_their_tensors() -> None:
    usual, _ = trained("adamw8bit", states=False, clip=None)
    found, stepped = trained("adamw8bit", states=True, clip=None)
    assert farthest(usual, found) == 0
    assert {t.dtype for parts in stepped._parked.values() for t in parts} == {torch.uint8}


def test_gradients_stay_parts_of_one_tensor() -> None:
    """Also where somebody has set them to None, and a step without new ones changes nothing."""
    model, optimizer = trained("adamw", states=True, steps=1)
    places = [p.grad.data_ptr() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert [p.grad.data_ptr() for p in model.parameters()] == places
    optimizer.zero_grad()
    assert all(not p.grad.any() for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.host_bytes == 0


def test_a_state_travels_and_waits_on_the_host_again() -> None:
    whole, _ = trained("adamw", states=True, steps=2)
    model, first = trained("adamw", states=True, steps=1)
    first.remove()
    second = streaming.StatesOnHost(stepping.by_block(model), optimizers.maker("adamw", lr=1e-2), clip=0.3, most=SMALL)
    second.load_state_dict(first.state_dict())
    assert second._parked.keys() == first._parked.keys()
    for part in tokens().chunk(2):
        (model(input_ids=part, labels=part).loss / 2).backward()
    second.step()
    assert farthest(whole, model) == 0


def test_the_host_keeps_what_is_said() -> None:
    """Bytes of GPT-2's states, from the pieces as they are made (two blocks, float32)."""
    recipe = lab.Recipe.of(model="gpt2", batch=1, seq=8, offload="states", dropout=0.0)
    two = recipe.experiment(layers=2)(torch.device("cpu"))
    two()
    parked = two.optimizer._parked
    sizes = [t.nbytes for parts in parked.values() for t in parts]
    block = sum(t.nbytes for t in parked[0, 0])
    said = host_memory(recipe).total_bytes
    pinned = sum(1 << (n - 1).bit_length() for n in sizes) + 10 * 2 * (1 << (block // 2 - 1).bit_length())
    assert said == pinned


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"precision": "fp16"}, "offload=optimizer"),
        ({"gradients": "in-backward"}, "gradients=card or host"),
        ({"optimizer": "sgd"}, "no states"),
    ],
)
def test_what_does_not_go_with_states_on_the_host(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(lab.UserError, match=says):
        lab.Recipe.of(offload="states", **fields)


@pytest.mark.slow
def test_inputs_of_segments_wait_on_the_host_beside_compiled_blocks() -> None:
    """The hooks get each segment's input and nothing that is inside one."""
    fields = {"model": "gpt2", "batch": 6, "seq": 64, "checkpoint": 1, "dropout": 0.0, "loss": "in-place"}
    losses, taken = [], []
    for offload in ("states", "states+activations"):
        torch.manual_seed(0)
        step = lab.Recipe.of(**fields, offload=offload).experiment(layers=2)(torch.device("cpu"))
        losses.append(float(step()))
        taken.append(0 if step.hooks is None else step.hooks.count)
    assert losses[0] == losses[1]
    assert taken[0] == 0 and taken[1] >= 2
    with pytest.raises(lab.UserError, match="checkpoint=1"):
        lab.Recipe.of(**{**fields, "checkpoint": 0}, offload="states+activations", compile="blocks")


@pytest.mark.gpu
def test_on_a_card_states_are_on_the_host_and_steps_the_same() -> None:
    """Three steps of a checkpointed GPT-2 in bf16 with 8-bit states: losses of the same optimizer with states on the
    card, and between steps every large state in pinned memory."""
    from labkit import capstone

    common: dict[str, Any] = {"model": "gpt2", "batch": 2, "seq": 256, "precision": "bf16", "optimizer": "adamw8bit",
                              "attention": "sdpa", "checkpoint": 1, "loss": "in-place", "clip": 1.0}  # fmt: skip
    losses = []
    for offload in ("none", "states", "states+activations"):
        step = capstone.training("cuda", **common, offload=offload, layers=4)
        losses.append([float(step()) for _ in range(3)])
        if offload != "none":
            parked = [t for parts in step.optimizer._parked.values() for t in parts]
            assert parked and all(t.is_pinned() for t in parked)
        del step
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[2] == pytest.approx(losses[1], rel=2e-3)
