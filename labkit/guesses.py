"""A learner's guesses: a number is committed before it is measured, and scored afterwards.

A guess within 20 % of the measurement counts. ``None`` (the default that a lesson writes) is no guess: the learner then
sees the formula and the measurement, and no score.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from . import show

WITHIN = 0.2  # of the measured value: what counts as a good guess
FAR = 3.0  # from this factor on a distance is shown as a factor, not as a percentage
Value = float | bool | str


@dataclass(frozen=True)
class Guess(show.Silent):
    """One committed guess: a number in `unit`, a truth value or a word; ``value`` is None where there is none.

    ``problem`` says why what the learner wrote is no guess; ``late`` is set when the answer had been shown already.
    """

    name: str
    question: str
    value: Value | None = None
    unit: str | None = None
    problem: str | None = None
    late: bool = False

    @classmethod
    def of(cls, name: str, value: Any, question: str, unit: str | None = None, late: bool = False) -> Guess:
        """A guess from whatever stands in the learner's cell; never raises."""
        kept, problem = _read(value)
        return cls(name, question, kept, unit, problem, late)

    def text(self) -> str:
        """The card as plain text."""
        return f"guess: {self.question}\n  {self._state()}"

    def html(self) -> str:
        """The card as HTML; one line while there is no guess."""
        apart = "" if self.value is None and not self.problem else "</div><div>"
        body = f"<div><b>Guess</b> · {show.inline(self.question)} {apart}{show.inline(self._state())}</div>"
        return show.card(body, "plain" if self.value is None else "info")

    def _state(self) -> str:
        if self.problem:
            return f"{self.problem}; this counts as no guess"
        if self.value is None:
            unit = f" ({self.unit})" if self.unit else ""
            return f"Put yours{unit} in place of `None`, then run this cell."
        shown = show.number(self.value, self.unit)
        return f"yours: {shown}" + (" (changed after the answer: not scored)" if self.late else "")


@dataclass(frozen=True)
class Answer(show.Silent):
    """A guess beside what came out: ``formula`` (the arithmetic's value) and ``measured``, both in `unit`.

    ``source`` says where the measured value comes from (`labkit.results.SOURCES`); ``measured`` is None when this
    machine could not tell.
    """

    name: str
    question: str
    unit: str | None
    guess: Value | None
    formula: float | None
    measured: Value | None
    source: str | None
    note: str | None = None

    @property
    def error(self) -> float | None:
        """How far the guess is off, as a fraction of the measured value; 0 or 1 for words and truth values."""
        return off_by(self.guess, self.measured)

    @property
    def scored(self) -> bool:
        """Whether there is a guess and something to hold it against."""
        return self.error is not None

    @property
    def good(self) -> bool:
        """Whether the guess lies within 20 % of what came out."""
        return self.error is not None and self.error <= WITHIN

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Answer:
        """The answer in a ledger row."""
        return cls(**{f.name: row.get(f.name) for f in fields(cls)})  # type: ignore[arg-type]

    def row(self) -> dict[str, Any]:
        """The row for the ledger: kind ``guess`` for numbers (what a calibration plot takes), ``choice`` for words."""
        numbers = all(v is None or _is_number(v) for v in (self.guess, self.measured))
        error = self.error if self.error is None or math.isfinite(self.error) else None
        kind = "guess" if numbers else "choice"
        return {"kind": kind, **asdict(self), "error": error, "good": self.good if self.scored else None}

    def text(self) -> str:
        """The card as plain text."""
        parts = [f"{label} {shown}" for label, _, shown, _ in self._parts()]
        line = "  " + " · ".join([*parts, self._verdict()])
        return "\n".join([self.question or self.name, line, *([f"  {self.note}"] if self.note else [])])

    def html(self) -> str:
        """The card as HTML: bars on one scale and the verdict."""
        tone = "plain" if not self.scored else "good" if self.good else "bad"
        parts = self._parts()
        numbers = [(a, float(v), s, t) for a, v, s, t in parts if _is_number(v)]
        words = [f"{a} {s}" for a, v, s, _ in parts if not _is_number(v)]
        body = f"<div><b>Answer</b> · {show.inline(self.question or self.name)}</div>"
        body += show.bars(numbers) if numbers else ""
        body += f"<div>{show.inline(' · '.join([*words, self._verdict()]))}</div>"
        return show.card(body + (f"<div>{show.inline(self.note)}</div>" if self.note else ""), tone)

    def _parts(self) -> list[tuple[str, Any, str, str]]:
        what = {None: "measured", "cpu": "processor"}.get(self.source, str(self.source))
        rows = [("your guess", self.guess, "info"), ("formula", self.formula, "half"), (what, self.measured, "good")]
        return [(label, v, show.number(v, self.unit), tone) for label, v, tone in rows if v is not None]

    def _verdict(self) -> str:
        if self.measured is None:
            return "not measured here"
        if self.error is None:
            return "no guess, no score"
        if not _is_number(self.measured) or not _is_number(self.guess):
            return "right" if self.good else "not so"
        if self.good:
            return f"off by {_percent(self.error)}: within {_percent(WITHIN)}"
        ratio = float(self.guess) / float(self.measured) if self.measured and self.guess else 0.0  # type: ignore[arg-type]
        factor = max(ratio, 1 / ratio) if ratio > 0 else 0.0
        if factor >= FAR or math.isfinite(self.error):
            return f"off by {_off(self.error, factor if factor >= FAR else None)}"
        return "off: nothing was there"


@dataclass(frozen=True)
class Calibration:
    """How well a set of guesses fits what came out."""

    asked: int
    guessed: int
    good: int
    median_error: float | None
    median_ratio: float | None  # guess over measured: below 1, the learner guesses too low
    median_factor: float | None = None  # how many times too high or too low, never below 1

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Calibration:
        """The calibration of `answers`; those that nothing was measured for do not count."""
        known = [a for a in answers if a.measured is not None]
        errors = [a.error for a in known if a.error is not None]
        ratios = [
            float(a.guess) / float(a.measured)  # type: ignore[arg-type]
            for a in known
            if _is_number(a.guess) and _is_number(a.measured) and a.measured
        ]
        return cls(
            len(known),
            len(errors),
            sum(a.good for a in known),
            statistics.median(errors) if errors else None,
            statistics.median(ratios) if ratios else None,
            statistics.median(max(r, 1 / r) for r in ratios if r > 0) if any(r > 0 for r in ratios) else None,
        )

    def __str__(self) -> str:
        if not self.asked:
            return "–"
        if not self.guessed:
            return f"no guesses ({self.asked} asked)"
        return f"{self.good}/{self.guessed} in {_percent(WITHIN)}"

    def sentence(self) -> str:
        """One sentence for people."""
        if not self.guessed:
            numbers = "1 number was" if self.asked == 1 else f"{self.asked} numbers were"
            return f"{numbers} asked for, none was guessed: guessing first is what makes them stay."
        line = f"{self.good} of {self.guessed} guesses within {_percent(WITHIN)} of what came out"
        if self.median_error is not None and math.isfinite(self.median_error):
            far = self.median_factor is not None and self.median_factor >= FAR
            line += f"; half of them are off by {_off(self.median_error, self.median_factor if far else None)} or less"
        if self.median_ratio is not None and not 0.83 <= self.median_ratio <= 1.2:
            line += f"; typically you guess too {'low' if self.median_ratio < 1 else 'high'}"
        return line + "."


def off_by(guess: Value | None, measured: Value | None) -> float | None:
    """``|guess - measured| / |measured|``; 0 or 1 for words and truth values; None without a guess or a measurement.

    Infinity when nothing was measured where something was guessed.
    """
    if guess is None or measured is None:
        return None
    if isinstance(guess, str) or isinstance(measured, (str, bool)) or isinstance(guess, bool):
        same = str(guess).strip().lower() == str(measured).strip().lower()
        return 0.0 if same else 1.0
    if measured == 0:
        return 0.0 if guess == 0 else math.inf
    return abs(guess - measured) / abs(measured)


def _off(error: float, factor: float | None) -> str:
    return f"a factor of {factor:,.3g}" if factor else _percent(error)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read(value: Any) -> tuple[Value | None, str | None]:
    """A learner's value as a plain number, truth value or word; or None with the reason."""
    if value is None or value is ...:
        return None, None
    if type(value) is bool:
        return value, None
    if type(value) is str:
        try:
            value = float(value.replace(",", ""))
        except ValueError:
            word = value.strip()  # type: ignore[union-attr]
            return (word, None) if 0 < len(word) <= 80 else (None, "a guess is a number or one word")
    try:
        plain = float(value)
    except Exception:  # whatever a learner's object does in __float__, a guess must not stop the lesson
        return None, f"{type(value).__name__} is not a number"
    return (plain, None) if math.isfinite(plain) else (None, f"{plain} is not a finite number")
