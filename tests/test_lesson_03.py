"""Lesson 03: its exercises score right, empty and typical wrong answers as they should, and its arithmetic is exact."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # checkpointing imports it: not within the time that a check gives an answer
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong
from torch.utils.checkpoint import checkpoint

import labkit as lab

LESSON = Lesson("03_gradient_checkpointing", checkpoint=checkpoint)
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solved
MiB, GiB = 2**20, 2**30
EXERCISES = ["best_mib", "in_segments_of", "cured", "why"]


def imported() -> dict[str, Any]:
    return dict(LESSON.names)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in ("181.25", "116 * 1600", 'cured_step = "B"', "8-bit\nstates", "run(hidden, part)", "This is N = 1"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def mib(for_each: float, width: int = 1600) -> float:
    return for_each * width * 1024 / MiB


def test_exercise_1_right() -> None:
    found = checked("best_mib", best_mib=solution("best_mib"))
    assert (found.status, found.points) == ("right", 1)
    assert checked("best_mib", best_mib=181.25).status == "right"


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (mib(96 + 34), 0, "N = 1"),
        (mib(32 + 102), 0, "N = 3"),
        (mib(7 * 2 + 7 * 34), 0, "√L"),
        (mib(48 / 7 * 2 + 7 * 34), 0, "√L"),
        (mib(3 * 2 + 16 * 34), 0, "third"),
        (mib(2 * (48 * 2 * 34) ** 0.5), 0.5, "whole"),
        (mib(68), 0.5, "inputs"),
        (mib(48), 0.5, "inside"),
        (mib(48 * 34), 0, "everything"),
        (mib(116, width=768), 0, "small gpt2"),
        (2, 0, "how many MiB"),
        (181.25 * MiB, 0, "unit"),
        (0.177, 0, "1024"),
        ("181", 0, "number"),
        (None, 0, "number"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("best_mib", best_mib=answer), points, word, *(["181"] if answer != "181" else []))


# ------------------------------------------------------------------------------------------- exercise 2


def right(blocks: Any, hidden: Any, every: int) -> Any:
    for start in range(0, len(blocks), every):
        hidden = checkpoint(torch.nn.Sequential(*blocks[start : start + every]), hidden, use_reentrant=False)
    return hidden


def late_binding(blocks: Any, hidden: Any, every: int) -> Any:
    def run_part(x: Any) -> Any:
        for block in part:
            x = block(x)
        return x

    for start in range(0, len(blocks), every):
        part = blocks[start : start + every]
        hidden = checkpoint(run_part, hidden, use_reentrant=False)
    return hidden


def stored(blocks: Any, hidden: Any, every: int) -> Any:
    for block in blocks:
        hidden = block(hidden)
    return hidden


def one_by_one(blocks: Any, hidden: Any, every: int) -> Any:
    for block in blocks:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    return hidden


def one_in(blocks: Any, hidden: Any, every: int) -> Any:
    for place, block in enumerate(blocks):
        hidden = checkpoint(block, hidden, use_reentrant=False) if place % every == 0 else block(hidden)
    return hidden


def without_the_last(blocks: Any, hidden: Any, every: int) -> Any:
    return right(blocks[: len(blocks) // every * every], hidden, every)


def number_of_segments(blocks: Any, hidden: Any, every: int) -> Any:
    return right(blocks, hidden, max(1, len(blocks) // every))


def not_chained(blocks: Any, hidden: Any, every: int) -> Any:
    start = hidden
    for place in range(0, len(blocks), every):
        hidden = checkpoint(torch.nn.Sequential(*blocks[place : place + every]), start, use_reentrant=False)
    return hidden


def no_return(blocks: Any, hidden: Any, every: int) -> Any:
    right(blocks, hidden, every)


def detached(blocks: Any, hidden: Any, every: int) -> Any:
    with torch.no_grad():
        return right(blocks, hidden, every)


def reentrant(blocks: Any, hidden: Any, every: int) -> Any:
    for start in range(0, len(blocks), every):
        hidden = checkpoint(torch.nn.Sequential(*blocks[start : start + every]), hidden, use_reentrant=True)
    return hidden


@pytest.mark.parametrize("answer", [right, reentrant, solution("in_segments_of")], ids=["right", "reentrant", "ours"])
def test_exercise_2_right(answer: Callable[..., Any]) -> None:
    assert_right(checked("in_segments_of", in_segments_of=answer), 2)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        (late_binding, 1.5, "names"),
        (stored, 0, "where is `checkpoint`"),
        (one_by_one, 0.5, "share a checkpoint"),
        (one_in, 0.5, "share a checkpoint"),
        (without_the_last, 1, "shorter segment"),
        (number_of_segments, 0.5, "share a checkpoint"),
        (not_chained, 1, "gradients are wrong"),
        (no_return, 0, "return"),
        (detached, 0, "backward fails"),
        (lambda blocks, hidden, every: blocks.forward(hidden), 0, "AttributeError"),
        (lambda blocks, hidden, every: hidden.sum().item(), 0, "no tensor"),
    ],
)
def test_exercise_2_wrong(answer: Callable[..., Any], most: float, word: str) -> None:
    assert_code(checked("in_segments_of", in_segments_of=answer), word, most=most)


def test_exercise_2_is_no_function() -> None:
    assert_wrong(checked("in_segments_of", in_segments_of=3))


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("cured", cured_step=solution("cured", "cured_step")), 1)
    written = checked("why", why=solution("why"))
    assert (written.status, written.points, written.manual) == ("right", 2, True)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ("A", "larger than the budget"),
        ("C", "first block"),
        ("all", "'A', 'B', 'C'"),
        (["B"], "'A', 'B', 'C'"),
        (2, "'A'"),
    ],
)
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("cured", cured_step=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("Because A is too big.", 0, "words"),
        ("A has its logits, three times over, and these stay whatever one does with the blocks of it.", 1, "A smaller"),
        (
            "C has weights and the state of its optimizer, and they are too large before there is any activation.",
            1,
            "A",
        ),
        (
            "Checkpointing works for B and it does not work for the two others, as one sees in the table.",
            0.5,
            "A",
        ),
        (
            "In A the logits remain, so chunk the loss. C needs its weights; take 8-bit ones. It cures all of them.",
            1.5,
            "A, or C",
        ),
        (
            "A: the weights are too many, use fewer parameters, in half. C: logits too large, chunk the loss.",
            1.5,
            "logits of C",
        ),
        (
            "A needs a longer segment to reduce logits, with N=4, a smaller batch. C the same, offload the weights.",
            1.5,
            "longer segment",
        ),
        (
            "C needs checkpointing with offload of activations, as state is not the problem; A needs a chunked loss "
            "for its logits.",
            1.5,
            "first column",
        ),
        (42, 0, "text"),
    ],
)
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    assert_written(checked("why", why=answer), most, word)


@pytest.mark.parametrize(
    "answer",
    [
        "A keeps the head's output for a vocabulary of 50257 words; a smaller batch, accumulated, would do. C is too "
        "large by its parameters and Adam's moments: put the optimizer on the host.",
        "A still has its output layer's scores three times: a batch of 8 or fewer. C has no room even for parameters: "
        "bf16 weights.",
        "The loss of A alone needs 9 GiB: micro-batches. C's optimizer states exceed the budget: use SGD or LoRA.",
    ],
)
def test_exercise_3_takes_other_words_for_it(answer: str) -> None:
    assert_right(checked("why", why=answer), 2)


# ------------------------------------------------------------------------------------------- the lesson's arithmetic


def account() -> dict[str, Any]:
    """The functions of the account and of the experiment, without what the cells measure and draw."""
    from labkit import checkpointing
    from labkit.memory.workspaces import workspaces

    names = {**imported(), "checkpointing": checkpointing, "workspaces": workspaces, "capability": (9, 0)}
    names |= {"L": 12, "d": 768, "h": 12, "V": 50257, "N_p": 124_439_808, "kept_bytes": {}, "FEW": 3}
    for cell in ("segment", "experiment", "kept", "moments"):
        tree = ast.parse(cells()[cell])
        keep = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.ImportFrom))]
        keep += [n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in WANTED]
        exec(compile(ast.Module(keep, []), "<cell>", "exec"), names)
    return names


WANTED = ("CHANGES", "sixteen", "of_block", "of_classes")  # of the cells that define functions
QUICK: dict[str, Any] = {"card": "h200", "repeats": 0, "trace": False, "stateless": True}


@pytest.mark.parametrize(("batch", "seq"), [(1, 64), (2, 512)])
def test_a_block_keeps_what_the_formula_says_and_a_checkpointed_one_its_input(batch: int, seq: int) -> None:
    names = account()
    for wrap in (False, True):
        lab.measure(names["one_block"], batch=batch, seq=seq, wrap=wrap, **QUICK)
    random_state = 16  # of SDPA's dropout: seed and offset
    assert names["kept_bytes"] == {False: names["inside"](batch, seq) + random_state, True: 4 * batch * seq * 768}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "every", "head", "batch"),
    [
        ("all stored", 0, "language model", 3),
        ("segments", 1, "language model", 3),
        ("segments", 5, "language model", 2),
        ("segments", 12, "language model", 3),
        ("one in", 3, "language model", 3),
        ("all stored", 0, "classifier", 6),
        ("segments", 1, "classifier", 6),
        ("segments", 4, "classifier", 6),
        ("one in", 2, "classifier", 6),
        ("segments", 1, "classifier", 1),
    ],
)
def test_the_moments_explain_the_peak(how: str, every: int, head: str, batch: int) -> None:
    names = account()
    report = lab.measure(names["training"], how=how, every=every, head=head, batch=batch, **QUICK)
    assert report.steady is not None
    wanted = names["peak_by_formula"](how, every, head, batch)
    assert report.steady.requested_bytes == pytest.approx(wanted, rel=0.004)


def test_the_class_in_the_open_is_the_one_in_the_package() -> None:
    names = account()
    ours = lab.measure(names["language_model"], batch=1, seq=64, every=5, **QUICK)
    theirs = lab.measure(names["training"], batch=1, seq=64, how="segments", every=5, **QUICK)
    assert ours.steady is not None and theirs.steady is not None
    classes = 4 * (20 * 768 + 20) + 8  # the classifier's head is there, unused, and one label
    assert 0 <= theirs.steady.requested_bytes - ours.steady.requested_bytes <= classes + 512


def test_the_table_of_exercise_3_is_arithmetic() -> None:
    names, text = account(), cells()["exercise-3-1"]
    state = 12 * names["N_p"]
    assert f"{state / GiB:.2f} GiB | {12 * names['inside'](16) / GiB:.2f} GiB" in text
    assert f"{3 * 4 * 16 * 1024 * 50257 / GiB:.2f} GiB" in text
    large, width, heads = 774_030_080, 1280, 20
    block = 114 * 512 * width + 16 * 512 + 4 * heads * 512
    assert f"{12 * large / GiB:.2f} GiB | {36 * block / GiB:.2f} GiB | {3 * 4 * 512 * 50257 / GiB:.2f} GiB" in text
    with torch.device("meta"):
        assert sum(p.numel() for p in lab.models.gpt2("gpt2-large").parameters()) == large


@pytest.mark.slow
@pytest.mark.parametrize(("head", "fits"), [("language model", False), ("classifier", True)])
def test_only_the_classifier_of_exercise_3_is_cured(head: str, fits: bool) -> None:
    names = account()
    settings = {"head": head, "batch": 16, "nearest": False, **QUICK}
    assert not lab.measure(names["training"], budget="8GiB", how="all stored", **settings).ok
    assert lab.measure(names["training"], budget="8GiB", how="segments", every=1, **settings).ok == fits
