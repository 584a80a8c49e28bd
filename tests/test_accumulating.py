"""Accumulation by tokens equals one large batch; by micro-batches it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from labkit import models
from labkit.accumulating import accumulate, predicted_tokens
from labkit.batching import IGNORED, Packed, Padded
from labkit.units import UserError


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    small = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 64}
    return models.gpt2("gpt2", bos_token_id=0, eos_token_id=0, **small).double().eval()


def gradient(model: Any) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return found


def texts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(1, 50, (n,), generator=chance).tolist() for n in (3, 40, 5, 20, 2, 31)]


def test_micro_batches_of_different_sizes_equal_one_large_batch(model: Any) -> None:
    whole = Padded()(texts())
    loss = accumulate(model, [whole])
    expected = gradient(model)
    parts = [Padded()(texts()[:2]), Padded()(texts()[2:3]), Padded()(texts()[3:])]
    assert len({predicted_tokens(p["labels"]) for p in parts}) == 3
    got = accumulate(model, parts)
    assert float(got - loss) == pytest.approx(0, abs=1e-6)  # transformers scores in float32
    torch.testing.assert_close(gradient(model), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(loss, model(**whole).loss.detach())
    for part in parts:  # the mean of means is something else
        (model(**part).loss / len(parts)).backward()
    assert float((gradient(model) - expected).norm() / expected.norm()) > 0.05


def test_packed_rows_accumulate_too(model: Any) -> None:
    alone = [Padded()([text]) for text in texts()]
    loss = accumulate(model, alone)
    expected = gradient(model)
    got = accumulate(model, [Packed(64)([texts()[:3]]), Packed(64)([texts()[3:]])])
    assert float(got - loss) == pytest.approx(0, abs=1e-6)  # transformers scores in float32
    torch.testing.assert_close(gradient(model), expected, rtol=1e-12, atol=1e-14)


def test_the_first_token_is_not_predicted() -> None:
    labels = torch.tensor([[1, 2, 3], [IGNORED, 5, IGNORED]])
    assert predicted_tokens(labels) == 3


def test_gradients_are_added_and_the_loss_is_detached(model: Any) -> None:
    batch = Padded()(texts())
    loss = accumulate(model, [batch])
    assert not loss.requires_grad
    once = gradient(model)
    accumulate(model, [batch])
    accumulate(model, [batch])
    torch.testing.assert_close(gradient(model), 2 * once)


def test_nothing_to_learn_from(model: Any) -> None:
    with pytest.raises(UserError, match="no token"):
        accumulate(model, [Padded()([[1], [2]])])


def test_a_scaler_scales(model: Any) -> None:
    batch = Padded()(texts())
    accumulate(model, [batch])
    plain = gradient(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulate(model, [batch], scaler=scaler)
    torch.testing.assert_close(gradient(model), 8 * plain)
