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
            return hidden.case({"text": text, "draft": tokens[len(text) :], "factor": factor}, because=because)

        yield draft(random.randint(3, 6), 0, "The whole draft is right.")
        yield draft(0, random.randint(2, 5), "The first token of the draft is wrong.")
        yield draft(random.randint(2, 4), random.randint(2, 5), "The draft goes wrong in the middle.")
        yield draft(random.randint(4, 7), 1, "Only the last token of the draft is wrong.")

    @staticmethod
    def _next(tokens: list[int], factor: int) -> int:
        """What the model writes after these tokens."""
        return (factor * sum(tokens) + len(tokens)) % VOCABULARY

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """The count, and how often the model was called."""
        import types

        import torch

        vocabulary, calls = 97, []

        def model(input_ids: Any, **more: Any) -> Any:
            calls.append(1)
            places = torch.arange(1, input_ids.shape[1] + 1)
            after = (given["factor"] * input_ids.cumsum(1) + places) % vocabulary
            scores = torch.nn.functional.one_hot(after, vocabulary).float()
            keep = more.get("logits_to_keep", 0)
            return types.SimpleNamespace(logits=scores[:, -keep:] if keep else scores)

        text, draft = (torch.tensor([given[part]]) for part in ("text", "draft"))
        return {"count": lesson["speculate"](model, text, draft), "calls": len(calls)}

    def judge(self, given: Any, result: Any) -> bool | str:
        found = result["count"]
        while isinstance(found, (list, tuple)) and len(found) == 1:  # a tensor of one number
            found = found[0]
        if found is None:
            return "returns nothing: is there a `return`?"
        if type(found) is not int:
            return f"returns a {type(found).__name__}; a whole number is asked for."
        tokens, right = list(given["text"]), 0
        for token in given["draft"]:
            if token != self._next(tokens, given["factor"]):
                break
            tokens.append(token)
            right += 1
        if found != right:
            return f"counts too {'many' if found > right else 'few'}."
        if result["calls"] != 1:
            return "the count is right, but the model is called more than once, or not at all."
        return True
