"""Hidden tests of lesson 08: masks for other texts and windows, looked at entry by entry."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from labkit.grading import hidden


class Packed(hidden.Exercise):
    """The mask is made into a table twice: on index tensors that broadcast, and by PyTorch's own function."""

    name = "packed"
    seconds = 60.0
    preload = ("torch.nn.attention.flex_attention",)

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        texts = [random.randint(3, 9) for _ in range(random.randint(3, 5))]
        yield hidden.case({"lengths": texts, "window": random.randint(2, 3)}, worth=1.5)
        mixed = [1, *(random.randint(4, 9) for _ in range(3)), 1]
        random.shuffle(mixed)
        wide = {"lengths": mixed, "window": sum(mixed) + random.randint(1, 50)}
        yield hidden.case(wide, worth=1.5, because="The window is larger than all texts together.")
        single = {"lengths": [random.randint(9, 14)], "window": random.randint(3, 6)}
        yield hidden.case(single, worth=0.5, because="It is one text.")
        alone = {"lengths": [random.randint(2, 6) for _ in range(4)], "window": 1}
        yield hidden.case(alone, worth=0.5, because="Each token sees itself only.")

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """Which keys each query sees, twice."""
        import torch
        from torch.nn.attention.flex_attention import create_mask

        mask = lesson["packed"](list(given["lengths"]), given["window"])
        if not callable(mask):
            return {"kind": type(mask).__name__}
        length = sum(given["lengths"])
        at, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)
        try:
            tables = (
                mask(zero, zero, at[:, None], at[None, :]),
                create_mask(mask, 1, 1, length, length, device="cpu")[0, 0],
            )
        except RuntimeError:  # `and` asks a whole tensor for one truth
            return {"kind": "function", "tables": None}
        if not all(isinstance(table, torch.Tensor) and table.shape == (length, length) for table in tables):
            return {"kind": "function", "tables": []}
        return {"kind": "function", "tables": [table.int().tolist() for table in tables]}

    def judge(self, given: Any, result: Any) -> bool | str:
        if result["kind"] != "function":
            return "returns no mask function: is there a `return`?"
        if result["tables"] is None:
            return "the mask cannot be called on tensors of positions."
        if len(result["tables"]) != 2:
            return "the mask does not give one entry for each query and key."
        owner = [text for text, length in enumerate(given["lengths"]) for _ in range(length)]
        for table in result["tables"]:
            for query, row in enumerate(table):
                for key, seen in enumerate(row):
                    near, same = 0 <= query - key < given["window"], owner[query] == owner[key]
                    if seen and key > query:
                        return "a token sees one that comes later."
                    if seen and not same:
                        return "a token sees one of another text."
                    if seen and not near:
                        return "a token sees more than the window."
                    if near and same and not seen:
                        return "a token does not see all of its own text that is in the window."
            if len(table) != len(owner) or any(len(row) != len(owner) for row in table):
                return "the mask does not give one entry for each query and key."
        return True
