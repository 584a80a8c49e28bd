"""Hidden tests of lesson 00: the timer, on pretended cards whose calls take other times each time it is graded."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from random import Random
from typing import Any

from labkit.grading import hidden

DEFAULT_REPEATS = 9  # of `honest_timer`
SHORTER, LONGER = 0.95, 1.4  # what may lie between the true time and a right answer: a sleep ends late, never early


class HonestTimer(hidden.Exercise):
    """The card keeps its own record: where this machine was busy, a right timer may be late by as much as the card."""

    name = "honest_timer"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        """Whatever is called before the timing, `repeats` timed calls in a row meet the whole pattern once."""
        work = random.uniform(0.03, 0.036)
        yield hidden.case(
            {"first": work, "pattern": [work], "repeats": None},
            because="The card queues its work, and nine timings are the default.",
        )
        yield hidden.case(
            {"first": random.uniform(0.15, 0.25), "pattern": [work], "repeats": 1},
            because="The first call of this card is slow: is it counted, or still running?",
        )
        disturbed = [work] * 5 + [work * random.uniform(4, 7) for _ in range(2)]
        random.shuffle(disturbed)
        yield hidden.case(
            {"first": work, "pattern": disturbed, "repeats": 7},
            because="Some calls were disturbed: which summary does not move?",
        )
        short = [work] * 4 + [work * random.uniform(0.05, 0.1) for _ in range(3)]
        random.shuffle(short)
        yield hidden.case(
            {"first": work, "pattern": short, "repeats": 7},
            because="Some calls were oddly short: which summary does not move?",
        )

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """The timer's answer, how many calls it made, and how late each wait for the card came back."""
        import time

        class Card:
            def __init__(self) -> None:
                self.calls, self.free_at, self.late = 0, 0.0, []

            def launch(self) -> None:
                now = time.perf_counter()
                at = (self.calls - 1) % len(given["pattern"])
                duration = given["pattern"][at] if self.calls else given["first"]
                self.calls += 1
                self.free_at = max(self.free_at, now) + duration

            def wait(self) -> None:
                while (left := self.free_at - time.perf_counter()) > 0:
                    time.sleep(left)
                self.late.append(-left)

        card = Card()
        repeats = {} if given["repeats"] is None else {"repeats": given["repeats"]}
        seconds = lesson["honest_timer"](card.launch, card.wait, **repeats)
        return {"seconds": seconds, "calls": card.calls, "late": card.late}

    def judge(self, given: Any, result: Any) -> bool | str:
        seconds = result["seconds"]
        if seconds is None:
            return "returns nothing: is there a `return`?"
        if type(seconds) not in (int, float):
            return f"returns a {type(seconds).__name__}; one number of seconds is asked for."
        repeats = given["repeats"] or DEFAULT_REPEATS
        wanted = statistics.median(given["pattern"])
        late = statistics.median(result["late"][-repeats:]) if len(result["late"]) >= repeats else 0.0
        if result["calls"] < repeats:
            return "makes fewer calls than were to be timed."
        if SHORTER * wanted <= seconds <= LONGER * wanted + late:
            return True
        if SHORTER * wanted <= seconds / 1000 <= LONGER * wanted + late:
            return "the result is in milliseconds; seconds are asked for."
        return f"the time is too {'long' if seconds > wanted else 'short'}."
