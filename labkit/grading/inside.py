"""What runs in the sandbox: a process that has imported what answers need, and forks a fresh one for each exercise.

It reads requests on standard input (`wire`): first the set-up (user, limits, imports), then one line for each
exercise: the given cells that the answer needs, the answer cell, and the variable to read or the probe to run with its
inputs. The fork answers with lines as it goes (stages, results, observations), so that what was found before a crash
counts; every line carries the request's token. Nothing here knows an expected value.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from .. import places, quiet, safely
from . import running, watching, wire

PRELUDE_SECONDS = 300.0
_MAIN_ERRORS = (SystemExit, KeyboardInterrupt)


class Speaker:
    """Writes lines on the grader's pipe, each with the request's token."""

    def __init__(self, descriptor: int, token: str):
        self._descriptor, self._token = descriptor, token

    def __call__(self, kind: str, **fields: Any) -> None:
        rest = json.dumps({"token": self._token, "kind": kind, **fields}).encode() + b"\n"
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


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


def main() -> None:
    """Serve requests until standard input ends."""
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
    Speaker(out, setup["token"])("ready")
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            requests.close()
            try:
                exercise(request, Speaker(out, request["token"]))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what it started and left behind
        left = setup.get("walled", False) and strays()
        say = Speaker(out, request["token"])
        say("exit", signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, strays=left)


def strays() -> bool:
    """Whether in this sandbox there are still processes besides its first and this one, after a moment to end."""
    for _ in range(20):
        if {int(p) for p in os.listdir("/proc") if p.isdigit()} <= {1, os.getpid()}:
            return False
        time.sleep(0.05)
    return True


def exercise(request: dict[str, Any], say: Speaker) -> None:
    """Run one exercise's cells and say what comes out."""
    names = running.main_module()
    own = [os.getcwd(), os.environ.get("LABKIT_RUN", os.getcwd()), "/tmp", "/dev"]
    readable = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)), str(places.home() / "data")]
    watching.Watch(lambda kind, text: say(kind, text=text), own, [*readable, "/usr", "/sys", "/proc"])
    before = watching.Fingerprints()
    for piece in running.from_message(request["before"]):
        if piece.cell.role == "given":
            error, _ = limited(lambda p=piece: running.run(p, names), PRELUDE_SECONDS)  # type: ignore[misc]
            before = watching.Fingerprints()
        else:
            error, _ = limited(lambda p=piece: running.run(p, names), request["seconds"])  # type: ignore[misc]
        if error is not None:
            say("failed", where=piece.cell.role, **error)
            return
    say("started")
    (answer,) = running.from_message([request["answer"]])
    error, _ = limited(lambda: running.run(answer, names), request["seconds"])
    if error is not None:
        say("failed", where="answer", **error)
    else:
        _look(request, names, say)
    for name in before.changed():
        say("tampered", text=f"exchanges {name}")
    say("end")


def _look(request: dict[str, Any], names: dict[str, Any], say: Speaker) -> None:
    variable = request["variable"]
    value = names.get(variable, safely)
    if variable and value is safely:
        say("undefined")
    elif safely.is_blank(value):
        say("blank")
    elif "probe" not in request:
        _say_value(say, "value", value)
    elif variable and not callable(value):
        say("uncallable", shown=safely.shown(value))
    else:
        space: dict[str, Any] = {"__name__": "probe"}
        exec(compile(request["probe"], "<probe>", "exec"), space)
        for number, given in enumerate(request["cases"]):
            if not _case(space["probe"], names, wire.decode(given), number, request["seconds"], say):
                break  # time was up: the next case would only wait again


def _case(
    probe: Callable[..., Any], names: dict[str, Any], given: Any, number: int, seconds: float, say: Speaker
) -> bool:
    say("case", number=number)
    error, value = limited(lambda: probe(names, given), seconds)
    if error is not None:
        say("failed", where="case", **error)
    elif value is ...:
        say("blank")
    else:
        _say_value(say, "result", value)
    return error is None or error["error"] != "timeout"


def _say_value(say: Speaker, kind: str, value: Any) -> None:
    if watching.pretends(value):
        say("tampered", text="gives an object that decides by itself what it is equal to")
    try:
        plain = safely.plain(value)
        say(kind, value=wire.encode(plain), shown=safely.shown(plain))
    except safely.NotPlain as reason:
        say("unreadable", text=str(reason))
    except (RecursionError, MemoryError, TypeError, ValueError) as error:
        say("unreadable", text=f"something that cannot be read ({safely.type_name(error)})")


class _TimeIsUp(BaseException):
    """Raised in the learner's code when its time is over."""


def limited(action: Callable[[], Any], seconds: float) -> tuple[dict[str, Any] | None, Any]:
    """Run `action`, at most `seconds` long. Returns what went wrong (type, message, line of the learner's cell) or
    None, and the value. Code that catches everything is left to the grader, which ends the process."""

    def stop(signum: int, frame: Any) -> None:
        raise _TimeIsUp

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
    value, error = None, None
    try:
        value = action()
    except _TimeIsUp:
        error = {"error": "timeout", "message": "", "line": None, "mine": True}
    except BaseException as raised:
        error = _described(raised)
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return error, value
        except _TimeIsUp:
            error = error or {"error": "timeout", "message": "", "line": None, "mine": True}


def _described(error: BaseException) -> dict[str, Any]:
    """An exception as data. ``mine``: whether the learner's code was running; ``line``: where in the cell."""
    line, mine = None, False
    if isinstance(error, SyntaxError) and str(error.filename).startswith(("<answer:", "<own:")):
        line, mine = error.lineno, True
    with contextlib.suppress(Exception):  # the error is an object of the learner's: its traceback may be anything
        for frame, number in traceback.walk_tb(_traceback(error)):
            if frame.f_code.co_filename.startswith(("<answer:", "<own:")):
                line, mine = number, True
    kind = safely.type_name(error)
    if isinstance(error, EOFError):
        kind = "EOFError"
    try:
        message = " ".join(str(error).split())[:200] if not isinstance(error, SyntaxError) else str(error.msg)
    except Exception:
        message = ""
    known = type(error).__module__ in ("builtins", "torch", "torch._C", "torch.cuda", "labkit.units")
    return {"error": kind if known else "an error of its own", "message": message, "line": line, "mine": mine}


def _traceback(error: BaseException) -> types.TracebackType | None:
    return BaseException.__dict__["__traceback__"].__get__(error)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
