"""Libraries that ask what device a tensor or the machine has: during a prediction they hear of a CUDA card.

A module is changed when it is there already, or as soon as the experiment imports it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from .ghosts import Ghosts

PAGED = (
    "states of paged optimizers are managed memory: PyTorch's counters do not see them, here or on a card; the driver "
    "keeps them on the card while there is room"
)
Patches = Iterator[tuple[Any, str, Any]]  # owner, name, value


def _torchao_offload(module: ModuleType, ghosts: Ghosts) -> Patches:
    yield module, "get_available_devices", lambda: ["cpu", "cuda"]


def _bitsandbytes_products(module: ModuleType, ghosts: Ghosts) -> Patches:
    """The 8-bit product of a card, also in training, where a processor has one of its own."""
    original: Any = module.matmul

    def matmul(A: Any, B: Any, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None) -> Any:
        if A.get_device() != 0:
            return original(A, B, out, state, threshold, bias)
        state = state or module.MatmulLtState()
        if threshold > 0.0:
            state.threshold = threshold
        return module.MatMul8bitLt.apply(A, B, out, bias, state)

    yield module, "matmul", matmul
    package = sys.modules["bitsandbytes"]
    if getattr(package, "matmul", None) is original:
        yield package, "matmul", matmul


def _bitsandbytes_layers(module: ModuleType, ghosts: Ghosts) -> Patches:
    original: Any = module.Linear4bit.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        if x.get_device() == 0:
            self.support_avx512bf16_for_cpu = False  # of a processor: its weights are packed another way
        return original(self, x)

    yield module.Linear4bit, "forward", forward


def _bitsandbytes_optimizer(module: ModuleType, ghosts: Ghosts) -> Patches:
    original: Any = module.Optimizer8bit.get_state_buffer

    def get_state_buffer(self: Any, p: Any, dtype: torch.dtype = torch.float32) -> Any:
        if p.get_device() != 0:
            return original(self, p, dtype)
        if not self.is_paged or p.numel() < 1e5:
            return torch.zeros_like(p, dtype=dtype)
        ghosts.notes[PAGED] = None
        state: Any = torch.empty(p.shape, dtype=dtype, device="cpu")
        state.is_paged = True
        return state

    def prefetch_state(self: Any, p: Any) -> Any:
        return None if p.get_device() == 0 else prefetch(self, p)

    prefetch: Any = module.Optimizer8bit.prefetch_state
    yield module.Optimizer8bit, "get_state_buffer", get_state_buffer
    yield module.Optimizer8bit, "prefetch_state", prefetch_state


def _transformers_tracing(module: ModuleType, ghosts: Ghosts) -> Patches:
    """Inside compiled code transformers takes other ways: it cannot look at values, and builds masks for all cases."""
    original: Any = module.is_torchdynamo_compiling
    yield module, "is_torchdynamo_compiling", lambda: ghosts.regions.inside or original()


def _flex_attention(module: ModuleType, ghosts: Ghosts) -> Patches:
    from . import flex

    def compiling() -> bool:
        return bool(ghosts.regions.inside)

    original: Any = module.flex_attention
    yield module, "flex_attention", functools.partial(flex.uncompiled, original=original, compiling=compiling)


_BY_MODULE: dict[str, Callable[[ModuleType, Ghosts], Patches]] = {
    "torchao.optim.cpu_offload": _torchao_offload,
    "bitsandbytes.autograd._functions": _bitsandbytes_products,
    "bitsandbytes.nn.modules": _bitsandbytes_layers,
    "torch.nn.attention.flex_attention": _flex_attention,
    "transformers.utils.import_utils": _transformers_tracing,
    "bitsandbytes.optim.optimizer": _bitsandbytes_optimizer,
}


@contextmanager
def informed(ghosts: Ghosts) -> Iterator[None]:
    """Inside the block the libraries of this module take ghosts for tensors on a card."""
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            for owner, name, value in _BY_MODULE[module.__name__](module, ghosts):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

        for name in _BY_MODULE:
            if name in sys.modules:
                change(sys.modules[name])
        finder = _Finder(change)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the usual finder find a module of the table, and changes it once it is loaded."""

    def __init__(self, change: Callable[[ModuleType], None]):
        self._change = change

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _BY_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._change)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, change: Callable[[ModuleType], None]):
        self._loader, self._change = loader, change

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)
