"""Weights and optimizer states in 8 and 4 bits: what they take, byte by byte, and GPT-2 blocks quantised in place.

The layout is that of bitsandbytes 0.50 (``optim/optimizer.py``, ``nn/modules.py``, ``functional.py``): 8-bit states in
blocks of 256 values with one fp32 scale each; int8 weights with one fp32 scale a row of the product; NF4 weights in
blocks of 64, two values a byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .units import UserError

if TYPE_CHECKING:
    import torch

STATE_BLOCK = 256  # values that share one scale in an 8-bit state
STATE_SMALLEST = 4096  # elements; a smaller tensor keeps 32-bit states
STATE_TABLES = 2 * 256 * 4  # bytes: one table of 256 fp32 levels for each moment, shared by all tensors
NF4_BLOCK = 64
NF4_TABLE = 16 * 4  # bytes: the 16 levels, once for every layer
SCHEMES = ("fp32", "bf16", "int8", "nf4")


def adam_state_bytes(elements: Iterable[int], *, bits: int = 8) -> dict[str, int]:
    """Bytes of Adam's state for tensors of so many `elements` each, by what they are for.

    `bits` 32: two fp32 moments. `bits` 8: ``moments`` one byte a value and moment, ``scales`` one fp32 value for each
    started block of `STATE_BLOCK`, ``small tensors`` what stays in 32 bits, ``tables`` shared by all. Raises
    `UserError` for other bits.
    """
    sizes = list(elements)
    if bits == 32:
        return {"moments": 8 * sum(sizes)}
    if bits != 8:
        raise UserError(f"Adam's states have 8 or 32 bits here, not {bits!r}")
    large = [n for n in sizes if n >= STATE_SMALLEST]
    return {
        "moments": 2 * sum(large),
        "scales": 2 * 4 * sum(-(-n // STATE_BLOCK) for n in large),
        "small tensors": 8 * (sum(sizes) - sum(large)),
        "tables": STATE_TABLES if large else 0,
    }


def products(model: Any) -> dict[str, tuple[int, int]]:
    """The matrices inside the blocks of `model` that quantised loading replaces: name -> (inputs, outputs)."""
    found = {}
    for name, module in _layers(model):
        inputs, outputs = module.weight.shape if _is_conv1d(module) else reversed(module.weight.shape)
        found[name] = (int(inputs), int(outputs))
    return found


def weight_bytes(model: Any, scheme: str) -> dict[str, int]:
    """Bytes of the weights of `model` (on any device, ``meta`` too) under one of `SCHEMES`, by part.

    ``blocks``: the matrices of the blocks; ``scales``: what their quantisation adds; ``rest``: embeddings, head, norms
    and biases, which quantised loading leaves in 16 bits (32 for ``fp32``). Shared weights count once.
    """
    if scheme not in SCHEMES:
        raise UserError(f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
    matrices = products(model)
    inside = sum(i * o for i, o in matrices.values())
    rest = sum(p.numel() for p in model.parameters()) - inside
    if scheme in ("fp32", "bf16"):
        width = 4 if scheme == "fp32" else 2
        return {"blocks": width * inside, "scales": 0, "rest": width * rest}
    if scheme == "int8":
        return {"blocks": inside, "scales": 4 * sum(o for _, o in matrices.values()), "rest": 2 * rest}
    scales = sum(4 * -(-i * o // NF4_BLOCK) + NF4_TABLE for i, o in matrices.values())
    return {"blocks": sum(-(-i * o // 2) for i, o in matrices.values()), "scales": scales, "rest": 2 * rest}


def quantise_blocks(model: Any, scheme: str, *, compute: torch.dtype | None = None) -> Any:
    """Replace every matrix inside the blocks of `model` by bitsandbytes' ``"int8"`` or ``"nf4"`` layer, in place.

    What ``from_pretrained(quantization_config=...)`` does, for a model that is there already (one with random weights,
    say); one matrix at a time, so that the peak stays near the unquantised model. GPT-2's ``Conv1D`` keeps its weight
    as (inputs, outputs) and is turned round. `compute` is the dtype of NF4 products (the model's own unless given).
    Quantised weights do not train. Raises `UserError` for another scheme.
    """
    import bitsandbytes as bnb
    import torch
    from bitsandbytes import functional

    if scheme not in ("int8", "nf4"):
        raise UserError(f"scheme {scheme!r} is not int8 or nf4")
    for name, module in _layers(model):
        weight = module.weight.data.t().contiguous() if _is_conv1d(module) else module.weight.data
        outputs, inputs = weight.shape
        has_bias = module.bias is not None
        new: Any
        with torch.device("meta"):
            if scheme == "int8":
                new = bnb.nn.Linear8bitLt(inputs, outputs, bias=has_bias, has_fp16_weights=False, threshold=6.0)
            else:
                new = bnb.nn.Linear4bit(inputs, outputs, has_bias, compute_dtype=compute or weight.dtype)
        if scheme == "int8":
            rows, scales, _ = functional.int8_vectorwise_quant(weight.half())
            new.weight = bnb.nn.Int8Params(rows, requires_grad=False, CB=rows, SCB=scales)
        else:
            packed, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
            new.weight = bnb.nn.Params4bit(
                packed, requires_grad=False, quant_state=state, blocksize=NF4_BLOCK, compress_statistics=False,
                quant_type="nf4", module=new, bnb_quantized=True,
            )  # fmt: skip
            new.quant_state = state
        if has_bias:
            new.bias = module.bias
        new.train(module.training)  # an int8 layer computes differently in training
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
        module.weight = None
    return model


def held_bytes(model: Any) -> dict[str, int]:
    """Bytes that the parameters and buffers of `model` really take, scales of quantised layers included: ``quantised``
    (weights in 8 and 4 bits), ``scales`` and ``rest``. Storages that are shared count once."""
    seen: set[int] = set()
    held = {"quantised": 0, "scales": 0, "rest": 0}

    def add(part: str, tensor: Any) -> None:
        if tensor is None or not hasattr(tensor, "untyped_storage"):
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            held[part] += storage.nbytes()

    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        kind = type(weight).__name__
        if kind in ("Int8Params", "Params4bit"):
            add("quantised", weight)
        if kind == "Int8Params":  # the layer takes the scales over from the weight in its first forward pass
            add("scales", weight.SCB)
            add("scales", getattr(getattr(module, "state", None), "SCB", None))
        if kind == "Params4bit":
            for state in (weight.quant_state, weight.quant_state.state2):  # the second one: scales of scales
                add("scales", getattr(state, "absmax", None))
                add("scales", getattr(state, "code", None))
    for tensor in (*model.parameters(), *model.buffers()):
        add("rest", tensor)
    return held


def _layers(model: Any) -> list[tuple[str, Any]]:
    """Every ``nn.Linear`` and ``Conv1D`` inside the list of blocks, by its full name."""
    import torch

    from .models import blocks

    inside = {id(module) for module in blocks(model).modules()}
    return [
        (name, module)
        for name, module in model.named_modules()
        if id(module) in inside and (type(module) is torch.nn.Linear or _is_conv1d(module))
    ]


def _is_conv1d(module: Any) -> bool:
    return type(module).__name__ == "Conv1D"
