"""Every exercise of every lesson: the solution scores full, the blank nothing, typical wrong answers what they should.

The answers lie in instructor/answers/, one file for each lesson in percent format. A cell's line says the exercise, the
score and the status that it must get, and what is wrong with it ("another way: ..." is right and scores full).
``visible="right"`` says that the check under the exercise takes it, and only the hidden test does not.
"""

from __future__ import annotations

import ast
import math
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jupytext
import pytest
from grading_samples import HOME, hand_in, lesson, notebook, solutions

import labkit as lab
from labkit import notebooks, safely
from labkit.checks import Check
from labkit.grading import grader, hidden, lessons, outcomes, running, sandbox, session, slicing

LESSONS = sorted(path.stem for path in (HOME / "lessons").glob("[0-9][0-9]_*.py"))
SAMPLE = "06_attention"  # imports little, measures nothing
LEAST = 3  # typical wrong answers for each exercise
SEEDS = 20
ELSEWHERE = 40  # a line of a solution that is shorter than this may stand in another lesson by chance
PASSAGE = 4  # lines in a row that two files share only if one was copied
GARBAGE: list[Any] = [None, ..., True, 1e308, float("nan"), "right", [], [[]], {}, {"kind": "Tensor"}, [None] * 4]


@dataclass(frozen=True)
class Answer:
    """One wrong answer of a file, and what grading must say of it."""

    exercise: str
    source: str
    score: float
    status: str
    what: str
    visible: str = ""


@lru_cache
def answers(name: str) -> tuple[Answer, ...]:
    """The wrong answers in a lesson's file."""
    file = HOME / "instructor" / "answers" / f"{name}.py"
    cells = jupytext.reads(file.read_text(encoding="utf-8"), fmt="py:percent").cells
    rows = [({k: v for k, v in c.metadata.items() if k != "lines_to_next_cell"}, c.source) for c in cells[1:]]
    return tuple(Answer(row.pop("answer"), source, **row) for row, source in rows)


@lru_cache
def hidden_tests(name: str) -> dict[str, hidden.Exercise]:
    """The hidden tests of a lesson; one for each code exercise, or an error."""
    return lessons.tests(lesson(name), HOME / "instructor" / "hidden")


# ------------------------------------------------------------------------------------------- what files there must be


@pytest.mark.parametrize("name", LESSONS)
def test_every_exercise_has_typical_wrong_answers(name: str) -> None:
    counts = Counter(answer.exercise for answer in answers(name) if answer.status != "graded")
    assert {task.name: counts[task.name] >= LEAST for task in lesson(name).tasks} == dict.fromkeys(counts, True)
    for task in lesson(name).tasks:
        mine = [answer for answer in answers(name) if answer.exercise == task.name]
        assert len({answer.what for answer in mine}) == len(mine), (
            f"{task.name}: two answers say the same of themselves"
        )
        for answer in mine:
            assert (answer.status == "graded") == answer.what.startswith("another way"), answer
            full = answer.score == task.maximum
            assert 0 <= answer.score <= task.maximum and full == (answer.status == "graded"), answer
        if task.kind == "code":
            assert any(a.what == "raises" and a.status == "error" for a in mine), task.name
            assert any(a.what == "returns nothing" and a.score == 0 for a in mine), task.name
            assert any(a.visible == "right" for a in mine), f"{task.name}: no answer that only the hidden test finds"


def test_every_file_belongs_to_a_lesson_and_every_code_exercise_has_its_hidden_test() -> None:
    for folder in ("answers", "hidden"):
        assert sorted(path.stem for path in (HOME / "instructor" / folder).glob("*.py")) == LESSONS
    for name in LESSONS:
        assert set(hidden_tests(name)) == {task.name for task in lesson(name).tasks if task.kind == "code"}


# ------------------------------------------------------------------------------------------- no answer in notebooks/


def stripped(source: str, least: int = 1) -> list[str]:
    """The lines of a source that are at least so many characters long, without the spaces around them."""
    return [line.strip() for line in source.split("\n") if len(line.strip()) >= least]


def regions(source: str) -> Iterator[str]:
    """What stands between the marks of solutions."""
    for part in source.split(notebooks.BEGIN)[1:]:
        yield part.partition(notebooks.END)[0]


def secrets(name: str) -> set[str]:
    """Lines of a lesson's solutions, and what its checks know, that learners are shown nowhere in that lesson."""
    master = notebooks.master(HOME / "lessons" / f"{name}.py")
    solved = {line for cell in master.cells for part in regions(cell.source) for line in stripped(part, 16)}
    given = "\n".join(
        re.sub(f"{notebooks.BEGIN}.*?{notebooks.END}", "", c.source, flags=re.DOTALL) for c in master.cells
    )
    known = {text for source in lesson(name).checks.values() for text in told_by(source)}
    return {line for line in solved if line not in given} | known


def told_by(check: str) -> Iterator[str]:
    """The texts that a check cell of a number, a choice or a text would give away: hints for mistakes, ideas."""
    for node in ast.walk(ast.parse(check)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in notebooks._TELLING:
            wanted = notebooks._TELLING[node.func.attr]
            told = [*node.args[2:3], *(k.value for k in node.keywords if k.arg in wanted)]
            constants = [c.value for part in told for c in ast.walk(part) if isinstance(c, ast.Constant)]
            yield from (text for text in constants if isinstance(text, str) and len(text) >= 16)


@lru_cache
def shown() -> dict[str, str]:
    """The text of every cell in notebooks/, by lesson."""
    books = {path.stem: jupytext.read(path) for path in sorted((HOME / "notebooks").glob("*.ipynb"))}
    return {name: "\n".join(stripped("\n".join(cell.source for cell in book.cells))) for name, book in books.items()}


def leaks(name: str, texts: dict[str, str]) -> list[str]:
    """Which secrets of a lesson stand in which text; in another lesson's, short ones are chance."""
    wanted = sorted(secrets(name))
    return [
        f"{other}: {line}"
        for other, text in texts.items()
        for line in wanted
        if line in text and (other == name or len(line) >= ELSEWHERE)
    ]


@pytest.mark.parametrize("name", LESSONS)
def test_no_solution_is_in_the_notebooks(name: str) -> None:
    assert leaks(name, shown()) == []
    solved = notebooks.solved(notebooks.master(HOME / "lessons" / f"{name}.py"))
    assert leaks(name, {name: "\n".join(cell.source for cell in solved.cells)}), "the search finds nothing at all"


def test_no_hidden_test_is_in_the_notebooks() -> None:
    text = "\n".join(shown().values())
    for path in (HOME / "instructor" / "hidden").glob("*.py"):
        lines = stripped(path.read_text(encoding="utf-8"))
        passages = ["\n".join(lines[at : at + PASSAGE]) for at in range(len(lines) - PASSAGE + 1)]
        assert [passage for passage in passages if passage in text] == []
    for word in ("labkit.grading", "instructor/hidden", "instructor/answers"):
        assert word not in text


# ------------------------------------------------------------------------------------------- judges


@pytest.mark.parametrize("name", LESSONS)
def test_no_judge_takes_what_its_probe_cannot_have_found(name: str) -> None:
    for test in hidden_tests(name).values():
        for garbage in GARBAGE:
            verdicts = []
            for case in test.cases(random.Random(0)):
                try:
                    verdicts.append(test.judge(case.given, garbage))
                except Exception:  # counts as wrong
                    verdicts.append("cannot be judged")
            assert not all(verdict is True for verdict in verdicts), f"{test.name} takes {garbage!r}"
            assert all(verdict is True or type(verdict) is str for verdict in verdicts)


@pytest.mark.parametrize("name", LESSONS)
def test_hidden_inputs_are_new_for_each_seed_and_the_same_for_one(name: str) -> None:
    for test in hidden_tests(name).values():
        made = [[(c.given, c.worth) for c in test.cases(random.Random(seed))] for seed in (1, 1, 2)]
        assert made[0] == made[1] != made[2]
        assert [worth for _, worth in made[0]] == [worth for _, worth in made[2]]
        assert all(safely.plain(given) == given for given, _ in made[0]), f"{test.name}: inputs are not plain data"


BUSY_SECONDS = 0.01  # that each way to the pretended card and back takes: more than the judge forgives a quiet machine


@pytest.mark.parametrize(("what", "right"), [("the solution", True), ("takes the mean", False)])
def test_a_busy_machine_makes_no_right_timer_wrong_and_no_wrong_one_right(what: str, right: bool) -> None:
    name, exercise = "00_environment", "honest_timer"
    test = hidden_tests(name)[exercise]
    wrong = {a.what: a.source for a in answers(name) if a.exercise == exercise}
    names: dict[str, Any] = {"time": time, "statistics": statistics}
    exec(wrong.get(what, solutions(name)[exercise]), names)
    case = list(test.cases(random.Random(3)))[2]
    kept = [0.0]
    card = hidden.stands_outside(test, case.given, lambda: kept[0])

    def busy(counts: bool) -> None:
        began = time.perf_counter()
        time.sleep(BUSY_SECONDS)
        kept[0] += (time.perf_counter() - began) * counts

    def timed(counts: bool) -> float:
        def late(action: Callable[[], None]) -> Callable[[], None]:
            return lambda: (busy(counts), action(), busy(counts))[1]

        seconds: float = names[exercise](late(card.launch), late(card.wait), case.given["repeats"])
        return seconds

    verdict = test.judge(case.given, {"back": timed(True), "seen": card.seen()})
    assert verdict is True if right else "too long" in str(verdict)
    card = hidden.stands_outside(test, case.given, lambda: kept[0])
    verdict = test.judge(case.given, {"back": timed(False), "seen": card.seen()})
    assert "too long" in str(verdict), "who sleeps is not kept waiting"


STORES = {
    ("03_gradient_checkpointing", "in_segments_of"): "def in_segments_of(blocks, x, every):\n"
    "    for block in blocks:\n        x = block(x)\n    return x",
    ("05_offload", "halves"): "def pack(tensor):\n    return tensor\n\ndef unpack(kept):\n    return kept",
}


@pytest.mark.grading
@pytest.mark.parametrize(("name", "exercise"), STORES)
@pytest.mark.parametrize("honest", [True, False])
def test_a_forged_peak_is_not_believed(name: str, exercise: str, honest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the answer says what was predicted; what it holds is seen from outside."""
    test, task = hidden_tests(name)[exercise], lesson(name).task(exercise)
    source = solutions(name)[exercise] if honest else STORES[name, exercise]
    names = answered(name, task, source, set())
    case = list(test.cases(random.Random(1)))[-1]
    lengths = iter(case.given.get("chains", ()))

    def forged(*_: Any, **__: Any) -> Any:
        given = case.given
        if exercise == "halves":
            return SimpleNamespace(steady=SimpleNamespace(requested_bytes=0.5 * next(lengths) * 4 * 2048 * 4096))
        tensors = math.ceil(given["blocks"] / given["every"]) + 2 + given["every"] * given["depth"]
        return SimpleNamespace(steady=SimpleNamespace(requested_bytes=tensors * 4 * 16 * 2**20))

    monkeypatch.setattr(lab, "measure", forged)
    verdict = test.judge(case.given, safely.plain(hidden.tried(test, names, case.given)))
    assert verdict is True if honest else "holds more" in str(verdict)


# ------------------------------------------------------------------------------------------- scores


def wrongly_scored(name: str) -> list[str]:
    """Every answer to a lesson whose score or status is not what it should be; its processes run once for all."""
    found = []

    def score(exercise: str, source: str, points: float, status: str, what: str) -> None:
        got = hidden.try_answer(name, exercise, source)
        if abs(got.points - points) > 1e-3 or got.status != status:
            wanted = f"{points:g} and {status}"
            found.append(f"{exercise}, {what}: {got.points:g} and {got.status} ({got.message}), not {wanted}")

    try:
        for task in lesson(name).tasks:
            full = "needs-manual" if task.manual else "graded"
            score(task.name, solutions(name)[task.name], task.maximum, full, "the solution")
            blank = next(cell.source for cell in lesson(name).cells if cell.id == task.answer)
            score(task.name, blank, 0, "blank", "the blank")
        for answer in answers(name):
            score(answer.exercise, answer.source, answer.score, answer.status, answer.what)
    finally:
        session.close_all()
    return found


@pytest.mark.slow
def test_a_sample_of_answers_scores_what_it_should() -> None:
    assert wrongly_scored(SAMPLE) == []


@pytest.mark.grading
@pytest.mark.parametrize("name", [name for name in LESSONS if name != SAMPLE])
def test_answers_score_what_they_should(name: str) -> None:
    assert wrongly_scored(name) == []


@pytest.mark.grading
def test_every_solved_lesson_scores_full_where_submissions_are_graded(tmp_path: Path) -> None:
    """Predictions, compilers and masks must work behind the walls of the sandbox, too."""
    for name in LESSONS:
        answered = {task.answer: solutions(name)[task.name] for task in lesson(name).tasks}
        hand_in(tmp_path / "in", "ada", notebook(name, **answered), f"{name}.ipynb")
    options = grader.Options(exercises_only=True, walled=not sandbox.why_not())
    assert grader.grade(tmp_path / "in", tmp_path / "out", options=options, home=HOME) == 0
    found = outcomes.load_all(tmp_path / "out")
    assert [result.lesson for result in found] == LESSONS
    for result in found:
        for e in result.exercises:
            right = "needs-manual" if lesson(result.lesson).task(e.exercise).manual else "graded"
            assert (e.points, e.status) == (e.maximum, right), f"{result.lesson}, {e.exercise}: {e.message}"


# ------------------------------------------------------------------------------------------- in this process


def answered(name: str, task: lessons.Task, source: str, wanted: set[str]) -> dict[str, Any]:
    """The names that an answer leaves after the given cells that it, and whatever needs `wanted`, rest on."""
    cells = lesson(name).cells
    at = next(i for i, cell in enumerate(cells) if cell.id == task.answer)
    names = {"__name__": "answered"}
    for piece in slicing.before(cells, at, slicing.needs(source) | wanted):
        running.run(piece, names)
    running.run(slicing.Piece(slicing.Cell(task.answer, source, "answer")), names)
    return names


@pytest.mark.grading
@pytest.mark.parametrize("name", LESSONS)
def test_answers_made_for_the_visible_check_pass_it(name: str) -> None:
    for answer in answers(name):
        if answer.visible:
            task = lesson(name).task(answer.exercise)
            check = lesson(name).checks[task.check]
            found = running.run(
                slicing.Piece(slicing.Cell(task.check, check, "check")),
                answered(name, task, answer.source, slicing.needs(check)),
            )
            assert isinstance(found, Check)
            assert found.status == answer.visible, f"{answer.exercise}, {answer.what}: {found.message}"


@pytest.mark.grading
@pytest.mark.parametrize("name", LESSONS)
def test_solutions_are_right_for_any_hidden_inputs(name: str) -> None:
    for exercise, test in hidden_tests(name).items():
        task = lesson(name).task(exercise)
        wanted = slicing.keys_of(hidden.probe_source(type(test)), "lesson") - {task.variable}
        names = answered(name, task, solutions(name)[exercise], wanted)
        for seed in range(SEEDS):
            for case in test.cases(random.Random(seed)):
                verdict = test.judge(case.given, safely.plain(hidden.tried(test, names, case.given)))
                assert verdict is True, f"{exercise}, seed {seed}: {verdict} {case.because}"
