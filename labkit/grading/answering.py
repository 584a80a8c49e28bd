"""What runs in the process of one answer: the given cells that it needs, its cell, and calls of its function.

The process holds these, and a channel to the one that started it. It knows no expected value, only the inputs of the
case that is asked for, and nothing that it says is more than data (`inside`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from .. import places, safely
from . import running, watching, wire
from .channel import Channel, Outside

PRELUDE_SECONDS = 300.0


def exercise(request: dict[str, Any], channel: Channel) -> None:
    """Run one exercise's cells and say what comes out."""
    say = channel.say
    names = running.main_module()
    own = [os.getcwd(), os.environ.get("LABKIT_RUN", os.getcwd()), "/tmp", "/dev"]
    readable = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)), str(places.home() / "data")]
    readable += ["/usr", "/sys", "/proc"]
    watching.Watch(lambda kind, text: say(kind, text=text), own, readable, inputs="probe" in request)
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
        _look(request, names, channel)
    for name in before.changed():
        say("tampered", text=f"exchanges {name}")
    say("end")


def _look(request: dict[str, Any], names: dict[str, Any], channel: Channel) -> None:
    variable, say = request["variable"], channel.say
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
        more = (Outside(channel),) if space["probe"].__code__.co_argcount == 3 else ()
        say("ready")
        while "given" in (message := channel.hear()):
            given = wire.decode(message["given"])
            _case(lambda given=given: space["probe"](names, given, *more), request["seconds"], say)  # type: ignore[misc]


def _case(probe: Callable[[], Any], seconds: float, say: Callable[..., None]) -> None:
    error, value = limited(probe, seconds)
    if error is not None:
        say("failed", where="case", **error)
    elif value is ...:
        say("blank")
    else:
        _say_value(say, "result", value)


def _say_value(say: Callable[..., None], kind: str, value: Any) -> None:
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
