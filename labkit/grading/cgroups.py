"""A control group for one sandbox, where this machine lets us make one.

The kernel then counts all memory that the sandbox takes: files in memory, pipes and sockets, too, which belong to no
process. Both versions are known (cgroup-v2.rst and cgroup-v1/memory.rst of Linux); root can make groups, an ordinary
user where the system has handed a part of the tree to them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V2, _V1 = "memory.max", "memory.limit_in_bytes"
_SWAP = {_V2: ("memory.swap.max", 0), _V1: ("memory.memsw.limit_in_bytes", 1)}  # and how often the limit it may have
_KILLED = {_V2: "memory.events", _V1: "memory.oom_control"}


@dataclass(frozen=True)
class Group:
    """One group; ``limit`` is the name of the file that has its limit."""

    folder: Path
    limit: str

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, started in the group; outside it where the system lets nobody in, and `guard` counts alone."""
        enter = '(echo $$ > "$0") 2>/dev/null; exec "$@"'
        return ["/bin/sh", "-c", enter, str(self.folder / "cgroup.procs"), *command]

    def killed(self) -> bool:
        """Whether the kernel has ended a process for what the group took."""
        with contextlib.suppress(OSError):
            lines = (self.folder / _KILLED[self.limit]).read_text().splitlines()
            return any(line.split()[0] == "oom_kill" and line.split()[1] != "0" for line in lines)
        return False

    def remove(self) -> None:
        """Take the group away once its processes have ended; one that is left behind holds nothing."""
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # a process is still ending
                time.sleep(0.02)


def make(most: int) -> Group | None:
    """A new group that may take `most` bytes; None where none can be made."""
    for parent, limit in _parents():
        for old in parent.glob("labkit-*-*"):  # of a grader that was killed
            if not Path("/proc", old.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):
                    old.rmdir()
        folder = parent / f"labkit-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
        except OSError:
            continue
        group = Group(folder, limit)
        try:
            (folder / limit).write_text(str(most))
        except OSError:
            group.remove()
            continue
        swap, times = _SWAP[limit]
        with contextlib.suppress(OSError):  # not counted everywhere
            (folder / swap).write_text(str(times * most))
        return group
    return None


def _parents() -> Iterator[tuple[Path, str]]:
    """Folders below which a group may be made, so that limits of ours hold for it, too."""
    with contextlib.suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                own = ROOT / "memory" / path.lstrip("/")
                yield (own if own.is_dir() else ROOT / "memory"), _V1
            elif not kinds:
                above = (ROOT / path.lstrip("/")).parent if path.strip("/") else ROOT
                with contextlib.suppress(OSError):
                    if "memory" in (above / "cgroup.subtree_control").read_text().split():
                        yield above, _V2
