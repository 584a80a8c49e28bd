"""Hidden tests of lesson 01: the search for the largest batch, measured again on experiments of other sizes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from labkit.grading import hidden

MiB = 2**20
MARGIN = 120 * MiB  # more than the workspaces that are held beside an experiment, and the rounding of its blocks
LARGEST, MEASUREMENTS = 63, 6  # what the exercise asks for


class LargestBatch(hidden.Exercise):
    """Every size leaves a margin on both sides: the answer is the same on any card, measured or predicted."""

    name = "largest_batch"
    seconds = 60.0
    preload = ("labkit.memory.prediction",)

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        """A few sequences beside a model, many alone, none at all, and all of them."""
        few = random.choice([9, 10, 11, 12, 13, 14, 15, 17, 18, 19])  # no power of two: doubling would find it
        yield self._fitting(few, random.randint(6, 8) * 1024 * MiB, random.randint(100, 600) * MiB)
        yield self._fitting(random.randint(40, 54), 8192 * MiB, 0)
        budget = random.randint(1, 4) * 1024 * MiB
        yield self._case(budget, 0, budget + random.randint(1, 900) * MiB)
        yield self._case(budget, 0, random.randint(1, 8) * MiB)

    @staticmethod
    def _case(budget: int, fixed: int, each: int) -> hidden.Case:
        return hidden.case({"budget": budget, "outside": {"fixed": fixed, "each": each}})

    @classmethod
    def _fitting(cls, batch: int, budget: int, fixed: int) -> hidden.Case:
        """A case in which `batch` sequences fit with `MARGIN` to spare and one more does not fit without it."""
        least, most = (budget - fixed) / (batch + 1), (budget - fixed - MARGIN) / batch
        return cls._case(budget, fixed, int((least + most) / 2))

    @staticmethod
    def outside(given: Any) -> Any:
        """The sizes of the experiment, told for one batch at a time, and the batches that were asked for."""

        class Sizes:
            def __init__(self) -> None:
                self.tried: set[int] = set()

            def of(self, batch: int) -> Any:
                self.tried.add(batch)
                return given["outside"]["fixed"], batch * given["outside"]["each"]

            def seen(self) -> Any:
                return sorted(self.tried)

        return Sizes()

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any, outside: Any) -> Any:
        """The batch that was found."""
        import torch

        def experiment(device: Any, batch: int = 1) -> Any:
            fixed, each = outside.of(batch)
            model = torch.empty(fixed, dtype=torch.uint8, device=device)
            rows = torch.empty(each, dtype=torch.uint8, device=device)
            return lambda: model.numel() + rows.numel()

        return lesson["largest_batch"](experiment, given["budget"])

    def judge(self, given: Any, result: Any) -> bool | str:
        found, tried, sizes = result["back"], result["seen"], given["outside"]
        if found is None:
            return "returns nothing: is there a `return`?"
        if type(found) not in (int, float):
            return f"returns a {type(found).__name__}; a number of sequences is asked for."
        if not tried:
            return "measures nothing."
        right = max(0, min(LARGEST, (given["budget"] - sizes["fixed"] - MARGIN) // sizes["each"]))
        if found < right:
            return "a larger batch than the one it returns still fits."
        if found > right:
            return "the batch that it returns does not fit."
        if len(tried) > MEASUREMENTS:
            return f"right, but with more than {MEASUREMENTS} measurements."
        return True
