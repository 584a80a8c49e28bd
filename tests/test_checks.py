"""Checks under exercises against right, empty, typical wrong and hostile answers."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from labkit import checks, safely, show
from labkit.checks import Check, case, choice, code, number, words


class EqualToEverything:
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __lt__(self, other: object) -> bool:
        return True

    __le__ = __gt__ = __ge__ = __lt__
    __hash__ = None  # type: ignore[assignment]

    def __sub__(self, other: object) -> float:
        return 0.0

    __rsub__ = __abs__ = __sub__  # type: ignore[assignment]

    def __float__(self) -> float:
        return 12.0

    __call__ = __sub__


class Exploding:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"touched {name}")

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise RuntimeError("no")


class NamedBadly(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no")


class Odd(metaclass=NamedBadly):
    pass


class TwelveText(str):
    def lower(self) -> str:
        return "backward"


class Twelve(numpy.float64):
    def item(self, *args: object) -> Any:
        return 12.0


HOSTILE: list[Any] = [
    EqualToEverything(), Exploding(), Odd(), TwelveText("x"), math.nan, math.inf, -math.inf, 10**5000, -(10**5000),
    "12", "", "12 bytes", b"12", [], [12, 12], {}, set(), {12: 12}, None, True, False, complex(12, 0), object(), type,
    lambda *a: 12, print, iter([12]), Twelve(5), numpy.array([1.0, 2.0]), numpy.float64("nan"), range(10**9),
    NotImplemented, "x" * 10**6,
]  # fmt: skip


def all_checks(answer: Any) -> list[Check]:
    return [
        number("n", answer, 12.0, unit="bytes", mistakes={24: "two", (lambda v: v > 1e9): "bits"}, points=2),
        choice("c", answer, "backward", of=("forward", "backward"), mistakes={"forward": "no"}, points=2),
        code("f", answer, [case(1, expect=2), case(2, expect=3)], points=2, seconds=1),
        words("w", answer, {"sequence": "What?", "batch": "Which?"}, points=2),
    ]


@pytest.mark.parametrize("which", range(len(HOSTILE)))  # pytest itself would touch the objects
def test_a_hostile_answer_gains_nothing_and_stops_nothing(which: int, capfd: pytest.CaptureFixture[str]) -> None:
    for found in all_checks(HOSTILE[which]):
        assert found.points == 0 and found.status in ("wrong", "error", "blank"), found
        assert "the check itself failed" not in found.message
        assert "\n" not in str(found) and len(str(found)) < 300
        assert found._repr_html_() and found.row()["kind"] == "check"
    assert capfd.readouterr() == ("", "")


def test_blank_answers_are_blank() -> None:
    for found in all_checks(...):
        assert (found.status, found.points) == ("blank", 0)


def test_stub_functions_are_blank() -> None:
    def bare(n): ...

    def documented(n):
        """What it does."""
        ...

    def returns_ellipsis(n):
        return ...

    def returns_nothing(n):
        n + 1

    cases = [case(1, expect=2)]
    assert [code("f", f, cases).status for f in (bare, documented, returns_ellipsis)] == ["blank"] * 3
    assert code("f", returns_nothing, cases).message.startswith("returns nothing")


def test_right_answers_are_right() -> None:
    assert number("n", 12, 12.0, points=2).points == 2
    assert number("n", 12.2, 12.0).status == "right" and number("n", 12.3, 12.0).status == "wrong"
    assert number("n", numpy.float32(12), 12.0).status == "right"
    assert number("n", numpy.array([12]), 12.0).status == "right"
    assert number("n", numpy.longdouble(12), 12.0).status == "right"
    assert choice("c", " Backward", "backward", of=("forward", "backward")).status == "right"
    assert code("f", lambda n: n + 1, [case(1, expect=2), case(2, expect=3)], points=2).points == 2
    found = words(
        "w", "it cannot go below one sequence however small the batch of the learner may be", {"sequence": "?"}
    )
    assert found.status == "right" and found.manual


def test_a_tensor_of_one_element_is_a_number() -> None:
    import torch

    assert number("n", torch.tensor(12.0, requires_grad=True), 12.0).status == "right"
    assert number("n", torch.zeros(3), 12.0).status == "wrong"


@pytest.mark.parametrize(
    ("answer", "words_"),
    [
        (24.0, "Each value"), (12 * 1024, "1024"), (12 / 1024, "1024"), (12 * 2**30, "1024³"), (96, "bits or bytes"),
        (12 * 2**30 / 1e9, "GB is 10⁹"), (-12, "sign"), (1000, "much too large"), (0.5, "much too small"),
        (30, "too large"), (13, "close, but too large"), (11, "close, but too small"), (0, "too small"),
    ],
)  # fmt: skip
def test_a_wrong_number_is_diagnosed_without_giving_the_answer_away(answer: float, words_: str) -> None:
    found = number("n", answer, 12.0, unit="GiB", tolerance=0.02, mistakes={24: "Each value takes 4 bytes, not 8."})
    assert found.status == "wrong" and words_ in found.message and "12" not in found.message


def test_a_known_mistake_can_earn_a_part() -> None:
    found = number("n", 24, 12, points=2, mistakes={24: ("the mask was forgotten", 0.5)})
    assert (found.points, found.status) == (1, "partial") and "· 1 of 2 points" in str(found)


def test_expected_zero() -> None:
    assert number("n", 0.0, 0).status == "right" and number("n", 1, 0).status == "wrong"


def test_the_check_of_the_storyboard() -> None:
    say = "returns {} for the small model, but 8 fits (7.6 of 8.0 GiB). Does your bisection stop one early?"
    cases = [case(8, expect=lambda got: got == 8 or say.format(got)), case(0, expect=-1)]
    found = code("largest_batch", lambda n: n - 1, cases, points=2)
    assert str(found) == (
        "◐ largest_batch: returns 7 for the small model, but 8 fits (7.6 of 8.0 GiB). Does your bisection stop one"
        " early? · 1 of 2 points"
    )


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (lambda n: n, "wrong", "returns 1. look here"),
        (lambda n: 1 / 0, "error", "raises ZeroDivisionError: division by zero. look here"),
        (lambda: 2, "error", "raises TypeError"),
        (lambda n: sys.exit(3), "error", "raises SystemExit"),
        (lambda n: "2", "wrong", "returns '2'; a number is asked for"),
        (lambda n: {2}, "wrong", "a number is asked for"),
        (lambda n: True, "wrong", "returns True"),
        (lambda n: EqualToEverything(), "wrong", "returns an object of type EqualToEverything"),
        (lambda n: [2], "wrong", "returns [2]"),
        (12, "wrong", "a function is asked for"),
    ],
)
def test_a_wrong_function_is_told_where_to_look(answer: Any, status: str, message: str) -> None:
    found = code("f", answer, [case(1, expect=2, because="look here")])
    assert found.status == status and message in found.message and found.points == 0


def test_weights_of_cases() -> None:
    cases = [case(1, expect=2, worth=3), case(2, expect=0, worth=1)]
    assert code("f", lambda n: n + 1, cases, points=4).points == 3


def test_a_judge_that_cannot_judge_is_no_pass() -> None:
    found = code("f", lambda n: "x", [case(1, expect=lambda got: got > 3)])
    assert found.points == 0 and "cannot be judged" in found.message
    found = code("f", lambda n: 1, [case(1, expect=lambda got: EqualToEverything())])
    assert found.points == 0


def test_endless_functions_are_stopped() -> None:
    def stubborn(n: int) -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass

    started = time.monotonic()
    found = code("f", stubborn, [case(1, expect=2, because="Does the loop end?"), case(2, expect=2)], seconds=0.3)
    assert time.monotonic() - started < 3
    assert found.status == "wrong" and "not done after 0.3 s" in found.message and "Does the loop end?" in found.message


def test_a_function_that_catches_everything_is_hit_again() -> None:
    def sleeps_on(n: int) -> int:
        for _ in range(3):
            with contextlib.suppress(BaseException):
                time.sleep(20)
        return 2

    started = time.monotonic()
    found = code("f", sleeps_on, [case(1, expect=2)], seconds=0.2)
    assert time.monotonic() - started < 5 and found.points == 0 and "not done after 0.2 s" in found.message


def test_a_timer_of_the_check_is_gone_afterwards() -> None:
    code("f", lambda n: n, [case(1, expect=1)], seconds=0.1)
    time.sleep(0.3)  # an alarm left behind would end the test run here


def test_time_limit_outside_the_main_thread() -> None:
    import threading

    found: list[Check] = []
    worker = threading.Thread(
        target=lambda: found.append(code("f", lambda n: time.sleep(5), [case(1, expect=2)], seconds=0.2))
    )
    worker.start()
    worker.join(3)
    assert found and "not done after" in found[0].message


def test_printing_and_warnings_of_an_answer_are_kept_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    def noisy(n: int) -> int:
        import warnings

        print("x" * 1000)
        print("y", file=sys.stderr)
        warnings.warn("careful", stacklevel=1)
        return n + 1

    assert code("f", noisy, [case(1, expect=2)]).status == "right"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("too short", "wrong", "2 words"),
        ("   ", "blank", "between the quotes"),
        (
            "many words about something else entirely that never touch what was asked here at all",
            "wrong",
            "What is split?",
        ),
        (
            "the batch is cut in pieces and each of them goes through the model alone and then is added",
            "partial",
            "How small?",
        ),
    ],
)
def test_written_answers_are_looked_through(text: str, status: str, message: str) -> None:
    found = words("w", text, {"batch": "What is split?", "sequence": "How small?"}, least=12)
    assert found.status == status and message in found.message and found.manual


IDEAS = {"batch": "What is split?", "same time": "Is it faster?"}
AGAINST = {r"\bis faster": "Is it faster?"}


@pytest.mark.parametrize(
    ("text", "points", "message"),
    [
        ("the batch is cut and takes the same time", 2, "no judgement"),
        ("the batch is cut and takes the same\n  time", 2, "no judgement"),
        ("the batch is cut, the same time, no, it is faster", 1, "think again. Is it faster?"),
        ("the batch is cut and then it is faster", 1, "something is missing. Is it faster?"),
        ("it is cut and then it is faster", 0, "something is missing. What is split?"),
    ],
)
def test_what_speaks_against_an_idea_asks_once(text: str, points: float, message: str) -> None:
    found = words("w", text, IDEAS, against=AGAINST, points=2, least=3)
    assert found.points == points and message in found.message


def test_code_in_a_message_is_shown_as_code() -> None:
    shown = number("n_1", 3, 12, hint="Look at `size`.")._repr_html_()
    assert "<code>size</code>" in shown and "<b>n_1:</b>" in shown


def test_points_are_always_a_number_that_nbgrader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbgrader import utils

    monkeypatch.setattr(show, "in_kernel", lambda: True)
    answers: list[tuple[Any, float]] = [(..., 0), (12, 2), (24, 1), (7, 0), (math.nan, 0), (EqualToEverything(), 0)]
    for answer, points in answers:
        found = number("n", answer, 12, points=2, mistakes={24: ("half", 0.5)})
        cell = nbformat.v4.new_code_cell(
            "check",
            metadata={"nbgrader": {"grade": True, "solution": False, "points": 2, "grade_id": "x", "locked": True}},
        )
        cell.outputs = [nbformat.v4.new_output("execute_result", data=found._repr_mimebundle_(), execution_count=1)]
        assert utils.determine_grade(cell) == (points, 2)


@pytest.mark.parametrize("share", [7.0, math.nan, -1.0, math.inf])
def test_no_share_of_points_leaves_the_range(share: float) -> None:
    found = number("n", 24, 12, points=2, mistakes={24: ("odd", share)})
    assert 0 <= found.points <= 2 and math.isfinite(found.points)


def test_a_broken_check_becomes_a_result_that_is_not_right() -> None:
    found = number("n", 12, "twelve", points=2)  # type: ignore[arg-type]
    assert found.status == "error" and found.points == 0 and "the check itself failed" in found.message


def test_results_go_to_the_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Check] = []
    monkeypatch.setattr(checks, "listeners", [heard.append])
    number("n", 12, 12)
    assert [c.exercise for c in heard] == ["n"]


def test_a_message_cannot_break_the_page() -> None:
    found = choice("c", "<script>", "backward", of=("forward", "backward"))
    assert "<script>" not in found._repr_html_()


def test_sealing_gives_back_what_went_in() -> None:
    value = {24_000: "eight bytes", 1.5: ("half", 0.5)}
    sealed = checks.seal(value)
    assert checks.sealed(sealed) == value and "24" not in sealed and "eight" not in sealed


def test_plain_reads_data_and_nothing_else() -> None:
    assert safely.plain([1, (2.0, "x"), {"k": None}]) == [1, (2.0, "x"), {"k": None}]
    assert safely.plain(numpy.arange(3)) == [0, 1, 2]
    nested: list[Any] = []
    nested.append(nested)
    for odd in (nested, EqualToEverything(), object(), list(range(20_000))):
        with pytest.raises(safely.NotPlain):
            safely.plain(odd)


def outcome_of(function: Callable[..., Any], **options: Any) -> safely.Outcome:
    return safely.call(function, **options)


def test_call_never_raises() -> None:
    def deep() -> None:
        deep()

    def odd_error() -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise Mute

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert "RecursionError" in str(outcome_of(deep).error)
    assert outcome_of(odd_error).error == "Mute"
    assert outcome_of(interrupt).error == "interrupted"
    assert outcome_of(lambda: 5).value == 5
