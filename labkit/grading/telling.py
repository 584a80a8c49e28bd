"""How far grading is: a bar on a terminal, one line for each submission elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .outcomes import SubmissionResult


@dataclass
class Progress:
    """Counts what is through. ``write`` shows a line, ``advance`` moves the bar where there is one."""

    total: int
    write: Callable[[str], None] = print
    advance: Callable[[], None] = lambda: None
    done: int = field(default=0, init=False)

    def tell(self, result: SubmissionResult, *, kept: bool = False) -> None:
        """One submission has its result: now, or from an earlier call (`kept`)."""
        self.done += 1
        counts = Counter(e.status for e in result.exercises)
        words = ", ".join(f"{n} {status}" for status, n in counts.items())
        spent = "kept" if kept else f"{result.seconds:.0f} s"
        points = f"{result.points:g}/{result.maximum:g}"
        self.write(f"[{self.done}/{self.total}] {result.student} · {result.lesson} · {points} ({words}) · {spent}")
        self.advance()

    def __str__(self) -> str:
        return f"{self.done} of {self.total} notebooks are graded"


@contextlib.contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Shows progress while this lasts."""
    if not sys.stdout.isatty():
        yield Progress(total, lambda line: print(line, flush=True))
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("grading", total=total)
        yield Progress(
            total,
            lambda line: bar.console.print(line, highlight=False, markup=False),
            lambda: bar.advance(task),
        )
