"""Operators that need a rule of their own on ghosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import quantised
from .ghosts import _UNKNOWN, VALUES_READ, _values, assumed, aten

_Disable = torch._C._DisableTorchDispatch


def _scalar(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``.item()``: the value where it is known; zero, with a note in the report, where only a run has it (the loss
    for a log line, the overflow flag of a gradient scaler)."""
    value = _values(args[0])
    if value is not _UNKNOWN:
        if assumed(value):
            ghosts.notes[VALUES_READ] = None
        with _Disable():
            return func(value)
    ghosts.notes[VALUES_READ] = None
    return (args[0].dtype in (torch.bool,) and False) or (0.0 if args[0].dtype.is_floating_point else 0)


def _lift(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor made from Python values is real and on the host."""
    with _Disable():
        return func(*args, **kwargs)


def _first(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _nothing(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return None


def _no(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return False


def _native(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    with _Disable():
        return func(*args, **kwargs)


_LIKE_FIRST = (
    "add", "sub", "mul", "div", "sqrt", "neg", "exp", "log", "abs", "sign", "addcmul", "addcdiv", "lerp", "maximum",
    "minimum", "clamp_max", "clamp_min", "pow", "reciprocal", "rsqrt", "sigmoid", "tanh",
)  # fmt: skip


def _foreach(ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A list operator on GPU tensors of one floating dtype: each result is like its first argument."""
    tensors = args[0]
    dtype = tensors[0].dtype
    if tensors[0].get_device() != 0 or not dtype.is_floating_point:
        return NotImplemented
    for other in args[1:]:
        if isinstance(other, list) and other and isinstance(other[0], torch.Tensor) and other[0].dtype is not dtype:
            return NotImplemented
    return [ghosts.like(t) for t in tensors]


def rules() -> dict[Any, Callable[..., Any]]:
    """Operator -> ``rule(ghosts, func, args, kwargs)``; a rule may decline with ``NotImplemented``."""
    table: dict[Any, Callable[..., Any]] = {
        aten._local_scalar_dense.default: _scalar,
        aten.lift_fresh.default: _lift,
        aten.is_pinned.default: _no,
        aten._pin_memory.default: _first,
        aten.pin_memory.default: _first,
        aten.record_stream.default: _nothing,
        aten.equal.default: _no,
    }
    for name in _LIKE_FIRST:
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in packet.overloads() if packet is not None else ():
            if "out" not in overload:
                table[getattr(packet, overload)] = _foreach
    for name in ("_record_function_enter_new", "_record_function_enter", "_record_function_exit"):
        packet = getattr(torch.ops.profiler, name, None)
        for overload in packet.overloads() if packet is not None else ():
            table[getattr(packet, overload)] = _native
    return table | quantised.rules()
