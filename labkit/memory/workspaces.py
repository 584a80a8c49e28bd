"""What cuBLAS holds for a whole run: one workspace for each thread that multiplies matrices."""

from __future__ import annotations

import os
import re

from ..units import KiB, MiB

# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize(): 4096 KiB x 8 on Hopper, else :4096:2:16:8
HOPPER = 4096 * 8 * KiB
OTHERS = (4096 * 2 + 16 * 8) * KiB
LT_WORKSPACE = 1 * MiB  # of cuBLASLt, kept by each thread that adds a bias in a product: measured on an H200


def workspaces(capability: tuple[int, int]) -> tuple[int, ...]:
    """Bytes of each block held once both threads have multiplied matrices and the main one has added a bias in it.

    The variable ``CUBLAS_WORKSPACE_CONFIG`` (``:KiB:count`` pairs, as for cuBLAS) overrides the size by capability.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    size = sum(int(kib) * int(count) for kib, count in pairs) * KiB
    size = size or (HOPPER if capability[0] == 9 else OTHERS)
    return (size, size, LT_WORKSPACE)
