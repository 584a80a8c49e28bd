"""CUDA's behaviour for tensors on the stand-in device: autocast's lists, dropout, softmax and attention.

The differences are put in at the dispatcher, so that they also hold when autograd or a checkpoint calls an operator.
Everything is undone when the prediction ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .attention import Attention
from .ghosts import GPU

aten = torch.ops.aten
_Autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

# aten/src/ATen/autocast_mode.h: what autocast on CUDA runs in float32
FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp",
)  # fmt: skip
# ... and in float32 unless the caller asks for another dtype
FP32_UNLESS_ASKED = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _single(x: Any) -> Any:
    """Autocast's cast to float32: eligible are floating-point tensors that are not double."""
    if isinstance(x, torch.Tensor):
        return x.to(torch.float32) if x.is_floating_point() and x.dtype is not torch.float64 else x
    if isinstance(x, (list, tuple)):
        return type(x)(_single(item) for item in x)
    return x


def _in_float32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_Autocast):
            return op(*[_single(a) for a in args], **{k: _single(v) for k, v in kwargs.items()})

    return kernel


def _in_float32_unless_asked(op: Any) -> Callable[..., Any]:
    arguments = [a.name for a in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_Autocast):
            given = dict(zip(arguments, args, strict=False)) | kwargs
            tensor = args[0]
            if tensor.is_floating_point() and tensor.dtype is not torch.float64 and given.get("dtype") is None:
                given["dtype"] = torch.float32
            keyword = {a.name for a in op._schema.arguments if a.kwarg_only}
            return op(
                *[given[n] for n in arguments if n in given and n not in keyword],
                **{n: v for n, v in given.items() if n in keyword},
            )

    return kernel


def _as_is(op: Any) -> Callable[..., Any]:
    """CUDA's autocast does not know `op`: only the operators that it is made of are cast."""
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keyset & below, *args, **kwargs)

    return kernel


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp: on CUDA the mask is a bool tensor."""
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros_like(input))
    return aten.native_dropout(input, p, train)[0]


def _softmax(name: str) -> Callable[..., Any]:
    inner = getattr(aten, f"_{name}").default

    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """On CUDA half to float happens inside the kernel (aten/src/ATen/native/SoftMax.cpp)."""
        if dtype is torch.float32 and input.dtype is torch.float16 and input.device == GPU:
            return inner(input, dim, True)
        return inner(input if dtype is None else input.to(dtype), dim, False)

    return kernel


@contextmanager
def cuda_semantics(
    capability: tuple[int, int], *, cudnn: bool = True, without: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Inside the block, operators on ghosts behave as on a card of `capability`.

    `without` leaves out ``autocast``, ``dropout`` or ``attention``, to see what each is worth.
    """
    library = torch.library.Library("aten", "IMPL")
    with ExitStack() as stack:
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, kernel, key in _kernels(capability, cudnn, without):
                with_keyset = name == "cross_entropy_loss"
                library.impl(name, kernel, key, with_keyset=with_keyset, allow_override=True)
        yield


def _kernels(
    capability: tuple[int, int], cudnn: bool, without: frozenset[str]
) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Operator, kernel and dispatch key of every difference between CUDA and the CPU."""
    if "autocast" not in without:
        for names, cast in ((FP32, _in_float32), (FP32_UNLESS_ASKED, _in_float32_unless_asked)):
            for name in names:
                op = _overload(name)
                if op is not None:
                    yield name, cast(op), "AutocastCPU"
        yield "cross_entropy_loss", _as_is(aten.cross_entropy_loss.default), "AutocastCPU"
        for name in ("softmax", "log_softmax"):
            yield f"{name}.int", _softmax(name), "AutogradCPU"
    if "dropout" not in without:
        yield "dropout", _dropout, "AutogradCPU"
    if "attention" not in without:
        yield "scaled_dot_product_attention", Attention(capability, cudnn=cudnn), "AutogradCPU"
