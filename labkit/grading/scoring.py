"""From what came out of the sandbox to points, a status and a sentence for the student."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from . import hidden, lessons, wire
from .outcomes import ExerciseResult
from .runner import Outcome

Ask = Callable[..., dict[str, Any]]
_OUTCOMES = {"right": "graded", "partial": "partial", "wrong": "wrong", "blank": "blank", "error": "error"}


def score(
    blank: ExerciseResult,
    task: lessons.Task,
    outcome: Outcome,
    test: dict[str, Any] | None,
    ask: Ask,
    seed: int,
) -> ExerciseResult:
    """The result of one exercise: `outcome` is what its process gave, `ask` the process that judges. `blank` is the
    result of an exercise that is not answered, `test` the hidden test of a code exercise."""

    def result(points: float, status: str, message: str, answer: str = "") -> ExerciseResult:
        return dataclasses.replace(
            blank, points=round(min(max(points, 0.0), task.maximum), 4), status=status, message=message, answer=answer
        )

    first = outcome.values[0] if outcome.values else {"kind": "nothing"}
    kind = first["kind"]
    if outcome.ending != "done" and not (test and outcome.values):
        status = {"timeout": "timeout", "crashed": "crashed", "flooded": "error"}[outcome.ending]
        return result(0, status, outcome.reason)
    if kind == "failed" and first["where"] != "case":
        return result(0, *_failure(first, task))
    if kind == "blank":
        return blank
    if kind == "undefined":
        return result(0, "error", f"the cell leaves no `{task.variable}`")
    if kind == "uncallable":
        return result(0, "wrong", f"this is {_text(first, 'shown')}; a function is asked for", _text(first, "shown"))
    if test:
        return _judged(result, blank, task, outcome, test, ask, seed)
    if kind == "unreadable":
        return result(0, "wrong", f"this is {_text(first, 'text')}, which is no answer")
    if kind != "value":
        return result(0, "crashed", "its process sent something else than an answer")
    try:
        wire.decode(first["value"])
    except (ValueError, KeyError, RecursionError):
        return result(0, "tampered", "its process sent something else than an answer")
    found = ask("check", task.name, value=first["value"])
    points = task.maximum * found["points"] / found["maximum"] if found["maximum"] else 0.0
    status = _OUTCOMES[found["status"]]
    shown = _text(first, "shown") if task.kind != "words" else str(first["value"])[:4000]
    if task.manual and status != "blank":
        status = "needs-manual"
    return result(points, status, found["message"], shown)


def _judged(
    result: Any,
    blank: ExerciseResult,
    task: lessons.Task,
    outcome: Outcome,
    test: dict[str, Any],
    ask: Ask,
    seed: int,
) -> ExerciseResult:
    """The score of a code exercise: what the hidden test says of each case's result."""
    cases = test["cases"]
    heard = [m for m in outcome.values if m["kind"] in ("result", "failed", "unreadable", "blank")][: len(cases)]
    if any(m["kind"] == "blank" for m in heard):
        return blank
    try:
        values = [{"value": wire.encode(wire.decode(m["value"]))} if m["kind"] == "result" else None for m in heard]
    except (ValueError, KeyError, RecursionError):
        return result(0, "tampered", "its process sent something else than results")  # type: ignore[no-any-return]
    sent = [v["value"] if v else None for v in values]
    verdicts = ask("judge", task.name, seed=seed, results=sent)["verdicts"]
    right, complaints, statuses = [], [], []
    for number, case in enumerate(cases):
        because = f" {case['because']}" if case["because"] else ""
        if number >= len(heard):
            status = {"timeout": "timeout", "crashed": "crashed"}.get(outcome.ending, "error")
            say = outcome.reason
        elif heard[number]["kind"] == "failed":
            status, say = _failure(heard[number], task)
        elif heard[number]["kind"] == "unreadable":
            status, say = "wrong", f"returns {_text(heard[number], 'text')}."
        elif verdicts[number] is True:
            right.append(True)
            continue
        else:
            status, say = "wrong", str(verdicts[number])
        right.append(False)
        statuses.append(status)
        complaints.append(say if because.strip() and because.strip() in say else f"{say}{because}")
    if not complaints:
        return result(task.maximum, "graded", "right")  # type: ignore[no-any-return]
    share = hidden.share([hidden.Case(None, c["worth"]) for c in cases], right)
    status = "partial" if share else statuses[0]
    return result(task.maximum * share, status, complaints[0])  # type: ignore[no-any-return]


def _failure(message: dict[str, Any], task: lessons.Task) -> tuple[str, str]:
    """Status and sentence for code that raised."""
    kind, line = _text(message, "error"), message.get("line")
    where = f" in line {line} of its cell" if isinstance(line, int) else ""
    if kind == "timeout":
        return "timeout", f"not done in time{where}."
    if message["where"] == "given":
        return "error", f"a given cell that it needs fails: {kind}: {_text(message, 'message')}"
    said = _text(message, "message")
    if message["where"] == "case" and kind == "KeyError" and not message.get("mine") and said[1:-1].isidentifier():
        return "error", f"the cell leaves no `{said[1:-1]}`"
    if message["where"] == "case" and kind == "TypeError" and f"{task.variable or said}()" in said:
        return "error", "cannot be called as the exercise asks (TypeError)."
    if message["where"] == "case" and not message.get("mine"):
        return "wrong", f"what `{task.variable or task.name}` returns cannot be used ({kind})."
    if kind == "EOFError":
        return "error", f"waits for somebody to type something{where}: input() has no place in an answer."
    if message["where"] == "case":  # the text of the error could tell the hidden input
        return "error", f"raises {kind}{where}."
    return "error", f"raises {kind}{where}: {_text(message, 'message')}"


def _text(message: dict[str, Any], key: str) -> str:
    return str(message.get(key, ""))[:300]
