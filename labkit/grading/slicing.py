"""Which statements of a notebook an answer needs before it, so that not the whole lesson runs for each answer.

Names are followed as Python resolves them: what a statement needs at once is looked for above it, what a function's
body needs is looked for above the answer. Where this misses something (a name that is made by `exec`, say), the answer
raises `NameError`, and the caller runs all cells instead.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import functools
import symtable
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import sources

ROLES = ("given", "answer", "check", "own")


@dataclass(frozen=True)
class Cell:
    """A code cell: its id, its source, and what it is: ``given`` (ours), ``answer``, ``check`` or the learner's
    ``own``."""

    id: str
    source: str
    role: str


@dataclass(frozen=True)
class Piece:
    """The statements (by number) of one cell that have to run; None stands for all of them, as it does for each cell
    with magics."""

    cell: Cell
    keep: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Unit:
    cell: int
    statement: int
    binds: frozenset[str]
    touches: frozenset[str]  # changes something inside: x[0] = ..., x.y = ...
    now: frozenset[str]
    late: frozenset[str]  # inside functions, looked up when they are called
    sure: bool  # binds its names whatever happens


def keys_of(source: str, name: str) -> set[str]:
    """The constant keys under which `source` looks into the mapping called `name`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and _is(node.value, name) and isinstance(node.slice, ast.Constant):
            found.add(str(node.slice.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is(node.func.value, name):
            found |= {str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)}
    return found


def needs(source: str) -> set[str]:
    """The names that a cell looks up outside itself. Raises `SyntaxError` when it is no Python."""
    units = _units_of(source)
    if units is None:
        raise SyntaxError("not Python")
    found: set[str] = set()
    bound: set[str] = set()
    for unit in units:
        found |= unit.now - bound
        bound |= unit.binds
    return found | ({name for unit in units for name in unit.late} - bound)


def binds(source: str) -> set[str]:
    """The names that a cell gives a value; none where it is no Python."""
    return {name for unit in _units_of(source) or () for name in unit.binds}


def before(cells: Sequence[Cell], at: int, wanted: Iterable[str]) -> list[Piece]:
    """The pieces of the cells above number `at` that the names `wanted` need, in order. Check cells are left out, and
    so are cells that are no Python."""
    units = _units(cells[:at])
    binders = _Binders(units)
    chosen: set[int] = set()
    queue = [(name, len(units)) for name in wanted]
    while queue:
        name, end = queue.pop()
        for index in binders.new(name, end):
            if index not in chosen:
                chosen.add(index)
                queue += [(n, index) for n in units[index].now]
                queue += [(n, len(units)) for n in units[index].late]
    kept: dict[int, list[int]] = {}
    for index in sorted(chosen):
        kept.setdefault(units[index].cell, []).append(units[index].statement)
    plain = {cell: sources.outline(cells[cell].source)[1] for cell in kept}
    return [Piece(cells[cell], tuple(found) if plain[cell] else None) for cell, found in kept.items()]


def imports(pieces: Iterable[Piece]) -> set[str]:
    """The modules that pieces import at their top level."""
    found = set()
    for piece in pieces:
        statements = ast.parse(sources.outline(piece.cell.source)[0]).body
        for node in statements if piece.keep is None else [statements[i] for i in piece.keep]:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                if node.module == "labkit":
                    found |= {f"labkit.{alias.name}" for alias in node.names}
    return found


def everything(cells: Sequence[Cell], at: int) -> list[Piece]:
    """All cells above number `at`, except checks."""
    return [Piece(cell) for cell in cells[:at] if cell.role != "check"]


class _Binders:
    """The statements that decide what a name is at a place: the last above it that surely binds the name, and after
    that all that may change it. Each is given once for each name, so that asking often costs no more than once."""

    def __init__(self, units: Sequence[_Unit]):
        self._units, self._given = units, set[tuple[str, int]]()
        self._places: dict[str, list[int]] = {}
        for index, unit in enumerate(units):
            for name in unit.binds | unit.touches:
                self._places.setdefault(name, []).append(index)

    def new(self, name: str, end: int) -> list[int]:
        """Those before the statement `end` that were not given yet."""
        places, found = self._places.get(name, []), []
        for at in range(bisect.bisect_left(places, end) - 1, -1, -1):
            index = places[at]
            if (name, index) in self._given:
                break  # what lies above it was given with it
            self._given.add((name, index))
            found.append(index)
            if name in self._units[index].binds and self._units[index].sure:
                break
        return found


def _units(cells: Sequence[Cell]) -> list[_Unit]:
    found = []
    for number, cell in enumerate(cells):
        if cell.role != "check":
            found += [dataclasses.replace(unit, cell=number) for unit in _units_of(cell.source) or ()]
    return found


@functools.lru_cache(maxsize=1024)
def _units_of(source: str) -> tuple[_Unit, ...] | None:
    """The statements of a cell, as if it were the first; None where it is no Python."""
    try:
        text = sources.outline(source)[0]
        statements, lines = ast.parse(text).body, text.split("\n")
        return tuple(_unit(place, statement, _text(statement, lines)) for place, statement in enumerate(statements))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _text(statement: ast.stmt, lines: Sequence[str]) -> str:
    """A statement's source: its lines where they are its own."""
    first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
    own = lines[first - 1 : statement.end_lineno]
    shared = statement.col_offset or ";" in own[0] or ";" in own[-1]
    return ast.unparse(statement) if shared else "\n".join(own)


def _unit(place: int, statement: ast.stmt, text: str) -> _Unit:
    table = symtable.symtable(text, "<cell>", "exec")
    binds: set[str] = set()
    now: set[str] = set()
    late: set[str] = set()
    for symbol in table.get_symbols():
        if symbol.is_assigned() or symbol.is_imported():
            binds.add(symbol.get_name())
        if symbol.is_referenced():
            now.add(symbol.get_name())
    for child in table.get_children():
        _inner(child, binds, now, late, immediate=child.get_type() != "function")
    sure = isinstance(
        statement,
        (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    )
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        now.add(statement.target.id)
    return _Unit(0, place, frozenset(binds), frozenset(_touched(statement)), frozenset(now), frozenset(late), sure)


def _inner(table: symtable.SymbolTable, binds: set[str], now: set[str], late: set[str], immediate: bool) -> None:
    """Global names of a nested scope: of a class body and a comprehension at once, of a function when it is called."""
    comprehension = table.get_type() == "function" and table.get_name() in (
        "listcomp",
        "setcomp",
        "dictcomp",
        "genexpr",
    )
    immediate = immediate or comprehension
    for symbol in table.get_symbols():
        if symbol.is_global() and symbol.is_referenced():
            (now if immediate else late).add(symbol.get_name())
        if symbol.is_declared_global() and symbol.is_assigned():
            binds.add(symbol.get_name())
    for child in table.get_children():
        _inner(child, binds, now, late, immediate=immediate and child.get_type() != "function")


def _touched(statement: ast.stmt) -> set[str]:
    """Names whose value is changed from inside: targets such as ``x[0]`` and ``x.y``."""
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            base: ast.expr = node
            while isinstance(base, (ast.Subscript, ast.Attribute)):
                base = base.value
            if isinstance(base, ast.Name):
                found.add(base.id)
    return found if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else set()


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
