"""Hidden tests of lesson 04: codes and scales of other matrices, the awkward ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from labkit.grading import hidden

HALF_A_STEP = 0.505  # of a level: half, and what fp32 rounds


class Int8Rows(hidden.Exercise):
    """Every element must come back to within half a level of its row."""

    name = "int8_rows"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        def row(width: int, size: float, low: float = -1.0, high: float = 1.0) -> list[float]:
            return [size, *(abs(size) * random.uniform(low, high) for _ in range(width - 1))]

        width = random.randint(12, 70)
        sizes = [1.0, -1.0, *(random.choice([-1, 1]) for _ in range(random.randint(3, 7)))]
        unlike = [row(width, sign * 10.0 ** random.uniform(-5, 6)) for sign in sizes]
        yield hidden.case(unlike, because="Its rows are of very different size.")
        width = random.randint(12, 70)
        positive = [row(width, random.uniform(*size), 0.2, 1.0) for size in ((0.1, 0.2), (3, 9))]
        negative = [row(width, -random.uniform(*size), -1.0, -0.2) for size in ((0.5, 0.9), (20, 50))]
        yield hidden.case([*positive, *negative], because="Some rows have one sign only.")
        empty = [row(width, 1.0), [0.0] * width, row(width, -3.0), [0.0] * width]
        yield hidden.case(empty, because="Some rows are zeros.")
        narrow = [row(3, random.choice([-1, 1]) * random.uniform(2, 9)) for _ in range(random.randint(12, 20))]
        yield hidden.case([row(3, 1.0), row(3, -1.0), *narrow], because="It is narrow.")

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """The kinds and shapes of what comes back, the codes and the scales."""
        import torch

        found = lesson["int8_rows"](torch.tensor(given))
        if not isinstance(found, (tuple, list)):
            return {"parts": None if found is None else 1}
        if len(found) != 2 or not all(isinstance(part, torch.Tensor) for part in found):
            return {"parts": len(found), "tensors": False}
        codes, scales = found
        return {
            "parts": 2,
            "tensors": True,
            "dtype": str(codes.dtype),
            "shape": list(codes.shape),
            "codes": codes.flatten().tolist(),
            "scales": scales.detach().double().flatten().tolist(),
        }

    def judge(self, given: Any, result: Any) -> bool | str:
        import torch

        if result["parts"] is None:
            return "returns nothing: is there a `return`?"
        if result["parts"] != 2 or not result["tensors"]:
            return "two tensors are asked for: codes and scales."
        weight = torch.tensor(given).double()
        if result["dtype"] != "torch.int8":
            return "the codes are not int8."
        if list(result["shape"]) != list(weight.shape):
            return "the codes have another shape than the weight."
        if len(result["scales"]) != len(weight):
            return "there is not one scale for each row."
        codes = torch.tensor(result["codes"]).double().reshape(weight.shape)
        back = codes * torch.tensor(result["scales"]).double()[:, None]
        if not bool(torch.isfinite(back).all()):
            return "some numbers come back as nan or inf."
        step = weight.abs().amax(1, keepdim=True) / 127
        off = (back - weight).abs()
        if bool((off > 64 * step).any()):
            return "some numbers come back with the wrong sign or size."
        if bool((off > HALF_A_STEP * step).any()):
            return "some numbers are further off than half a level."
        return True
