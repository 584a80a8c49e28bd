"""Hidden tests of lesson 09: batches of other texts, by what they compute and by how full they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from labkit.grading import hidden

PADDING, BATCHES = 1.5, 1.5  # times what batches by length have; another order of the texts costs less than that
SLACK = 0.02  # of all tokens, in padding


class BatchesOf(hidden.Exercise):
    """Texts of all lengths, a few long ones among many short ones, and two whose best batches are plain."""

    name = "batches_of"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        even = [random.randint(1, 80) for _ in range(random.randint(150, 250))]
        yield hidden.case({"lengths": even, "most": random.randint(280, 340)}, because="Its texts have all lengths.")
        tail = [random.randint(2, 9) for _ in range(random.randint(180, 220))] + [
            random.randint(150, 220) for _ in range(4)
        ]
        random.shuffle(tail)
        yield hidden.case({"lengths": tail, "most": 230}, because="It has a few long texts.")
        length, rows = random.randint(7, 19), random.randint(5, 9)
        same = {
            "lengths": [length] * (rows * random.randint(3, 6) + random.randint(1, rows - 1)),
            "most": length * rows,
        }
        yield hidden.case(same, because="All of its texts have one length.")
        most = random.randint(30, 60)
        filling = {"lengths": [most, 1] * random.randint(8, 12), "most": most}
        yield hidden.case(filling, because="Some of its texts fill a batch alone.")

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """The batches."""
        return lesson["batches_of"](list(given["lengths"]), given["most"])

    def judge(self, given: Any, result: Any) -> bool | str:
        lengths, most = given["lengths"], given["most"]
        if result is None:
            return "returns nothing: is there a `return`?"
        if not isinstance(result, (list, tuple)) or not all(isinstance(batch, (list, tuple)) for batch in result):
            return "a list of lists of indices is asked for."
        flat = [index for batch in result for index in batch]
        if not all(type(index) is int and 0 <= index < len(lengths) for index in flat):
            return "there is something else in a batch than indices of texts."
        if len(flat) != len(set(flat)):
            return "a text is in two batches."
        if len(flat) < len(lengths):
            return "not every text is in a batch."
        batches = [batch for batch in result if batch]
        if max(self._sizes(batches, lengths)) > most:
            return "a batch is too large."
        best = self._by_length(lengths, most)
        least, padding = (sum(self._sizes(found, lengths)) - sum(lengths) for found in (best, batches))
        if padding > PADDING * least + SLACK * sum(lengths):
            return "there is too much padding."
        if len(batches) > BATCHES * len(best) + 1:
            return "there are too many batches: they are far from full."
        return True

    @staticmethod
    def _sizes(batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
        return [len(batch) * max(lengths[index] for index in batch) for batch in batches]

    @staticmethod
    def _by_length(lengths: Sequence[int], most: int) -> list[list[int]]:
        """Batches filled from the longest text down: the first one in a batch says how many rows it takes."""
        found: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > most:
                found.append([])
            found[-1].append(index)
        return found
