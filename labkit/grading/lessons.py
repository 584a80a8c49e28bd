"""What a lesson asks for: its cells as learners get them, its exercises, and the check cells with their answers in."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import notebooks
from ..units import UserError
from . import hidden, slicing
from .slicing import Cell

KINDS = ("number", "choice", "code", "words")


@dataclass(frozen=True)
class Task:
    """One exercise: the ``kind`` of its check, the ``variable`` that holds the answer (empty where a code exercise asks
    for several), what it is worth, and whether a reader scores it (``manual``)."""

    name: str
    kind: str
    variable: str
    maximum: float
    manual: bool = False

    @property
    def answer(self) -> str:
        """The id of the answer cell."""
        return notebooks._slug(self.name)

    @property
    def check(self) -> str:
        """The id of the check cell."""
        return notebooks._slug(f"{self.name}-check")


@dataclass(frozen=True)
class Lesson:
    """One lesson: the learner's notebook (no solution in it), its exercises, and the master's check cells by id."""

    name: str
    notebook: Any
    tasks: tuple[Task, ...]
    checks: dict[str, str]

    @property
    def cells(self) -> list[Cell]:
        """The code cells as learners get them."""
        return [Cell(c.id, c.source, role(c)) for c in self.notebook.cells if c.cell_type == "code"]

    def task(self, name: str) -> Task:
        """The exercise of this name. Raises `UserError` naming those that there are."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise UserError(f"{self.name} has no exercise {name!r}: {', '.join(t.name for t in self.tasks)}")


def role(cell: Any) -> str:
    """What one of our code cells is, by its nbgrader metadata."""
    found = cell.metadata.get("nbgrader") or {}
    return "answer" if found.get("solution") else "check" if found.get("grade_id") else "given"


def read(path: Path) -> Lesson:
    """The lesson in a file of lessons/. Raises `UserError` when an exercise's check is of no known kind."""
    master = notebooks.master(path)
    checks = {c.id: c.source for c in master.cells if role(c) == "check" and c.cell_type == "code"}
    points = {}
    for cell in master.cells:
        found = cell.metadata.get("nbgrader") or {}
        if "points" in found:
            points[found["grade_id"].removesuffix("-check")] = (float(found["points"]), bool(found["solution"]))
    tasks = []
    for cell in master.cells:
        if role(cell) != "answer":
            continue
        name = cell.metadata["nbgrader"]["grade_id"]
        source = checks.get(notebooks._slug(f"{name}-check"), "")
        kind, variable = _asked(source, f"{path.name}, exercise {name}")
        if kind == "code" and variable not in slicing.binds(cell.source):
            variable = ""  # made by the check of what the answer defines
        tasks.append(Task(name, kind, variable, *points[name]))
    return Lesson(path.stem, notebooks.learner(master), tuple(tasks), checks)


def imports(path: Path, tasks: Iterable[Task]) -> set[str]:
    """The modules that the solved answers of the lesson in a file need, by what their names come from."""
    solved = notebooks.solved(notebooks.master(path))
    cells = [Cell(c.id, c.source, role(c)) for c in solved.cells if c.cell_type == "code"]
    found: set[str] = set()
    for task in tasks:
        at = next((i for i, c in enumerate(cells) if c.id == task.answer), None)
        if at is not None:
            found |= slicing.imports(slicing.before(cells, at, slicing.needs(cells[at].source)))
    return found


def find(folder: Path, wish: str) -> Path:
    """The file of a lesson given by name or number. Raises `UserError` naming the lessons when there is none."""
    names = sorted(folder.glob("[0-9][0-9]_*.py"))
    for file in names:
        if wish in (file.stem, file.stem[:2]) or (wish.isdigit() and file.stem[:2] == wish.zfill(2)):
            return file
    raise UserError(f"no lesson {wish!r} in {folder}: {', '.join(f.stem for f in names) or 'there are none'}")


def tests(lesson: Lesson, folder: Path) -> dict[str, hidden.Exercise]:
    """The hidden tests of a lesson's code exercises. Raises `UserError` for a missing or a stray one."""
    code = [t.name for t in lesson.tasks if t.kind == "code"]
    file = folder / f"{lesson.name}.py"
    found = hidden.load(file) if file.is_file() else {}
    missing = [name for name in code if name not in found]
    if missing:
        raise UserError(f"no hidden test for {', '.join(missing)}: {file} needs a class for each code exercise")
    stray = [name for name in found if name not in code]
    if stray:
        raise UserError(f"{file}: {', '.join(stray)} is no code exercise of {lesson.name}")
    return found


def digest(*paths: Path) -> str:
    """A short digest of files (and of the Python files in folders): when it changes, a score is computed again."""
    found = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(file.name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b""))
    return found.hexdigest()[:16]


def _asked(source: str, where: str) -> tuple[str, str]:
    """The kind of check in a check cell, and the variable that it looks at."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS
        and ast.unparse(node.func.value) in ("lab.check", "lab.checks", "check", "checks")
    ]  # fmt: skip
    if len(calls) != 1 or len(calls[0].args) < 2 or not isinstance(calls[0].args[1], ast.Name):
        raise UserError(
            f"{where}: the check cell must call lab.check.number, choice, code or words once, on a variable"
        )
    return calls[0].func.attr, calls[0].args[1].id  # type: ignore[attr-defined]
