"""Submissions made up for the tests of grading: lesson 00's own notebook with answers, attacks and damage put in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit import notebooks
from labkit.grading import lessons

HOME = Path(__file__).resolve().parents[1]
NAME = "00_environment"
NUMBER, OTHER, CODE, WORDS = "product_rate", "copy_rate", "honest_timer", "slow_print"
MAXIMUM = {NUMBER: 1, OTHER: 1, CODE: 4, WORDS: 2}


@lru_cache
def lesson(name: str = NAME) -> lessons.Lesson:
    return lessons.read(HOME / "lessons" / f"{name}.py")


def course(folder: Path) -> Path:
    """A course of lesson 00 alone, which is read in a tenth of the time."""
    for part in (f"lessons/{NAME}.py", f"instructor/hidden/{NAME}.py"):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_bytes((HOME / part).read_bytes())
    return folder


@lru_cache
def solutions(name: str = NAME) -> dict[str, str]:
    """The solved answer cells, by exercise."""
    solved = notebooks.solved(notebooks.master(HOME / "lessons" / f"{name}.py"))
    cells = {c.id: c.source for c in solved.cells}
    return {t.name: cells[t.answer] for t in lesson(name).tasks}


def answers(name: str) -> dict[str, str]:
    """The solved answer cells, by the cells' ids."""
    found = solutions(name)
    return {t.answer: found[t.name] for t in lesson(name).tasks}


def notebook(name: str = NAME, **answers: str) -> Any:
    """The learner's notebook with these answers, by the cells' ids; what is not named stays as it comes."""
    made = copy.deepcopy(lesson(name).notebook)
    for cell in made.cells:
        if cell.id in answers:
            cell.source = answers[cell.id]
    return made


def solved(**other: str) -> Any:
    """The notebook with every exercise right, except those given."""
    return notebook(**{**solutions(), **other})


def body(line: str) -> str:
    """An `honest_timer` that first does something else, and then is right."""
    head, _, rest = solutions()[CODE].partition("\n")
    inner = "\n".join(f"    {part}" for part in line.split("\n"))
    return f"{head}\n{inner}\n{rest}"


def cell(made: Any, identity: str) -> Any:
    return next(c for c in made.cells if c.id == identity)


def changed(made: Any, change: Callable[[Any], None]) -> Any:
    change(made)
    return made


def claiming(made: Any, **points: float) -> Any:
    """A notebook whose saved check outputs say that these exercises have these points."""
    for exercise, value in points.items():
        check = cell(made, f"{exercise}-check")
        check.execution_count = 1
        check.outputs = [
            {"output_type": "execute_result", "execution_count": 1, "metadata": {}, "data": {"text/plain": str(value)}}
        ]
    return made


def stripped(made: Any) -> dict[str, Any]:
    """A notebook as a tool leaves it that drops ids and metadata."""
    found: dict[str, Any] = json.loads(notebooks.dumps(made))
    found["nbformat_minor"] = 4
    for one in found["cells"]:
        one["metadata"] = {}
        del one["id"]
    return found


def hand_in(folder: Path, student: str, content: Any, name: str = f"{NAME}.ipynb") -> Path:
    """Write a submission: text and bytes as they are, a notebook or a dict as JSON."""
    target = folder / student / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        target.write_bytes(content)
    else:
        target.write_text(content if isinstance(content, str) else json.dumps(content))
    return target
