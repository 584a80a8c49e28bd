"""The one thing that an answer's process shares with the process that started it: a socket with lines of JSON.

What comes over it was said by a learner's process: it is read as data, and decides nothing by itself.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import wire


class Channel:
    """The answer's end. A time limit of its cells (`SIGALRM`) never cuts a line in two."""

    def __init__(self, end: socket.socket):
        self._end, self._heard = end, b""
        self._turn, self._asked = threading.Lock(), 0

    def say(self, kind: str, **fields: Any) -> None:
        """Send one message."""
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        try:
            self._end.sendall(line)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def hear(self) -> dict[str, Any]:
        """The next message. Raises `EOFError` when there will be none."""
        while b"\n" not in self._heard:
            got = self._end.recv(wire.READ)
            if not got:
                raise EOFError("the grader is gone")
            self._heard += got
        line, _, self._heard = self._heard.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """What a function outside gives for plain data. Raises what it raised, as far as that has a name of Python's
        own."""
        with self._turn:
            self._asked += 1
            number = self._asked
            self.say("ask", name=name, arguments=wire.encode(list(arguments)), number=number)
            while (reply := self.hear()).get("answers") != number:
                pass  # to a question that a time limit broke off
        if "error" not in reply:
            return wire.decode(reply["value"])
        kind = getattr(builtins, str(reply["error"]), RuntimeError)
        known = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if known else RuntimeError)(str(reply["text"]))


class Outside:
    """What a hidden test keeps outside the answer's process: its functions, by name (`hidden.Exercise.outside`)."""

    def __init__(self, channel: Channel):
        self._channel = channel

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._channel.ask(name, arguments)


class Line:
    """The other end: messages of a process that may say anything."""

    def __init__(self, end: socket.socket):
        self._end = end

    def messages(self, over: Callable[[], bool], every: Callable[[], float]) -> Iterator[dict[str, Any] | None]:
        """Each message as it comes, None for what is none. Ends when the process has closed its end, or when it is
        `over`, which is asked when nothing has come for the seconds that `every` says; raises `wire.TooMuch` for a line
        that is too long."""
        heard = b""
        while True:
            line, found, rest = heard.partition(b"\n")
            if found:
                heard = rest
                yield wire.message(line)
                continue
            if len(heard) > wire.LINE_CAP:
                raise wire.TooMuch
            if not select.select([self._end], [], [], every())[0]:
                if over():
                    return
                continue
            got = self._received()
            if not got:
                return
            heard += got

    def _received(self) -> bytes:
        try:
            return self._end.recv(wire.READ)
        except ConnectionError:
            return b""

    def send(self, **fields: Any) -> None:
        """Send one message; nothing happens when nobody reads it."""
        with contextlib.suppress(ConnectionError):
            self._end.sendall(json.dumps(fields).encode() + b"\n")
