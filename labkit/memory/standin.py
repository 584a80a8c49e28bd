"""The process during a prediction: calls meant for a CUDA card go to the stand-in device, and all of it is undone.

What an experiment may do that would outlive it (random states, default dtype and device, a model made elsewhere that
it moves to the GPU) is put back when the prediction ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .ghosts import VALUES_READ, is_ghost


@contextmanager
def stand_in(notes: dict[str, None]) -> Iterator[None]:
    """Inside the block the process behaves as if the stand-in were its GPU; afterwards it is as it was."""
    with ExitStack() as stack:
        stack.enter_context(_random_states())
        stack.enter_context(_defaults())
        stack.enter_context(_models_from_outside())
        _redirect(stack, notes)
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _random_states() -> Iterator[None]:
    state, python = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)


@contextmanager
def _defaults() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def _models_from_outside() -> Iterator[None]:
    """A real module that the experiment moves or casts gets its tensors back."""
    apply: Any = torch.nn.Module._apply
    saved: list[tuple[Any, Any, Any]] = []

    def remembering(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.numel() and parameter.get_device() != 0 and not is_ghost(parameter):
                saved.append((parameter, parameter.data, parameter.grad))
        buffers = {
            k: b for k, b in module._buffers.items() if b is not None and b.get_device() != 0 and not is_ghost(b)
        }
        if buffers:
            saved.append((module, buffers, None))
        return apply(module, *args, **kwargs)

    torch.nn.Module._apply = remembering  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module._apply = apply  # type: ignore[method-assign]
        for owner, values, grad in reversed(saved):
            if isinstance(owner, torch.nn.Parameter):
                owner.grad = None
                owner.data = values
                owner.grad = grad
            else:
                owner._buffers.update(values)


def _redirect(stack: ExitStack, notes: dict[str, None]) -> None:
    """``torch.autocast("cuda")``, ``GradScaler("cuda")``, synchronisation, and ``torch.compile``."""
    from torch.amp import autocast_mode, grad_scaler
    from torch.optim import optimizer as torch_optimizer
    from torch.utils import _foreach_utils

    autocast_init, scaler_init = autocast_mode.autocast.__init__, grad_scaler.GradScaler.__init__

    def autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type in ("cuda", "cpu"):
            device_type, dtype = "cpu", torch.float16 if dtype is None else dtype  # CUDA's default
        autocast_init(self, device_type, dtype, *args, **kwargs)

    def scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler_init(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    def compile(model: Any = None, **_: Any) -> Any:
        notes["torch.compile was left out: a compiled step usually needs less memory than this prediction"] = None
        return model if model is not None else (lambda function: function)

    def compile_module(self: torch.nn.Module, *_: Any, **__: Any) -> None:
        compile(self)

    def shown(self: torch.Tensor, **kwargs: Any) -> str:
        if self.get_device() == 0 or is_ghost(self):
            return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype}, no values in a prediction)"
        return show(self, **kwargs)

    def zeros(self: torch.Tensor, *_: Any, **__: Any) -> Any:
        if self.get_device() != 0 and not is_ghost(self):
            return numpy(self)
        import numpy as np

        notes[VALUES_READ] = None
        return np.zeros(tuple(self.shape), dtype=str(self.dtype).removeprefix("torch."))

    show, numpy = torch._tensor_str._str, torch.Tensor.numpy
    supported = _foreach_utils._get_foreach_kernels_supported_devices

    def foreach_devices() -> list[str]:
        return [*supported(), "cpu"]  # so that optimizers choose as they do on CUDA when nothing is asked for

    for owner, name, value in (
        (torch._tensor_str, "_str", shown),
        (torch.Tensor, "numpy", zeros),
        (torch.Tensor, "tolist", lambda self: zeros(self).tolist()),
        (_foreach_utils, "_get_foreach_kernels_supported_devices", foreach_devices),
        (torch_optimizer, "_get_foreach_kernels_supported_devices", foreach_devices),
        (autocast_mode.autocast, "__init__", autocast),
        (grad_scaler.GradScaler, "__init__", scaler),
        (torch, "compile", compile),
        (torch.nn.Module, "compile", compile_module),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "empty_cache", _nothing),
        (torch.cuda, "reset_peak_memory_stats", _nothing),
        (torch.cpu, "synchronize", _nothing),
    ):
        _replace(stack, owner, name, value)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _replace(stack: ExitStack, owner: Any, name: str, value: Callable[..., Any]) -> None:
    before = getattr(owner, name)
    stack.callback(setattr, owner, name, before)
    setattr(owner, name, value)
