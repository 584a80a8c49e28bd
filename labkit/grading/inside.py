"""What runs in the sandbox: a process that has imported what answers need, and forks a fresh one for each exercise.

It reads requests on standard input (`wire`): first the set-up (user, limits, imports), then one for each exercise: the
given cells that the answer needs, the answer cell, and the variable to read or the probe to run. What decides stays out
of the fork: the pipe to the grader, the inputs of the cases (each comes when the result before it is there), and the
part of a hidden test that keeps a record (`hidden.Exercise.outside`). The fork has a channel, over which it says what
it found, stage by stage, so that what was found before a crash counts. Nothing here knows an expected value.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

from .. import quiet
from . import answering
from .channel import Channel
from .relay import Relay, Speaker

_NOT_DUMPABLE = 4, 0  # of prctl: no process of the same user may look into this one, or take its files


def restrict(setup: dict[str, Any]) -> None:
    """Become the unprivileged user, where one is named, and set the limits (bytes, counts) for good."""
    if setup.get("user") is not None:
        os.setgroups([])
        os.setresgid(*[setup["user"]] * 3)
        os.setresuid(*[setup["user"]] * 3)
        os.umask(0o077)
    names = {
        "memory": resource.RLIMIT_DATA, "processes": resource.RLIMIT_NPROC, "file": resource.RLIMIT_FSIZE,
        "files": resource.RLIMIT_NOFILE,
    }  # fmt: skip
    for name, which in names.items():
        if setup.get("limits", {}).get(name):
            resource.setrlimit(which, (setup["limits"][name],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if setup.get("walled"):
        ctypes.CDLL(None).prctl(*_NOT_DUMPABLE, 0, 0, 0)


def main() -> None:
    """Serve requests until standard input ends."""
    sys.path[:] = [p for p in sys.path if p not in ("", os.getcwd())]  # answers write there
    requests = os.fdopen(os.dup(0), "rb")
    out = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    setup = json.loads(requests.readline())
    restrict(setup)
    quiet.libraries()
    for name in setup["preload"]:
        with contextlib.suppress(Exception):  # what needs it will say so
            importlib.import_module(name)
    say = Speaker(out)
    say("ready")
    while line := requests.readline():
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                ours.close()
                requests.close()
                os.close(out)
                sys.path.insert(0, os.getcwd())  # as in a notebook
                answering.exercise(json.loads(line), Channel(theirs))
            finally:
                os._exit(0)
        theirs.close()
        status = Relay(child, ours, requests, say).run()
        left = setup.get("walled", False) and strays()
        say("exit", signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, strays=left)


def strays() -> bool:
    """Whether in this sandbox there are still processes besides its first and this one, after a moment to end."""
    for _ in range(20):
        reap()
        if {int(p) for p in os.listdir("/proc") if p.isdigit()} <= {1, os.getpid()}:
            return False
        time.sleep(0.05)
    return True


def reap(besides: int | None = None) -> None:
    """Let go of processes that have ended, and of which this is the parent: where it is the sandbox's first, it becomes
    that of all who lose theirs. `besides` is another's to ask for."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and int(entry) != besides:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) == os.getpid():
                    os.waitpid(int(entry), os.WNOHANG)


if __name__ == "__main__":
    main()
