"""What a C++ compiler has to do once before Inductor can compile for a processor, done in the background.

PyTorch tries which vector instructions work on this machine, once in each process, and compiles its own headers, once
on each machine (into the default cache folder). The first function that is compiled would pay for both, some ten
seconds, which say nothing about that function::

    import torch._inductor.codecache

    ready = toolchain.preparing("cpu", folder)  # started, not waited for
    ...
    ready.join()
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from . import compiling

if TYPE_CHECKING:
    import torch

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# the smallest kernel that needs what Inductor's own kernels need (codecache.py compiles it as it compiles those)
_ONE_VECTOR = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* x) { at::vec::Vectorized<float>(1).store(x); }
"""


def preparing(device: torch.device | str, folder: str | Path) -> threading.Thread:
    """A thread in which the compiler gets ready, with `folder` as its cache on disk; ``join()`` it before you time a
    first call, or compile anything.

    For a card, and without a compiler, there is nothing to do, and the thread ends at once. It must not import what
    this thread imports at the same time: ``torch._inductor.codecache`` has to be there already.
    """
    import torch

    wanted = torch.device(device).type == "cpu" and compiling.why_not(device) is None
    thread = threading.Thread(target=_prepare if wanted else lambda _: None, args=(str(folder),), daemon=True)
    thread.start()
    return thread


def _prepare(folder: str) -> None:
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = folder
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        CppPythonBindingsCodeCache.load_pybinding(["float*"], _ONE_VECTOR)
    except Exception:  # nothing is lost: the first call does it then, and says what is wrong
        return
    finally:
        if before is None:
            os.environ.pop(_CACHE, None)
        else:
            os.environ[_CACHE] = before
