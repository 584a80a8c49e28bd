"""Tasks of a bench, each in a process of its own: a fresh allocator, and no hook or graph of the one before."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit import places

Task = TypeVar("Task")


def run(
    tasks: Sequence[Task],
    command: Callable[[Task], Sequence[str]],
    *,
    jobs: int,
    seconds: float,
    name: Callable[[Task], str] = str,
    environment: Callable[[Task], dict[str, str]] = lambda task: {},
) -> bool:
    """Call this script again with ``command(task)`` for each task, `jobs` at a time, and print what each says.

    A task that has not begun after `seconds` is not started. A process that fails is named with its code and the end of
    its error output. Returns whether every task was run and ended well.
    """
    start, script = time.monotonic(), str(Path(sys.argv[0]).resolve())

    def one(task: Task) -> tuple[str, bool]:
        if time.monotonic() - start > seconds:
            return f"{name(task)}: not started, the time is up", False
        done = subprocess.run(
            [sys.executable, script, *command(task)], env=places.environment(**environment(task)),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = done.stdout.strip()
        if done.returncode:
            said = f"{said}\n{name(task)}: code {done.returncode}\n{done.stderr[-1500:]}".strip()
        return f"[{time.monotonic() - start:5.0f} s] {said}", not done.returncode

    good = True
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for text, ended_well in pool.map(one, tasks):
            print(text, flush=True)
            good &= ended_well
    return good
