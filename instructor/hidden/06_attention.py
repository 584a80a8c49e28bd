"""Hidden tests of lesson 06: two parts of the keys put together, in other shapes, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from labkit.grading import hidden

NEAR = {"float64": 1e-9, "float32": 3e-4}  # relative to the largest number


class Merge(hidden.Exercise):
    """Both parts are made from scores; the judge weighs them by their share of the whole sum."""

    name = "merge"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        import torch

        def case(lead: list[int], size: float, because: str, dtype: str = "float64", shift: float = 0.0) -> hidden.Case:
            numbers = torch.Generator().manual_seed(random.randrange(2**31))
            seq, head_size = random.randint(3, 7), random.randint(8, 11)
            parts: list[Any] = []
            top = None
            for keys in random.sample([2, 3, 4, 7, 8, 9], 2):
                scores = shift + size * torch.randn(*lead, seq, keys, generator=numbers, dtype=torch.float64)
                if top is not None:  # in one row both parts weigh about the same
                    scores[..., 0, :] += top - scores[..., 0, :].amax(-1, keepdim=True)
                top = scores[..., 0, :].amax(-1, keepdim=True)
                values = torch.randn(*lead, keys, head_size, generator=numbers, dtype=torch.float64)
                parts += [(scores.softmax(-1) @ values).tolist(), scores.logsumexp(-1).tolist()]
            return hidden.case({"dtype": dtype, "parts": parts}, because=because)

        yield case([], random.uniform(1, 4), "The parts are not of one length.")
        yield case([2, 3], random.uniform(1, 4), "There are batch and heads.")
        yield case([], random.uniform(800, 2000), "Scores are very large.")
        yield case([], 1.0, "All scores are far from zero.", shift=random.choice([-1, 1]) * random.uniform(1500, 3000))
        yield case([2, 2], random.uniform(1, 4), "Numbers are float32.", dtype="float32")

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """The kinds and shapes of what comes back, and the numbers."""
        import torch

        found = lesson["merge"](*(torch.tensor(part, dtype=getattr(torch, given["dtype"])) for part in given["parts"]))
        if not isinstance(found, (tuple, list)) or not all(isinstance(part, torch.Tensor) for part in found):
            return {"count": 0 if found is None else len(found) if isinstance(found, (tuple, list)) else 1}
        told = [{"shape": list(part.shape), "values": part.double().flatten().tolist()} for part in found]
        return {"count": len(found), "told": told}

    def judge(self, given: Any, result: Any) -> bool | str:
        import torch

        if result["count"] != 2:
            return "two results are asked for: the output and the logsumexp."
        if "told" not in result:
            return "both results should be tensors."
        out_a, lse_a, out_b, lse_b = (torch.tensor(part, dtype=torch.float64) for part in given["parts"])
        lses = torch.stack([lse_a, lse_b])
        share_a, share_b = lses.softmax(0).unsqueeze(-1)
        right = share_a * out_a + share_b * out_b, lses.logsumexp(0)
        for name, told, wanted in zip(("output", "logsumexp"), result["told"], right, strict=True):
            if list(told["shape"]) != list(wanted.shape):
                return f"the {name} has another shape than its parts have."
            got = torch.tensor(told["values"], dtype=torch.float64).reshape(wanted.shape)
            if not bool(torch.isfinite(got).all()):
                return f"the {name} has inf or nan in it."
            if float((got - wanted).abs().max()) > NEAR[given["dtype"]] * float(wanted.abs().max()):
                return f"the {name} is not that of attention over all keys."
        return True
