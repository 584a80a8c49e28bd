"""Hidden tests of lesson 10: drafts for a model whose next token depends on the whole text before it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from labkit.grading import hidden

VOCABULARY = 97


class Speculate(hidden.Exercise):
    """After its first wrong token a draft goes on as the model would: what matches there does not count."""

    name = "speculate"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        def draft(right: int, wrong: int, because: str) -> hidden.Case:
            factor = random.randint(2, VOCABULARY - 1)
            tokens = [random.randrange(VOCABULARY) for _ in range(random.randint(2, 9))]
            text = list(tokens)
            for place in range(right + wrong):
                slip = random.randint(1, VOCABULARY - 1) if place == right else 0
                tokens.append((self._next(tokens, factor) + slip) % VOCABULARY)
            given = {"text": text, "draft": tokens[len(text) :], "outside": {"factor": factor}}
            return hidden.case(given, because=because)

        yield draft(random.randint(3, 6), 0, "The whole draft is right.")
        yield draft(0, random.randint(2, 5), "The first token of the draft is wrong.")
        yield draft(random.randint(2, 4), random.randint(2, 5), "The draft goes wrong in the middle.")
        yield draft(random.randint(4, 7), 1, "Only the last token of the draft is wrong.")

    @staticmethod
    def _next(tokens: list[int], factor: int) -> int:
        """What the model writes after these tokens."""
        return (factor * sum(tokens) + len(tokens)) % VOCABULARY

    @staticmethod
    def outside(given: Any) -> Any:
        """What the model says of a text, and how often it was asked."""

        class Model:
            def __init__(self) -> None:
                self.calls = 0

            def after(self, rows: list[list[int]]) -> Any:
                self.calls += 1
                factor = given["outside"]["factor"]
                return [[(factor * sum(row[: i + 1]) + i + 1) % 97 for i in range(len(row))] for row in rows]

            def seen(self) -> Any:
                return self.calls

        return Model()

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any, outside: Any) -> Any:
        """The count."""
        import types

        import torch

        def model(input_ids: Any, **more: Any) -> Any:
            after = torch.tensor(outside.after(input_ids.tolist())).reshape(input_ids.shape)
            scores = torch.nn.functional.one_hot(after, 97).float()
            keep = more.get("logits_to_keep", 0)
            return types.SimpleNamespace(logits=scores[:, -keep:] if keep else scores)

        text, draft = (torch.tensor([given[part]]) for part in ("text", "draft"))
        return lesson["speculate"](model, text, draft)

    def judge(self, given: Any, result: Any) -> bool | str:
        found = result["back"]
        while isinstance(found, (list, tuple)) and len(found) == 1:  # a tensor of one number
            found = found[0]
        if found is None:
            return "returns nothing: is there a `return`?"
        if type(found) is not int:
            return f"returns a {type(found).__name__}; a whole number is asked for."
        tokens, right = list(given["text"]), 0
        for token in given["draft"]:
            if token != self._next(tokens, given["outside"]["factor"]):
                break
            tokens.append(token)
            right += 1
        if found != right:
            return f"counts too {'many' if found > right else 'few'}."
        if result["seen"] != 1:
            return "the count is right, but the model is called more than once, or not at all."
        return True
