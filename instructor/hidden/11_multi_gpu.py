"""Hidden tests of lesson 11: other layers and other cards, among them where filling up evenly is not the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from labkit.grading import hidden


class SplitLayers(hidden.Exercise):
    """The fullest card must have as little as can be; which of several best splits is given does not matter."""

    name = "split_layers"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        def uneven(cards: int, unit: int, first: int) -> dict[str, Any]:
            while True:  # until neither equal numbers of layers nor equal shares are good enough
                sizes = [random.randint(2, 40) for _ in range(random.randint(11, 17))]
                sizes[0] *= first
                least = self._least(sizes, cards)
                plain = self._by_number(len(sizes), cards), self._by_share(sizes, cards)
                if all(self._fullest(sizes, where) > least for where in plain):
                    return {"sizes": [unit * size for size in sizes], "cards": cards}

        yield hidden.case(uneven(random.randint(3, 4), 1, 1), because="Its layers have all sizes.")
        yield hidden.case(uneven(random.randint(2, 4), 2**20, 5), because="Its first layer is large.")
        cards = random.randint(2, 5)
        even = {"sizes": [random.randint(3, 30)] * (cards * random.randint(2, 4)), "cards": cards}
        yield hidden.case(even, because="All of its layers have one size.")
        few = {"sizes": [random.randint(11, 20) for _ in range(3)], "cards": random.randint(5, 7)}
        yield hidden.case(few, because="It has fewer layers than cards.")

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """The card of each layer."""
        return lesson["split_layers"](list(given["sizes"]), given["cards"])

    def judge(self, given: Any, result: Any) -> bool | str:
        sizes, cards = given["sizes"], given["cards"]
        if result is None:
            return "returns nothing: is there a `return`?"
        if not isinstance(result, (list, tuple)) or not all(type(card) is int for card in result):
            return "a list of whole numbers is asked for, the card of each layer."
        if len(result) != len(sizes):
            return "the list does not have one card for each layer."
        if not all(0 <= card < cards for card in result):
            return "there is a card in it that does not exist."
        if list(result) != sorted(result):
            return "a layer lies on an earlier card than the one before it."
        if self._fullest(sizes, result) > self._least(sizes, cards):
            return "the fullest card could have less."
        return True

    @staticmethod
    def _fullest(sizes: Sequence[int], where: Sequence[int]) -> int:
        return max(sum(s for s, c in zip(sizes, where, strict=True) if c == card) for card in set(where))

    @staticmethod
    def _by_number(layers: int, cards: int) -> list[int]:
        """As many layers on each card."""
        return [layer * cards // layers for layer in range(layers)]

    @staticmethod
    def _by_share(sizes: Sequence[int], cards: int) -> list[int]:
        """Each card filled until the next layer would cross an equal share; the last one takes what is left."""
        where, card, held = [], 0, 0
        for size in sizes:
            if held and (held + size) * cards > sum(sizes) and card < cards - 1:
                card, held = card + 1, 0
            held += size
            where.append(card)
        return where

    @staticmethod
    def _least(sizes: Sequence[int], cards: int) -> int:
        """The smallest fullest card, by bisection over the limit."""

        def enough(limit: int) -> bool:
            used, held = 1, 0
            for size in sizes:
                if held + size > limit:
                    used, held = used + 1, 0
                held += size
            return used <= cards

        low, high = max(sizes) - 1, sum(sizes)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high
