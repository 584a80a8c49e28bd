"""Soft checks under exercises: they never raise, say what is wrong and where to look, and give partial credit.

A check cell ends in one call, and shows what it returns::

    lab.check.number("activation_bytes", activation_bytes, 50_331_648, unit="bytes",
                     mistakes={25_165_824: "Each value takes 4 bytes in fp32, not 2."})
    lab.check.code("largest_batch", largest_batch, [lab.check.case(toy, "8GiB", expect=8, because="…")], points=2)
    lab.check.choice("first_to_go", first_to_go, "backward", of=("forward", "backward", "optimizer"))
    lab.check.words("why", why, {r"one sequence|batch (of )?(1|one)": "What is the smallest batch there is?"})

A message never gives the answer away. An answer left as `...` (or a function whose body is `...`) is blank: no points,
no complaint.

**What nbgrader reads.** A `Check` shows its message as HTML and its points as the plain-text form of the cell's result;
nbgrader takes that number as the score of the cell. It is always finite and between 0 and the maximum, nothing is
written to stderr, and nothing is raised, so none of nbgrader's special cases (full marks for ``nan`` or for text, an
abort above the maximum, zero for a warning) is ever met. Outside a kernel the plain-text form is the message.
"""

from __future__ import annotations

import ast
import base64
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from . import safely, show

STATUSES = ("blank", "wrong", "partial", "right", "error")
_TONES = {"blank": "plain", "wrong": "bad", "partial": "half", "right": "good", "error": "bad"}
_SIGNS = {"blank": "○", "wrong": "✗", "partial": "◐", "right": "✓", "error": "✗"}
_UNIT_FACTORS = {
    2**10: "a factor of 1024: which unit is asked for?",
    2**20: "a factor of 1024²: which unit is asked for?",
    2**30: "a factor of 1024³: which unit is asked for?",
    1e3: "a factor of 1000: which unit is asked for?",
    1e6: "a factor of a million: which unit is asked for?",
    1e9: "a factor of 10⁹: which unit is asked for?",
    8.0: "a factor of 8: bits or bytes?",
    2**20 / 1e6: "about 5 %: 1 MiB is 2²⁰ bytes, 1 MB is 10⁶.",
    2**30 / 1e9: "about 7 %: 1 GiB is 2³⁰ bytes, 1 GB is 10⁹.",
}

listeners: list[Callable[[Check], None]] = []  # the open lesson's ledger, while a lesson is open


@dataclass(frozen=True)
class Check:
    """What a check found: points out of a maximum, one of `STATUSES`, and one or two lines for the learner.

    ``manual`` marks a written answer: its points are an instructor's to give; here they only say what was found.
    """

    exercise: str
    points: float
    maximum: float
    message: str
    status: str
    manual: bool = False

    def row(self) -> dict[str, Any]:
        """The row for the ledger."""
        return {"kind": "check", **asdict(self)}

    def __str__(self) -> str:
        tail = "" if self.status == "blank" else f" · {_points(self.points)} of {_points(self.maximum)} points"
        if self.manual:
            tail = " · read by an instructor where there is one"
        return f"{_SIGNS[self.status]} {self.exercise}: {self.message}{tail}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = show.inline(str(self))
        name = show.inline(f"{self.exercise}:")
        return show.card(text.replace(name, f"<b>{name}</b>", 1), _TONES[self.status])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self.points) if show.in_kernel() else str(self), "text/html": self._repr_html_()}


@dataclass(frozen=True)
class Case:
    """One call of a learner's function in `code`. Made by `case`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expect: Any
    because: str
    worth: float
    tolerance: float
    raw: bool


F = TypeVar("F", bound=Callable[..., Check])


def _soft(check: F) -> F:
    """Wraps a check so that nothing it meets leaves it: a failure of the check itself becomes a visible result."""

    @functools.wraps(check)
    def run(exercise: str, answer: Any, *args: Any, **kwargs: Any) -> Check:
        try:
            found = check(exercise, answer, *args, **kwargs)
        except Exception as error:  # the answer is the learner's: any object at all
            reason = f"the check itself failed ({safely.type_name(error)}: {str(error)[:120]}); please report it"
            found = Check(str(exercise), 0.0, float(kwargs.get("points", 1)), reason, "error")
        points = found.points if math.isfinite(found.points) else 0.0
        found = replace(found, points=min(max(round(points, 4), 0.0), found.maximum))
        for listener in list(listeners):
            listener(found)
        return found

    return run  # type: ignore[return-value]


@_soft
def number(
    exercise: str,
    answer: Any,
    expected: float,
    *,
    unit: str = "",
    tolerance: float = 0.02,
    points: float = 1,
    mistakes: Mapping[Any, str | tuple[str, float]] | None = None,
    hint: str = "",
) -> Check:
    """Check one number against `expected`, within the relative `tolerance`.

    `mistakes` maps a typical wrong value, or a function of the answer that recognises one, to what to say; a pair
    ``(hint, fraction)`` also gives that fraction of the points. Mixed-up units are recognised without being listed.
    `hint` is said when nothing else is known.
    """
    if safely.is_blank(answer):
        return _blank(exercise, points, "put a number in place of `...`")
    try:
        got = safely.number(answer)
    except safely.NotPlain as reason:
        return Check(
            exercise, 0, points, f"this is {reason}; a number{f' in {unit}' if unit else ''} is asked for", "wrong"
        )
    if _close(got, expected, tolerance):
        return Check(exercise, points, points, "right", "right")
    for mistake, say in (mistakes or {}).items():
        known = bool(mistake(got)) if callable(mistake) else _close(got, mistake, min(tolerance, 0.01))
        if known:
            text, share = say if isinstance(say, tuple) else (say, 0.0)
            return Check(exercise, points * share, points, text, "partial" if share else "wrong")
    return Check(exercise, 0, points, f"{_how_far(got, expected, bool(unit))} {hint}".strip(), "wrong")


@_soft
def choice(
    exercise: str,
    answer: Any,
    expected: str,
    *,
    of: Sequence[str],
    points: float = 1,
    mistakes: Mapping[str, str | tuple[str, float]] | None = None,
    hint: str = "",
) -> Check:
    """Check one word out of `of`. `mistakes` says for a wrong word what it overlooks (and may give a fraction)."""
    if safely.is_blank(answer):
        return _blank(exercise, points, f"put one of {', '.join(map(repr, of))} in place of `...`")
    try:
        got = safely.plain(answer)
    except safely.NotPlain:
        got = None
    word = got.strip().lower() if isinstance(got, str) else None
    if word == expected.lower():
        return Check(exercise, points, points, "right", "right")
    if word not in [o.lower() for o in of]:
        return Check(
            exercise,
            0,
            points,
            f"this is {safely.shown(answer)}; one of {', '.join(map(repr, of))} is asked for",
            "wrong",
        )
    say = {k.lower(): v for k, v in (mistakes or {}).items()}.get(word or "", hint or "not this one")
    text, share = say if isinstance(say, tuple) else (say, 0.0)
    return Check(exercise, points * share, points, text, "partial" if share else "wrong")


def case(
    *args: Any,
    expect: Any,
    because: str = "",
    worth: float = 1.0,
    tolerance: float = 1e-6,
    raw: bool = False,
    **kwargs: Any,
) -> Case:
    """One call ``function(*args, **kwargs)`` for `code`, and what should come out.

    `expect` is a value (numbers within the relative `tolerance`), or a judge: a function of the result that returns
    True, or a sentence that says what is wrong. It gets plain data, or with ``raw=True`` the object itself. `because`
    is said when this case fails: where to look. `worth` weighs the case against the others.
    """
    return Case(args, kwargs, expect, because, worth, tolerance, raw)


@_soft
def code(
    exercise: str,
    answer: Any,
    cases: Sequence[Case],
    *,
    points: float = 1,
    seconds: float = 10.0,
) -> Check:
    """Call the learner's function in every case, each at most `seconds` long; points for the share that is right.

    What the function prints is not shown, and its warnings are silenced. The message is about the first case that
    fails.
    """
    if safely.is_blank(answer):
        return _blank(exercise, points, "write the body in place of `...`")
    if not callable(answer):
        return Check(exercise, 0, points, f"this is {safely.shown(answer)}; a function is asked for", "wrong")
    earned, complaints, raised = 0.0, [], 0
    for one in cases:
        outcome = safely.call(answer, *one.args, seconds=seconds, **one.kwargs)
        if outcome.value is ... and not outcome.error and not outcome.timed_out:
            return _blank(exercise, points, "write the body in place of `...`")
        complaint = _judge(one, outcome, seconds)
        if complaint is None:
            earned += one.worth
        else:
            complaints.append(complaint)
            raised += outcome.error is not None
        if outcome.timed_out:
            break  # the next case would only wait again
    total = sum(one.worth for one in cases)
    if not complaints:
        return Check(exercise, points, points, "right", "right")
    status = "partial" if earned else "error" if raised == len(complaints) else "wrong"
    return Check(exercise, points * earned / total, points, complaints[0], status)


@_soft
def words(
    exercise: str,
    answer: Any,
    ideas: Mapping[str, str],
    *,
    against: Mapping[str, str] | None = None,
    points: float = 1,
    least: int = 12,
) -> Check:
    """Look through a written answer: at least `least` words, each of the `ideas` touched, nothing said `against` them.

    `ideas` maps a regular expression (any case) to the question to ask when it is not found, `against` one to the
    question to ask when it is found. A question costs the share of one idea, whichever of the two asks it. Whether the
    answer is right is for a reader to say: the result is marked ``manual``.
    """
    if safely.is_blank(answer):
        return _blank(exercise, points, "write your answer between quotes in place of `...`", manual=True)
    try:
        got = safely.plain(answer)
    except safely.NotPlain as reason:
        return Check(exercise, 0, points, f"this is {reason}; a text in quotes is asked for", "wrong", True)
    if not isinstance(got, str):
        return Check(exercise, 0, points, f"this is {safely.shown(got)}; a text in quotes is asked for", "wrong", True)
    if not got.strip():
        return _blank(exercise, points, "write your answer between the quotes", manual=True)
    count = len(re.findall(r"\w+", got[:20_000]))
    if count < least:
        return Check(exercise, 0, points, f"{count} words; say it in at least {least}", "wrong", True)
    text = " ".join(got[:20_000].split())  # an idea may run over the end of a line

    def found(pattern: str) -> bool:
        return re.search(pattern, text, re.IGNORECASE) is not None

    missing = [ask for pattern, ask in ideas.items() if not found(pattern)]
    doubtful = [ask for pattern, ask in (against or {}).items() if found(pattern)]
    asks = list(dict.fromkeys([*missing, *doubtful]))
    if not asks:
        say = "the words looked for are there, which is no judgement yet"
        return Check(exercise, points, points, say, "right", True)
    share = max(0.0, 1 - len(asks) / len(ideas))
    what = "something is missing" if asks[0] in missing else "think again"
    return Check(exercise, points * share, points, f"{what}. {asks[0]}", "partial" if share else "wrong", True)


def seal(value: Any) -> str:
    """`value` (plain literals) as text that gives nothing away at a glance. Building the notebooks seals the answers
    that stand in check cells; `sealed` reads them back. This hides from the eye, not from the curious."""
    return base64.b64encode(repr(value).encode()).decode()


def sealed(text: str) -> Any:
    """What was given to `seal`."""
    return ast.literal_eval(base64.b64decode(text).decode())


def _blank(exercise: str, points: float, message: str, manual: bool = False) -> Check:
    return Check(exercise, 0, points, message, "blank", manual)


def _close(got: float, expected: float, tolerance: float) -> bool:
    return abs(got - expected) <= tolerance * abs(expected) or got == expected


def _how_far(got: float, expected: float, has_unit: bool) -> str:
    if got and expected and (got < 0) != (expected < 0):
        return "the sign is wrong."
    ratio = got / expected if expected else math.inf
    if has_unit and ratio > 0:
        for factor, say in _UNIT_FACTORS.items():
            if _close(ratio, factor, 0.002) or _close(ratio, 1 / factor, 0.002):
                return f"off by {say}"
    size = "much too" if not 0.1 <= ratio <= 10 else "too" if not 0.8 <= ratio <= 1.25 else "close, but too"
    return f"{size} {'large' if ratio > 1 else 'small'}."


_KINDS = {
    list: "a list", tuple: "a list", dict: "a dict", str: "a text", bool: "True or False", int: "a number",
    float: "a number",
}  # fmt: skip


def _judge(one: Case, outcome: safely.Outcome, seconds: float) -> str | None:
    """What is wrong with one call, or None."""
    because = f" {one.because}" if one.because else ""
    if outcome.timed_out:
        return f"not done after {seconds:g} s.{because}"
    if outcome.error:
        return f"raises {outcome.error}.{because}"
    try:
        got = outcome.value if one.raw else safely.plain(outcome.value)
    except safely.NotPlain as reason:
        wanted = None if one.raw or callable(one.expect) else _KINDS.get(type(one.expect))
        return f"returns {reason}{f'; {wanted} is asked for' if wanted else ''}.{because}"
    if callable(one.expect):
        verdict = safely.call(one.expect, got, seconds=seconds)
        if verdict.error or verdict.timed_out:
            return f"returns {safely.shown(outcome.value)}, which cannot be judged.{because}"
        if verdict.value is True:
            return None
        return verdict.value if type(verdict.value) is str else f"returns {safely.shown(got)}.{because}"
    if _same(got, one.expect, one.tolerance):
        return None
    if got is None:
        return f"returns nothing: is there a `return`?{because}"
    wanted = _KINDS.get(type(one.expect))
    if wanted and _KINDS.get(type(got)) not in (None, wanted):
        return f"returns {safely.shown(got)}; {wanted} is asked for.{because}"
    return f"returns {safely.shown(got)}.{because}"


def _same(got: Any, expected: Any, tolerance: float) -> bool:
    """Equality of plain data, with numbers within `tolerance` and no difference between lists and tuples."""
    if isinstance(expected, bool) or isinstance(got, bool):
        return got is expected
    if isinstance(expected, (int, float)):
        try:
            return isinstance(got, (int, float)) and _close(float(got), float(expected), tolerance)
        except OverflowError:
            return False
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(expected):
            return False
        return all(_same(a, b, tolerance) for a, b in zip(got, expected, strict=True))
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(_same(got[k], expected[k], tolerance) for k in got)
        )
    return type(got) is type(expected) and got == expected


def _points(value: float) -> str:
    return f"{value:g}"
