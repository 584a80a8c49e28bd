"""Hidden tests of lesson 05: a compression of saved tensors, by what comes back and by what a step keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random, SystemRandom
from typing import Any

from labkit import safely
from labkit.grading import hidden

LINKS, ELEMENTS = 50, 2 * 2**20  # of a chain that is really run
PARTS, LOOKED_AT = 256, 8  # of its gradient, and how many of them are computed again
BESIDES = 140 * 2**20  # bytes that a process may hold in that run besides its tensors: libraries and the like
KEPT_AS_IT_IS = {"bool": 1, "int64": 8, "int32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # bytes of an element


class Halves(hidden.Exercise):
    """Single tensors of all dtypes, and a chain of operations: on a card, predicted, and really run, while the memory
    of the process is looked at from outside."""

    name = "halves"
    seconds = 60.0
    watched = True
    preload = ("labkit.memory.prediction",)

    def cases(self, random: Random) -> Iterator[hidden.Case]:
        def tensor(dtype: str, size: float, dimensions: int) -> dict[str, Any]:
            shape = [random.randint(2, 6) for _ in range(dimensions)]
            values = [size * random.gauss(0, 1) for _ in range(math.prod(shape))]
            return {"dtype": dtype, "shape": shape, "values": [x > 0 for x in values] if dtype == "bool" else values}

        yield hidden.case({"tensors": [tensor("float32", 10.0 ** random.uniform(0.5, 3), random.randint(2, 4))]})
        large = tensor("float32", 10.0 ** random.uniform(20, 36), random.randint(2, 4))
        tiny = tensor("float32", 10.0 ** random.uniform(-30, -20), 0)
        yield hidden.case(
            {"tensors": [large, tiny]}, worth=2, because="It is very large, or a very small single number."
        )
        yield hidden.case({"tensors": [tensor(dtype, 100.0, random.randint(1, 3)) for dtype in KEPT_AS_IT_IS]})
        chains = {"chains": [random.randint(3, 6), random.randint(9, 14)]}
        chains |= {"links": LINKS, "elements": ELEMENTS, "parts": PARTS, "pace": random.uniform(0.5, 1.5)}
        yield hidden.case(chains, because="What a chain of operations keeps was measured.")

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any) -> Any:
        """For each tensor: the bytes that are kept and what comes back; for chains: the predicted peak of each."""
        import ctypes

        import torch

        import labkit as lab

        pack, unpack = lesson["pack"], lesson["unpack"]

        def storages(kept: Any, found: Any) -> Any:
            if isinstance(kept, torch.Tensor):
                storage = torch.Tensor.untyped_storage(kept)  # a class of the answer's own may have another
                found[storage.data_ptr()] = storage.nbytes()
            for part in kept.values() if isinstance(kept, dict) else kept if isinstance(kept, (tuple, list)) else ():
                storages(part, found)
            return found

        def measured(length: int) -> float:
            height, width = 2048, 4096

            def experiment(device: Any) -> Any:
                x = torch.ones(height, width, device=device, requires_grad=True)

                def step() -> None:
                    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                        y = x
                        for _ in range(length):
                            y = torch.tanh(y)  # saves its result
                        y = y.sum()
                    y.backward()
                    x.grad = None

                return step

            quick = {"repeats": 0, "trace": False, "nearest": False, "record": False, "stateless": True}
            return lab.measure(experiment, card="h200", **quick).steady.requested_bytes / (4 * height * width)

        if "chains" in given:
            tensors = [measured(length) for length in given["chains"]]
            keep = getattr(ctypes.CDLL(None), "mallopt", None)
            if keep is not None:
                keep(-3, 2**20)  # M_MMAP_THRESHOLD of mallopt(3): tensors are given back to the system at once
            y = x = torch.sin(torch.arange(given["elements"]) * given["pace"]).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                for _ in range(given["links"]):
                    y = torch.tanh(y)
            y.sum().backward()
            return {"tensors": tensors, "sums": x.grad.view(given["parts"], -1).double().sum(1).tolist()}
        found = []
        for one in given["tensors"]:
            tensor = torch.tensor(one["values"]).reshape(one["shape"]).to(getattr(torch, one["dtype"]))
            kept = pack(tensor)
            back = unpack(kept)
            told = {"bytes": sum(storages(kept, {}).values())}
            if isinstance(back, torch.Tensor):
                values = back.detach().double().flatten().tolist()
                told |= {"dtype": str(back.dtype), "shape": list(back.shape), "back": values}
            found.append(told)
        return found

    def judge(self, given: Any, result: Any) -> bool | str:
        if "chains" in given:
            return self._memory(given, result["back"], result["held"])
        import torch

        for one, told in zip(given["tensors"], result["back"], strict=True):
            tensor = torch.tensor(one["values"]).reshape(one["shape"]).to(getattr(torch, one["dtype"]))
            complaint = self._one(tensor, one["dtype"], told)
            if complaint:
                return f"{one['dtype']}: {complaint}"
        return True

    @staticmethod
    def _one(tensor: Any, dtype: str, told: Any) -> str:
        """What is wrong with one tensor that went there and back, or nothing."""
        import torch

        if "back" not in told:
            return "unpack returns no tensor: is there a `return`?"
        if told["dtype"] != f"torch.{dtype}":
            return "another dtype comes back than was saved."
        if list(told["shape"]) != list(tensor.shape):
            return "the shape is not the one that went in."
        kept, least = safely.number(told["bytes"]), tensor.numel() * KEPT_AS_IT_IS.get(dtype, 2)
        if not kept > 0:
            return "pack keeps no tensor."
        if kept > least:
            return "more bytes are kept than are needed."
        back = torch.tensor(told["back"], dtype=torch.float64).reshape(tensor.shape)
        if dtype in KEPT_AS_IT_IS:
            return "" if torch.equal(back, tensor.double()) else "it must come back as it was."
        if not bool(torch.isfinite(back).all()):
            return "some values became infinite."
        rounded = tensor.to(torch.bfloat16).double()
        near = torch.isclose(back, rounded, rtol=2**-7, atol=0)  # rounded to the nearest, or cut off
        return "" if bool(near.all()) else "the values are further off than bfloat16 rounds."

    @staticmethod
    def _memory(given: Any, result: Any, held: int) -> bool | str:
        """Each operation more keeps one more tensor: half of its fp32 size. Where a chain is really run, a few whole
        tensors may be held besides; its gradient, some parts of which are computed again, shows that it was."""
        import torch

        short, long = (safely.number(tensors) for tensors in result["tensors"])
        each = (long - short) / (given["chains"][1] - given["chains"][0])
        if math.isclose(each, 0.5, abs_tol=0.05):
            values = torch.sin(torch.arange(given["elements"]) * given["pace"]).view(given["parts"], -1)
            for part in SystemRandom().sample(range(given["parts"]), LOOKED_AT):
                y = x = values[part].requires_grad_()
                for _ in range(given["links"]):
                    y = torch.tanh(y)
                total = torch.autograd.grad(y.sum(), x)[0].double().sum().item()
                if not math.isclose(result["sums"][part], total, rel_tol=0.05):
                    return "the gradient of a longer chain is further off than bfloat16 rounds."
            if held > (0.5 * given["links"] + 4) * 4 * given["elements"] + BESIDES:
                return "a longer chain holds more than bfloat16 takes."
            return True
        return f"{'more' if each > 0.5 else 'less'} is kept for each operation than bfloat16 takes."
