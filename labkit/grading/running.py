"""Cells, or some statements of them, run in a namespace as a notebook would run them."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Iterable
from typing import Any

from .slicing import Cell, Piece
from .sources import python


class Shell:
    """What `get_ipython` gives a cell here: magics and shell commands do nothing."""

    def run_line_magic(self, name: str, line: str, *more: Any, **options: Any) -> None:
        """Nothing: no magic is needed for an answer."""

    def run_cell_magic(self, name: str, line: str, cell: str) -> None:
        """Nothing, as above."""

    def system(self, command: str) -> None:
        """Nothing is run."""

    def getoutput(self, command: str, *more: Any, **options: Any) -> list[str]:
        """No lines: nothing is run."""
        return []


def main_module() -> dict[str, Any]:
    """The namespace of a fresh ``__main__``: what a notebook's cells run in, with what IPython adds to it."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    shell = Shell()
    module.__dict__.update(get_ipython=lambda: shell, display=lambda *shown, **options: None)
    sys.modules["__main__"] = module
    return module.__dict__


def filename(cell: Cell) -> str:
    """The name under which a cell's code runs: its role and id, as tracebacks show it."""
    return f"<{cell.role}:{cell.id}>"


def run(piece: Piece, names: dict[str, Any]) -> Any:
    """Run a cell, or the chosen statements of it; returns the value of the last expression of a whole cell. ``await``
    stands at the top level as in a notebook."""
    source, name = python(piece.cell.source), filename(piece.cell)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = compile(source, name, "exec", ast.PyCF_ONLY_AST)
    assert isinstance(tree, ast.Module)
    body = tree.body if piece.keep is None else [tree.body[i] for i in piece.keep]
    last = body.pop() if body and piece.keep is None and isinstance(body[-1], ast.Expr) else None
    _evaluated(ast.Module(body, []), name, "exec", names)
    if last is None:
        return None
    return _evaluated(ast.Expression(last.value), name, "eval", names)  # type: ignore[attr-defined]


def _evaluated(tree: ast.Module | ast.Expression, name: str, mode: str, names: dict[str, Any]) -> Any:
    code = compile(tree, name, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    value = eval(code, names)
    return _loop().run_until_complete(value) if code.co_flags & inspect.CO_COROUTINE else value


@functools.cache
def _loop() -> Any:
    """The event loop that all cells of this process share."""
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def to_message(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Pieces as JSON."""
    return [
        {"id": p.cell.id, "source": p.cell.source, "role": p.cell.role, "keep": None if p.keep is None else [*p.keep]}
        for p in pieces
    ]


def from_message(rows: Iterable[dict[str, Any]]) -> list[Piece]:
    """What `to_message` was given."""
    return [Piece(Cell(r["id"], r["source"], r["role"]), None if r["keep"] is None else tuple(r["keep"])) for r in rows]
