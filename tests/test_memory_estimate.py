"""The quick estimate against the exact prediction, and what a recipe keeps on the host against what it really takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import memory
from labkit.memory import estimate
from labkit.memory.host import HostMemory, host_memory, pinned
from labkit.recipes import Recipe

MiB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 of six blocks whose weights are large enough to matter, 3.1 million numbers each."""
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("model")
    sizes = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 4096, "n_positions": 512}
    GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return str(folder)


GRID: list[dict[str, Any]] = [
    {},
    {"precision": "amp-bf16", "batch": 32, "optimizer": "adam8bit"},
    {"precision": "bf16", "checkpoint": 2, "loss": "chunked", "accumulation": 3},
    {"precision": "bf16", "optimizer": "adamw8bit", "checkpoint": 1, "gradients": "host", "clip": 1.0},
    {"precision": "bf16", "optimizer": "sgd", "checkpoint": 2, "gradients": "host", "loss": "in-place", "batch": 96},
    {"precision": "bf16", "gradients": "in-backward", "attention": "eager"},
    {"precision": "fp16", "offload": "optimizer+gradients", "checkpoint": 1, "loss": "in-place"},
    {"offload": "activations", "batch": 64, "optimizer": "sgd"},
]


@pytest.mark.parametrize("fields", GRID, ids=str)
def test_the_estimate_is_near_the_exact_prediction(model: str, fields: dict[str, Any]) -> None:
    recipe = Recipe.of(**{"model": model, "batch": 16, "seq": 256, "dropout": 0.0, **fields})
    exact, quick = memory.predict_recipe(recipe, card="h200"), estimate.estimate(recipe, card="h200")
    for name in ("first", "steady"):
        found, truth = getattr(quick, name).allocated_bytes, getattr(exact, name).allocated_bytes
        low, high = quick.band
        assert low * found - 24 * MiB <= truth <= high * found + 24 * MiB, (name, found / truth)


def test_another_optimizer_or_more_micro_batches_follow_no_step_again(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.of(model=model, batch=17, seq=256, dropout=0.0)
    first = estimate.estimate(recipe, card="h200")
    estimate.estimate(recipe.changed(optimizer="sgd"), card="h200")

    def never(*_: Any) -> None:
        raise AssertionError("a short model was followed again")

    monkeypatch.setattr(estimate, "_followed", never)
    more = estimate.estimate(recipe.changed(accumulation=4, optimizer="sgd", expandable_segments=True), card="h200")
    assert more.steady.allocated_bytes != first.steady.allocated_bytes
    assert more.steady.reserved_bytes < 1.05 * more.steady.allocated_bytes


def test_pinned_blocks_are_powers_of_two() -> None:
    assert [pinned(n) for n in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]


@pytest.mark.parametrize("checkpoint", [0, 2])
def test_gradients_on_the_host_take_what_is_said(model: str, checkpoint: int) -> None:
    recipe = Recipe.of(model=model, batch=1, seq=8, gradients="host", checkpoint=checkpoint)
    step: Any = recipe.experiment()(torch.device("cpu"))
    buffers = [group.buffer.numel() * group.buffer.element_size() for group in step.optimizer._groups]
    assert host_memory(recipe) == HostMemory(sum(map(pinned, buffers)))


def test_masters_on_the_host_take_what_is_said(model: str) -> None:
    recipe = Recipe.of(model=model, batch=1, seq=8, precision="fp16", offload="optimizer+gradients")
    step: Any = recipe.experiment(layers=6)(torch.device("cpu"))
    groups = step.optimizer._groups
    masters = sum(master.numel() for group in groups for master in group.masters)
    buffers = [2 * group.buffer.numel() for group in groups]
    largest = max(group.count for group in groups)
    assert host_memory(recipe) == HostMemory(sum(map(pinned, buffers)), 12 * masters + 4 * largest)


def test_activations_on_the_host_take_what_is_said(model: str) -> None:
    recipe = Recipe.of(model=model, batch=4, seq=256, offload="activations", dropout=0.0, attention="eager")
    step: Any = recipe.experiment()(torch.device("cpu"))
    step()
    real = sum(pinned(size) * count for size, count in step.hooks.buffers.items())
    assert host_memory(recipe).total_bytes == pytest.approx(real, rel=0.02)


def test_nothing_is_on_the_host_unless_asked() -> None:
    assert host_memory(Recipe.of(model="no-such-model-is-looked-for")).total_bytes == 0


def test_the_row_says_it(model: str) -> None:
    recipe = Recipe.of(model=model, batch=1, seq=8, gradients="host")
    report = memory.predict_recipe(recipe, card="h200")
    row = memory.recipe_row(recipe, report, 0.0, memory.host_memory(recipe))
    assert row["host_pinned_bytes"] >= 4 * 6 * 12 * 512**2 and row["host_pageable_bytes"] == 0
    assert Path(row["model"]).is_dir()
