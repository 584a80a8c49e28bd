"""Handling what learners write: any object as a plain value, any function called with a time limit, nothing printed.

This keeps honest mistakes from stopping a lesson. It is no sandbox: grading runs answers in a process of their own.
"""

from __future__ import annotations

import contextlib
import io
import math
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

BLANK = ...
_DEEPEST = 6  # levels of nested lists that are still read
_LONGEST = 10_000  # elements


class NotPlain(Exception):
    """An object that cannot be read as plain data; the message says what it is."""


class _TimeIsUp(BaseException):
    """Raised inside the learner's function when its time is over; not an Exception, so that ``except Exception`` in
    the function does not keep it running."""


@dataclass(frozen=True)
class Outcome:
    """What calling a learner's function gave: a value, or the error as one line, or neither because time was up."""

    value: Any = None
    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as plain Python data, so that comparing it runs none of the learner's code.

    Numbers, truth values, strings, None, `...`, lists, tuples and dicts of them, NumPy scalars and arrays, one tensor
    (as numbers). Raises `NotPlain` for anything else: also for an object that merely claims to be equal to everything.
    """
    kind = type(value)
    if value is None or value is BLANK or kind in (bool, int, str):
        return value
    if kind is float:
        return value
    if kind in (list, tuple, dict):
        if depth >= _DEEPEST or len(value) > _LONGEST:
            raise NotPlain(f"a {kind.__name__} that is too large to read")
        if kind is dict:
            return {plain(k, depth + 1): plain(v, depth + 1) for k, v in value.items()}
        return kind(plain(item, depth + 1) for item in value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    # the libraries' own methods, called on the type: a subclass of the learner's may have others
    if numpy is not None and kind is numpy.longdouble:  # its item() is itself
        return float(value)
    if numpy is not None and issubclass(kind, numpy.generic) and depth < _DEEPEST:
        return plain(numpy.generic.item(value), depth + 1)
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return plain(numpy.ndarray.tolist(value), depth + 1)
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        if value.numel() > _LONGEST:
            raise NotPlain(f"a tensor of {value.numel():,} elements")
        return plain(value.detach().cpu().tolist(), depth + 1)
    raise NotPlain(f"an object of type {type_name(value)}")


def number(value: Any) -> float:
    """`value` as one finite number. Raises `NotPlain` with what it is instead."""
    got = plain(value)
    if isinstance(got, (list, tuple)) and len(got) == 1:
        got = got[0]
    if isinstance(got, bool) or got is None:
        raise NotPlain(f"{got}, not a number")
    if isinstance(got, str):
        raise NotPlain("text in quotes, not a number")
    if not isinstance(got, (int, float)):
        raise NotPlain(f"a {type(got).__name__}, not a number")
    try:
        found = float(got)
    except OverflowError:
        raise NotPlain("a number too large to be meant") from None
    if not math.isfinite(found):
        raise NotPlain(f"{found}, not a finite number")
    return found


def type_name(value: Any) -> str:
    """The name of a value's type, whatever its metaclass does."""
    try:
        return str(type.__dict__["__name__"].__get__(type(value)))[:40]  # past any __name__ that the learner defined
    except Exception:  # a metaclass can break even this
        return "unknown"


def shown(value: Any, limit: int = 60) -> str:
    """A short form of a value for a message; of unknown objects only the type."""
    try:
        text = repr(plain(value))
    except NotPlain as reason:
        return str(reason)
    except Exception:  # an oversized integer refuses to become text
        return f"a {type_name(value)}"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_blank(value: Any) -> bool:
    """Whether an answer was left as it came: `...`, or a function that does nothing (its body is `...`)."""
    if value is BLANK:
        return True
    if type(value) is not types.FunctionType:
        return False
    code = value.__code__

    def stub():  # type: ignore[no-untyped-def]
        ...

    def documented():  # type: ignore[no-untyped-def]
        """What a stub with a docstring compiles to."""

    nothing = all(constant is None or constant == value.__doc__ for constant in code.co_consts)
    return nothing and code.co_code in (stub.__code__.co_code, documented.__code__.co_code)


def call(function: Callable[..., Any], *args: Any, seconds: float = 10.0, **kwargs: Any) -> Outcome:
    """Call a learner's function, at most `seconds` long, with its printing and warnings caught; never raises.

    In the main thread (a notebook) a timer interrupts it; elsewhere, and on Windows, it runs in a thread that is left
    behind when the time is up.
    """
    started = time.perf_counter()
    alarm = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    with _quiet():
        try:
            value = (_with_alarm if alarm else _in_thread)(lambda: function(*args, **kwargs), seconds)
            spent = time.perf_counter() - started
            return Outcome(timed_out=True, seconds=spent) if spent > seconds else Outcome(value=value, seconds=spent)
        except _TimeIsUp:
            return Outcome(timed_out=True, seconds=time.perf_counter() - started)
        except KeyboardInterrupt:
            return Outcome(error="interrupted", seconds=time.perf_counter() - started)
        except BaseException as error:  # SystemExit and whatever else a learner's code raises
            return Outcome(error=_one_line(error), seconds=time.perf_counter() - started)


def _one_line(error: BaseException) -> str:
    try:
        message = " ".join(str(error).split())[:160]
    except Exception:
        message = ""
    return f"{type_name(error)}: {message}" if message else type_name(error)


def _with_alarm(action: Callable[[], Any], seconds: float) -> Any:
    def stop(signum: int, frame: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)  # again and again: code may catch the first
    try:
        return action()
    finally:
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                break
            except _TimeIsUp:
                continue


def _in_thread(action: Callable[[], Any], seconds: float) -> Any:
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(seconds)
    if worker.is_alive():
        raise _TimeIsUp
    if failure:
        raise failure[0]
    return result[0]


class _Sink(io.StringIO):
    """Swallows what is written: a learner's endless printing must not fill memory."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(_Sink()), contextlib.redirect_stderr(_Sink()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
