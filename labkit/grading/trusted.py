"""The process that knows the answers: it judges plain data, and no learner's code ever runs in it.

One for each lesson; it reads requests on standard input and answers each with one line:

- ``check``: run the lesson's own check cell on a value; back come points, maximum, status, message;
- ``cases``: the hidden inputs of a code exercise for a seed;
- ``judge``: what the hidden test says of each case's result.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from .. import checks, quiet, safely
from ..units import UserError
from . import hidden, lessons, running, slicing, wire

JUDGE_SECONDS = 30.0


class Judge:
    """A lesson's check cells and hidden tests, ready to be asked."""

    def __init__(self, lesson: lessons.Lesson, tests: dict[str, hidden.Exercise]):
        self.lesson, self.tests = lesson, tests
        self._names: dict[tuple[str, bool], dict[str, Any]] = {}

    def check(self, exercise: str, value: Any) -> dict[str, Any]:
        """What the check cell says when the exercise's variable holds `value`."""
        task = self.lesson.task(exercise)
        piece = slicing.Piece(slicing.Cell(task.check, self.lesson.checks[task.check], "check"))
        found = None
        for whole in (False, True):
            names = {**self._given(task, whole), task.variable: value}
            outcome = safely.call(running.run, piece, names, seconds=JUDGE_SECONDS)
            if outcome.timed_out:  # a text made to keep a pattern busy
                found = checks.Check(exercise, 0, task.maximum, "takes too long to look through", "wrong", task.manual)
            elif not outcome.error:
                found = outcome.value
            if not str(outcome.error).startswith("NameError"):
                break
        if not isinstance(found, checks.Check):
            if outcome.error:
                raise TypeError(f"the check cell of {exercise} raises {outcome.error}")
            raise TypeError(f"the check cell of {exercise} shows a {type(found).__name__}, not a check")
        return {k: getattr(found, k) for k in ("points", "maximum", "status", "message", "manual")}

    def cases(self, exercise: str, seed: int) -> list[hidden.Case]:
        """The hidden inputs for this seed."""
        return list(self.tests[exercise].cases(random.Random(seed)))

    def judge(self, exercise: str, seed: int, results: list[Any]) -> list[Any]:
        """True, or a sentence, for each of the first cases' results."""
        verdicts = []
        for case, result in zip(self.cases(exercise, seed), results, strict=False):
            outcome = safely.call(self.tests[exercise].judge, case.given, result, seconds=JUDGE_SECONDS)
            good = outcome.value
            if outcome.error or outcome.timed_out or not (good is True or isinstance(good, str)):
                good = "what comes back cannot be judged."
            verdicts.append(good)
        return verdicts

    def _given(self, task: lessons.Task, whole: bool) -> dict[str, Any]:
        """What the given cells above a check leave: those that the check needs, or all."""
        if (task.name, whole) not in self._names:
            cells = [c for c in self.lesson.cells if c.role == "given" or c.id == task.check]
            at = next(i for i, c in enumerate(cells) if c.id == task.check)
            wanted = slicing.needs(self.lesson.checks[task.check]) - {task.variable}
            names = running.main_module()
            for piece in slicing.everything(cells, at) if whole else slicing.before(cells, at, wanted):
                running.run(piece, names)
            self._names[task.name, whole] = names
        return dict(self._names[task.name, whole])


def answer(judge: Judge, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    do, exercise = request["do"], request["exercise"]
    if do == "check":
        return judge.check(exercise, wire.decode(request["value"]))
    if do == "cases":
        if exercise not in judge.tests:
            raise UserError(f"{judge.lesson.name} has no hidden test for {exercise!r}")
        found = judge.cases(exercise, request["seed"])
        test = judge.tests[exercise]
        cases = [{"given": wire.encode(safely.plain(c.given)), "worth": c.worth, "because": c.because} for c in found]
        probe, outside = hidden.probe_source(type(test)), hidden.outside_source(type(test))
        return {"cases": cases, "probe": probe, "outside": outside, "watched": test.watched, "seconds": test.seconds}
    if do == "judge":
        return {"verdicts": judge.judge(exercise, request["seed"], [wire.decode(r) for r in request["results"]])}
    raise ValueError(f"cannot {do}")


def serve(lesson: Path, folder: Path | None) -> None:
    """Answer requests on standard input until it ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the lesson's own cells print
    quiet.libraries()
    known = lessons.read(lesson)
    file = folder / f"{known.name}.py" if folder else None
    judge = Judge(known, hidden.load(file) if file and file.is_file() else {})
    for line in sys.stdin:
        try:
            reply = answer(judge, json.loads(line))
        except Exception as error:  # said to the grader, which names the lesson
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
