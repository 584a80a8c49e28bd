"""Where compiled code runs in a prediction: regions, and every operator with the storages that it reads and writes."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from . import flex
from .recorder import Recorder

aten = torch.ops.aten
_ALONE = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution", "convolution_backward", "embedding_dense_backward",
          "sort", "topk", "multinomial", "nonzero", "_local_scalar_dense", "index_put_", "index_put", "scatter_add_",
          "_cudnn_rnn", "_fused_adamw_", "_fused_adam_")  # fmt: skip
GRAPHS = "CUDA graphs hold memory in a pool of their own: not part of the estimate of a compiled step"


@dataclass(slots=True)
class Op:
    """One operator as it ran: ``region`` and whether in its backward; events from `start` to `end`."""

    start: int
    end: int
    region: int
    backward: bool
    alone: bool  # a kernel of a library: fuses with nothing
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    drawn: tuple[int, ...] = ()  # of `outs`: what is random
    padded: tuple[int, ...] = ()  # of `ins`: what is copied to aligned sizes


@dataclass
class Regions:
    """Which compiled function runs now, and every operator of the run with the storages it read and wrote."""

    recorder: Recorder
    tracer: Any = None
    used: bool = False
    ops: list[Op] = field(default_factory=list)
    _count: int = 0
    _stack: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)  # autograd sequence numbers, rising
    _owners: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Something is compiled: from here on, note what every operator reads and writes."""
        if not self.used:
            self.used = True
            self.tracer._run = self._watching(self.tracer._run)

    def enter(self) -> None:
        """A compiled function begins."""
        self._count += 1
        self._stack.append(self._count)
        self._turn(self._stack[0])

    def leave(self) -> None:
        """It ends."""
        if self._stack:
            self._stack.pop()
        if not self._stack:
            self._turn(0)

    @property
    def inside(self) -> bool:
        """Whether a compiled function runs."""
        return bool(self._stack)

    def _watching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(func: Any, args: Any, kwargs: Any) -> Any:
            start = len(self.recorder.events)
            region, backward = self._where()
            ins: list[int] = []
            self._identities(args, ins)
            if kwargs:
                self._identities(tuple(kwargs.values()), ins)
            out = run(func, args, kwargs)
            outs: list[int] = []
            self._identities((out,), outs)
            end = len(self.recorder.events)
            if end == start and not ins:
                return out
            written = outs if func._schema.is_mutable or func is aten.add.Tensor else [o for o in outs if o not in ins]
            if written or end > start or func._schema.is_mutable:
                name = func._schema.name
                alone = not name.startswith(("aten::", "prims::")) or _is_alone(name[6:])
                drawn = tuple(written[1:]) if func is aten.native_dropout.default else ()
                padded: list[int] = []
                if region and alone:
                    self._identities(_misaligned(func, args), padded)
                self.ops.append(
                    Op(start, end, region, backward, alone, tuple(ins), tuple(written), drawn, tuple(padded))
                )
            return out

        return watched

    def _identities(self, values: Any, found: list[int]) -> None:
        by_pointer = self.recorder.by_pointer
        for x in values:
            if isinstance(x, torch.Tensor):
                if x.get_device() == 0:
                    identity = by_pointer.get(x.untyped_storage()._cdata)
                    if identity is not None and identity not in found:
                        found.append(identity)
            elif isinstance(x, (list, tuple)):
                self._identities(x, found)

    def _where(self) -> tuple[int, bool]:
        """The region that the present operator belongs to, and whether to its backward pass."""
        if self._stack:
            return self._stack[0], False
        if torch._C._current_graph_task_id() == -1:
            if self._owners and self._owners[-1]:
                self._turn(0)
            return 0, False
        node = torch._C._current_autograd_node()
        if node is None or node.name() == "torch::autograd::AccumulateGrad" or not self._starts:
            return 0, True
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        region = self._owners[index] if index >= 0 else 0
        if torch.is_grad_enabled():  # a checkpoint inside: its nodes belong to the region whose backward runs
            self._turn(region)
        return region, True

    def _turn(self, owner: int) -> None:
        number = torch.autograd._get_sequence_nr()
        if self._starts and self._starts[-1] == number:
            self._owners[-1] = owner
        elif not self._starts or (number > self._starts[-1] and self._owners[-1] != owner):
            self._starts.append(number)
            self._owners.append(owner)


def _misaligned(func: Any, args: Any) -> list[torch.Tensor]:
    """Factors of a 16-bit product that ``torch/_inductor/fx_passes/pad_mm.py`` copies so that every side is a multiple
    of 8 elements (a vocabulary of 50257 is not)."""
    if func not in (aten.mm.default, aten.addmm.default, aten.bmm.default):
        return []
    a, b = args[1:3] if func is aten.addmm.default else args[:2]
    if a.dtype not in (torch.float16, torch.bfloat16):
        return []
    rows, inner, columns = a.shape[-2] % 8, a.shape[-1] % 8, b.shape[-1] % 8
    return [t for t, uneven in ((a, rows or inner), (b, inner or columns)) if uneven]


def region_of(code: Any, regions: Regions, stack: ExitStack) -> Any:
    """What stands for ``torch.compile(code)`` until `stack` unwinds: the same code, whose runs are regions."""
    regions.begin()
    if getattr(code, "__name__", "") == "flex_attention" or getattr(code, "func", None) is flex.uncompiled:
        return flex.compiled
    if isinstance(code, torch.nn.Module):
        before = code.register_forward_pre_hook(lambda *_: regions.enter())
        after = code.register_forward_hook(lambda *_: regions.leave(), always_call=True)
        stack.callback(before.remove)
        stack.callback(after.remove)
        return code

    @functools.wraps(code)
    def call(*args: Any, **kwargs: Any) -> Any:
        regions.enter()
        try:
            return code(*args, **kwargs)
        finally:
            regions.leave()

    return call


def _is_alone(name: str) -> bool:
    return name in _ALONE or name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention"))
