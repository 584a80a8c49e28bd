"""The process during a prediction: calls meant for a CUDA card go to the stand-in device, and all of it is undone.

What an experiment may do that would outlive it (random states, default dtype and device, a model made elsewhere that
it moves to the GPU) is put back when the prediction ends.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import streams
from .ghosts import RECURRENT, VALUES_READ, Ghosts, PredictionError, assume, is_ghost
from .libraries import informed
from .regions import GRAPHS, region_of
from .threads import refusing_threads


@contextmanager
def stand_in(ghosts: Ghosts, *, cuda: bool = False) -> Iterator[None]:
    """Inside the block the process behaves as if the stand-in were its GPU; afterwards it is as it was.

    `cuda`: ghosts are on a real card's device, so that calls meant for CUDA stay what they are.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_states())
        stack.enter_context(_defaults())
        stack.enter_context(_autocast())
        stack.enter_context(_models_from_outside())
        stack.enter_context(_optimizers_from_outside())
        _answer(stack, ghosts)
        if "torch._dynamo.eval_frame" in sys.modules:
            _compiled_outside(stack, ghosts)
        if not cuda:
            _redirect(stack, ghosts)
            stack.enter_context(informed(ghosts))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(refusing_threads())
        yield


@contextmanager
def _random_states() -> Iterator[None]:
    state, python = torch.get_rng_state(), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


@contextmanager
def _defaults() -> Iterator[None]:
    dtype, device = torch.get_default_dtype(), _default_device()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if _default_device() is not device:
            torch.set_default_device(None if device is None else device.device)


def _default_device() -> Any:
    """The context that ``torch.set_default_device`` left; None if it was never called."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # type: ignore[attr-defined]


@contextmanager
def _autocast() -> Iterator[None]:
    """A context that the experiment entered and never left ends with the prediction."""
    flags = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    cache, depth = torch.is_autocast_cache_enabled(), _depth_of_autocast()
    try:
        yield
    finally:
        for kind, enabled, dtype in flags:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
        for _ in range(_depth_of_autocast() - depth):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _depth_of_autocast() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


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


@contextmanager
def _optimizers_from_outside() -> Iterator[None]:
    """An optimizer that steps gets back the states of before its first step, and loses those that are ghosts."""
    saved: dict[int, tuple[Any, dict[Any, Any]]] = {}

    def remember(optimizer: Any, *_: Any) -> None:
        if id(optimizer) not in saved and hasattr(optimizer, "state"):
            states = {p: _real_copy(state) for p, state in optimizer.state.items()}
            kept = {p: state for p, state in states.items() if state is not None}
            saved[id(optimizer)] = weakref.ref(optimizer), kept  # weak: its end is an event of the run

    handle = register_optimizer_step_pre_hook(remember)
    try:
        yield
    finally:
        handle.remove()
        for reference, states in saved.values():
            optimizer = reference()
            if optimizer is not None:
                optimizer.state.clear()
                optimizer.state.update(states)


def _real_copy(state: dict[str, Any]) -> dict[str, Any] | None:
    """A copy of an optimizer's `state` of one parameter, step counters included; None if there are ghosts in it."""
    copy = dict(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.get_device() == 0 or is_ghost(value):
                return None
            if value.dim() == 0:
                with torch._C._DisableTorchDispatch():
                    copy[name] = value.clone()
    return copy


def _answer(stack: ExitStack, ghosts: Ghosts) -> None:
    """Calls that ask for values, and ``torch.compile``."""
    notes = ghosts.notes

    compile_for_good = torch.compile

    def compile(model: Any = None, **how: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **how)
        if _being_imported(model):
            return compile_for_good(model, **how)
        if how.get("disable") or how.get("backend", "inductor") != "inductor":
            return model
        if how.get("mode") in ("reduce-overhead", "max-autotune"):
            notes[GRAPHS] = None
        return region_of(model, ghosts.regions, stack)

    def compile_module(self: torch.nn.Module, *_: Any, **how: Any) -> None:
        compile(self, **how)

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

    def listed(self: torch.Tensor) -> Any:
        if self.get_device() != 0 and not is_ghost(self):
            return tolist(self)
        import numpy as np

        notes[VALUES_READ] = None
        zero = False if self.dtype is torch.bool else 0.0 if self.dtype.is_floating_point else 0
        return np.full(tuple(self.shape), zero).tolist()

    def finite(input: torch.Tensor) -> torch.Tensor:
        out = isfinite(input)
        if out.get_device() == 0:  # as in a run that goes well
            with torch._C._DisableTorchDispatch():
                assume(out, torch.ones((), dtype=torch.bool).expand(out.shape))
        return out

    def save(*args: Any, **kwargs: Any) -> None:
        try:
            save_to(*args, **kwargs)
        except RuntimeError as error:
            if "data pointer" not in str(error):
                raise
            raise PredictionError("torch.save got a tensor that only exists in a prediction") from error

    show, numpy, tolist = torch._tensor_str._str, torch.Tensor.numpy, torch.Tensor.tolist
    isfinite, save_to = torch.isfinite, torch.save
    for owner, name, value in (
        (torch._tensor_str, "_str", shown),
        (torch.Tensor, "numpy", zeros),
        (torch.Tensor, "tolist", listed),
        (torch, "isfinite", finite),
        (torch.Tensor, "isfinite", finite),
        (torch, "save", save),
        (torch, "compile", compile),
        (torch.nn.Module, "compile", compile_module),
    ):
        _replace(stack, owner, name, value)


def _being_imported(code: Any) -> bool:
    """Whether `code` is a library's own, compiled while the library is imported: no part of the experiment, and there
    for good."""
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _compiled_outside(stack: ExitStack, ghosts: Ghosts) -> None:
    """Modules that were compiled before the experiment began are regions too; their code runs uncompiled."""
    from torch.nn.modules import module as modules

    stack.enter_context(torch.compiler.set_stance("force_eager"))
    regions = ghosts.regions

    def compiled(module: Any) -> bool:
        return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"

    def enter(module: torch.nn.Module, _: Any) -> None:
        if compiled(module):
            regions.begin()
            regions.enter()

    def leave(module: torch.nn.Module, *_: Any) -> None:
        if compiled(module):
            regions.leave()

    stack.callback(modules.register_module_forward_pre_hook(enter).remove)
    stack.callback(modules.register_module_forward_hook(leave, always_call=True).remove)


def _redirect(stack: ExitStack, ghosts: Ghosts) -> None:
    """``torch.autocast("cuda")``, ``GradScaler("cuda")``, streams and synchronisation."""
    from torch.amp import autocast_mode, grad_scaler
    from torch.optim import optimizer as torch_optimizer
    from torch.utils import _device, _foreach_utils

    notes = ghosts.notes
    _device._device_constructors()  # remembered for good at its first call: not with what stands here for torch.tensor
    autocast_init, scaler_init = autocast_mode.autocast.__init__, grad_scaler.GradScaler.__init__

    def autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type in ("cuda", "cpu"):
            device_type, dtype = "cpu", torch.float16 if dtype is None else dtype  # CUDA's default
        autocast_init(self, device_type, dtype, *args, **kwargs)

    def scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler_init(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    def lstm(*args: Any, **kwargs: Any) -> Any:
        notes[RECURRENT] = None
        return lstm_on(*args, **kwargs)

    def unless_on_gpu(name: str) -> Callable[..., Any]:
        kernel = getattr(torch._VF, name)

        def layer(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if input.get_device() == 0:
                raise PredictionError(f"{name}: what cuDNN's recurrent kernel takes has no rule")
            return kernel(input, *args, **kwargs)

        return layer

    asking = False

    def ambient() -> torch.device:
        """The device that constructors take when none is named. PyTorch makes a tensor to find out, and that one shall
        be real."""
        nonlocal asking
        if asking:
            return torch.device("cpu")
        asking = True
        try:
            return torch.get_default_device()
        finally:
            asking = False

    def made(data: Any, *, device: Any = None, requires_grad: bool = False, **how: Any) -> torch.Tensor:
        """PyTorch makes a tensor of Python's values on the host and moves it without asking anyone."""
        place = ambient() if device is None else torch.device(device)
        if place != ghosts.gpu and place.type != "cuda":
            return tensor(data, device=device, requires_grad=requires_grad, **how)
        out = tensor(data, device="cpu", **how).to(ghosts.gpu)
        return out.requires_grad_() if requires_grad else out

    tensor = torch.tensor
    lstm_on = torch._VF.lstm  # type: ignore[attr-defined]
    supported = _foreach_utils._get_foreach_kernels_supported_devices

    def foreach_devices() -> list[str]:
        return [*supported(), "cpu"]  # so that optimizers choose as they do on CUDA when nothing is asked for

    for owner, name, value in (
        (_foreach_utils, "_get_foreach_kernels_supported_devices", foreach_devices),
        (torch_optimizer, "_get_foreach_kernels_supported_devices", foreach_devices),
        (autocast_mode.autocast, "__init__", autocast),
        (grad_scaler.GradScaler, "__init__", scaler),
        (torch, "tensor", made),
        (torch._VF, "lstm", lstm),
        (torch._VF, "gru", unless_on_gpu("gru")),
        (torch._VF, "rnn_tanh", unless_on_gpu("rnn_tanh")),
        (torch._VF, "rnn_relu", unless_on_gpu("rnn_relu")),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "empty_cache", ghosts.recorder.empty_cache),
        (torch.cuda, "reset_peak_memory_stats", _nothing),
        (torch.cpu, "synchronize", _nothing),
        *streams.patches(ghosts.recorder, notes),
    ):
        _replace(stack, owner, name, value)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _replace(stack: ExitStack, owner: Any, name: str, value: Callable[..., Any]) -> None:
    before = getattr(owner, name)
    stack.callback(setattr, owner, name, before)
    setattr(owner, name, value)
