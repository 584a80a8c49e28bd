"""Folders for the time that grading takes, and the end of those that a killed grader left behind.

Each is locked by the process that made it. The system gives a lock back when a process ends, however it ends: a folder
whose lock can be had is nobody's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "labkit-grading-"
_locks: dict[str, int] = {}


def make(kind: str) -> str:
    """A new folder; `kind` becomes part of its name. `remove` takes it away."""
    while True:
        folder = tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-")
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            descriptor = os.open(folder, os.O_RDONLY)
            if _taken(descriptor) and os.path.isdir(folder):
                _locks[folder] = descriptor
                return folder
            os.close(descriptor)


def remove(folder: str) -> None:
    """Remove a folder that `make` made, with what is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


def sweep() -> list[Path]:
    """Remove this user's folders whose makers have ended without removing them; returns them."""
    gone = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid() and _taken(descriptor):
                    shutil.rmtree(folder)
                    gone.append(folder)
            finally:
                os.close(descriptor)
    return gone


def _taken(descriptor: int) -> bool:
    """Whether the lock on an open folder could be had."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
