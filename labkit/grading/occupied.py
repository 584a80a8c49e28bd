"""The folder of results while something writes to it: one grader at a time, apart from the submissions, writable."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..units import UserError

LOCK = ".lock"
_MACHINES = {  # errors that no hand-in causes: the disk, its rights, the machine's own memory and tables
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN,
    errno.EACCES, errno.EPERM,
}  # fmt: skip
ROOM_BYTES = 2**20  # less than this free on a disk is none


class Stopped(UserError):
    """Grading ends here for a reason of the machine's; what is graded stays."""


def apart(submissions: Path, out: Path) -> None:
    """Raises `UserError` when results would lie among the submissions, or submissions among the results."""
    here, there = submissions.resolve(), out.resolve()
    if here == there:
        raise UserError(f"--out {out} is the folder of submissions itself; give another one")
    if here in there.parents:
        raise UserError(f"--out {out} lies inside the folder of submissions; give one beside it")
    if there in here.parents:
        raise UserError(f"the submissions lie inside --out {out}; give another folder for the results")


@contextlib.contextmanager
def only(out: Path) -> Iterator[None]:
    """While this lasts, nobody else grades into `out`, which is made where it is not there.

    The system gives the lock back when a process ends, however it ends. Raises `UserError` when another process has it,
    or `out` cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}; give another --out") from error
    with file:
        if not _taken(file):
            file.seek(0)
            who = " ".join(file.read(200).split()) or "another process"
            raise UserError(f"{out} is in use: {who} grades into it; wait until it is through, or end it")
        with contextlib.suppress(OSError):  # on a full disk: what is written is for whoever finds it taken
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%H:%M:%S')},\n")
            file.flush()
        yield


def unwritable(out: Path, error: OSError) -> Stopped:
    """One line on an error of the machine's."""
    where = f"{error.filename}: " if error.filename and not str(error.filename).startswith(str(out)) else ""
    return Stopped(
        f"cannot write to {out}: {where}{error.strerror or error}. That is this machine's, no student's fault: what is "
        "graded stays, and the same command goes on from there"
    )


def the_machines(error: BaseException | None) -> OSError | None:
    """The error of the disk, of rights or of the machine's own memory that `error` is, or comes from; None: none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _MACHINES:
            return error
        error = error.__cause__ or error.__context__
    return None


def full(*folders: Path) -> OSError | None:
    """The error that a disk under one of these folders is full; None when there is room."""
    for folder in folders:
        found = shutil.disk_usage(folder)
        if found.total and found.free < ROOM_BYTES:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    return None


def _taken(file: IO[str]) -> bool:
    """Whether the lock on `file` could be had."""
    try:
        import fcntl
    except ImportError:  # not Linux: grading says later that it needs it
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any other: a file system without locks, where nothing better is to be had
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
