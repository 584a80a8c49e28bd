"""Hidden tests of lesson 12: the greedy order for other switches, alone and where they act on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from labkit.grading import hidden

Peak = Callable[[list[str]], int]


class Greedy(hidden.Exercise):
    """Peaks are whole numbers, made from what each switch saves and what each pair of them costs together."""

    name = "greedy"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        names = random.sample(["amp", "segments", "states", "loss", "micro", "host", "bf16", "window"], 6)

        def case(savings: list[int], budget: int, because: str, pairs: Any = (), worth: float = 1) -> hidden.Case:
            peaks = {"savings": savings, "pairs": list(pairs), "start": 1000}
            given = {"switches": names[: len(savings)], "budget": budget, "outside": peaks}
            return hidden.case(given, worth=worth, because=because)

        large = random.sample(range(40, 140), 6)
        enough = 1000 - sum(sorted(large)[-3:]) + random.randint(0, 20)
        yield case(large, enough, "It fits after some of the switches.")
        first, second, third = 200, random.randint(150, 190), random.randint(100, 140)
        apart = [third, first, random.randint(20, 60), second]
        cost = [[1, 3, second + random.randint(1, 50)]]  # the two best do not go together
        yield case(apart, 1000 - first - third, "Two of the switches disturb each other.", cost, worth=2)
        few = [random.randint(10, 50), -random.randint(1, 50), 0, random.randint(60, 90), -random.randint(1, 9)]
        yield case(few, random.randint(100, 500), "No combination of the switches is enough.")
        yield case(large[:4], 1000 + random.randint(0, 50), "It fits as it is.")
        one, two = random.sample(range(50, 90), 2)
        yield case([min(one, two), max(one, two), min(one, two), max(one, two)], 10, "Some switches save the same.")

    @staticmethod
    def outside(given: Any) -> Any:
        """The peak with some switches on."""
        known = given["outside"]

        class Peaks:
            def peak(self, on: Any) -> int:
                taken = [given["switches"].index(name) for name in dict.fromkeys(on)]
                cost = sum(more for one, other, more in known["pairs"] if one in taken and other in taken)
                return int(known["start"] - sum(known["savings"][i] for i in taken) + cost)

            def seen(self) -> Any:
                return None

        return Peaks()

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any, outside: Any) -> Any:
        """The switches that were taken, in their order."""
        return lesson["greedy"](list(given["switches"]), lambda on: outside.peak(list(on)), given["budget"])

    def judge(self, given: Any, result: Any) -> bool | str:
        result = result["back"]
        if result is None:
            return "returns nothing: is there a `return`?"
        if not isinstance(result, (list, tuple)) or not all(name in given["switches"] for name in result):
            return "a list of switches is asked for."
        right = self._order(given)
        if list(result) == right:
            return True
        if len(result) != len(set(result)):
            return "a switch is taken twice."
        if sorted(result) == sorted(right):
            return "these are the right switches, in another order than they are taken."
        if len(result) == len(right):
            return "it takes other switches than the rule does."
        return f"it takes {'more' if len(result) > len(right) else 'fewer'} switches than the rule does."

    @staticmethod
    def _order(given: Any) -> list[str]:
        """The order by hand: the saving of each switch on top of those that are taken, until it fits or none saves."""
        known = given["outside"]
        left, on, peak = list(range(len(given["switches"]))), [], known["start"]
        while peak > given["budget"] and left:
            extra = {i: known["savings"][i] for i in left}
            for one, other, more in known["pairs"]:
                for mine, theirs in ((one, other), (other, one)):
                    if mine in extra and theirs in on:
                        extra[mine] -= more
            best = max(left, key=lambda i: (extra[i], -i))
            if extra[best] <= 0:
                break
            peak -= extra[best]
            left.remove(best)
            on.append(best)
        return [given["switches"][i] for i in on]
