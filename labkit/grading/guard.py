"""A sandbox's processes while they run: what memory they take together, and their end when it is too much."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from ..units import show_bytes
from . import cgroups, weighing, wire


class Watched(wire.Process):
    """A sandbox whose processes are ended when together they take more than `most` bytes; ``ended`` says so. Where a
    control group can be made, the kernel sees to it, too: it counts what belongs to no process, and the files in
    memory, which may take `kept` bytes besides."""

    def __init__(self, command: list[str], most: int, kept: int, pipes: Sequence[int] = ()):
        self._most, self._ended = most, ""
        self._group = cgroups.make(most + kept)
        command = self._group.command(command) if self._group else command
        super().__init__(command, {"PATH": os.environ.get("PATH", os.defpath)}, "/", pipes)
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def ended(self) -> str:
        """Why its processes were ended from outside; empty where they were not."""
        if not self._ended and self._group and self._group.killed():
            return "it took more memory than it may, with what the system keeps for it"
        return self._ended

    def kill(self) -> None:
        """End the process and its group, and take away what counted its memory."""
        super().kill()
        if self._group:
            self._ended = self.ended
            self._group.remove()

    def _watch(self) -> None:
        while self.popen.poll() is None:
            found, processes = taken(self.popen.pid)
            if found > self._most:
                self._ended = f"it took more than {show_bytes(self._most)} of memory, in {processes} processes"
                self.popen.kill()
                return
            time.sleep(0.25)


def taken(top: int) -> tuple[int, int]:
    """Bytes of memory that the processes below `top` hold besides files (what forks have not yet copied, and what
    several share, counts for each), and how many they are."""
    children: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            found = weighing.status(int(entry))
        except OSError:  # it has ended
            continue
        children.setdefault(int(found["PPid"]), []).append(int(entry))
        sizes[int(entry)] = weighing.held(found)
    total, below = 0, [top]
    for process in below:
        total += sizes.get(process, 0)
        below += children.get(process, [])
    return total, len(below)
