"""Lesson 12: its exercises score right, empty and typical wrong answers as they should, and its arithmetic is exact."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong

import labkit as lab
from labkit import capstone, checkpointing, compiling, stepping, streaming

LESSON = Lesson("12_capstone")
checked, solution = LESSON.checked, LESSON.solution


@pytest.mark.parametrize("exercise", ["resident", "greedy", "in_order", "audit"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(LESSON.cells().values())
    for secret in ("2.97", "774.0e6", 'in_order = "F"', "min(left, key=lambda s: peak([*on, s]))", "45 %"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def test_exercise_1_right() -> None:
    assert_right(checked("resident", resident=solution("resident")["resident"]), 1)
    assert_right(checked("resident", resident=2.97), 1)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (774.0e6 * 4.125 / 1e9, "10⁹"),
        (774.0e6 * 4 / 2**30, "scales"),
        (774.0e6 * 6.125 / 2**30, "host"),
        (774.0e6 * 3.0625 / 2**30, "moments"),
        (774.0e6 * 4.0625 / 2**30, "scales"),
        (774.0e6 * 10 / 2**30, "8 bits"),
        (100, "parameter"),
    ],
)
def test_exercise_1_wrong(answer: float, word: str) -> None:
    assert_number(checked("resident", resident=answer), 0, word, "2.97", "4.125")


# ------------------------------------------------------------------------------------------- exercise 2


def test_exercise_2_right() -> None:
    assert_right(checked("greedy", greedy=solution("greedy")["greedy"]), 2)


def sorted_once(switches: list[str], peak: Callable[..., int], budget: int) -> list[str]:
    order, on = sorted(switches, key=lambda s: peak([s])), []
    while peak(on) > budget and order:
        on.append(order.pop(0))
    return on


def as_given(switches: list[str], peak: Callable[..., int], budget: int) -> list[str]:
    on: list[str] = []
    for s in switches:
        if peak(on) <= budget:
            break
        on.append(s)
    return on


def everything(switches: list[str], peak: Callable[..., int], budget: int) -> list[str]:
    on: list[str] = []
    while len(on) < len(switches):
        on.append(min((s for s in switches if s not in on), key=lambda s: peak([*on, s])))
    return on


def never_early(switches: list[str], peak: Callable[..., int], budget: int) -> list[str]:
    on: list[str] = []
    while peak(on) > budget and len(on) < len(switches):
        on.append(min((s for s in switches if s not in on), key=lambda s: peak([*on, s])))
    return on


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (as_given, "largest saving"),
        (sorted_once, "each time"),
        (everything, "as soon as it fits"),
        (never_early, ""),
        (lambda switches, peak, budget: print(switches), ""),
        (lambda switches, peak, budget: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_exercise_2_wrong(answer: Callable[..., Any], word: str) -> None:
    assert_code(checked("greedy", greedy=answer), word, below=2)


def test_exercise_2_is_no_function() -> None:
    assert_wrong(checked("greedy", greedy=["checkpoint"]))


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("in_order", in_order=solution("in_order")["in_order"]), 1)
    written = checked("audit", audit=solution("audit")["audit"])
    assert (written.status, written.points, written.manual) == ("right", 3, True)


@pytest.mark.parametrize("answer", ["A", "B", "C", "D", "E"])
def test_exercise_3_wrong(answer: str) -> None:
    assert_wrong(checked("in_order", in_order=answer), "?" if answer != "B" and answer != "C" else "")


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("The log is wrong.", 0, "words"),
        (
            "A is 0.48 GB and not 6.5, and B sums to 11 GB, and C is 45 %, everything else in the log seems to be in "
            "order as far as this reader can tell from it.",
            2,
            "D",
        ),
        (
            "The parameters take less than that, the parts are too many, the drop is a little higher, and the two "
            "calls do not work in the libraries as they are written there.",
            1,
            "A",
        ),
        (
            "A: 480 MB. B: 11 GB. C: 45 per cent. D takes one device for a module. I do not know what is wrong with E, "
            "it is an integer.",
            2.5,
            "multiply",
        ),
    ],
)
def test_exercise_3_written_answers(answer: str, most: float, word: str) -> None:
    assert_written(checked("audit", audit=answer), most, word)


def test_exercise_3_takes_other_words_for_it() -> None:
    answer = (
        "120e6 x 4 bytes are 480 MB. Together the parts exceed the card. 3.5/7.8 is 45%. A module goes to exactly one "
        "device, so a list is refused. max_length must be an int, a lambda is not called."
    )
    assert_right(checked("audit", audit=answer), 3)


# ------------------------------------------------------------------------------------------- the lesson's own code


def test_the_recipe_in_the_open_is_the_last_rung() -> None:
    """Predicted at two blocks, the function of the lesson and the last rung of the ladder need the same memory."""
    names = {"capstone": capstone, "checkpointing": checkpointing, "compiling": compiling, "stepping": stepping,
             "streaming": streaming}  # fmt: skip
    from torchao.optim import AdamW8bit

    found = LESSON.defined("whole-model", AdamW8bit=AdamW8bit, **names)
    how: dict[str, Any] = {"card": "h200", "repeats": 0, "trace": False, "nearest": False, "record": False}
    ours = lab.measure(found["whole_model"], blocks=2, batch=1, seq=128, stateless=True, **how)
    rung = {**capstone.rung(list(capstone.LADDER)[-1]), "layers": 2, "batch": 1, "seq": 128}
    theirs = lab.measure(capstone.training, stateless=True, **how, **rung)
    assert ours.steady is not None and theirs.steady is not None
    assert ours.steady.requested_bytes == pytest.approx(theirs.steady.requested_bytes, rel=0.005)


def _defines(node: ast.stmt) -> bool:
    table = isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    return table or isinstance(node, ast.FunctionDef)


def test_equivalence_holds_and_can_fail() -> None:
    small = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    names = {"capstone": capstone, "small_tokens": small, "CLIP": 0.5}
    found = LESSON.defined("equivalence", keep=_defines, **names)
    start = torch.cat([p.detach().flatten() for p in found["small_model"]().parameters()])
    trained = found["trained"]
    for micro_batches in (1, 2):
        usual = trained("the usual way", micro_batches)
        way = (usual - start).norm()
        for how in ("states on the host", "gradients on the host"):
            assert (trained(how, micro_batches) - usual).norm() < 1e-3 * way
    usual = trained("the usual way")
    assert (trained("two backward passes") - usual).norm() < 1e-3 * way
    assert (trained("in backward, each clipped") - usual).norm() > 1e-2 * way
