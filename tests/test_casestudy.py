"""The case study's passages, batches, classifier and score."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import labkit as lab
from labkit import casestudy


def rows() -> list[tuple[list[int], int]]:
    """Forty rows of 1 to 40 tokens."""
    return [(list(range(1, n + 1)), n % 3) for n in range(1, 41)]


def test_passages_of_training_and_testing_come_from_different_files() -> None:
    names, train, test = casestudy.passages(classes=4, each=20)
    assert len(names) == 4 == len({p.label for p in train}) and names == sorted(names)
    assert len(train) == 80 and 10 <= len(test) <= 24
    assert not {p.file for p in train} & {p.file for p in test}
    assert all(p.file.startswith(f"{names[p.label]}/") and len(p.text.splitlines()) >= 4 for p in [*train, *test])
    assert casestudy.passages(classes=4, each=20) == (names, train, test)
    with pytest.raises(lab.UserError, match="packages"):
        casestudy.passages(classes=500)


@pytest.mark.parametrize("padding", casestudy.PADDINGS)
def test_batches_hold_every_row_once(padding: str) -> None:
    found = casestudy.batches(rows(), 8, padding=padding, longest=32)
    assert len(found) == 5
    lengths = sorted(int(n) for _, mask, _ in found for n in mask.sum(1))
    assert lengths == sorted(min(n, 32) for n in range(1, 41))
    for tokens, mask, labels in found:
        assert tokens.shape == mask.shape and len(tokens) == len(labels) == 8
        assert tokens.shape[1] % 16 == 0 and tokens.shape[1] <= 32
        for row, kept, label in zip(tokens, mask, labels, strict=True):
            n = int(kept.sum())
            assert row[:n].tolist() == list(range(1, n + 1)) and not row[n:].any()
            assert n == 32 or n % 3 == int(label)


def test_buckets_pad_least() -> None:
    def real(padding: str) -> float:
        found = casestudy.batches(rows(), 4, padding=padding, longest=48, multiple=1)
        return float(sum(m.sum() for _, m, _ in found) / sum(m.numel() for _, m, _ in found))

    assert real("buckets") > 0.93 > real("batch") > real("longest")
    with pytest.raises(lab.UserError, match="padding"):
        casestudy.batches(rows(), 4, padding="none", longest=48)


def test_the_classifier_reads_the_last_token_and_learns() -> None:
    """What stands behind the last real token does not count; a few steps bring the loss down."""
    torch.manual_seed(0)
    from transformers import LlamaConfig

    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=2)
    model = casestudy.classifier(lab.models.causal_lm(config, attention="eager"), 3)
    tokens, mask, labels = casestudy.batches(rows(), 8, padding="batch", longest=40)[0]
    other = torch.where(mask.bool(), tokens, 5)
    assert model(tokens, mask).shape == (8, 3)
    torch.testing.assert_close(model(tokens, mask), model(other, mask))
    step = casestudy.step_on(model.train(), lr=1e-2)(tokens, mask, labels)
    losses = [float(step()) for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0] and step.tokens == tokens.numel()
    truth, guesses = casestudy.predict(model, [(tokens, mask, labels)])
    assert truth == labels.tolist() and casestudy.macro_f1(truth, guesses) > 0.6


def test_macro_f1() -> None:
    assert casestudy.macro_f1([0, 1, 2], [0, 1, 2]) == 1
    assert casestudy.macro_f1([0, 0, 1, 1], [0, 0, 0, 1]) == pytest.approx((4 / 5 + 2 / 3) / 2)  # scikit-learn's value
    assert casestudy.macro_f1([0, 0, 0, 1], [0, 0, 0, 0]) == pytest.approx((6 / 7 + 0) / 2)
