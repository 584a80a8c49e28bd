"""What the tests of lessons 01 to 08 share: a lesson's cells run by hand, and what a check must say of an answer."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import labkit as lab
from labkit import notebooks
from labkit.checks import Check

LESSONS = Path(__file__).resolve().parents[1] / "lessons"


@lru_cache
def cells(name: str, kind: str = "learner") -> dict[str, str]:
    """Source by cell id, of the notebook that learners get or of the ``"solved"`` one."""
    master = notebooks.master(LESSONS / f"{name}.py")
    book = notebooks.learner(master) if kind == "learner" else notebooks.solved(master)
    return {cell.id: cell.source for cell in book.cells}


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; returns the value of its last expression, as a notebook would show it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None  # type: ignore[attr-defined]


class Lesson:
    """One lesson: ``before`` are given cells that its checks need, ``names`` what its first cell has imported."""

    def __init__(self, name: str, before: Iterable[str] = (), **names: Any):
        self.name, self.before, self.names = name, tuple(before), {"lab": lab, "torch": torch, **names}

    def cells(self, kind: str = "learner") -> dict[str, str]:
        return cells(self.name, kind)

    def given(self) -> dict[str, Any]:
        """What the imports and the cells ``before`` leave."""
        names = dict(self.names)
        for cell in self.before:
            run(self.cells()[cell], names)
        return names

    def checked(self, exercise: str, **answer: Any) -> Check:
        """What the learner's own check cell says about an answer; about the cell as it comes where none is given."""
        names = self.given()
        run(self.cells()[exercise], names)
        names.update(answer)
        found = run(self.cells()[f"{exercise}-check"], names)
        assert isinstance(found, Check)
        return found

    def solution(self, exercise: str) -> dict[str, Any]:
        """The names that the solved cell leaves."""
        names = self.given()
        run(self.cells("solved")[exercise], names)
        return names

    def solved(self, exercise: str, name: str | None = None) -> Any:
        """What the solved cell leaves in the variable of this name (the exercise's own unless given)."""
        return self.solution(exercise)[name or exercise]

    def defined(self, *ids: str, keep: Callable[[ast.stmt], bool] | None = None, **names: Any) -> dict[str, Any]:
        """The functions and classes of the cells with these ids (of all where none is given), or what `keep` chooses,
        without what the cells measure and draw."""
        keep = keep or (lambda node: isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        found = {**self.names, **names}
        for cell in ids or self.cells():
            try:
                tree = ast.parse(self.cells()[cell])
            except SyntaxError:
                assert not ids, f"{cell} is no Python"
                continue  # prose
            exec(compile(ast.Module([n for n in tree.body if keep(n)], []), "<cell>", "exec"), found)
        return found


def assert_right(found: Check, points: float) -> None:
    assert (found.status, found.points) == ("right", points), found.message


def assert_wrong(found: Check, word: str = "") -> None:
    """No points, and a message that has `word` in it."""
    assert (found.status, found.points) == ("wrong", 0), found.message
    assert word in found.message, found.message


def assert_number(found: Check, points: float, word: str, *secrets: str) -> None:
    """A wrong number: these `points`, a message with `word`, and nothing that gives the answer away."""
    assert found.status == ("partial" if points else "wrong")
    assert found.points == points
    assert word in found.message, found.message
    for secret in secrets:
        assert secret not in found.message, found.message


def assert_code(found: Check, word: str, *, most: float | None = None, below: float | None = None) -> None:
    """Wrong code: at most, or fewer than, so many points, and a message with `word`."""
    assert (most is None) != (below is None)
    assert found.status in ("wrong", "partial", "error"), found.message
    assert found.points <= most if most is not None else found.points < below, found.points  # type: ignore[operator]
    assert word in found.message, found.message


def assert_written(found: Check, most: float, word: str) -> None:
    """A written answer that misses something: for a reader, at most so many points, a message with `word`."""
    assert found.manual and found.status in ("wrong", "partial"), found.message
    assert found.points <= most
    assert word in found.message, found.message
