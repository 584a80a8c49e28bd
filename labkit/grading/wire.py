"""How the grader talks to its processes: JSON lines over pipes, read with a deadline and a cap on bytes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

LINE_CAP = 16 * 2**20  # bytes of one message
READ = 2**16
SEND_SECONDS = 60.0  # that a process has to take a message


class Late(Exception):
    """No message came in time."""


class Gone(Exception):
    """The process ended, or closed its side."""


class TooMuch(Exception):
    """The process sent more than it may."""


def encode(value: Any) -> Any:
    """Plain data (`labkit.safely.plain`) as JSON that keeps tuples, `...`, keys of any type and large integers."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if value is ...:
        return {"e": 1}
    if isinstance(value, int):
        return value if abs(value) < 2**53 else {"i": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"f": repr(value)}
    if isinstance(value, dict):
        return {"d": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [encode(item) for item in value]
        return {"t": items} if isinstance(value, tuple) else items
    raise TypeError(f"{type(value).__name__} is no plain data")


def decode(value: Any) -> Any:
    """What was given to `encode`. Raises `ValueError` for anything that `encode` does not make."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("not an encoded value")
    ((tag, inner),) = value.items()
    try:
        if tag == "e":
            return ...
        if tag == "i":
            return int(inner, 16)
        if tag == "f":
            return float(inner)
        if tag == "t":
            return tuple(decode(item) for item in inner)
        if tag == "d":
            return {_key(decode(k)): decode(v) for k, v in inner}
    except TypeError as error:
        raise ValueError("not an encoded value") from error
    raise ValueError("not an encoded value")


def _key(key: Any) -> Any:
    hash(key)  # a list is no key
    return key


class Process:
    """A child process that reads JSON lines on standard input and writes them on standard output.

    It leads a process group of its own, so that `kill` takes what it has started, too.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ):
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        assert self.popen.stdin is not None and self.popen.stdout is not None and self.popen.stderr is not None
        self._buffer = b""
        self._errors = b""
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            os.set_blocking(pipe.fileno(), False)

    def send(self, message: dict[str, Any], seconds: float = SEND_SECONDS) -> None:
        """Write one message. Raises `Gone` when nobody reads any more, `Late` when nobody does for so long."""
        assert self.popen.stdin is not None
        deadline = time.monotonic() + seconds
        rest = memoryview(json.dumps(message).encode() + b"\n")
        try:
            pipe = self.popen.stdin.fileno()
            while rest:
                _, ready, _ = select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise Late
                rest = rest[os.write(pipe, rest[:READ]) :]
        except (OSError, ValueError) as error:
            raise Gone(str(error)) from error

    def receive(self, deadline: float, cap: int = LINE_CAP) -> dict[str, Any]:
        """The next message. Raises `Late` at `deadline` (of `time.monotonic`), `Gone` at the end of the stream,
        `TooMuch` for a line of more than `cap` bytes. Lines that are no JSON objects are skipped."""
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                said = message(line)
                if said is not None:
                    return said
                continue
            if len(self._buffer) > cap:
                raise TooMuch(f"more than {cap} bytes")
            self._fill(deadline)

    def _fill(self, deadline: float) -> None:
        out, err = self.popen.stdout, self.popen.stderr
        assert out is not None and err is not None
        left = deadline - time.monotonic()
        if left <= 0:
            raise Late
        ready, _, _ = select.select([out] if err.closed else [out, err], [], [], left)
        if err in ready:
            got = os.read(err.fileno(), READ)
            self._errors = (self._errors + got)[-4000:]
            if not got:
                err.close()
        if out in ready:
            got = os.read(out.fileno(), READ)
            if not got:
                raise Gone(self.said())
            self._buffer += got

    def said(self) -> str:
        """The end of what the process wrote to standard error."""
        err = self.popen.stderr
        if err is not None and not err.closed:
            with contextlib.suppress(OSError, ValueError):
                while got := os.read(err.fileno(), READ):
                    self._errors = (self._errors + got)[-4000:]
        return self._errors.decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process and its group, whatever they are doing, and wait for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.popen.poll() is None


def message(line: bytes) -> dict[str, Any] | None:
    """A line as a message; None where it is no JSON object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
