"""16-bit matrix products on a processor: the arithmetic of a GPU's matrix units, at the speed of fp32.

A processor without 16-bit units takes many times longer for a 16-bit product than for one in fp32. A GPU's matrix unit
multiplies 16-bit numbers exactly, adds in fp32 and rounds the sum once; `fast_products` does just that with an fp32
product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAMES = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu",
          "_scaled_dot_product_flash_attention_for_cpu_backward")  # fmt: skip


@contextmanager
def fast_products(device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, fp16 and bf16 products (attention's too) of tensors in the processor's memory are computed in fp32 and
    rounded once, forward and backward. Tensors on a GPU are left alone; for a GPU as `device` nothing is done at all.

    Every product of two 16-bit numbers fits into fp32 (11 + 11 bits of 24), so only the order of the additions can
    differ from a GPU's result.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    if torch.device(device).type != "cpu":
        yield
        return
    halves = (torch.float16, torch.bfloat16)
    products = {getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)}

    def half_on_cpu(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype in halves and x.device.type == "cpu"

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            dtype = next((x.dtype for x in args if half_on_cpu(x)), None) if func in products else None
            if dtype is None:
                return func(*args, **kwargs)
            wide = func(*(x.float() if half_on_cpu(x) else x for x in args), **kwargs)
            if not isinstance(wide, tuple):
                return wide.to(dtype)
            if "backward" in func.name():
                return tuple(x.to(dtype) for x in wide)
            return wide[0].to(dtype), *wide[1:]  # the log-sum-exp of attention stays in fp32

    with Products():
        yield
