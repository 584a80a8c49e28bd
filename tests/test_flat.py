"""Optimizers that step blocks as flat pieces, against PyTorch's usual step."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stepping import farthest, make, network, plain, tokens, trained

import labkit as lab
from labkit import flat, memory, optimizers, stepping
from labkit.memory import estimate

SMALL = 2**13  # numbers of a piece: a block of the small network is two of them


def flat_steps(model: Any, clip: float | None = 0.3) -> Any:
    return flat.FlatSteps(stepping.by_block(model), make, clip=clip, most=SMALL)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("scheduled", [False, True])
def test_flat_steps_are_the_usual_steps(micro_batches: int, scheduled: bool) -> None:
    """Clipping (to a third of the norm), accumulation and a schedule give the same weights."""
    how: dict[str, Any] = {"micro_batches": micro_batches, "scheduled": scheduled}
    usual, norms = trained(plain, clip=0.3, **how)
    found, same = trained(flat_steps, **how)
    assert same == pytest.approx(norms, rel=1e-5)
    assert farthest(usual, found) < 1e-5  # norms are summed in another order
    moved, _ = trained(plain, **how)
    assert farthest(usual, moved) > 1e-3  # without clipping it is another training


def test_flat_steps_are_few() -> None:
    """As many tensors step as there are pieces, and the state can be saved and loaded."""
    model, stepped = network(), []
    optimizer = flat_steps(model)
    for group in optimizer._groups:
        inner = group.optimizer.step
        group.optimizer.step = lambda inner=inner: stepped.append(1) or inner()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    pieces = sum(len(group.pieces) for group in optimizer._groups)
    assert len(stepped) == pieces < len(list(model.parameters()))
    saved = optimizer.state_dict()
    other = flat_steps(network())
    other.load_state_dict(saved)
    assert torch.equal(
        other._groups[0].optimizer.state_dict()["state"][0]["exp_avg"], saved["optimizers"][0]["state"][0]["exp_avg"]
    )
    assert optimizer.host_bytes == 0


class InBlocks:
    """`BlocksInBackward` with the face of an optimizer, for `trained`."""

    def __init__(self, model: Any):
        self.steps = flat.BlocksInBackward(stepping.by_block(model), make, most=SMALL)

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def test_blocks_in_backward_step_as_usual() -> None:
    usual, _ = trained(plain)
    found, _ = trained(InBlocks)
    assert farthest(usual, found) == 0


def test_no_gradient_outlives_its_block() -> None:
    model = network()
    steps = InBlocks(model).steps
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert not steps._there
    assert all(piece.grad is None for group in steps._groups for piece in group.pieces)
    most = max(len(group.members) for group in steps._groups)
    assert len(steps.optimizers) == 2 + len(stepping.by_block(model)[-1])
    assert most == len(stepping.by_block(model)[0])


def test_two_passes_clip_by_the_global_norm() -> None:
    usual, norms = trained(plain, clip=0.3, steps=2)
    model, found = network(), []
    steps = flat.BlocksInBackward(stepping.by_block(model), make)
    for _ in range(2):
        with steps.norm_only() as norm:
            model(input_ids=tokens(), labels=tokens()).loss.backward()
        found.append(float(norm()))
        steps.scale = stepping.clip_coefficient(norm(), 0.3)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert found == pytest.approx(norms, rel=1e-5)
    assert farthest(usual, model) < 4e-6


def test_a_block_with_a_part_of_its_gradients_is_named() -> None:
    """At the second pass: at the first nobody knows that no more will come."""
    model = network()
    frozen = next(model.transformer.h[0].mlp.parameters())
    steps = flat.BlocksInBackward(stepping.by_block(model), make)
    frozen.requires_grad_(False)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    with pytest.raises(lab.UserError, match=r"1 of 12 parameters .* got no gradient"):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    steps.remove()


def test_what_steps_is_freed_with_its_owner() -> None:
    steps = InBlocks(network()).steps
    seen = weakref.ref(steps)
    del steps
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    "fields",
    [
        {"gradients": "card", "clip": 1.0, "accumulation": 2},
        {"gradients": "in-backward"},
        {"gradients": "two-backward-passes", "clip": 1.0},
    ],
)
def test_a_flat_recipe_trains_as_the_usual_one(fields: dict[str, Any], tmp_path: Path) -> None:
    small = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 64, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(small))
    common = {"model": str(tmp_path), "batch": 1, "seq": 16, "dropout": 0.0, "loss": "in-place", **fields}
    losses = []
    for is_flat in (False, True):
        torch.manual_seed(0)
        step = lab.Recipe.of(**common, flat=is_flat).experiment()(torch.device("cpu"))
        losses.append([float(step()) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][1] < losses[0][0]


@pytest.mark.parametrize("fields", [{"gradients": "card", "clip": 1.0}, {"gradients": "in-backward"}])
def test_flat_steps_in_memory(fields: dict[str, Any]) -> None:
    """Stepped in backward, a block's gradients replace a tensor's; on the card, nothing but the padding is new."""
    common = {
        "model": "gpt2",
        "batch": 2,
        "seq": 64,
        "precision": "bf16",
        "checkpoint": 1,
        "optimizer": "adamw",
        **fields,
    }
    usual, found = (
        memory.predict_recipe(lab.Recipe.of(**common, flat=is_flat), card="h200").steady.allocated_bytes
        for is_flat in (False, True)
    )
    block = 2 * 7_087_872
    assert abs(found - usual) < 3 * block
    quick = estimate.estimate(lab.Recipe.of(**common, flat=True), card="h200").allocated_bytes
    assert quick == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"offload": "states"}, "flat pieces already"),
        ({"gradients": "host"}, "flat pieces already"),
        ({"precision": "amp-fp16"}, "scale for fp16"),
        ({"gradients": "in-backward-each-clipped", "clip": 1.0}, "single tensors"),
        ({"compile": "whole"}, "compile=blocks"),
        ({"flat": 1}, "true or false"),
    ],
)
def test_what_does_not_go_with_flat_steps(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(lab.UserError, match=says):
        lab.Recipe.of(**{"flat": True, **fields})


@pytest.mark.slow  # the optimizer is compiled
def test_flat_states_in_8_bits_are_those_of_pieces() -> None:
    """The same as with states on the host, which steps the same pieces."""
    from labkit import streaming

    found = []
    for kind in (flat.FlatSteps, streaming.StatesOnHost):
        model = network()
        steps = kind(stepping.by_block(model), optimizers.maker("adamw8bit", lr=1e-2), clip=0.3)
        for _ in range(3):
            model(input_ids=tokens(), labels=tokens()).loss.backward()
            steps.step()
            steps.zero_grad()
        found.append(model)
    assert farthest(*found) == 0


@pytest.mark.gpu
def test_on_a_card_flat_steps_train_the_same_and_leave_no_gradients() -> None:
    from labkit import capstone

    common: dict[str, Any] = {"model": "gpt2", "batch": 2, "seq": 256, "precision": "bf16", "optimizer": "adamw8bit",
                              "attention": "sdpa", "checkpoint": 1, "loss": "in-place"}  # fmt: skip
    losses = []
    for fields in ({"clip": 1e9}, {"clip": 1e9, "flat": True}, {"gradients": "in backward", "flat": True}):
        step = capstone.training("cuda", **common, **fields, layers=4)
        losses.append([float(step()) for _ in range(3)])
        del step
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)
