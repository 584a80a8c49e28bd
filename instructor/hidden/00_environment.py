"""Hidden tests of lesson 00: the timer, on pretended cards whose calls take other times each time it is graded."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from random import Random
from typing import Any

from labkit.grading import hidden

DEFAULT_REPEATS = 9  # of `honest_timer`
SHORTEST, LONGEST = 0.03, 0.12  # seconds of work: far enough apart that no number is right for all cases
SHORTER, LONGER = 0.95, 1.2  # of the true time, where the machine is quiet: a sleep ends late, never early
SLACK = 5e-3  # seconds besides


class HonestTimer(hidden.Exercise):
    """The card stands outside: nothing in the answer's process knows how long its calls take, and the card keeps its
    own record. That record has how long both processes were kept waiting for a processor while a call was timed: a busy
    machine costs a right timer nothing, and an answer that sleeps gains nothing by it."""

    name = "honest_timer"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        """Whatever is called before the timing, `repeats` timed calls in a row meet the whole pattern once."""

        def case(first: float, pattern: list[float], repeats: int | None, because: str) -> hidden.Case:
            return hidden.case({"repeats": repeats, "outside": {"first": first, "pattern": pattern}}, because=because)

        works = [SHORTEST * (LONGEST / SHORTEST) ** random.random() for _ in range(4)]
        work = works[0]
        yield case(work, [work], None, "The card queues its work, and nine timings are the default.")
        work, slow = works[1], random.uniform(0.5, 0.7)
        yield case(slow, [work], 1, "The first call of this card is slow: is it counted, or still running?")
        work = works[2]
        disturbed = [work] * 7 + [work + random.uniform(0.3, 0.5) for _ in range(2)]
        random.shuffle(disturbed)
        yield case(work, disturbed, 9, "Some calls were disturbed: which summary does not move?")
        work = works[3]
        short = [work] * 4 + [work * random.uniform(0.05, 0.1) for _ in range(3)]
        random.shuffle(short)
        yield case(work, short, 7, "Some calls were oddly short: which summary does not move?")

    @staticmethod
    def outside(given: Any, waited: Any) -> Any:
        """A card that takes its time: how many calls it was given, and how late the timing of each may be, which goes
        at most from the card's last word before the call to the first request after the wait."""
        import time

        first, pattern = given["outside"]["first"], given["outside"]["pattern"]

        class Card:
            def __init__(self) -> None:
                self.calls, self.free_at, self.late = 0, 0.0, []
                self.word = self.start = waited()
                self.over = self.closed = False

            def launch(self) -> None:
                self._asked()
                duration = pattern[(self.calls - 1) % len(pattern)] if self.calls else first
                self.calls += 1
                self.free_at = max(self.free_at, time.perf_counter()) + duration
                self.late.append(0.0)
                self.start, self.over, self.closed = self.word, False, False
                self.word = waited()

            def wait(self) -> None:
                self._asked()
                while (left := self.free_at - time.perf_counter()) > 0:
                    time.sleep(left)
                self.over, self.word = True, waited()

            def _asked(self) -> None:
                if self.late and not self.closed:
                    self.late[-1], self.closed = waited() - self.start, self.over

            def seen(self) -> Any:
                self._asked()
                return {"calls": self.calls, "late": self.late[-100:]}

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
        if card["calls"] < repeats:
            return "makes fewer calls than were to be timed."
        pattern = given["outside"]["pattern"]
        wanted = statistics.median(pattern)
        numbers = range(card["calls"] - repeats, card["calls"])
        true = [pattern[(n - 1) % len(pattern)] if n else wanted for n in numbers]
        latest = statistics.median(t + late for t, late in zip(true, card["late"][-repeats:], strict=True))
        most = max(LONGER * wanted, latest + SLACK)
        if SHORTER * wanted <= seconds <= most:
            return True
        if SHORTER * wanted <= seconds / 1000 <= most:
            return "the result is in milliseconds; seconds are asked for."
        return f"the time is too {'long' if seconds > wanted else 'short'}."
