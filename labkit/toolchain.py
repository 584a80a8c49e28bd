"""What a C++ compiler has to do once before Inductor can compile for a processor, done beside the first imports.

PyTorch tries which vector instructions work on this machine, once for each cache folder, and compiles its own headers,
once on each machine (into the default cache folder). The first function that is compiled would pay for both, some ten
seconds, which say nothing about that function::

    ready = toolchain.preparing(folder)  # started before PyTorch is imported, not waited for
    import torch
    ...
    ready.join()
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import places

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# the smallest kernel that needs what Inductor's own kernels need (codecache.py compiles it as it compiles those)
_ONE_VECTOR = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* x) { at::vec::Vectorized<float>(1).store(x); }
"""


class Preparing:
    """A process in which the compiler gets ready."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for `timeout` seconds at most. What it could not do, the first call does, and says
        what is wrong."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return

    def is_alive(self) -> bool:
        """Whether it is still at work."""
        return self._process.poll() is None


def preparing(folder: str | Path, device: str | None = None) -> Preparing:
    """Start getting ready, with `folder` as the cache on disk; ``join()`` it before you time a first call, or compile
    anything there. For a card (`device`, the lesson's unless given), and without a compiler, it ends at once."""
    code = "import sys; from labkit import toolchain; toolchain.prepare(sys.argv[1], sys.argv[2] or None)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), device or ""], env=places.environment(**{_CACHE: str(folder)}),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return Preparing(process)


def prepare(folder: str, device: str | None = None) -> bool:
    """Get ready in this process, whose cache folder must be `folder`; whether there was anything to do."""
    import torch

    from . import compiling, machine

    assert os.environ[_CACHE] == folder, "Inductor reads its folder from the environment"
    which = torch.device(device) if device is not None else machine.device()
    if which.type != "cpu" or compiling.why_not(which) is not None:
        return False
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    CppPythonBindingsCodeCache.load_pybinding(["float*"], _ONE_VECTOR)
    return True
