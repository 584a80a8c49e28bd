"""The exercises of lesson 00: right, blank and typical wrong answers, scored through the learner's own check cells."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import labkit as lab
from labkit import notebooks
from labkit.checks import Check

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "00_environment.py"
Timer = Callable[..., Any]
OPERATIONS, MOVED = 2 * 4096 * 1024 * 8192, 2 * 256 * 2**20


@lru_cache
def cells() -> dict[str, str]:
    """The learner's cells, by id: solutions cleared, expected values sealed."""
    return {cell.id: cell.source for cell in notebooks.learner(notebooks.master(LESSON)).cells}


def scored(exercise: str, answer: Any, **names: Any) -> Check:
    """What the check cell under `exercise` gives when the learner's cell has left `answer`."""
    found: list[Check] = []
    space = {"lab": lab, exercise: answer, **names}
    lab.checks.listeners.append(found.append)
    try:
        exec(compile(cells()[f"{exercise}-check"], exercise, "exec"), space)
    finally:
        lab.checks.listeners.remove(found.append)
    assert [check.exercise for check in found] == [exercise]
    return found[0]


def blank(exercise: str) -> Any:
    """What the learner's untouched cell leaves."""
    space: dict[str, Any] = {}
    exec(compile(cells()[exercise], exercise, "exec"), space)
    return space[exercise]


def solution(exercise: str) -> Any:
    """What the solved cell leaves."""
    solved = {cell.id: cell.source for cell in notebooks.solved(notebooks.master(LESSON)).cells}
    space: dict[str, Any] = {"statistics": statistics, "time": time}
    exec(compile(solved[exercise], exercise, "exec"), space)
    return space[exercise]


@lru_cache
def pretended_card() -> dict[str, Any]:
    space: dict[str, Any] = {"time": time}
    exec(compile(cells()["pretended-card"], "pretended-card", "exec"), space)
    return {"PretendedCard": space["PretendedCard"], "time": time}


@pytest.mark.parametrize("exercise", ["product_rate", "copy_rate", "honest_timer", "slow_print"])
def test_blank_is_no_mistake_and_the_solution_has_all_points(exercise: str) -> None:
    untouched = scored(exercise, blank(exercise), **pretended_card())
    assert (untouched.status, untouched.points) == ("blank", 0)
    right = scored(exercise, solution(exercise), **pretended_card())
    assert (right.status, right.points) == ("right", right.maximum), right.message


@pytest.mark.parametrize(
    ("answer", "points", "say"),
    [
        (OPERATIONS / 2 / 0.8e-3, 0.5, "multiply"),
        (OPERATIONS / 0.8, 0.5, "millisecond"),
        (OPERATIONS / 0.8e-3 / 1e12, 0.5, "TFLOP/s"),
        (OPERATIONS / 38e-3, 0, "cold"),
        (OPERATIONS / 38.8e-3, 0, "adds the cold"),
        (OPERATIONS / 2 / 38e-3, 0, "which call is warm"),
        (OPERATIONS / 2 / 0.8, 0, "Two things"),
        (OPERATIONS, 0, "in a second"),
        (2 * 4096 * 8192 / 0.8e-3, 0, "how many products"),
        (2 * 4096**3 / 0.8e-3, 0, "square"),
        (0.8e-3 / OPERATIONS, 0, "upside down"),
        (1.0, 0, "much too small"),
        ("8.6e13", 0, "text"),
    ],
)
def test_product_rate(answer: Any, points: float, say: str) -> None:
    check = scored("product_rate", answer)
    assert check.points == points and say in check.message


@pytest.mark.parametrize(
    ("answer", "points", "say"),
    [
        (MOVED / 2 / 0.5e-3, 0.5, "once"),
        (MOVED / 0.5, 0.5, "millisecond"),
        (2 * 256e6 / 0.5e-3, 0.5, "MiB"),
        (MOVED / 2e-3, 0, "cold"),
        (MOVED / 2.5e-3, 0, "adds the cold"),
        (MOVED / 2 / 2e-3, 0, "which call is warm"),
        (256e6 / 0.5e-3, 0, "Two things"),
        (MOVED, 0, "in a second"),
        (0.5e-3 / MOVED, 0, "upside down"),
        (8 * MOVED / 0.5e-3, 0, "bits"),
        (None, 0, "not a number"),
    ],
)
def test_copy_rate(answer: Any, points: float, say: str) -> None:
    check = scored("copy_rate", answer)
    assert check.points == points and say in check.message


@pytest.mark.parametrize("tolerated", [1.01, 0.99])
def test_rounding_is_no_mistake(tolerated: float) -> None:
    assert scored("product_rate", OPERATIONS / 0.8e-3 * tolerated).status == "right"
    assert scored("copy_rate", MOVED / 0.5e-3 * tolerated).status == "right"


def never_waits(call: Any, wait: Any, repeats: int = 9) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def no_warm_up(call: Any, wait: Any, repeats: int = 9) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def warm_up_still_running(call: Any, wait: Any, repeats: int = 9) -> float:
    call()
    return no_warm_up(call, wait, repeats)


def mean(call: Any, wait: Any, repeats: int = 9) -> float:
    call()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
        wait()
    return (time.perf_counter() - start) / repeats


def fastest(call: Any, wait: Any, repeats: int = 9) -> float:
    call()
    wait()
    return min(no_warm_up(call, wait, 1) for _ in range(repeats))


def slowest(call: Any, wait: Any, repeats: int = 9) -> float:
    call()
    wait()
    return max(no_warm_up(call, wait, 1) for _ in range(repeats))


def once(call: Any, wait: Any, repeats: int = 9) -> float:
    call()
    wait()
    return no_warm_up(call, wait, 1)


def milliseconds(call: Any, wait: Any, repeats: int = 9) -> float:
    call()
    wait()
    return 1e3 * no_warm_up(call, wait, repeats)


def returns_nothing(call: Any, wait: Any, repeats: int = 9) -> None:
    no_warm_up(call, wait, repeats)


def returns_all(call: Any, wait: Any, repeats: int = 9) -> list[float]:
    return [no_warm_up(call, wait, 1) for _ in range(repeats)]


def wrong_arguments(call: Any) -> float:
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timer", "points", "say"),
    [
        (never_waits, 0, "before it is done"),
        (no_warm_up, 3, "first call"),
        (warm_up_still_running, 3, "still running"),
        (mean, 3, "disturbed"),
        (fastest, 3, "oddly short"),
        (slowest, 3, "disturbed"),
        (once, 1, "were to be timed"),
        (milliseconds, 0, "milliseconds"),
        (returns_nothing, 0, "return"),
        (returns_all, 0, "list"),
        (wrong_arguments, 0, "TypeError"),
    ],
)
def test_honest_timer(timer: Timer, points: float, say: str) -> None:
    check = scored("honest_timer", timer, **pretended_card())
    assert check.points == points and say in check.message, check


def test_the_pretended_card_queues() -> None:
    card = pretended_card()["PretendedCard"](0.05)
    start = time.perf_counter()
    card.launch()
    card.launch()
    launched = time.perf_counter() - start
    card.wait()
    waited = time.perf_counter() - start
    assert launched < 0.5 * waited and waited >= 0.1


@pytest.mark.parametrize(
    ("text", "points", "say"),
    [
        ("", 0, "write your answer"),
        ("print is slow", 0, "words"),
        (
            "The print itself is slow because a terminal is slow, so I remove the line and my training becomes quick,"
            " and I use time.time() around the whole loop as before.",
            0,
            "backward()",
        ),
        (
            "Kernels are only queued by backward, it is asynchronous, and item waits for the card. So I remove the line"
            " and everything is quick again and the problem is gone for good.",
            1,
            "faster without",
        ),
        (
            "The kernels are launched asynchronously, so the clock stops too early; item waits until the card is done."
            " Without the line the same time is spent elsewhere. I would time it better, with more care, over a day.",
            1.5,
            "clock",
        ),
    ],
)
def test_slow_print(text: str, points: float, say: str) -> None:
    check = scored("slow_print", text)
    assert check.manual and check.points == points and say in check.message, check


NONSENSE = (
    "The backward pass is queued on the card but the terminal is what is slow: print has to wait until the screen is"
    " free. Removing the line makes every step much faster, later steps too. To time it, call torch.cuda.synchronize"
    " only after the print has been removed."
)
QUEUED = "Forward and backward only put kernels into a queue, "
TIMED = " I would use CUDA events to time the step."


def test_nonsense_in_the_right_words_is_asked_again() -> None:
    check = scored("slow_print", NONSENSE)
    assert check.points == 1.5 and "faster without" in check.message, check
    either = NONSENSE.replace("later steps too", "and the time is not changed elsewhere")  # the words alone do not help
    assert scored("slow_print", either).points == 1.5


@pytest.mark.parametrize(
    "text",
    [
        "so item stalls the program for the whole step. Without the line the step takes equally long.",
        "so item holds the host. If you remove it, the wait shows up in some other place, so the epoch takes equally"
        " long.",
        "and item blocks. Removing the line does not make the step any faster.",
        "and item waits for them. Removing it gains nothing, the time moves to the next line that needs a value.",
        "and item waits for them. The step only looks faster then; the total is unchanged.",
        "and item waits for them. It isn't getting faster, the cost shifts.",
        "and item waits for them. Nothing gets faster, the wait is at another\nplace: the next\nplace that reads.",
    ],
)
def test_other_words_for_what_is_right(text: str) -> None:
    check = scored("slow_print", QUEUED + text + TIMED)
    assert (check.status, check.points) == ("right", 2), check


@pytest.mark.parametrize(
    "text",
    [
        "and item waits for them. Without the line it gets faster, later and still.",
        "and item waits for them. Removing it will be much faster and nothing else happens.",
        "and item waits for them. The time is the same time as before, so without it each step is faster.",
    ],
)
def test_faster_without_the_line_is_asked_about(text: str) -> None:
    check = scored("slow_print", QUEUED + text + TIMED)
    assert check.points == 1.5 and "faster without" in check.message, check


def test_the_check_cells_do_not_show_the_answers() -> None:
    shown = "\n".join(source for name, source in cells().items() if name.endswith("-check"))
    for telling in ("4096", "0.5e-3", "asynchron", "faster"):
        assert telling not in shown


def test_code_fits_the_page() -> None:
    code = [cell.source for cell in notebooks.master(LESSON).cells if cell.cell_type == "code"]
    assert [line for source in code for line in source.split("\n") if len(line) > 96] == []
