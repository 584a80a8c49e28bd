"""Lesson 09: its exercises score right, empty and typical wrong answers as they should, and its functions are exact."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong
from torch.utils.data import DataLoader

from labkit import accumulating, batching, loading, stalls
from labkit.checkpoints import CheckpointManager

LESSON = Lesson(
    "09_data_pipeline", accumulating=accumulating, batching=batching, loading=loading, stalls=stalls, math=math,
    random=random, Path=Path, DataLoader=DataLoader, CheckpointManager=CheckpointManager, Padded=batching.Padded,
    device=torch.device("cpu"), MOST=1024, sixteen=torch.bfloat16,
)  # fmt: skip
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solved


@pytest.mark.parametrize("exercise", ["least_workers", "batches_of", "starved_run", "slow_why"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in (
        "math.ceil(260",
        "260 / 60)\n",
        "this one is the longest",
        'starved_run = "A"',
        "shorter than Python",
    ):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def test_exercise_1_right() -> None:
    answer = solution("least_workers")
    assert_right(checked("least_workers", least_workers=answer), 1)
    assert 260 / answer <= 60 < 260 / (answer - 1)


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (4, 0, "65 ms"),
        (260 / 60, 0.5, "whole workers"),
        (6, 0, "One less"),
        (32, 0, "number of cores"),
        (31, 0, "number of cores"),
        (1, 0, "260 ms"),
        (0, 0, "add up"),
        (17, 0, "how often"),
    ],
)
def test_exercise_1_wrong(answer: float, points: float, word: str) -> None:
    assert_number(checked("least_workers", least_workers=answer), points, word, " 5")


def test_exercise_1_is_no_number() -> None:
    assert_wrong(checked("least_workers", least_workers="five"), "number")


# ------------------------------------------------------------------------------------------- exercise 2


def test_exercise_2_right() -> None:
    assert_right(checked("batches_of", batches_of=solution("batches_of")), 2)


def longest_first(lengths: list[int], most: int) -> list[list[int]]:
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not found or lengths[found[-1][0]] * (len(found[-1]) + 1) > most:
            found.append([])
        found[-1].append(i)
    return found


def by_labkit(lengths: list[int], most: int) -> list[list[int]]:
    return batching.LengthBatches(lengths, tokens=most, pool=None).order(0)


@pytest.mark.parametrize("answer", [longest_first, by_labkit])
def test_exercise_2_takes_other_ways(answer: Callable[..., Any]) -> None:
    assert_right(checked("batches_of", batches_of=answer), 2)


def unsorted(lengths: list[int], most: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for i, _ in enumerate(lengths):
        if found[-1] and max(lengths[j] for j in [*found[-1], i]) * (len(found[-1]) + 1) > most:
            found.append([])
        found[-1].append(i)
    return found


def by_sum(lengths: list[int], most: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if sum(lengths[j] for j in found[-1]) + lengths[i] > most:
            found.append([])
        found[-1].append(i)
    return found


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        (lambda lengths, most: [[i] for i in range(len(lengths))], 1.6, "far from full"),
        (unsorted, 1, "share a batch"),
        (by_sum, 1.6, "too large"),
        (lambda lengths, most: by_labkit(lengths, most)[:-1], 0.4, "no batch"),
        (lambda lengths, most: [list(range(len(lengths)))], 0.5, "too large"),
        (lambda lengths, most: [[lengths[i] for i in b] for b in longest_first(lengths, most)], 0.5, "in"),
        (lambda lengths, most: [*longest_first(lengths, most), [0]], 0, "two batches"),
        (lambda lengths, most: print(longest_first(lengths, most)), 0, "list of lists"),
        (lambda lengths, most: sorted(lengths), 0, "list of lists"),
        (lambda lengths, most: 1 / 0, 0, "ZeroDivisionError"),
    ],
    ids=[
        "one each",
        "unsorted",
        "by sum",
        "last missing",
        "all in one",
        "lengths",
        "twice",
        "prints",
        "flat",
        "raises",
    ],
)
def test_exercise_2_wrong(answer: Callable[..., Any], most: float, word: str) -> None:
    assert_code(checked("batches_of", batches_of=answer), word, most=most)


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("starved_run", starved_run=solution("starved_run")), 1)
    written = checked("slow_why", slow_why=solution("slow_why"))
    assert (written.status, written.points, written.manual) == ("right", 2, True)


@pytest.mark.parametrize(
    ("answer", "word"),
    [("B", "how long does its loop wait"), ("C", "How long"), ("all", "'A', 'B', 'C'"), (1, "'A', 'B', 'C'")],
)
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("starved_run", starved_run=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("More workers for all.", 0, "words"),
        ("B has a utilisation below 70 %, and C has 99 %, so C is all right and B waits for its loader.", 1.5, "B"),
        ("B launches small kernels from Python, so take a larger batch; C is busy and is all right as it is.", 1, "C"),
        (
            "In C most of it is padding, so bucket the texts by length. In B I see nothing that one could change.",
            1,
            "B",
        ),
        (
            "I do not know if launches, a larger batch, padding or buckets matter here, sorry for that answer.",
            1.5,
            "do know",
        ),
        (42, 0, "text"),
    ],
)
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    assert_written(checked("slow_why", slow_why=answer), most, word)


@pytest.mark.parametrize(
    "answer",
    [
        "B is bound by the overhead of the host: 64 tokens are no work for a GPU. Put more texts into the batch. C "
        "computes 85 % padding; sort the texts by length.",
        "In B the CPU cannot launch the kernels fast enough, compile it with CUDA graphs. C wastes its time on padded "
        "tokens, packing several texts into one row would help.",
    ],
)
def test_exercise_3_takes_other_words_for_it(answer: str) -> None:
    assert_right(checked("slow_why", slow_why=answer), 2)


# ------------------------------------------------------------------------------------------- the lesson's functions


def test_the_formula_for_dynamic_padding_is_the_mean_of_the_longest() -> None:
    chance = random.Random(0)
    lengths = [min(500, 1 + int(chance.expovariate(1 / 60))) for _ in range(5000)]
    names = {"lengths": lengths, "BATCH": 8}
    source = cells("solved")["account"] if "account" in cells("solved") else cells()["account"]
    exec(compile(source[: source.index("lab.table(")], "<cell>", "exec"), names)
    found = batching.waste(lengths, batching.LengthBatches(lengths, batch=8, pool=1).order(0), batching.Padded())
    assert 1 - sum(lengths) / 5000 / names["longest_of"] == pytest.approx(found.share, abs=0.01)


@pytest.mark.parametrize("stop", [3, 20, 21, 33])
def test_the_script_goes_on_where_it_stopped(tmp_path: Path, stop: int) -> None:
    loading.TokenCache.write(tmp_path / "tokens", [[n % 4096] * 64 for n in range(80)])
    run = LESSON.defined("script")["run"]
    threads = torch.get_num_threads()
    try:
        run(tmp_path / "whole", steps=34)
        run(tmp_path / "stopped", steps=34, stop_at=stop)
        run(tmp_path / "stopped", steps=34)
    finally:
        torch.set_num_threads(threads)
    whole, stopped = (
        dict(line.split() for line in (tmp_path / f"{name}-losses.txt").read_text().splitlines())
        for name in ("whole", "stopped")
    )
    assert whole == stopped and len(whole) == 34


def test_a_random_number_more_would_be_seen(tmp_path: Path) -> None:
    """The comparison notices what the pitfall describes: a loader that draws from the global state."""
    loading.TokenCache.write(tmp_path / "tokens", [[n % 4096] * 64 for n in range(80)])
    source = cells()["script"]
    assert "generator=torch.Generator()," in source
    names = dict(LESSON.names)
    function = source[: source.index("lab.guess")].replace("generator=torch.Generator(),", "")
    exec(compile(function, "<cell>", "exec"), names)
    threads = torch.get_num_threads()
    try:
        names["run"](tmp_path / "whole", steps=30)
        names["run"](tmp_path / "stopped", steps=30, stop_at=12)
        names["run"](tmp_path / "stopped", steps=30)
    finally:
        torch.set_num_threads(threads)
    whole, stopped = ((tmp_path / f"{n}-losses.txt").read_text().splitlines()[-1] for n in ("whole", "stopped"))
    assert whole != stopped


def test_accumulation_as_the_lesson_compares_it() -> None:
    names = LESSON.defined("cap", "equal", "accumulate")
    names["model"] = names["small_gpt2"](0, width=16, layers=1).double().eval()
    parts = [batching.Padded()([[5] * 3, [6] * 9]), batching.Padded()([[7, 8] * 20])]
    whole = [batching.Padded()([[5] * 3, [6] * 9, [7, 8] * 20])]
    wanted, gradient = names["loss_and_gradients"](whole)
    got, weighted = names["loss_and_gradients"](parts)
    _, plain = names["mean_of_means"](parts)
    assert got == pytest.approx(wanted, abs=1e-5)  # transformers scores in float32
    assert float((weighted - gradient).norm() / gradient.norm()) < 1e-12
    assert float((plain - gradient).norm() / gradient.norm()) > 0.05


def test_losses_are_told_apart_before_and_beyond_the_place() -> None:
    names = LESSON.defined("cap")
    model = names["small_gpt2"](0, width=16, layers=1).eval()
    texts = [[3, 4, 5, 6], [7, 8]]
    before, beyond = names["losses_around"](model, texts, 2)
    logits = [model(input_ids=torch.tensor([t])).logits[0, :-1] for t in texts]
    losses = [
        torch.nn.functional.cross_entropy(x, torch.tensor(t[1:]), reduction="none")
        for x, t in zip(logits, texts, strict=True)
    ]
    assert before == pytest.approx(torch.stack([losses[0][0], losses[1][0]]).mean().item(), rel=1e-5)
    assert beyond == pytest.approx(losses[0][1:].mean().item(), rel=1e-5)
