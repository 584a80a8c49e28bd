"""Between the process of one answer and the grader: passes on what it says, gives it one case after the other, keeps
what must not be in that process.

A hidden test may have a part that stands outside (`hidden.Exercise.outside`): it knows what the answer has to find out,
and keeps the record that the judge believes. The answer reaches it by calling functions, with plain data.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, BinaryIO

from .. import safely
from . import weighing, wire
from .channel import Line

OUTSIDE = "outside"  # the key of a case's inputs that stay here
BEFORE = ("blank", "end", "failed", "note", "started", "tampered", "uncallable", "undefined", "unreadable", "value")
RESULTS = ("blank", "failed", "result", "unreadable")  # of one case
BESIDE = ("end", "note", "tampered")
_BROKEN = "the part of the hidden test that stands outside fails: {0!r}"
IDLE_SECONDS = 0.2  # between two looks whether the process has ended
MOST_CALLS = 100_000  # of what is outside, in one case


class Speaker:
    """Writes lines on the grader's pipe."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def __call__(self, kind: str, **fields: Any) -> None:
        rest = json.dumps({**fields, "kind": kind}).encode() + b"\n"
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


class Forged(Exception):
    """A message that no answer's process sends."""


class Broken(Exception):
    """The hidden test itself fails."""


class Case:
    """One case while it runs: what the answer's process is given of it, what stays outside, and the `scale` that
    weighs the process, where the case is watched."""

    def __init__(
        self, given: Any, source: str | None, waited: Callable[[], float], scale: weighing.Scale | None = None
    ):
        self._calls, self._apart, self.scale = 0, None, scale
        if source is None:
            self.inputs = given
            return
        space: dict[str, Any] = {"__name__": "outside"}
        try:
            whole = wire.decode(given)
            self.inputs = wire.encode({k: v for k, v in whole.items() if k != OUTSIDE})
            exec(compile(source, "<outside>", "exec"), space)
            more = (waited,) if space["outside"].__code__.co_argcount == 2 else ()
            self._apart = space["outside"](whole, *more)
        except Exception as error:
            raise Broken(_BROKEN.format(error)) from error

    def call(self, name: Any, arguments: Any) -> dict[str, Any]:
        """What one of the functions outside gives, or what it raises, as a message."""
        self._calls += 1
        kind = type(self._apart)
        public = isinstance(name, str) and name[:1] != "_" and name != "seen" and callable(vars(kind).get(name))
        if self._calls > MOST_CALLS or not public:
            raise Forged
        try:
            return {"value": wire.encode(safely.plain(getattr(self._apart, name)(*wire.decode(arguments))))}
        except Exception as error:  # as it would have reached the answer
            return {"error": type(error).__name__, "text": str(error)[:200]}

    def seen(self, value: Any) -> Any:
        """The result as the judge gets it: with what was seen outside, where there is something."""
        more = [["held", self.scale.peak]] if self.scale else []
        if self._apart is None:
            return {"d": [["back", value], *more]} if more else value
        try:
            return {"d": [["back", value], ["seen", wire.encode(safely.plain(self._apart.seen()))], *more]}
        except safely.NotPlain:
            raise
        except Exception as error:
            raise Broken(_BROKEN.format(error)) from error


class Relay:
    """Listens to the process `child` at the other end of a socket, reads cases from `requests`, tells the grader."""

    def __init__(self, child: int, end: socket.socket, requests: BinaryIO, say: Callable[..., None]):
        self._child, self._end, self._line = child, end, Line(end)
        self._requests, self._say = requests, say
        self._status: int | None = None
        self._asked = False  # whether the process is through with its cells and waits for cases
        self._case: Case | None = None

    def run(self) -> int:
        """Listen until the process has ended; returns its status. What it started and left behind is ended, too."""
        try:
            for message in self._line.messages(self._over, self._patience):
                self._heard(message or {})
        except (wire.TooMuch, Forged, Broken) as problem:
            self._say({wire.TooMuch: "flood", Forged: "forged"}.get(type(problem), "broken"), text=str(problem))
            self._kill()
        self._end.close()
        if self._status is None:
            _, self._status = os.waitpid(self._child, 0)
        self._kill()
        return self._status

    def _kill(self) -> None:
        for end, process in ((os.killpg, self._child), (os.kill, self._child if self._status is None else 0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process:
                    end(process, signal.SIGKILL)

    def _waited(self) -> float:
        return weighing.waited(self._child, os.getpid())

    def _patience(self) -> float:
        return weighing.EVERY_SECONDS if self._case and self._case.scale else IDLE_SECONDS

    def _over(self) -> bool:
        if self._case and self._case.scale:
            self._case.scale.look()
        if self._status is None:
            ended, status = os.waitpid(self._child, os.WNOHANG)
            self._status = status if ended else None
        return self._status is not None

    def _heard(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind", None)
        if kind == "ask" and self._case is not None:
            self._line.send(
                **self._case.call(message.get("name"), message.get("arguments")), answers=message.get("number")
            )
        elif kind == "ready" and not self._asked:
            self._asked = True
            self._say("ready")
            self._next()
        elif self._case is not None and kind in RESULTS:
            if kind == "result":
                try:
                    message["value"] = self._case.seen(message["value"])
                except KeyError:
                    raise Forged from None
                except safely.NotPlain:
                    kind, message = "unreadable", {"text": "more calls than anybody can count"}
            self._case = None
            self._say(kind, **message)
            self._next()
        elif kind in (BESIDE if self._asked else BEFORE):
            self._say(kind, **message)
        else:
            raise Forged

    def _next(self) -> None:
        """Give the process its next case, or say that there is none."""
        found = json.loads(self._requests.readline() or b"{}")
        if "given" not in found:
            self._line.send(done=True)
            return
        scale = weighing.Scale(self._child, os.getpid()) if found.get("watched") else None
        self._case = Case(found["given"], found.get("outside"), self._waited, scale)
        self._line.send(given=self._case.inputs)
