"""Hidden tests of lesson 00: the timer, on pretended cards whose calls take other times each time it is graded."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from random import Random
from typing import Any

from labkit.grading import hidden

DEFAULT_REPEATS = 9  # of `honest_timer`
SHORTER, LONGER = 0.95, 1.4  # what may lie between the true time and a right answer: a sleep ends late, never early
MOST_LATE = 0.05  # seconds by which the card itself may be late on a busy machine


class HonestTimer(hidden.Exercise):
    """The card stands outside: nothing in the answer's process knows how long its calls take, and the card keeps its
    own record. Where this machine was busy, a right timer may be late by as much as the card."""

    name = "honest_timer"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        """Whatever is called before the timing, `repeats` timed calls in a row meet the whole pattern once."""

        def case(first: float, pattern: list[float], repeats: int | None, because: str) -> hidden.Case:
            return hidden.case({"repeats": repeats, "outside": {"first": first, "pattern": pattern}}, because=because)

        work = random.uniform(0.06, 0.072)  # long against what a busy machine adds to a call
        yield case(work, [work], None, "The card queues its work, and nine timings are the default.")
        slow = random.uniform(0.5, 0.7)
        yield case(slow, [2 * work], 1, "The first call of this card is slow: is it counted, or still running?")
        disturbed = [work] * 7 + [work * random.uniform(4, 7) for _ in range(2)]
        random.shuffle(disturbed)
        yield case(work, disturbed, 9, "Some calls were disturbed: which summary does not move?")
        short = [work] * 4 + [work * random.uniform(0.05, 0.1) for _ in range(3)]
        random.shuffle(short)
        yield case(work, short, 7, "Some calls were oddly short: which summary does not move?")

    @staticmethod
    def outside(given: Any) -> Any:
        """A card that takes its time: how many calls it was given, and how late each wait for it came back."""
        import time

        first, pattern = given["outside"]["first"], given["outside"]["pattern"]

        class Card:
            def __init__(self) -> None:
                self.calls, self.free_at, self.late = 0, 0.0, []

            def launch(self) -> None:
                duration = pattern[(self.calls - 1) % len(pattern)] if self.calls else first
                self.calls += 1
                self.free_at = max(self.free_at, time.perf_counter()) + duration

            def wait(self) -> None:
                until = max(self.free_at, time.perf_counter())  # who comes later than the card does not make it late
                while (left := until - time.perf_counter()) > 0:
                    time.sleep(left)
                self.late.append(-left)

            def seen(self) -> Any:
                return {"calls": self.calls, "late": self.late}

        return Card()

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any, outside: Any) -> Any:
        """The timer's answer."""
        repeats = {} if given["repeats"] is None else {"repeats": given["repeats"]}
        return lesson["honest_timer"](outside.launch, outside.wait, **repeats)

    def judge(self, given: Any, result: Any) -> bool | str:
        seconds, card = result["back"], result["seen"]
        if seconds is None:
            return "returns nothing: is there a `return`?"
        if type(seconds) not in (int, float):
            return f"returns a {type(seconds).__name__}; one number of seconds is asked for."
        repeats = given["repeats"] or DEFAULT_REPEATS
        wanted = statistics.median(given["outside"]["pattern"])
        late = statistics.median(card["late"][-repeats:]) if len(card["late"]) >= repeats else 0.0
        late = min(late, MOST_LATE)
        if card["calls"] < repeats:
            return "makes fewer calls than were to be timed."
        if SHORTER * wanted <= seconds <= LONGER * wanted + late:
            return True
        if SHORTER * wanted <= seconds / 1000 <= LONGER * wanted + late:
            return "the result is in milliseconds; seconds are asked for."
        return f"the time is too {'long' if seconds > wanted else 'short'}."
