"""Hidden tests of lesson 07: the clipped tensor, by its values and by the graphs that are traced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

from labkit import safely
from labkit.grading import hidden


class ClippedInOneGraph(hidden.Exercise):
    """One compiled function is called with a tensor above the limit and one below it, of the same shape."""

    name = "clipped_in_one_graph"
    seconds = 60.0
    preload = ("torch._dynamo",)

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        def tensor(count: int, norm: float) -> list[float]:
            direction = [random.gauss(0, 1) for _ in range(count)]
            length = math.hypot(*direction)
            return [norm * x / length for x in direction]

        limit = random.uniform(0.3, 9)
        far = [tensor(12, limit * random.uniform(3, 50)), tensor(12, limit * random.uniform(0.02, 0.3))]
        yield hidden.case({"limit": limit, "shape": [3, 4], "tensors": far})
        near = [tensor(5, limit * 1.02), tensor(5, limit * 0.98)]
        yield hidden.case({"limit": limit, "shape": [5], "tensors": near}, because="The norm is near the limit.")
        empty = [[0.0] * 8, tensor(8, limit * random.uniform(3, 50))]
        yield hidden.case({"limit": limit, "shape": [2, 2, 2], "tensors": empty}, because="Zeros are among it.")
        # the largest element is below the limit, the norm is above it
        many = [[limit * random.choice([-0.5, 0.5]) for _ in range(36)], tensor(36, 0.5 * limit)]
        yield hidden.case({"limit": limit, "shape": [6, 6], "tensors": many}, because="It has many small elements.")

    @staticmethod
    def outside(given: Any) -> Any:
        """The graphs that were traced, by their number of calls."""

        class Graphs:
            def __init__(self) -> None:
                self.calls: list[int] = []

            def traced(self, calls: int) -> None:
                self.calls.append(calls)

            def seen(self) -> Any:
                return self.calls

        return Graphs()

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any, outside: Any) -> Any:
        """What comes back for each tensor, as it is and compiled."""
        import logging

        import torch

        torch._logging.set_logs(dynamo=logging.ERROR)
        torch.compiler.reset()

        def backend(module: Any, inputs: Any) -> Any:
            outside.traced(sum(node.op in ("call_function", "call_method") for node in module.graph.nodes))
            return module.forward

        function = lesson["clipped_in_one_graph"]
        compiled = torch.compile(function, backend=backend)
        found = []
        for numbers in given["tensors"]:
            for run in (function, compiled):
                got = run(torch.tensor(numbers).reshape(given["shape"]), given["limit"])
                if not isinstance(got, torch.Tensor):
                    return {"kind": type(got).__name__}
                found.append({"shape": list(got.shape), "values": got.detach().double().flatten().tolist()})
        return {"kind": "Tensor", "found": found}

    def judge(self, given: Any, result: Any) -> bool | str:
        back, graphs = result["back"], result["seen"]
        if back["kind"] != "Tensor":
            return "returns no tensor: is there a `return`?"
        calls = [numbers for numbers in given["tensors"] for _ in range(2)]
        for numbers, told in zip(calls, back["found"], strict=True):
            norm = math.hypot(*numbers)
            factor = min(1.0, given["limit"] / norm) if norm else 1.0
            got = [safely.plain(x) for x in told["values"]]
            if list(told["shape"]) != given["shape"]:
                return "the shape is not the one that went in."
            if not all(math.isfinite(x) for x in got):
                return "returns values that are not finite."
            if not all(
                math.isclose(x, factor * y, rel_tol=1e-3, abs_tol=1e-6) for x, y in zip(got, numbers, strict=True)
            ):
                where = "above" if factor < 1 else "not above"
                return f"other values than `clipped` where the norm is {where} the limit."
        if not graphs or max(graphs) < 2:
            return "computes nothing that the compiler could see."
        if len(graphs) > 1:
            return "the values are right, but there is more than one graph."
        return True
