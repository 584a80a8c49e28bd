"""The grader's end of a sandbox: sends one exercise at a time, listens with deadlines, and puts together what came."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import places
from . import wire
from .answering import PRELUDE_SECONDS
from .relay import RESULTS

START_SECONDS = 180.0
GRACE = 10.0  # seconds that a process has to stop by itself when its time is up
MOST_BYTES = 32 * 2**20  # of one exercise's answers
MOST_LINES = 20_000
_TEXT, _NUMBER = (str,), (int, type(None))
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {  # of each kind of message, with their types
    "blank": {}, "broken": {"text": _TEXT}, "end": {}, "exit": {}, "flood": {}, "forged": {}, "note": {"text": _TEXT},
    "failed": {"where": _TEXT, "error": _TEXT, "message": _TEXT, "line": _NUMBER, "mine": (bool,)}, "ready": {},
    "result": {"value": (object,), "shown": _TEXT}, "started": {}, "tampered": {"text": _TEXT},
    "uncallable": {"shown": _TEXT}, "undefined": {}, "unreadable": {"text": _TEXT},
    "value": {"value": (object,), "shown": _TEXT},
}  # fmt: skip
_BESIDE = ("outside", "watched")  # of a request: for the process beside the answer's
_FORGED = "sends something else than an answer"


@dataclass
class Outcome:
    """What running one exercise gave.

    ``ending``: ``done``, ``timeout`` (ended from outside), ``crashed`` (it died), ``flooded`` (it said too much).
    ``values`` are the messages with the answer's value or each case's result, in order.
    """

    ending: str = "done"
    values: list[dict[str, Any]] = field(default_factory=list)
    tampered: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    started: bool = False  # the given cells are through, the answer's own cell began
    reason: str = ""
    seconds: float = 0.0


class Runner:
    """Runs exercises in processes that `launch` starts: one that lives on and forks, started again when it had to be
    ended. ``setup`` is what `inside.restrict` and the imports need."""

    def __init__(self, launch: Callable[[], wire.Process], setup: dict[str, Any]):
        self._launch, self._setup = launch, setup
        self._process: wire.Process | None = None

    def run(self, request: dict[str, Any]) -> Outcome:
        """Run one exercise. Raises `wire.Gone` when the process cannot be started at all.

        ``cases`` of the request are sent one by one, each when the result of the one before it has come, together with
        ``outside``, the source of what must not be in the answer's process, and whether it is ``watched``.
        """
        outcome = Outcome()
        process = self._ready()
        began = time.monotonic()
        try:
            process.send({k: v for k, v in request.items() if k not in ("cases", *_BESIDE)})
            self._listen(process, request, outcome)
        except wire.Late:
            outcome.ending, outcome.reason = "timeout", f"not done after {request['seconds']:g} s"
            self.close()
        except wire.Gone:
            outcome.ending, outcome.reason = "crashed", self.reason()
            self.close()
        except wire.TooMuch:
            outcome.ending, outcome.reason = "flooded", "sends more than an answer can be"
            self.close()
        outcome.seconds = time.monotonic() - began
        return outcome

    def reason(self) -> str:
        """Why the process is gone, as far as it can be told; a sandbox that keeps watch says more."""
        watch = getattr(self._process, "ended", "") if self._process else ""
        return watch or "its process died"

    def _listen(self, process: wire.Process, request: dict[str, Any], outcome: Outcome) -> None:
        bytes_left, lines_left = MOST_BYTES, MOST_LINES
        beside = {k: request.get(k) for k in _BESIDE}
        cases = [{"given": given, **beside} for given in request.get("cases", ())]
        parts = 1 + len(cases)  # whatever the answer says of itself, it ends at the last of these
        deadline = time.monotonic() + PRELUDE_SECONDS + GRACE
        last = deadline + parts * (request["seconds"] + GRACE)
        asked = ended = broken = False
        while True:
            message = process.receive(deadline, cap=bytes_left)
            bytes_left -= len(str(message))
            lines_left -= 1
            if bytes_left < 0 or lines_left < 0:
                raise wire.TooMuch
            kind = message.get("kind")
            if not _sound(message):
                kind = "forged"
            if kind == "started" and not outcome.started:
                outcome.started = True
                deadline = min(last, time.monotonic() + request["seconds"] + GRACE)
            elif kind in ("tampered", "note"):
                (outcome.tampered if kind == "tampered" else outcome.notes).append(message["text"][:200])
            elif kind == "forged":
                outcome.tampered.append(_FORGED)
            elif kind == "flood":
                raise wire.TooMuch
            elif kind == "broken":
                outcome.ending, outcome.reason, broken = "crashed", message["text"], True
            elif kind == "end":
                ended = True
            elif kind == "exit":
                if not broken and not ended and not any(m["kind"] == "failed" for m in outcome.values):
                    outcome.ending, outcome.reason = "crashed", _signal(message.get("signal"))
                if message.get("strays"):  # the next exercise shall not share its sandbox with what they do
                    self.close()
                return
            elif kind not in ("ready", "started"):
                outcome.values.append(message)
            if kind == "ready" or (asked and kind in RESULTS):
                asked = True
                if kind == "failed" and message["error"] == "timeout":
                    cases.clear()  # time was up: the next case would only wait again
                process.send(cases.pop(0) if cases else {"done": True})
                deadline = min(last, time.monotonic() + request["seconds"] + GRACE)

    def _ready(self) -> wire.Process:
        if self._process is None or not self._process.alive:
            self.close()
            self._process = self._launch()
            try:
                self._process.send(self._setup)
                while self._process.receive(time.monotonic() + START_SECONDS).get("kind") != "ready":
                    pass
            except (wire.Late, wire.Gone, wire.TooMuch) as error:
                said = self._process.said()
                self.close()
                raise wire.Gone(f"the answers' process does not start: {said or type(error).__name__}") from error
        return self._process

    def close(self) -> None:
        """End the process and everything that it started."""
        if self._process is not None:
            self._process.kill()
            self._process = None


def plain_launch(folder: Path) -> Callable[[], wire.Process]:
    """Starts processes without a sandbox, with the working directory `folder`: for answers that one trusts."""

    def launch() -> wire.Process:
        environment = places.environment(LABKIT_RUN=str(folder / "run"), OMP_NUM_THREADS="2")
        return wire.Process([sys.executable, "-m", "labkit.grading.inside"], environment, str(folder))

    return launch


def _sound(message: dict[str, Any]) -> bool:
    """Whether a message is of a kind that there is, with its fields."""
    kind = message.get("kind")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    return fields is not None and all(k in message and isinstance(message[k], t) for k, t in fields.items())


def _signal(number: Any) -> str:
    if number == 9:
        return "its process was killed (out of memory, or by itself)"
    return f"its process died (signal {number})" if number else "it ended its own process"
