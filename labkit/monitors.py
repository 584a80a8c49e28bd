"""What numbers do inside a model while it trains: gradient norms by layer, values that a 16-bit type loses, sizes of
activations, and the first module that makes something that is not a number.

Everything here reads values back from the device and so waits for it: for looking, not for every step of a long run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KEPT = 4096  # values of one activation that are kept for a histogram


@dataclass(frozen=True)
class Lost:
    """What becomes of values in a narrower type, as shares of those that are not zero: ``zero`` rounds to 0,
    ``subnormal`` keeps fewer digits, ``overflow`` becomes infinite."""

    zero: float
    subnormal: float
    overflow: float


@dataclass(frozen=True)
class Activation:
    """One module's output: its root mean square, its largest magnitude, the share of zeros, whether all of it is
    finite, and ``exponents``: log2 of the magnitude of at most `KEPT` evenly spaced values that are finite and not 0.
    """

    rms: float
    largest: float
    zero_share: float
    finite: bool
    exponents: tuple[float, ...]


@dataclass(frozen=True)
class Trouble:
    """The first value that is not finite: in which ``phase`` (``"forward"``, ``"backward"``), at which module, and
    ``what`` (``"output"``, ``"input"``: made before the module was called, ``"gradient"``) holds ``kind`` (``"inf"``,
    ``"nan"``)."""

    phase: str
    module: str
    what: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase}: {self.what} of {self.module}"


@dataclass
class Watched:
    """What `watch` saw: ``activations`` by module, of the latest forward pass, and the first ``trouble``, if any."""

    activations: dict[str, Activation] = field(default_factory=dict)
    trouble: Trouble | None = None


def lost(values: torch.Tensor, dtype: torch.dtype | None = None, *, scale: float = 1.0) -> Lost:
    """Which share of `values` (any shape; those that are 0 do not count) `dtype` loses after multiplying by `scale`.

    `dtype` is float16 unless given. Values that are not finite already count as overflow.
    """
    import torch

    dtype = dtype or torch.float16
    info = torch.finfo(dtype)
    wide = values.detach().double()
    scaled = wide[wide != 0] * scale
    if not scaled.numel():
        return Lost(0.0, 0.0, 0.0)
    narrow = scaled.to(dtype)
    zero = narrow == 0
    # a device may flush what is too small for a normal number: judged by size, not by what this processor keeps
    small = (scaled.abs() < info.tiny) & ~zero
    return Lost(*(float(x.double().mean()) for x in (zero, small, ~narrow.isfinite())))


def exponents(tensors: torch.Tensor | Iterable[torch.Tensor], *, most: int | None = None) -> torch.Tensor:
    """log2 of the magnitudes of all finite values that are not 0, as one 1-D float32 tensor on the processor.

    `most` bounds how many evenly spaced values of each tensor are looked at.
    """
    import torch

    parts = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    found = [torch.empty(0)]
    for part in parts:
        flat = part.detach().flatten()
        if most is not None and flat.numel() > most:
            flat = flat[:: -(-flat.numel() // most)]
        logs = flat.float().abs().log2()  # of 0, inf and nan: not finite either
        found.append(logs[logs.isfinite()].cpu())
    return torch.cat(found)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients of `model` that are there, in the order of its parameters."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradient_norms(model: torch.nn.Module, *, scale: float = 1.0) -> dict[str, float]:
    """The L2 norm of the gradient of each layer (the module that owns the parameters), in the model's order.

    `scale` is taken off: what the loss was multiplied by when the gradients have not been unscaled. A layer whose
    parameters have no gradient at all is left out; one that is all zeros has the norm 0.
    """
    squares: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = name.rpartition(".")[0] or "(model)"
            squares[layer] = squares.get(layer, 0.0) + parameter.grad.detach().double().square().sum()
    return {layer: math.sqrt(float(total)) / scale for layer, total in squares.items()}


@contextmanager
def watch(model: torch.nn.Module) -> Iterator[Watched]:
    """Look at every module's output and at the gradient that comes back to it, until the block ends.

    Modules report from the inside out, so the first trouble names the innermost module that can be blamed; an
    ``input`` that is not finite was made between modules, by code of the module around it.
    """
    found = Watched()
    handles = [
        module.register_forward_hook(_forward_hook(found, path or "(model)")) for path, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _forward_hook(found: Watched, path: str) -> Any:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensor = _tensor(output)
        if tensor is None:
            return
        seen = found.activations[path] = _activation(tensor)
        if found.trouble is None and not any(module.children()):
            _blame(found, "forward", path, "input", _tensor(inputs))
        if not seen.finite:
            _blame(found, "forward", path, "output", tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: _blame(found, "backward", path, "gradient", gradient))

    return hook


def _blame(found: Watched, phase: str, path: str, what: str, tensor: torch.Tensor | None) -> None:
    if found.trouble is not None or tensor is None or not tensor.is_floating_point():
        return
    tensor = tensor.detach()
    if not math.isfinite(_largest(tensor)):
        found.trouble = Trouble(phase, path, what, "nan" if bool(tensor.isnan().any()) else "inf")


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude; inf or nan where one value is (`torch.aminmax` hands nan on)."""
    if not tensor.numel():
        return 0.0
    low, high = tensor.aminmax()
    return max(-float(low), float(high))


def _tensor(value: Any) -> torch.Tensor | None:
    """The tensor of floating point numbers that a module takes or gives first; None where there is none."""
    import torch

    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, (tuple, list)) and value:
        return _tensor(value[0])
    return None


def _activation(tensor: torch.Tensor) -> Activation:
    import torch

    flat = tensor.detach().flatten()
    count, largest = flat.numel(), _largest(flat)
    return Activation(
        rms=float(torch.linalg.vector_norm(flat.float(), dtype=torch.float64)) / math.sqrt(max(1, count)),
        largest=largest,
        zero_share=1 - int(flat.count_nonzero()) / count if count else 0.0,
        finite=math.isfinite(largest),
        exponents=tuple(exponents(flat, most=KEPT).tolist()),
    )
