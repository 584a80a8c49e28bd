"""One lesson being graded: the trusted process that knows the answers, and exercises scored by it.

The learner's code runs elsewhere (`runner`); what crosses over is plain data.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import places
from ..units import UserError
from . import hidden, lessons, matching, prying, running, scoring, scratch, slicing, wire
from .outcomes import ExerciseResult
from .runner import Outcome, Runner, plain_launch
from .slicing import Cell

ASK_SECONDS = 600.0  # the first question may run the lesson's given cells
ANSWER_SECONDS = 30.0
KEY_BYTES = 64
SEED_BYTES = 6  # not to be guessed in the time of an exercise, and exact in any program's numbers


class Trusted:
    """The process that judges, for one lesson; started when first asked, and again if it died. Threads take turns."""

    def __init__(self, lesson: Path, folder: Path | None):
        self._lesson, self._folder = lesson, folder
        self._process: wire.Process | None = None
        self._scratch = scratch.make("trusted")
        self._turn = threading.Lock()

    def ask(self, do: str, exercise: str, **fields: Any) -> dict[str, Any]:
        """One request of `trusted`. Raises `UserError` when it cannot be answered, naming lesson and exercise."""
        with self._turn:
            if self._process is None or not self._process.alive:
                self._process = self._start()
            try:
                self._process.send({"do": do, "exercise": exercise, **fields})
                reply = self._process.receive(time.monotonic() + ASK_SECONDS)
            except (wire.Late, wire.Gone, wire.TooMuch) as error:
                said = self._process.said().splitlines()[-1:]
                self._process.kill()
                reason = said[0] if said else type(error).__name__
                raise UserError(f"{self._lesson.stem}, {exercise}: judging it failed: {reason}") from error
        if "failed" in reply:
            raise UserError(f"{self._lesson.stem}, {exercise}: judging it failed: {reply['failed']}")
        return reply

    def _start(self) -> wire.Process:
        environment = places.environment(LABKIT_RUN=self._scratch, LABKIT_HOME=str(places.home()), OMP_NUM_THREADS="2")
        command = [sys.executable, "-m", "labkit.grading.trusted", str(self._lesson.resolve())]
        command += [str(self._folder.resolve())] if self._folder else []
        return wire.Process(command, environment, self._scratch)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        scratch.remove(self._scratch)


def key_of(out: Path) -> bytes:
    """The key of the seeds of everything that is graded into the folder `out`: made once, for its owner's eyes only, so
    that no student knows the hidden inputs before, and grading again gives the same."""
    file = out / "seeds.key"
    if not file.is_file() or file.stat().st_size < KEY_BYTES:
        out.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=out)  # mode 600
        with os.fdopen(descriptor, "wb") as made:
            made.write(secrets.token_hex(KEY_BYTES // 2).encode())
        os.replace(part, file)
    return file.read_bytes()


def seed_of(key: bytes, student: str, lesson: str, exercise: str) -> int:
    """The seed of a student's hidden inputs: the same each time the exercise is graded with this key."""
    words = repr((student, lesson, exercise)).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(words, key=key[:KEY_BYTES], digest_size=SEED_BYTES).digest(), "big")


def modules(file: Path, lesson: lessons.Lesson, tests: Mapping[str, hidden.Exercise]) -> list[str]:
    """What answers of this lesson will import: what the solutions and the hidden tests need, and what these ask for.
    It is imported once, in the process that answers are forked from."""
    found = {"labkit.safely", "labkit.checks"} | lessons.imports(file, lesson.tasks)
    for task in lesson.tasks:
        if task.name in tests:
            keys = slicing.keys_of(hidden.probe_source(type(tests[task.name])), "lesson")
            at = next(i for i, c in enumerate(lesson.cells) if c.id == task.answer)
            found |= slicing.imports(slicing.before(lesson.cells, at, keys))
            found |= set(tests[task.name].preload)
    return sorted(found)


def grade(
    lesson: lessons.Lesson,
    task: lessons.Task,
    sheet: Sequence[Cell],
    trusted: Trusted,
    runner: Runner,
    *,
    student: str = "",
    seed: int | None = None,
    seconds: float = ANSWER_SECONDS,
) -> ExerciseResult:
    """Score one exercise of a sheet: the cells handed in, given and check cells being ours. `seconds` is what the
    answer's cell may take; a hidden test says itself what one of its cases may take. `seed` is that of the hidden
    inputs, one that nobody knows unless given."""
    began = time.monotonic()
    blank = ExerciseResult(student, lesson.name, task.name, 0, task.maximum, "blank", "not answered", kind=task.kind)
    ours = next(c.source for c in lesson.cells if c.id == task.answer)
    at = next((i for i, c in enumerate(sheet) if c.id == task.answer and c.role == "answer"), None)
    if at is None:
        return dataclasses.replace(blank, message="the answer's cell is not there")
    sheet = _with_additions(task, sheet, at)
    if matching.bare(sheet[at].source) == matching.bare(ours):
        return blank
    if task.kind == "code" and (
        pried := prying.found(c.source for c in sheet[: at + 1] if c.role in ("answer", "own"))
    ):
        message = f"no points: the answer looks into the process that grades it ({pried})."
        return dataclasses.replace(blank, status="tampered", message=message)
    seed = secrets.randbits(8 * SEED_BYTES) if seed is None else seed
    test = trusted.ask("cases", task.name, seed=seed) if task.kind == "code" else None
    outcome = _run(task, sheet, at, test, runner, seconds)
    found = scoring.score(blank, task, outcome, test, trusted.ask, seed)
    if outcome.tampered:
        text = "; ".join(dict.fromkeys(outcome.tampered))
        found = dataclasses.replace(found, points=0, status="tampered", message=f"no points: the answer {text}.")
    notes = tuple(dict.fromkeys(outcome.notes))
    return dataclasses.replace(
        found, notes=notes, seed=seed if test else None, seconds=round(time.monotonic() - began, 2)
    )


def _run(
    task: lessons.Task, sheet: Sequence[Cell], at: int, test: dict[str, Any] | None, runner: Runner, seconds: float
) -> Outcome:
    """Run the answer after what it needs; after everything above it when a name is missing."""
    request: dict[str, Any] = {
        "answer": running.to_message([slicing.Piece(sheet[at])])[0],
        "variable": task.variable,
        "seconds": test["seconds"] if test else seconds,
    }
    if test:
        request |= {"probe": test["probe"], "cases": [c["given"] for c in test["cases"]]}
        request |= {"outside": test["outside"], "watched": test["watched"]}
    wanted = slicing.keys_of(test["probe"], "lesson") - {task.variable} if test else set()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # running it says what is wrong with it
        wanted |= slicing.needs(sheet[at].source)
    few = slicing.before(sheet, at, wanted)
    outcome = runner.run({**request, "before": running.to_message(few)})
    lost = [m for m in outcome.values if m["kind"] == "failed" and m.get("error") in ("NameError", "KeyError")]
    if not lost:
        return outcome
    bound = set().union(*(slicing.binds(c.source) for c in sheet[:at] if c.role != "check"))
    if not any(name in bound for m in lost for name in _names_in(str(m.get("message")))):
        return outcome
    runner.close()  # what is left in its memory knows this run's cases
    whole = [p for p in slicing.everything(sheet, at) if p.cell.role != "answer"]
    return runner.run({**request, "before": running.to_message(whole)})


def _names_in(message: str) -> list[str]:
    return message.replace('"', "'").split("'")[1::2]


def _with_additions(task: lessons.Task, sheet: Sequence[Cell], at: int) -> list[Cell]:
    """The sheet with the answer's cell followed, in itself, by the cells that the learner added between it and the
    check and that give the answer anew: the check would see what they leave."""
    end = next((i for i, c in enumerate(sheet) if i > at and c.role == "check"), len(sheet))
    more = [c for c in sheet[at + 1 : end] if c.role == "own" and task.variable in slicing.binds(c.source)]
    source = "\n".join(c.source for c in (sheet[at], *more))
    return [*sheet[:at], dataclasses.replace(sheet[at], source=source), *sheet[at + 1 :]]


class Trial:
    """Answers to one lesson tried without a sandbox; see `hidden.try_answer`."""

    def __init__(self, file: Path, folder: Path | None):
        self.lesson = lessons.read(file)
        self._trusted = Trusted(file, folder)
        found = folder / file.name if folder else None
        tests = hidden.load(found) if found and found.is_file() else {}
        self._folder = scratch.make("trial")
        self._runner = Runner(plain_launch(Path(self._folder)), {"preload": modules(file, self.lesson, tests)})

    def exercise(self, exercise: str, source: str, *, seed: int = 0) -> ExerciseResult:
        """The score of `source` in the exercise's answer cell."""
        task = self.lesson.task(exercise)
        sheet = [
            dataclasses.replace(c, source=source) if c.id == task.answer else c for c in self.lesson.cells
        ]  # fmt: skip
        return grade(self.lesson, task, sheet, self._trusted, self._runner, seed=seed)

    def close(self) -> None:
        """End both processes."""
        self._runner.close()
        self._trusted.close()
        scratch.remove(self._folder)


_trials: dict[tuple[Path, Path | None], Trial] = {}


def trial(lesson: str, folder: Path | None = None) -> Trial:
    """The trial of a lesson, started once; `folder` holds hidden tests (instructor/hidden unless given)."""
    home = places.home()
    file = lessons.find(home / "lessons", lesson)
    folder = folder or home / "instructor" / "hidden"
    if (file, folder) not in _trials:
        _trials[file, folder] = Trial(file, folder)
    return _trials[file, folder]


@atexit.register
def close_all() -> None:
    """End the processes of all trials."""
    while _trials:
        _trials.popitem()[1].close()
