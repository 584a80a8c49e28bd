"""Where autograd's engine behaves differently when a dispatch mode watches it, and how a ghost run undoes that.

A node that receives several gradients adds them up in its input buffer. In a plain run the sum reuses the first
gradient's memory if nobody else holds it; under any dispatch mode it is always a new tensor
(torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``). For a model's residual stream and its tied
embedding that is a large difference.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from .ghosts import GPU, aten

_Disable = torch._C._DisableTorchDispatch
_use_count = torch._C._storage_Use_Count


class Accumulation:
    """The rule for ``add.Tensor``: in place where the engine would add in place.

    How many references a gradient has that nobody else holds depends on PyTorch's version; `calibrate` finds out with
    a graph of three nodes.
    """

    def __init__(self) -> None:
        self._alone: tuple[int, int] | None = None
        self._listening = False

    def calibrate(self) -> None:
        """Run a small graph under the active mode and note the counts of an unshared gradient."""
        self._listening = True
        leaf = torch.empty((2, 2), device=GPU, requires_grad=True)
        fork = leaf * 2
        total = fork.sin() + fork.cos()
        total.backward(torch.empty((2, 2), device=GPU))
        self._listening = False
        assert self._alone is not None, "autograd added no gradients"

    def __call__(self, ghosts: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or kwargs or len(args) != 2:
            return NotImplemented
        old, new = args
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            return NotImplemented
        if old.shape != new.shape or old.dtype is not new.dtype or old.get_device() != 0:
            return NotImplemented
        node = torch._C._current_autograd_node()
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            return NotImplemented  # a user's own backward adds as it says
        counts = cast(Any, old)._use_count(), _use_count(old.untyped_storage()._cdata)
        if self._listening:
            self._alone = counts
            return NotImplemented
        if counts != self._alone or not _dense(old):
            return NotImplemented
        with _Disable():
            return aten.alias.default(old)


def _dense(tensor: torch.Tensor) -> bool:
    """``is_non_overlapping_and_dense``: every element of a gap-free range once."""
    pairs = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True
