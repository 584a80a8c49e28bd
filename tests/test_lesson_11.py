"""Lesson 11: its exercises score right, empty and typical wrong answers as they should; its arithmetic and its ways."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong

import labkit as lab
from labkit import launching, parallel

LESSON = Lesson("11_multi_gpu", itertools=itertools)
checked, solved = LESSON.checked, LESSON.solved
MiB = 2**20


@pytest.mark.parametrize("exercise", ["sent_mib", "split_layers", "copied", "why_copied"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(LESSON.cells().values())
    for secret in ("354.8e6", "filled(limit)", 'copied = "C"', "longer to cross the bus than the tiny batch"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def sent(halves: float = 2, part: float = 3 / 4, size: int = 4) -> float:
    return halves * part * size * 354.8e6 / MiB


def test_exercise_1_right() -> None:
    assert_right(checked("sent_mib", sent_mib=solved("sent_mib")), 1)
    assert_right(checked("sent_mib", sent_mib=2030), 1)


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (sent(halves=1), 0.5, "two halves"),
        (sent(size=2), 0.5, "4 bytes"),
        (sent(part=1 / 2), 0, "two ranks"),
        (sent(part=1), 0, "its own part"),
        (sent(part=3), 0, "a fourth"),
        (sent(halves=3), 0, "full sharding"),
        (sent() * MiB / 1e6, 0, "5 %"),
        (sent() / 1024, 0, "1024"),
        ("2030", 0, "number"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("sent_mib", sent_mib=answer), points, word, "2030")


# ------------------------------------------------------------------------------------------- exercise 2


def test_exercise_2_right() -> None:
    assert_right(checked("split_layers", split_layers=solved("split_layers")), 2)
    assert_right(checked("split_layers", split_layers=lambda s, c: tuple(solved("split_layers")(s, c))), 2)


def by_number(sizes: list[int], cards: int) -> list[int]:
    return [layer * cards // len(sizes) for layer in range(len(sizes))]


def by_share(sizes: list[int], cards: int) -> list[int]:
    where, card, held = [], 0, 0
    for size in sizes:
        if held and held + size > sum(sizes) / cards and card < cards - 1:
            card, held = card + 1, 0
        held += size
        where.append(card)
    return where


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        (by_number, 1.2, "is possible"),
        (by_share, 1.6, "is possible"),
        (lambda sizes, cards: [0] * len(sizes), 0, "is possible"),
        (lambda sizes, cards: [1 + c for c in by_number(sizes, cards)], 0.4, "a card that is none"),
        (lambda sizes, cards: list(range(cards)), 0.4, "one for each layer"),
        (lambda sizes, cards: by_number(sizes, cards)[::-1], 0, "earlier card"),
        (lambda sizes, cards: print(by_number(sizes, cards)), 0, "return"),
        (lambda sizes, cards: [float(c) for c in by_number(sizes, cards)], 0, "whole numbers"),
        (lambda sizes, cards: sizes[99], 0, "IndexError"),
        ([0, 0, 1, 1], 0, "function"),
    ],
)
def test_exercise_2_wrong(answer: Any, most: float, word: str) -> None:
    assert_code(checked("split_layers", split_layers=answer), word, most=most)


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("copied", copied="c"), 1)
    assert_right(checked("why_copied", why_copied=solved("why_copied")), 2)
    said = (
        "A spends its time on the all-reduce, so it should accumulate with no_sync. With DDP every card has a copy, "
        "and no card can hold B: cut it into shards."
    )
    assert_right(checked("why_copied", why_copied=said), 2)


@pytest.mark.parametrize(("answer", "word"), [("A", "two times"), ("B", "copies"), ("D", "one of"), (1, "one of")])
def test_exercise_3_wrong_word(answer: Any, word: str) -> None:
    assert_wrong(checked("copied", copied=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        (
            "I do not know what these jobs need, perhaps cards with more memory would be better for all of them then.",
            0,
            "44 ms",
        ),
        (
            "A: the gradients cross the slow bus, so the batch should be larger. B has a problem with its memory.",
            1.0,
            "each rank",
        ),
        (
            "B holds a whole copy in each rank, so shard it. A is a different case where two cards do not help much.",
            1.0,
            "44 ms",
        ),
        (
            "A sends gradients: larger batch. In B a smaller batch is needed, as each rank holds a copy; or use FSDP2.",
            1.5,
            "",
        ),
        ("larger batch and sharding", 0, "at least"),
    ],
)
def test_exercise_3_wrong_text(answer: str, most: float, word: str) -> None:
    assert_written(checked("why_copied", why_copied=answer), most, word)


# ------------------------------------------------------------------------------------------- the lesson's arithmetic


def test_zero_stages_cut_what_they_say() -> None:
    of = LESSON.defined("zero")["rank_bytes"]
    assert [of(1000, 4, stage) for stage in range(4)] == [16_000, 10_000, 7_000, 4_000]
    assert [of(1000, 1, stage) for stage in range(4)] == [16_000] * 4


def test_buckets_cost_what_gradients_do_not_give_back() -> None:
    from labkit.results import Report, Timeline

    account = LESSON.defined("one-process", N=10, LARGEST=12)["with_buckets"]

    def report(*moments: tuple[str, int, int]) -> Report:
        """From (phase, bytes beside the gradients, bytes of gradients) of each moment."""
        phases, rest, gradients = zip(*moments, strict=True)
        totals = tuple(r + g for r, g in zip(rest, gradients, strict=True))
        timeline = Timeline(phases, ("all",), (totals,), ("parameter", "gradient"), (rest, gradients))
        return Report("one", "ok", "predicted", "h200", timeline=timeline)

    early = report(("forward", 90, 0), ("backward", 110, 0), ("backward", 40, 40), ("optimizer", 40, 40))
    assert [account(early, views=v) for v in (False, True)] == [150, 150]  # no gradient at the peak
    late = report(("forward", 50, 0), ("backward", 40, 40), ("optimizer", 40, 40))
    assert [account(late, views=v) for v in (False, True)] == [120, 92]  # all of them, and one apart


# ------------------------------------------------------------------------------------------- the lesson's ways, run


@pytest.fixture(scope="module")
def ranks() -> Iterator[launching.Ranks]:
    with launching.Ranks(2, imports=("labkit.parallel", "transformers")) as started:
        yield started


def workers() -> dict[str, Any]:
    """The functions of the lesson that run in ranks, as the notebook defines them, on a small model."""
    import contextlib

    small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128, "n_positions": 64}
    small |= {"bos_token_id": 0, "eos_token_id": 0}
    names = {"parallel": parallel, "contextlib": contextlib, "SMALL": small, "half": torch.bfloat16, "BUDGET": None}
    names |= {"WAYS": ("one process", "DDP", "DDP, bucket views", "FSDP2"), "dist": torch.distributed}
    names["DDP"] = torch.nn.parallel.DistributedDataParallel
    cells = ("hello", "ways", "one-process", "peaks", "accumulation", "xl-ranks", "stages", "equivalence")
    found = LESSON.defined(*cells, **names)
    found["__name__"] = "__main__"
    for value in found.values():
        if callable(value) and getattr(value, "__module__", None) == "builtins":
            value.__module__ = "__main__"
    return found


@pytest.mark.slow
def test_what_ranks_hold_and_send(ranks: launching.Ranks) -> None:
    counted = workers()["counted"]
    found = {way: ranks.run(counted, way=way, timeout=120)[0] for way in workers()["WAYS"]}
    weights = found["one process"]["held"]["weights"]
    held = {way: [value / weights for value in row["held"].values()] for way, row in found.items()}
    assert held["one process"] == pytest.approx([1, 1, 2, 0], rel=0.01)
    assert held["DDP"] == pytest.approx([1, 1, 2, 1], rel=0.01)
    assert held["DDP, bucket views"] == pytest.approx([1, 0, 2, 1], rel=0.01)
    assert held["FSDP2"] == pytest.approx([0.5, 0.5, 1, 0], rel=0.01)
    assert sum(found["DDP"]["buckets"]) == weights
    sent = {way: row["link_bytes"] / weights for way, row in found.items()}
    assert sent["one process"] == 0 and sent["DDP"] == sent["DDP, bucket views"] == 1  # 2 (W - 1) / W
    again = (found["FSDP2"]["bytes"]["all_gather"] - weights) / weights
    assert 0.3 < again < 1 and sent["FSDP2"] == pytest.approx(1 + again / 2)
    assert found["FSDP2"]["calls"] == {"all_gather": 5, "reduce_scatter": 3}  # 2 blocks twice, the rest once


@pytest.mark.slow
def test_every_way_gives_the_gradients_of_one_process(ranks: launching.Ranks) -> None:
    names = workers()
    ways = [*names["WAYS"][1:], "DDP, no_sync", "pipeline"]
    for row in ranks.run(names["differences"], ways=ways, timeout=120):
        assert all(0 < row[way] < 1e-4 for way in ways), row


@pytest.mark.slow
def test_no_sync_sends_once(ranks: launching.Ranks) -> None:
    accumulated = workers()["accumulated"]
    often, once = (ranks.run(accumulated, quiet_until_last=quiet)[0] for quiet in (False, True))
    assert often["bytes"]["all_reduce"] == 4 * once["bytes"]["all_reduce"]
    assert often["norm"] == pytest.approx(once["norm"], rel=1e-5)


@pytest.mark.slow
def test_a_model_that_no_rank_holds_trains_in_shards(ranks: launching.Ranks) -> None:
    """What the lesson does with GPT-2 XL, small: shapes, shards, memory, checkpointing, 16-bit weights."""
    names = workers()
    sharded, training_step, small = names["sharded"], names["training_step"], names["SMALL"]

    def worker() -> dict[str, Any]:
        place = parallel.join()

        def build() -> Any:
            model = sharded(place.device, place, "gpt2", torch.bfloat16, **small)
            assert model.lm_head.weight is model.transformer.wte.weight
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            tokens = torch.randint(0, 128, (1, 32))
            built.append((model, optimizer))
            return training_step(model, optimizer, tokens, amp=False)

        built: list[Any] = []
        row = parallel.measured(build, place, warmup=2, steps=2)
        return {**row, "held": parallel.held(*built[0])}

    for row in ranks.run(worker, timeout=120):
        assert row["status"] == "ok" and row["loss"] < 10 and row["seconds"] > 0
        with torch.device("meta"):
            whole = sum(p.numel() for p in lab.models.gpt2("gpt2", **small).parameters())
        assert row["held"]["weights"] == pytest.approx(2 * whole / 2, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_pipeline_trains(ranks: launching.Ranks, micro_batches: int) -> None:
    names = workers()
    pipeline, fed, network, small = (names[n] for n in ("pipeline", "fed", "network", "SMALL"))

    def worker() -> dict[str, Any]:
        place = parallel.join()
        part, schedule = pipeline(network(place, **small, tie_word_embeddings=False), place, micro_batches)
        optimizer = torch.optim.AdamW(part.parameters())
        tokens = torch.arange(64).repeat(4, 1)
        losses = []
        for _ in range(6):
            losses.append(fed(schedule, tokens, place))
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": [None if loss is None else loss.item() for loss in losses]}

    first, last = ranks.run(worker, timeout=120)
    assert first["losses"] == [None] * 6
    assert last["losses"][-1] < 0.8 * last["losses"][0]
