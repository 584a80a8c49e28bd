"""The table that grows while lessons run: live in a terminal, one plain line a lesson elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runs import State
    from .summary import Summary

HEAD = ("lesson", "status", "time", "peak", "guesses", "claims")
_WIDTHS = (28, 9, 6, 18, 15)
_STYLES = {"done": "green", "kept": "green", "failed": "bold red", "running": "bold", "pending": "dim"}
_BAR = 12


class Table:
    """The table of a run. `start`, `cell` and `end` are called as a lesson goes; this base class prints plain lines."""

    def __init__(self, line: str, names: Sequence[str]):
        self.rows: dict[str, list[str]] = {name: [label(name), "pending", "", "", "", ""] for name in names}
        self.line = line
        self.started = 0.0

    def open(self) -> None:
        """Show the head of the table."""
        print(self.line)
        print(" " + _columns(HEAD), flush=True)

    def start(self, name: str) -> None:
        """The lesson `name` starts."""
        self.started = time.monotonic()
        self.rows[name][1] = "running"

    def cell(self, name: str, cell: int, cells: int) -> None:
        """The lesson `name` is at this cell."""
        done = round(_BAR * (cell - 1) / max(cells, 1))
        self.rows[name][3:5] = ["#" * done + "-" * (_BAR - done), f"cell {cell}/{cells}"]

    def end(self, state: State, found: Summary | None, again: bool = False) -> None:
        """The lesson of `state` is over (or was kept from before)."""
        status = "kept" if again and state.status == "done" else state.status
        self.rows[state.name] = [label(state.name), status, clock(state.seconds), *columns(found)]
        self.show(self.rows[state.name])

    def show(self, row: Sequence[str]) -> None:
        """Print the row of a lesson that is over."""
        print(" " + _columns(row), flush=True)


class _Live(Table):
    """The same in a terminal that can be written over."""

    def __init__(self, line: str, names: Sequence[str], console: Any):
        super().__init__(line, names)
        self.console = console

    def open(self) -> None:
        self.console.print(self.line, highlight=False, markup=False)

    def show(self, row: Sequence[str]) -> None:
        pass

    def __rich__(self) -> Any:
        from rich import box
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in HEAD:
            grid.add_column(
                name, no_wrap=name in ("lesson", "status", "time"), justify="right" if name == "time" else "left"
            )
        for row in self.rows.values():
            cells = list(row)
            if row[1] == "running":
                cells[2] = clock(time.monotonic() - self.started)
            style = _STYLES.get(row[1], "")
            grid.add_row(
                *(Text(cell, style=style if i == 1 or row[1] == "pending" else "") for i, cell in enumerate(cells))
            )
        return grid


@contextlib.contextmanager
def table(line: str, names: Sequence[str]) -> Iterator[Table]:
    """The table of a run, live where standard output is a terminal."""
    if not sys.stdout.isatty():
        plain = Table(line, names)
        plain.open()
        yield plain
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    live = _Live(line, names, console)
    live.open()
    with Live(live, console=console, refresh_per_second=2):
        yield live


def ending(page: Path, failed: Sequence[tuple[str, str]]) -> None:
    """What is said below the table: the failures with cell and error, and where the report is."""
    for name, where in failed:
        print(f"failed  {name}, {where}")
    print(f"report  {nearby(page)}")


def columns(found: Summary | None) -> list[str]:
    """Peak, guesses and claims of a lesson."""
    return [found.peak_text(), str(found.calibration), found.claims_text()] if found else ["–", "–", "–"]


def label(name: str) -> str:
    """``01 baseline oom`` for ``01_baseline_oom``."""
    return name.replace("_", " ")


def clock(seconds: float | None) -> str:
    """``1:12``."""
    return "" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def nearby(path: Path) -> str:
    """`path` from the working directory where it lies below it."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return str(path)


def _columns(row: Sequence[str]) -> str:
    head = "".join(f"{cell:{width}s} " for cell, width in zip(row, _WIDTHS, strict=False))
    return f"{head}{row[-1]}".rstrip()
