"""Hidden tests of lesson 03: which blocks run when, what the gradients are, and what the segments keep in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random, SystemRandom
from typing import Any

from labkit import safely
from labkit.grading import hidden

WIDTH = 4
NEAR, REENTRANT = 0.4, 1  # tensors by which the peak may be off, and those that a reentrant checkpoint keeps besides
PARTS, LOOKED_AT = 256, 8  # of the gradient, and how many of them are computed again
TENSOR = 8 * 2**20  # bytes of one, where the step is really run
BESIDES = 160 * 2**20  # bytes that a process may hold in that run besides its tensors: libraries and the like


class InSegmentsOf(hidden.Exercise):
    """Small blocks that keep a diary, and large ones whose peak is predicted, and whose memory is looked at from
    outside while they really run."""

    name = "in_segments_of"
    seconds = 60.0
    watched = True
    preload = ("labkit.memory.prediction",)

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        every = random.randint(3, 5)
        uneven = every * 2 + random.randint(1, every - 1)
        yield hidden.case(self._small(random, uneven, every), because="It does not come out even.")
        even = random.choice([2, 3])
        yield hidden.case(self._small(random, 4 * even, even))
        count = random.randint(3, 6)
        yield hidden.case(self._small(random, count, count + random.randint(1, 5)), because="One segment is enough.")
        blocks, every = random.choice([(26, 3), (27, 4), (29, 3)])  # a last, shorter segment in each
        large = {"blocks": blocks, "every": every, "depth": 2}
        run = {"elements": TENSOR // 4, "parts": PARTS, "pace": random.uniform(0.5, 1.5)}
        yield hidden.case({**large, **run}, because="What is kept was measured.")

    @staticmethod
    def _small(random: Random, count: int, every: int) -> dict[str, Any]:
        weights = [[random.uniform(0.3, 1.5) for _ in range(WIDTH)] for _ in range(count)]
        return {"weights": weights, "every": every, "start": [random.uniform(-1, 1) for _ in range(WIDTH)]}

    @staticmethod
    def outside(given: Any) -> Any:
        """A diary: which block ran in forward, and which in backward. What stands in it stays."""

        class Diary:
            def __init__(self) -> None:
                self.first: list[int] = []
                self.second: list[int] = []
                self.page = self.first

            def ran(self, number: int) -> None:
                self.page.append(number)

            def turn(self) -> None:
                self.page = self.second

            def seen(self) -> Any:
                return {"first": self.first, "second": self.second}

        return Diary()

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any, outside: Any) -> Any:
        """Small blocks: result and gradients, or that backward fails; large ones: the predicted peak."""
        import ctypes

        import torch

        import labkit as lab

        run = lesson["in_segments_of"]

        class Deep(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                for _ in range(given["depth"]):
                    x = torch.tanh(x)  # keeps its result
                return x

        class Small(torch.nn.Module):
            def __init__(self, number: int, weight: Any) -> None:
                super().__init__()
                self.number = number
                self.weight = torch.nn.Parameter(torch.tensor(weight))

            def forward(self, x: Any) -> Any:
                outside.ran(self.number)
                return torch.sin(self.weight * x) + 0.3 * x

        if "weights" not in given:
            size = 16 * 2**20

            def experiment(device: Any) -> Any:
                blocks = [Deep() for _ in range(given["blocks"])]
                x = torch.ones(size, device=device, requires_grad=True)

                def step() -> None:
                    run(blocks, x, given["every"]).sum().backward()
                    x.grad = None

                return step

            quick = {"repeats": 0, "trace": False, "nearest": False, "record": False, "stateless": True}
            report = lab.measure(experiment, card="h200", **quick)
            keep = getattr(ctypes.CDLL(None), "mallopt", None)
            if keep is not None:
                keep(-3, 2**20)  # M_MMAP_THRESHOLD of mallopt(3): tensors are given back to the system at once
            x = torch.sin(torch.arange(given["elements"]) * given["pace"]).requires_grad_()
            run([Deep() for _ in range(given["blocks"])], x, given["every"]).sum().backward()
            return {
                "tensors": report.steady.requested_bytes / (4 * size),
                "sums": x.grad.view(given["parts"], -1).double().sum(1).tolist(),
            }
        blocks = [Small(number, weight) for number, weight in enumerate(given["weights"])]
        start = torch.tensor(given["start"], requires_grad=True)
        out = run(blocks, start, given["every"])
        if not isinstance(out, torch.Tensor):
            return {"kind": type(out).__name__}
        outside.turn()
        try:
            out.sum().backward()
        except RuntimeError:
            return {"kind": "Tensor", "fails": True}
        gradients = [None if b.weight.grad is None else b.weight.grad.tolist() for b in blocks]
        return {"kind": "Tensor", "fails": False, "out": out.tolist(), "gradients": gradients}

    def judge(self, given: Any, result: Any) -> bool | str:
        back, diary = result["back"], result["seen"]
        if "weights" not in given:
            return self._memory(given, safely.number(back["tensors"]), back["sums"], result["held"])
        if back["kind"] != "Tensor":
            return "returns no tensor: is there a `return`?"
        count, every = len(given["weights"]), given["every"]
        first, second = diary["first"], diary["second"]
        if sorted(set(first)) != list(range(count)):
            return "not every block ran."
        if first != list(range(count)):
            return "the blocks did not run once each and in their order."
        if back["fails"] is not False:
            return "backward fails: did other blocks run again?"
        if not second:
            return "nothing is computed again in backward."
        parts = [list(range(at, min(at + every, count))) for at in range(0, count, every)]
        if not self._close(given, back):
            return "the result or the gradients are wrong: did other blocks run again?"
        if second != [number for part in reversed(parts) for number in part]:
            return "the blocks that share a checkpoint are not those that were asked for."
        return True

    @staticmethod
    def _close(given: Any, result: Any) -> bool:
        """Whether result and gradients are those of the blocks without any checkpoint."""
        import torch

        x = torch.tensor(given["start"])
        weights = [torch.tensor(weight, requires_grad=True) for weight in given["weights"]]
        for weight in weights:
            x = torch.sin(weight * x) + 0.3 * x
        right = [x.detach(), *torch.autograd.grad(x.sum(), weights)]
        found = [result["out"], *result["gradients"]]
        if len(found) != len(right) or None in found:
            return False
        return all(torch.allclose(torch.tensor(f), r, atol=1e-5) for f, r in zip(found, right, strict=True))

    @staticmethod
    def _memory(given: Any, tensors: float, found: list[float], held: int) -> bool | str:
        """The peak in tensors of the input's size: what one segment keeps, the inputs of the others, and three more
        (the first input, and two gradients while backward passes through). No more may be held where the same step is
        really run; its gradient, some parts of which are computed again, shows that it was."""
        import torch

        every = min(given["every"], given["blocks"])
        right = math.ceil(given["blocks"] / every) - 1 + every * given["depth"] + 3
        if right - NEAR <= tensors <= right + REENTRANT + NEAR:
            values = torch.sin(torch.arange(given["elements"]) * given["pace"]).view(given["parts"], -1)
            for part in SystemRandom().sample(range(given["parts"]), LOOKED_AT):
                y = x = values[part].requires_grad_()
                for _ in range(given["blocks"] * given["depth"]):
                    y = torch.tanh(y)
                total = torch.autograd.grad(y.sum(), x)[0].double().sum().item()
                if not math.isclose(found[part], total, rel_tol=1e-3):
                    return "the gradient of a larger step is wrong."
            if held > (right + REENTRANT + NEAR) * TENSOR + BESIDES:
                return "a larger step holds more than with the segments asked for."
            return True
        return f"the peak of a step is {'higher' if tensors > right else 'lower'} than with the segments asked for."
