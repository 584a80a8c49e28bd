"""Hidden tests of lesson 02: the careful step, on other models, scales and learning rates, and over several steps."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from labkit import safely
from labkit.grading import hidden

FAR = 0.03  # how far half precision may take a step, or a norm, from the one in fp32, relative to its length
HUGE = 1e6  # beyond the range of fp16


class CarefulStep(hidden.Exercise):
    """A linear layer steps once or more; a reference in fp32 says where it must be after each step."""

    name = "careful_step"

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        clipped = self._run(random, micro=random.randint(3, 5), clip=0.3)
        yield hidden.case(clipped, because="Several micro-batches, and the norm is above the limit.")
        free = self._run(random, micro=2, clip=10.0, steps=2)
        yield hidden.case(free, because="Two steps, both with a norm below the limit.")
        spoilt = self._run(random, micro=random.randint(2, 4), clip=0.3, steps=2)
        spoilt["steps"][0][0][0][0] = HUGE
        yield hidden.case(spoilt, because="The first step overflows, the second is a common one.")
        single = self._run(random, micro=1, clip=0.5, momentum=0.9, steps=2)
        yield hidden.case(single, because="One micro-batch at a time, and an optimizer with a state.")

    def _run(self, random: Random, *, micro: int, clip: float, steps: int = 1, momentum: float = 0.0) -> dict[str, Any]:
        """A model and its batches; `clip` comes relative to the norm of the first gradient."""
        inputs, outputs, rows = random.randint(5, 9), random.randint(3, 6), random.randint(8, 20)

        def numbers(height: int, width: int) -> list[list[float]]:
            return [[random.gauss(0, 1) for _ in range(width)] for _ in range(height)]

        given = {
            "weight": numbers(outputs, inputs),
            "bias": numbers(1, outputs)[0],
            "steps": [[numbers(rows, inputs) for _ in range(micro)] for _ in range(steps)],
            "rate": random.uniform(0.05, 0.3),
            "momentum": momentum,
            "scale": float(2 ** random.choice([5, 6, 7, 8, 9, 11])),
            "clip": 1.0,
        }
        given["clip"] = clip * self._reference(given)[0]["norm"]
        return given

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """After each step: the norm that was returned, all weights, the scale, and whether gradients are left."""
        import torch

        model = torch.nn.Linear(len(given["weight"][0]), len(given["bias"]))
        with torch.no_grad():
            model.weight.copy_(torch.tensor(given["weight"]))
            model.bias.copy_(torch.tensor(given["bias"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=given["rate"], momentum=given["momentum"])
        scaler = torch.amp.GradScaler("cpu", init_scale=given["scale"], growth_interval=1)
        after = []
        for batches in given["steps"]:
            tensors = [torch.tensor(batch) for batch in batches]
            norm = lesson["careful_step"](model, optimizer, scaler, tensors, given["clip"])
            after.append(
                {
                    "norm": norm,
                    "weights": torch.cat([model.weight.detach().flatten(), model.bias.detach()]).tolist(),
                    "scale": scaler.get_scale(),
                    "left": any(p.grad is not None and bool(p.grad.any()) for p in model.parameters()),
                }
            )
        return after

    @staticmethod
    def _reference(given: Any) -> list[dict[str, Any]]:
        """Norm (None after an overflow), weights and scale that each step should leave, computed in fp32."""
        import torch

        weight, bias = (torch.tensor(given[part], requires_grad=True) for part in ("weight", "bias"))
        speed = [torch.zeros_like(weight), torch.zeros_like(bias)]
        scale, found = given["scale"], []
        for batches in given["steps"]:
            norm = None
            spoilt = any(abs(x) >= HUGE for batch in batches for row in batch for x in row)
            if not spoilt:
                losses = [(torch.tensor(b) @ weight.T + bias).square().mean() for b in batches]
                gradients = torch.autograd.grad(sum(losses) / len(losses), [weight, bias])
                norm = float(torch.cat([g.flatten() for g in gradients]).norm())
                factor = min(1.0, given["clip"] / norm)
                speed = [given["momentum"] * s + factor * g for s, g in zip(speed, gradients, strict=True)]
                with torch.no_grad():
                    for parameter, step in zip((weight, bias), speed, strict=True):
                        parameter -= given["rate"] * step
            scale *= 0.5 if spoilt else 2.0
            left = torch.cat([weight.detach().flatten(), bias.detach()])
            found.append({"norm": norm, "weights": left.tolist(), "scale": scale})
        return found

    def judge(self, given: Any, result: Any) -> bool | str:
        before = [x for row in given["weight"] for x in row] + list(given["bias"])
        for wanted, got in zip(self._reference(given), result, strict=True):
            complaint = self._step(before, wanted, got)
            if complaint:
                return complaint
            before = wanted["weights"]
        return True

    @staticmethod
    def _step(before: list[float], wanted: dict[str, Any], got: dict[str, Any]) -> str:
        """What is wrong with one step from the weights `before`, or nothing."""
        import torch

        start, right, there = (torch.tensor(w).double() for w in (before, wanted["weights"], got["weights"]))
        length, moved = float((right - start).norm()), float((there - start).norm())
        if wanted["norm"] is None:
            if not moved <= FAR * float(start.norm()):  # also where it is nan
                return "an infinite gradient reached the weights: who decides whether the optimizer steps?"
        elif not moved <= (1 + FAR) * length:
            return "the step is longer than it should be."
        elif moved < (1 - FAR) * length:
            return "the step is shorter than it should be."
        elif float((there - right).norm()) > 2 * FAR * length:
            return "the step goes another way than it should."
        if safely.number(got["scale"]) != wanted["scale"]:
            return "the scale is not what a GradScaler makes of it after such a step."
        if got["left"] is not False:
            return "gradients are left over: the next step would add to them."
        if wanted["norm"] is None:
            return ""
        try:
            norm = safely.number(got["norm"])
        except safely.NotPlain as reason:
            return f"returns {reason}; the norm before clipping is asked for."
        if abs(norm / wanted["norm"] - 1) > FAR:
            return "the norm that is returned is not that of the mean loss, before clipping, without the scale."
        return ""
