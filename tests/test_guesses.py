"""Guesses: what counts as one, how it is scored, what the learner is told."""

from __future__ import annotations

import math

import pytest

from labkit.guesses import Answer, Calibration, Guess, off_by


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no")


def answer(guess: object, measured: object, **more: object) -> Answer:
    fields = {"name": "peak", "question": "How much?", "unit": "GiB", "formula": 12.5, "source": "measured", **more}
    return Answer(guess=guess, measured=measured, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "kept"),
    [(7.1, 7.1), (7, 7.0), ("7.1", 7.1), ("7,100", 7100.0), (True, True), ("backward", "backward"), (None, None)],
)
def test_a_guess_is_a_number_a_truth_value_or_a_word(written: object, kept: object) -> None:
    made = Guess.of("peak", written, "How much?", "GiB")
    assert made.value == kept and type(made.value) is type(kept) and made.problem is None


@pytest.mark.parametrize("written", [math.nan, math.inf, [1], {}, Hostile(), "", "x" * 100, 10**400, object(), 1j])
def test_what_is_no_guess_says_why_and_stops_nothing(written: object) -> None:
    made = Guess.of("peak", written, "How much?", "GiB")
    assert made.value is None and made.problem
    assert "counts as no guess" in made.text() and "counts as no guess" in made.html()


def test_ellipsis_is_no_guess_and_no_mistake() -> None:
    assert Guess.of("peak", ..., "How much?").problem is None


@pytest.mark.parametrize(
    ("guess", "measured", "error"),
    [(12.0, 10.0, 0.2), (8.0, 10.0, 0.2), (10, 0, math.inf), (0, 0, 0.0), (True, True, 0.0), (True, False, 1.0),
     ("Backward ", "backward", 0.0), (None, 10.0, None), (10.0, None, None)],
)  # fmt: skip
def test_the_error_is_a_fraction_of_what_came_out(guess: object, measured: object, error: float | None) -> None:
    assert off_by(guess, measured) == (pytest.approx(error) if error is not None else None)  # type: ignore[arg-type]


def test_twenty_percent_is_the_line() -> None:
    assert answer(12.0, 10.0).good and answer(8.0, 10.0).good
    assert not answer(12.1, 10.0).good and not answer(7.9, 10.0).good
    assert not answer(None, 10.0).good


def test_the_card_of_the_storyboard() -> None:
    shown = answer(7.1, 12.4).text()
    assert "your guess 7.1 GiB · formula 12.5 GiB · measured 12.4 GiB · off by 43 %" in shown


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (answer(12.0, 12.4), "within 20 %"),
        (answer(100.0, 3.0), "off by a factor of 33.3"),
        (answer(None, 12.4), "no guess, no score"),
        (answer(7.1, None, source=None), "not measured here"),
        (answer(True, False, formula=None), "not so"),
        (answer(5.0, 0.0), "off: nothing was there"),
        (answer(5.0, -3.0), "off by 267 %"),
    ],
)
def test_the_verdict_on_a_guess(made: Answer, words: str) -> None:
    assert words in made.text() and words in made.html()


def test_no_guess_still_shows_formula_and_measurement() -> None:
    shown = answer(None, 12.4, source="predicted").text()
    assert "formula 12.5 GiB" in shown and "predicted 12.4 GiB" in shown and "your guess" not in shown


def test_a_question_cannot_break_the_page() -> None:
    assert "<script>" not in answer(1.0, 2.0, question="<script>alert(1)</script>", note="<b>").html()


def test_calibration_counts_what_was_guessed_and_measured() -> None:
    found = Calibration.of([answer(10.0, 10.0), answer(5.0, 10.0), answer(None, 10.0), answer(3.0, None)])
    assert (found.asked, found.guessed, found.good) == (3, 2, 1)
    assert found.median_error == pytest.approx(0.25) and str(found) == "1/2 in 20 %"
    assert "too low" in found.sentence()


@pytest.mark.parametrize(
    ("guessed", "words"),
    [(1000.0, "off by a factor of 100 or less"), (0.1, "a factor of 100"), (15.0, "by 50 % or less")],
)
def test_the_calibration_speaks_as_the_card_does(guessed: float, words: str) -> None:
    assert words in Calibration.of([answer(guessed, 10.0)]).sentence()
    assert words.removesuffix(" or less") in answer(guessed, 10.0).text()


def test_calibration_without_guesses() -> None:
    assert str(Calibration.of([answer(None, 1.0)])) == "no guesses (1 asked)"
    assert str(Calibration.of([])) == "–"


def test_a_row_round_trips_and_tells_numbers_from_words() -> None:
    made = answer(7.1, 12.4)
    row = made.row()
    assert row["kind"] == "guess" and row["good"] is False and Answer.from_row(row) == made
    assert answer(True, False).row()["kind"] == "choice"
    assert answer(5.0, 0.0).row()["error"] is None  # infinity is no JSON
