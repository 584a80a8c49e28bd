"""Hidden tests: what an instructor writes for an exercise whose answer is code.

A file ``instructor/hidden/NN_name.py`` holds one class for each code exercise of the lesson::

    from labkit.grading import hidden

    class LargestBatch(hidden.Exercise):
        name = "largest_batch"

        def cases(self, random):
            for _ in range(3):
                mib = random.randint(100, 400)
                yield hidden.case({"mib": mib, "budget_mib": 4096}, because="Does your bisection stop early?")

        @staticmethod
        def probe(lesson, given):
            tried = []
            ...
            return {"found": lesson["largest_batch"](experiment, budget), "tried": tried}

        def judge(self, given, result):
            return True if result["found"] == right(given) else "a larger batch still fits."

``cases`` makes the inputs, from a `random.Random` whose seed is kept in the result. ``probe`` runs inside the sandbox,
where the learner's cells have run: ``lesson`` is their namespace, with the given cells that the answer and the probe
need. Only the source of ``probe`` goes there, so it sees no name of this file: it imports what it needs, and what it
knows of the case is in ``given``. It returns plain data (numbers, inf and nan among them, text, lists, dicts, small
tensors or arrays); what it raises counts against the answer. ``judge`` runs outside, on that data alone: the expected
value never enters the sandbox. A sentence that it returns is shown to the student: it must not give the answer away.

What lies in the process of the probe, the answer can read and change: a count of calls that it keeps, a number that an
argument of the answer hides. What a judge must be able to believe stands outside::

        def cases(self, random):
            yield hidden.case({"tries": 5, "outside": {"number": random.randint(1, 99)}})

        @staticmethod
        def outside(given):
            class Number:
                def __init__(self):
                    self.asked = []

                def larger(self, than):
                    self.asked.append(than)
                    return given["outside"]["number"] > than

                def seen(self):
                    return self.asked

            return Number()

        @staticmethod
        def probe(lesson, given, outside):
            return lesson["search"](outside.larger, given["tries"])

``outside`` makes an object in another process, of whose inputs the part under the key ``outside`` never enters that of
the answer. The probe's third argument calls its functions, with plain data. The judge's ``result`` is then a dict:
``back`` is what the probe returned, ``seen`` what the object's ``seen()`` says of the case in the end. An
``outside(given, waited)`` is given a function, too: the seconds that the answer's process and its own have so far been
kept waiting for a processor.

A peak that is measured or predicted in the probe is a number that the answer's process says. With ``watched = True``
that process is looked at from outside while a case runs, and ``held`` of the result (again a dict, with ``back``) is
the most memory that it was seen to hold, in bytes, beyond what it began with: let the probe do the same with real
tensors, and have the judge ask for both, the prediction near the right number and ``held`` below what a wrong answer
would take. ``held`` has what libraries take besides, and may miss a short peak: leave room.

Numbers, choices and written answers need no class: the lesson's own check cell scores them, in a process that the
learner's code never runs in.
"""

from __future__ import annotations

import abc
import ast
import contextlib
import importlib.util
import inspect
import os
import random as randomness
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..units import UserError
from . import weighing
from .outcomes import ExerciseResult
from .relay import OUTSIDE


@dataclass(frozen=True)
class Case:
    """One hidden input (plain JSON data), its weight among the others, and what to say when it fails."""

    given: Any
    worth: float = 1.0
    because: str = ""


def case(given: Any, *, worth: float = 1.0, because: str = "") -> Case:
    """One hidden input for `Exercise.cases`: `because` is added to what is wrong when it fails."""
    return Case(given, worth, because)


class Exercise(abc.ABC):
    """The hidden test of one code exercise; see the module's text. ``seconds`` is the time that one case may take;
    ``preload`` names modules to import once, before the processes of the answers are forked; ``watched``: whether the
    memory of the answer's process is looked at."""

    name = ""
    seconds = 20.0
    preload: tuple[str, ...] = ()
    watched: ClassVar[bool] = False
    outside: ClassVar[Callable[..., Any] | None] = None

    @abc.abstractmethod
    def cases(self, random: randomness.Random) -> Iterable[Case]:
        """The inputs, made from `random`."""

    @staticmethod
    @abc.abstractmethod
    def probe(lesson: dict[str, Any], given: Any, *outside: Any) -> Any:
        """Run the learner's code on `given` and return plain data. Runs inside the sandbox, from its source alone."""

    @abc.abstractmethod
    def judge(self, given: Any, result: Any) -> bool | str:
        """True when `result`, what `probe` returned, is right for `given`; else a sentence that says what is wrong."""


def load(file: Path) -> dict[str, Exercise]:
    """The hidden tests in one file, by the exercise's name. Raises `UserError` naming what is wrong with the file."""
    specification = importlib.util.spec_from_file_location(f"_hidden_{file.stem}", file)
    if specification is None or specification.loader is None:
        raise UserError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except FileNotFoundError as error:
        raise UserError(f"no hidden tests: {file}") from error
    except Exception as error:
        raise UserError(f"{file.name} cannot be imported: {type(error).__name__}: {error}") from error
    found: dict[str, Exercise] = {}
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, Exercise) and kind.__module__ == module.__name__ and kind.name:
            if kind.name in found:
                raise UserError(f"{file.name}: two classes are named {kind.name!r}")
            if missing := sorted(kind.__abstractmethods__):
                raise UserError(f"{file.name}: {kind.__name__} has no {', no '.join(missing)}")
            probe_source(kind), outside_source(kind)
            found[kind.name] = kind()
    return found


def probe_source(kind: type[Exercise]) -> str:
    """The source of a class's probe as a function of its own: all of the class that enters the answer's process.

    Raises `UserError` when the source cannot be had, or names what only exists in the file around it.
    """
    return _source_of(kind, "probe", ["lesson", "given", *(["outside"] if kind.outside else [])])


def outside_source(kind: type[Exercise]) -> str | None:
    """The source of what a class keeps outside the answer's process; None where it keeps nothing there. Raises as
    above."""
    if kind.outside is None:
        return None
    more = ["waited"] if kind.outside.__code__.co_argcount > 1 else []  # type: ignore[attr-defined]
    return _source_of(kind, "outside", ["given", *more])


def _source_of(kind: type[Exercise], name: str, arguments: list[str]) -> str:
    called = getattr(kind, name)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(called)))
    except (OSError, TypeError, SyntaxError) as error:
        raise UserError(f"the source of {kind.__name__}.{name} cannot be read: {error}") from error
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != len(arguments):
        raise UserError(f"{kind.__name__}.{name} must be a function of ({', '.join(arguments)})")
    function.decorator_list = []
    outside = set(called.__code__.co_names) & set(called.__globals__)
    strangers = sorted(stranger for stranger in outside if _loads_global(function, stranger))
    if strangers:
        raise UserError(f"{kind.__name__}.{name} names {', '.join(strangers)}: only its own source is sent away")
    return ast.unparse(function)


def _loads_global(function: ast.FunctionDef, name: str) -> bool:
    """Whether `name` is used in a function that neither binds nor imports it."""
    bound = {
        a.arg for node in ast.walk(function) if isinstance(node, ast.arguments) for a in node.args + node.kwonlyargs
    }
    bound |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.name for n in ast.walk(function) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(function):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    loaded = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return name in loaded - bound


def try_answer(
    lesson: str,
    exercise: str,
    source: str,
    *,
    hidden: Path | None = None,
    seed: int = 0,
) -> ExerciseResult:
    """Score `source`, the text of an answer cell, without a sandbox: for answers that you wrote yourself.

    `lesson` is a lesson's name or number. The first call for a lesson starts two processes (what the answers run in,
    what judges them), later calls only fork: call `labkit.grading.session.close_all` when done.
    """
    from . import session

    return session.trial(lesson, hidden).exercise(exercise, source, seed=seed)


def tried(test: Exercise, lesson: dict[str, Any], given: Any) -> Any:
    """What a judge gets of one case when everything runs in this process: to try a hidden test."""
    probe, scale = type(test).probe, weighing.Scale(os.getpid(), os.getpid())
    with weighing.weighed(scale) if test.watched else contextlib.nullcontext():
        if test.outside is None:
            found = {"back": probe(lesson, given)}
        else:
            apart = stands_outside(test, given, lambda: weighing.waited(os.getpid()))
            inputs = {k: v for k, v in given.items() if k != OUTSIDE}
            found = {"back": probe(lesson, inputs, apart), "seen": apart.seen()}
    if test.watched:
        found["held"] = scale.peak
    return found if len(found) > 1 else found["back"]


def stands_outside(test: Exercise, given: Any, waited: Callable[[], float]) -> Any:
    """The object of a case that stands outside, made in this process."""
    made: Any = type(test).outside
    return made(given, *((waited,) if made.__code__.co_argcount > 1 else ()))


def share(cases: Sequence[Case], right: Sequence[bool]) -> float:
    """The weight of the cases that are right, from 0 to 1."""
    total = sum(c.worth for c in cases)
    return sum(c.worth for c, good in zip(cases, right, strict=True) if good) / total if total else 0.0
