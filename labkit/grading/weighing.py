"""What a process takes, looked at from outside while it works: what no answer can say otherwise.

Its memory: pages of its own and shared ones, not files (proc_pid_status(5): RssAnon, RssShmem). And how long it had to
wait for a processor, which on a busy machine is time that it did not take.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

EVERY_SECONDS = 0.01  # between two looks


def status(process: int) -> dict[str, str]:
    """What /proc says of a process, by heading. Raises `OSError` when it has ended, or where there is no /proc."""
    lines = Path(f"/proc/{process}/status").read_text(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def held(found: dict[str, str]) -> int:
    """The bytes that a process of this `status` holds."""
    return sum(1024 * int(found.get(part, "0").split()[0]) for part in ("RssAnon", "RssShmem"))


def waited(*processes: int) -> float:
    """Seconds that processes (the first thread of each) were ready to run and had to wait for a processor, so far; none
    where the kernel does not say (Documentation/scheduler/sched-stats.rst of Linux: ``/proc/<pid>/schedstat``)."""
    found = 0.0
    for process in processes:
        with contextlib.suppress(OSError, IndexError):
            found += int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return found


class Scale:
    """The most that a process was seen to hold beyond what the process `beside` holds at the beginning."""

    def __init__(self, process: int, beside: int):
        self._process, self.peak = process, 0
        self._before = held(status(beside)) if Path("/proc/self/status").is_file() else 0

    def look(self) -> None:
        """Look once; nothing is seen of a process that has ended."""
        with contextlib.suppress(OSError):
            self.peak = max(self.peak, held(status(self._process)) - self._before)


@contextlib.contextmanager
def weighed(scale: Scale) -> Iterator[None]:
    """Look all the time while the block runs."""
    over = threading.Event()

    def looking() -> None:
        while not over.wait(EVERY_SECONDS):
            scale.look()

    thread = threading.Thread(target=looking, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
