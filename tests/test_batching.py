"""Batches of texts of different lengths: orders, rectangles, packed rows, and what they waste."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch

from labkit import batching
from labkit.batching import IGNORED, LengthBatches, Packed, Padded, pack, packed_waste, percentile, same_document, waste
from labkit.units import UserError


def some_lengths(count: int = 500, most: int = 300, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [min(most, 1 + int(chance.expovariate(1 / 60))) for _ in range(count)]


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (10, 1), (50, 5), (90, 9), (91, 10), (100, 10)])
def test_a_percentile_is_one_of_the_lengths(percent: float, expected: int) -> None:
    assert percentile([3, 1, 2, 10, 9, 8, 7, 6, 5, 4], percent) == expected


@pytest.mark.parametrize(("lengths", "percent"), [([], 90), ([1], 0), ([1], 101)])
def test_a_percentile_of_nothing(lengths: list[int], percent: float) -> None:
    with pytest.raises(UserError, match="percentile"):
        percentile(lengths, percent)


@pytest.mark.parametrize(
    "options", [{"batch": 8}, {"batch": 7, "pool": 3}, {"batch": 8, "pool": None}, {"tokens": 900}]
)
def test_every_text_is_in_one_batch(options: dict[str, Any]) -> None:
    lengths = some_lengths()
    batches = LengthBatches(lengths, **options).order(3)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batches)


def test_the_order_follows_from_seed_and_epoch() -> None:
    lengths = some_lengths()
    first, again = LengthBatches(lengths, batch=8), LengthBatches(lengths, batch=8)
    assert first.order(0) == again.order(0) != first.order(1)
    assert first.order(0) != LengthBatches(lengths, batch=8, seed=1).order(0)


def test_each_iteration_is_an_epoch_and_a_start_can_be_set() -> None:
    sampler = LengthBatches(some_lengths(), batch=8)
    assert list(sampler) == sampler.order(0)
    assert list(sampler) == sampler.order(1)
    sampler.start_at(1, 5)
    assert len(sampler) == len(sampler.order(1)) - 5
    assert list(sampler) == sampler.order(1)[5:]
    assert list(sampler) == sampler.order(2)


def test_a_larger_pool_wastes_less() -> None:
    lengths = some_lengths(4000)
    shares = [
        waste(lengths, LengthBatches(lengths, batch=8, pool=pool).order(0), Padded()).share
        for pool in (1, 10, 100, None)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5 and shares[-1] < 0.05


def test_batches_of_tokens_keep_to_them_rounded_up() -> None:
    lengths = some_lengths()
    sampler = LengthBatches(lengths, tokens=1000, multiple=8, pool=None)
    sizes = [len(b) * Padded(multiple=8).width([lengths[i] for i in b]) for b in sampler.order(0)]
    assert max(sizes) <= 1000
    assert sum(sizes) / len(sizes) > 800


def test_short_texts_do_not_join_a_batch_that_was_shuffled_to_be_wide() -> None:
    lengths = [100, 1, 1, 1, 100]
    for batch in LengthBatches(lengths, tokens=200, pool=1).order(0):
        assert len(batch) * max(lengths[i] for i in batch) <= 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either"),
        ({"batch": 2, "tokens": 10}, "either"),
        ({"batch": 0}, "batch"),
        ({"batch": True}, "batch"),
        ({"tokens": 8}, "does not fit"),
        ({"tokens": 10, "multiple": 8}, "does not fit"),
        ({"batch": 2, "pool": 0}, "pool"),
    ],
)
def test_what_makes_no_batches(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LengthBatches([3, 9], **options)
    with pytest.raises(UserError, match="no lengths"):
        LengthBatches([], batch=2)


def test_padding_stands_on_the_right_and_has_no_label() -> None:
    batch = Padded(pad=9, multiple=4)([[1, 2, 3, 4, 5], torch.tensor([6, 7])])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [6, 7, 9, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist()[1] == [6, 7, *[IGNORED] * 6]
    assert set(batch) == {"input_ids", "labels"}
    masked = Padded(mask=True)([[1, 2], [3]])
    assert masked["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_a_cap_cuts_and_a_fixed_width_stays() -> None:
    assert Padded(cap=3)([[1, 2, 3, 4], [5]])["input_ids"].shape == (2, 3)
    assert Padded(to=6)([[1, 2, 3, 4], [5]])["input_ids"].shape == (2, 6)
    assert Padded(to=2)([[1, 2, 3, 4]])["labels"].tolist() == [[1, 2]]
    assert Padded(cap=5, multiple=8)([[1] * 9])["labels"].tolist() == [[1] * 5 + [IGNORED] * 3]


@pytest.mark.parametrize(
    "collate", [Padded(), Padded(to=64), Padded(cap=20), Padded(multiple=8), Padded(cap=20, multiple=8)]
)
def test_waste_counts_what_collating_makes(collate: Padded) -> None:
    lengths = some_lengths(60, most=64)
    texts = [[1] * n for n in lengths]
    batches = LengthBatches(lengths, batch=7, pool=2).order(0)
    made = [collate([texts[i] for i in batch]) for batch in batches]
    found = waste(lengths, batches, collate)
    assert found.computed == sum(b["input_ids"].numel() for b in made)
    assert found.real == sum(int((b["labels"] != IGNORED).sum()) for b in made)
    assert found.real + found.cut == sum(lengths)
    assert found.share == pytest.approx(1 - found.real / found.computed)
    assert found.cut_share == pytest.approx(found.cut / sum(lengths))
    assert found.texts_cut == sum(n > collate.kept(n) for n in lengths)
    assert found.largest[0] * found.largest[1] == max(b["input_ids"].numel() for b in made)


def test_packing_fits_and_leaves_little() -> None:
    lengths = some_lengths(2000)
    rows = pack(lengths, 300)
    assert sorted(i for row in rows for i in row) == list(range(2000))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 300
    assert packed_waste(lengths, rows, 300, 4).share < 0.01
    with pytest.raises(UserError, match="does not fit"):
        pack([301], 300)


def test_packed_rows_say_where_a_text_begins() -> None:
    batch = Packed(seq=6, pad=9)([[[1, 2, 3], [4, 5]], [[6]]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9], [6, 9, 9, 9, 9, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3, IGNORED, 5, IGNORED], [IGNORED] * 6]
    with pytest.raises(UserError, match="do not fit"):
        Packed(seq=2)([[[1, 2], [3]]])


def test_the_mask_lets_a_token_look_at_its_own_text_only() -> None:
    mask = same_document(torch.tensor([[0, 1, 0, 1, 2]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_on_packed_rows_is_gpt2_on_each_text(attention: str) -> None:
    from labkit import models

    torch.manual_seed(0)
    small = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    model = models.gpt2("gpt2", attention=attention, bos_token_id=0, eos_token_id=0, **small).double().eval()
    texts = [torch.randint(1, 50, (n,)) for n in (7, 5, 9)]
    batch = Packed(seq=24)([texts])
    packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
    start = 0
    for text in texts:
        alone = model(input_ids=text[None]).logits[0]
        torch.testing.assert_close(packed[start : start + len(text)], alone)
        start += len(text)
    running = model(input_ids=batch["input_ids"]).logits[0]  # positions go on: the second text reads the first
    assert not torch.allclose(running[7:12], packed[7:12])


def test_collators_and_samplers_can_be_sent_to_workers() -> None:
    for thing in (Padded(cap=3), Packed(8)):
        assert pickle.loads(pickle.dumps(thing)) == thing
    sampler = pickle.loads(pickle.dumps(LengthBatches([1, 2, 3], batch=2)))
    assert sampler.order(0) == LengthBatches([1, 2, 3], batch=2).order(0)


def test_rounding_up() -> None:
    assert [batching._up(n, 8) for n in (1, 8, 9)] == [8, 8, 16]
