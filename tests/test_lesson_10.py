"""Lesson 10: its exercises score right, empty and typical wrong answers as they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong

LESSON = Lesson("10_inference")
checked, solved = LESSON.checked, LESSON.solved
GiB = 2**30


@pytest.mark.parametrize("exercise", ["cache_gib", "speculate", "served", "why_served"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(LESSON.cells().values())
    for secret in ("36 * 1280", "cumprod", 'served = "A"', "read once for all of them, so the throughput"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def gib(
    vectors: int = 2, layers: int = 36, width: int = 1280, size: int = 2, tokens: int = 1000, batch: int = 24
) -> float:
    return vectors * layers * width * size * tokens * batch / GiB


def test_exercise_1_right() -> None:
    assert_right(checked("cache_gib", cache_gib=solved("cache_gib")), 1)
    assert_right(checked("cache_gib", cache_gib=4.12), 1)


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (gib(vectors=1), 0.5, "two vectors"),
        (gib(size=4), 0.5, "2 bytes"),
        (gib(layers=1), 0, "one layer"),
        (gib(batch=1), 0, "one sequence"),
        (gib(tokens=1), 0, "one token"),
        (gib(vectors=3), 0, "still need"),
        (gib(tokens=1024), 0, "1000 tokens"),
        (20 * gib(), 0, "shared out"),
        (gib() * GiB / 1e9, 0, "GiB"),
        (gib() * 1024, 0, "1024"),
        ("4.1", 0, "number"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("cache_gib", cache_gib=answer), points, word, "4.12")


# ------------------------------------------------------------------------------------------- exercise 2


def test_exercise_2_right() -> None:
    assert_right(checked("speculate", speculate=solved("speculate")), 2)


def in_a_loop(model: Any, text: torch.Tensor, draft: torch.Tensor) -> int:
    for i, token in enumerate(draft[0]):
        if model(text).logits[0, -1].argmax() != token:
            return i
        text = torch.cat([text, token.view(1, 1)], 1)
    return draft.shape[1]


def all_matches(model: Any, text: torch.Tensor, draft: torch.Tensor) -> int:
    logits = model(torch.cat([text, draft], 1)).logits
    return int((logits[:, text.shape[1] - 1 : -1].argmax(-1) == draft).sum())


def one_off(model: Any, text: torch.Tensor, draft: torch.Tensor) -> int:
    logits = model(torch.cat([text, draft], 1)).logits
    return int((logits[:, text.shape[1] :].argmax(-1) == draft).long().cumprod(1).sum())


def forgets_to_return(model: Any, text: torch.Tensor, draft: torch.Tensor) -> None:
    model(torch.cat([text, draft], 1))


def without_text(model: Any, text: torch.Tensor, draft: torch.Tensor) -> int:
    wanted = model(draft).logits[:, :-1].argmax(-1)
    return int((wanted == draft[:, 1:]).long().cumprod(1).sum())


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        (in_a_loop, 0.5, "once is enough"),
        (all_matches, 1.5, "first error"),
        (one_off, 0.5, "in full"),
        (without_text, 1.0, "in full"),
        (forgets_to_return, 0, "return"),
        (lambda model, text, draft: [][0], 0, "raises IndexError"),
        (3, 0, "function"),
    ],
)
def test_exercise_2_wrong(answer: Any, most: float, word: str) -> None:
    assert_code(checked("speculate", speculate=answer), word, most=most)


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("served", served="a"), 1)
    assert_right(checked("why_served", why_served=solved("why_served")), 2)
    said = (
        "The users of B should be batched: the card idles and one pass over the weights serves them all. In C the kv "
        "cache grows with the texts; limit their length or use fewer users."
    )
    assert_right(checked("why_served", why_served=said), 2)


@pytest.mark.parametrize(
    ("answer", "word"), [("B", "serve many"), ("C", "memory in C"), ("D", "one of"), (1, "one of")]
)
def test_exercise_3_wrong_word(answer: Any, word: str) -> None:
    assert_wrong(checked("served", served=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        (
            "I do not know what they need, maybe a larger card would help all three of them in the end.",
            0.5,
            "serve many",
        ),
        (
            "B needs a second card for its many users because one is not enough. C needs more memory in its card.",
            0.5,
            "",
        ),
        (
            "B: put the users into one batch, the weights are read once. C runs out because the model is large.",
            1.0,
            "grows with the length",
        ),
        (
            "B: batch the users, since the card idles. C: its cache grows, so call empty_cache after each request.",
            1.5,
            "",
        ),
        ("batching and a shorter cache", 0, "at least"),
    ],
)
def test_exercise_3_wrong_text(answer: str, most: float, word: str) -> None:
    assert_written(checked("why_served", why_served=answer), most, word)
