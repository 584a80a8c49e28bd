"""Ghost tensors: shapes, dtypes, strides, views and lifetimes as on a GPU, without any data.

A ghost is a plain ``torch.Tensor`` on the device ``cpu:0`` (which stands for the GPU; ``cpu`` is the host) whose
storage has a size and no memory. No kernel ever runs on one: a dispatch mode asks `Ghosts` for the result of every
operator. Views are made by PyTorch's own view operators, which touch no data; the shapes of everything else come from
PyTorch's meta kernels, remembered by the shapes of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .recorder import Recorder
from .schemas import DRAWN, INPLACE, MIXING, RANDOM, VIEW, PredictionError, first_tensor, kind_of, returned

GPU = torch.device("cpu:0")
HOST = torch.device("cpu")
META = torch.device("meta")
_Disable = torch._C._DisableTorchDispatch
_wrapper = torch.Tensor._make_wrapper_subclass
_Tensor = torch.Tensor
_default_dtype = torch.get_default_dtype
aten = torch.ops.aten
KNOWN_LIMIT = 1 << 16  # elements of an integer tensor whose values are followed
REAL_LIMIT = 1 << 18  # bytes of a host tensor up to which it is a real one


CONVOLUTION = "what cuDNN takes inside a convolution depends on its choice of algorithm and was left out"
RECURRENT = "what cuDNN takes inside an LSTM (its reserve space) was left out"
VALUES_READ = "a value that only a run has was read (.item() and the like); the prediction took zero"


class _Ghost(torch.Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PredictionError(f"{func} was called on a tensor that only exists in a prediction")


class Ghosts:
    """Results of operators on ghosts, with the births that the operator would cause on the GPU.

    ``plan(func, args, kwargs, out)`` says what else an operator's kernel allocates, and when (see kernels.py). `cache`
    keeps the shapes of results by the shapes of arguments. `gpu` is the device that ghosts on the GPU say they are on:
    the stand-in, or a real card's, whose dispatcher then chooses the operators.
    """

    def __init__(
        self,
        recorder: Recorder,
        rules: dict[Any, Callable[..., Any]],
        plan: Callable[..., Any],
        cache: dict[Any, Any],
        gpu: torch.device = GPU,
    ):
        self.gpu = gpu
        self.recorder = recorder
        self.rules = rules
        self.plan = plan
        self.held: dict[Any, int] = {}  # blocks that a thread keeps for good
        self.cache = cache
        self.known: dict[int, tuple[Any, int]] = {}  # by operator: its rule, and what kind it is
        self.returns: dict[Any, Any] = {}  # of operators that write: which arguments they return
        self.notes: dict[str, None] = {}
        self.regions: Any = None  # of compiled code (compiled.py)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one operator. Raises `PredictionError` with the operator's name when there is no rule."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":  # asked for by name
            kwargs = {**kwargs, "device": GPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # the host's memory is not counted, pinned or not
        number = id(func)  # operators live as long as the process, and their own hash is slow
        how = self.known.get(number)
        if how is None:
            how = self.known[number] = self._rule(func), kind_of(func)
        rule, kind = how
        if rule is not None:
            out = rule(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if kind == VIEW:
            return self._view(func, args, kwargs)
        if kind == INPLACE:
            first = first_tensor(args)
            if first is not None and first.get_device() == 0:
                return self._write(func, args, kwargs, first)
        key: list[Any] = [number, _default_dtype()]
        seen = _describe(args, key)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                seen |= _describe((value,), key)
        if seen == _REAL and kwargs.get("device") != GPU:
            with _Disable():  # only host tensors with data: their values are real
                return func(*args, **kwargs)
        if kind == INPLACE:
            return self._write(func, args, kwargs, first)
        try:
            entry = self.cache.get(frozen := tuple(key))
        except TypeError as error:
            raise PredictionError(f"{func}: arguments of a kind that a prediction cannot follow ({error})") from None
        if entry is None:
            entry = self.cache[frozen] = self._infer(func, args, kwargs)
        plan, spec, device = entry
        if not seen and device is HOST and spec[0] == _TENSOR and spec[4] <= REAL_LIMIT:
            with _Disable():
                return func(*args, **kwargs)
        if func is aten.convolution.default:
            self.notes[CONVOLUTION] = None
        out = self._build(spec, device) if plan is None else self._planned(spec, plan)
        if device is GPU and spec[0] == _TENSOR:
            if func in DRAWN:
                self._draw(func, args, out)
            elif not seen & _UNKNOWN_VALUES:
                self._follow(func, args, kwargs, out)
        return out

    def _rule(self, func: Any) -> Any:
        """Its rule, if it has one. The experiment itself may have imported bitsandbytes."""
        rule = self.rules.get(func)
        if rule is None and func.namespace == "bitsandbytes":
            from . import quantised

            rule = quantised.rules().get(func)
        return rule

    def _write(self, func: Any, args: Any, kwargs: Any, first: Any) -> Any:
        """An operator that writes to its arguments: it returns them, and their values are no longer known."""
        if first is not None:
            first.__dict__.pop("_values", None)
            if first.get_device() == 0:
                if func not in MIXING and any(isinstance(x, _Tensor) and x.get_device() and x.dim() for x in args):
                    raise _not_together(func)
                plan = self.plan(func, args, kwargs, first)
                if plan is not None:
                    self._follow_plan(plan, ())
        places = self.returns.get(func)
        if places is None:
            places = self.returns[func] = returned(func)
        outs = [kwargs[name] if name in kwargs else args[position] for position, name in places]
        return outs[0] if len(outs) == 1 else (tuple(outs) if outs else None)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = args[0]
        with _Disable():
            out = func(*args, **kwargs)
            if isinstance(base, _Tensor):
                values = base.__dict__.get("_values")
                if values is not None:
                    parts, sure = func(values, *args[1:], **kwargs), not assumed(values)
                    if isinstance(out, _Tensor):
                        assume(out, parts, sure=sure)
                    else:
                        for item, part in zip(out, parts, strict=True):
                            assume(item, part, sure=sure)
        return out

    def _planned(self, spec: Any, plan: Any) -> Any:
        """Results on the GPU, born in the order of `plan`; those that it does not name are on the host."""
        single = spec[0] == _TENSOR
        specs = (spec,) if single else spec[2]
        outs = self._follow_plan(plan, specs)
        results = [outs[i] if i in outs else self._build(item, HOST) for i, item in enumerate(specs)]
        return results[0] if single else spec[1](results)

    def _follow_plan(self, plan: Any, specs: Any) -> dict[int, Any]:
        recorder = self.recorder
        taken: list[int] = []
        outs: dict[int, Any] = {}
        for step in plan:
            if step[0] == "out":
                outs[step[1]] = self._build(specs[step[1]], GPU)
            elif step[0] == "take":
                taken.append(recorder.birth(step[1]))
            elif step[0] == "give":
                recorder.death(taken[step[1]])
            else:
                self.hold(step[1], step[2])
        return outs

    def hold(self, name: str, nbytes: int) -> None:
        """The present thread takes a block and keeps it, once."""
        key = (name, torch._C._current_graph_task_id() != -1)
        if key not in self.held:
            self.held[key] = self.recorder.birth(nbytes)
            self.recorder.kinds[self.held[key]] = "workspace"

    def like(self, tensor: torch.Tensor) -> Any:
        """A ghost on the GPU with the size, stride and dtype of a dense `tensor`."""
        dtype = tensor.dtype
        return self._build((_TENSOR, tensor.shape, tensor.stride(), dtype, tensor.numel() * dtype.itemsize), GPU)

    def _build(self, spec: Any, device: torch.device) -> Any:
        kind = spec[0]
        if kind == _TENSOR:
            _, size, stride, dtype, nbytes = spec
            place = self.gpu if device is GPU else device
            with _Disable():
                out = _wrapper(
                    _Ghost, size, stride, 0, None, dtype, torch.strided, place, False, False, None, False, False, None,
                    nbytes,
                ).detach()  # fmt: skip
            if device is GPU and nbytes:  # the allocator has no block for nothing
                self.recorder.watch(out.untyped_storage(), nbytes)
            return out
        if kind == _SEQUENCE:
            return spec[1](self._build(item, device) for item in spec[2])
        return spec[1]

    def _infer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What meta kernels say about the result; the kernel's own blocks; the result's device."""
        devices: list[torch.device] = []
        metas = _map(args, devices)
        meta_kwargs = {name: _map((value,), devices)[0] for name, value in kwargs.items()}
        if GPU in devices and HOST in devices and func not in MIXING:
            raise _not_together(func)
        wanted = kwargs.get("device")
        if "device" in meta_kwargs or (not devices and any(a.name == "device" for a in func._schema.arguments)):
            meta_kwargs["device"] = META
        meta_kwargs.pop("pin_memory", None)
        try:
            with torch.no_grad():
                spec = _spec(out := func(*metas, **meta_kwargs))
        except RuntimeError as error:  # PyTorch says in several ways that an operator has no meta kernel
            no_kernel = isinstance(error, NotImplementedError) or "meta" in str(error).lower()
            if no_kernel or func.name().startswith("aten::_grouped"):
                raise PredictionError(
                    f"operator {func} has no rule for tensors without data ({str(error)[:150]})"
                ) from error
            raise
        device = _common(devices) if wanted is None else (GPU if torch.device(wanted) == GPU else HOST)
        plan = self.plan(func, args, kwargs, out) if device is GPU else None
        return plan, spec, device

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute small integer results for real, so that decisions on them are those of a run."""
        if out.dtype.is_floating_point or out.numel() > KNOWN_LIMIT or func in RANDOM:
            return
        real = tuple(_values(a) for a in args)
        if any(a is _UNKNOWN for a in real):
            return
        real_kwargs = {k: (HOST if k == "device" else _values(v)) for k, v in kwargs.items()}
        real_kwargs.pop("pin_memory", None)
        if any(a is _UNKNOWN for a in real_kwargs.values()):
            return
        with _Disable():
            assume(out, func(*real, **real_kwargs), sure=not assumed((real, tuple(real_kwargs.values()))))

    def _draw(self, func: Any, args: Any, out: Any) -> None:
        """Random integers are the smallest that may be drawn: what begins at one has the length that it has in a run"""
        if out.dtype.is_floating_point or out.numel() > KNOWN_LIMIT:
            return
        with _Disable():
            if func is aten.randperm.default:
                assume(out, torch.arange(out.numel(), dtype=out.dtype))
            else:
                lowest = args[0] if func is aten.randint.low else 0
                assume(out, torch.full(out.shape, lowest, dtype=out.dtype))


_TENSOR, _SEQUENCE, _PLAIN = 0, 1, 2
_ON_GPU, _UNKNOWN_VALUES, _HOST_GHOST, _REAL = 1, 2, 4, 8
_UNKNOWN = object()


def _describe(values: Any, key: list[Any]) -> int:
    """Append what matters about `values` to `key`; what kinds of tensors there are, as flags."""
    seen = 0
    for x in values:
        if isinstance(x, _Tensor):
            index = x.get_device()
            key += (x.dtype, x.shape, x.stride(), index)
            if index == 0:
                seen |= _ON_GPU if "_values" in x.__dict__ else _ON_GPU | _UNKNOWN_VALUES
            else:
                seen |= _HOST_GHOST | _UNKNOWN_VALUES if is_ghost(x) else _REAL
        elif x is None or x.__class__ is str:
            key.append(x)
        elif x.__class__ is list or x.__class__ is tuple or x.__class__ is torch.Size:
            key.append(len(x))
            seen |= _describe(x, key)
        else:
            key.append(x.__class__)
            key.append(x)
    return seen


def is_ghost(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no memory behind it."""
    try:
        with _Disable():
            return tensor.untyped_storage().data_ptr() == 0 and tensor.numel() > 0
    except RuntimeError:  # "invalid python storage": what a storage without memory answers
        return True


def lay_to_rest() -> None:
    """Give ghosts that outlived their prediction (a learner's list of losses) something real to show: each element is
    the same nan or zero. Without it the first use of one would read memory that is not there."""
    import gc

    for thing in gc.get_objects():
        if type(thing) in (_Tensor, torch.nn.Parameter) and thing.device.type in ("cpu", "cuda") and is_ghost(thing):
            value = float("nan") if thing.dtype.is_floating_point else 0
            with torch.no_grad():
                thing.data = torch.full((), value, dtype=thing.dtype, device=thing.device).expand(thing.shape)


def _map(values: Any, devices: list[torch.device]) -> Any:
    out = []
    for x in values:
        if isinstance(x, _Tensor):
            devices.append(GPU if x.device.index == 0 else (HOST if x.dim() else None))  # type: ignore[arg-type]
            out.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META))
        elif isinstance(x, (list, tuple)):
            out.append(_map(x, devices))
        else:
            out.append(x)
    return type(values)(out) if isinstance(values, list) else tuple(out)


def _not_together(func: Any) -> PredictionError:
    return PredictionError(
        f"Expected all tensors to be on the same device: operator {func} got some on the GPU and some on the host"
    )


def _common(devices: list[torch.device]) -> torch.device:
    return GPU if any(d is GPU for d in devices) else HOST


def _spec(out: Any) -> Any:
    if isinstance(out, _Tensor):
        return _TENSOR, tuple(out.shape), out.stride(), out.dtype, out.untyped_storage().nbytes()
    if isinstance(out, (tuple, list)):
        return _SEQUENCE, type(out) if type(out) in (tuple, list) else tuple, tuple(_spec(item) for item in out)
    return _PLAIN, out


def assume(out: Any, values: torch.Tensor, *, sure: bool = False) -> None:
    """From here on `values` stand for those of the ghost `out`; who reads them is told, unless they are `sure`."""
    out.__dict__["_values"] = values
    if not sure:
        values.__dict__["_assumed"] = True


def assumed(values: Any) -> bool:
    """Whether `values`, a followed tensor or a nest of such, come from an assumption."""
    if isinstance(values, _Tensor):
        return "_assumed" in values.__dict__
    return isinstance(values, (list, tuple)) and any(assumed(item) for item in values)


def _values(x: Any) -> Any:
    if isinstance(x, _Tensor):
        values = x.__dict__.get("_values")
        if values is None:
            return x if x.device.index is None and not is_ghost(x) else _UNKNOWN
        return values
    if isinstance(x, (list, tuple)):
        items = [_values(item) for item in x]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else type(x)(items)
    return x
