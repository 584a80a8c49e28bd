"""What cuBLAS holds for a whole run: one workspace for each thread that multiplies matrices."""

from __future__ import annotations

from ..units import KiB, MiB

# aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize(): 32 MiB on Hopper, else :4096:2:16:8
_HOPPER = 32 * MiB
_OTHERS = (4096 * 2 + 16 * 8) * KiB
# getChosenCUDABlasLtWorkspaceSize(): measured on an H200 as part of what is held before a model is built
LT_WORKSPACE = 1 * MiB


def workspaces(capability: tuple[int, int]) -> tuple[int, ...]:
    """Bytes of each block held once both threads have multiplied matrices and the main one has added a bias in it."""
    size = _HOPPER if capability[0] == 9 else _OTHERS
    return (size, size, LT_WORKSPACE)
