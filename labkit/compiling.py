"""torch.compile, watched: what it compiled and why again, where it broke off, what the first step costs, when it pays.

Nothing here compiles by itself but `compile_blocks`, which is one line for each block. Counts come from the counters
and metrics that torch._dynamo keeps of itself.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LEAST_SM = (7, 0)  # Triton's own floor, docs of torch.compile: Volta and later


@dataclass(frozen=True)
class Compilation:
    """One function that was compiled: its name, operations in its graph, seconds that forward's part took, and for a
    recompilation the guard that had failed (``why``), as torch._dynamo words it."""

    function: str
    operations: int
    seconds: float
    why: str | None = None


@dataclass(frozen=True)
class Break:
    """A place at which a graph ended early: why, as torch._dynamo words it, and the line that caused it."""

    why: str
    where: str
    line: str


@dataclass(frozen=True)
class Activity:
    """What the compiler did during one call.

    ``graphs`` that came out, ``operations`` in them all, ``breaks``: where a function was cut in two; ``compilations``
    in order; ``kernels``: those that Inductor wrote itself, for both directions; ``cache_hits``: kernels of a graph (a
    hit for each direction) that were found on disk instead of being written anew.
    """

    graphs: int
    operations: int
    breaks: tuple[Break, ...] = ()
    compilations: tuple[Compilation, ...] = ()
    kernels: int = 0
    cache_hits: int = 0

    @property
    def recompilations(self) -> tuple[Compilation, ...]:
        """Those compilations that had to be made because a guard of an earlier one failed."""
        return tuple(c for c in self.compilations if c.why is not None)

    def __str__(self) -> str:
        lines = [
            f"{_counted(self.graphs, 'graph')} with {_counted(self.operations, 'operation')}, "
            f"{_counted(len(self.breaks), 'graph break')}, {_counted(len(self.recompilations), 'recompilation')}"
        ]
        lines += [f"  break at {b.where}, `{b.line}`: {b.why}" for b in self.breaks]
        lines += [f"  again, {c.function}: {c.why}" for c in self.recompilations]
        return "\n".join(lines)


def watched(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Activity:
    """Run ``call(*args, **kwargs)`` and say what torch.compile did meanwhile in this process.

    Whatever it raises passes through. The counters are PyTorch's own (torch/_dynamo/utils.py).
    """
    from torch._dynamo import utils
    from torch._inductor import metrics

    compiled, broken = utils.get_compilation_metrics(), list(utils.graph_break_reasons)
    seen = {id(m) for m in (*compiled, *broken)}  # both lists are kept alive meanwhile: ids stay unique
    stats, kernels = dict(utils.counters["stats"]), metrics.generated_kernel_count
    hits = utils.counters["inductor"]["fxgraph_cache_hit"]
    call(*args, **kwargs)
    counted = {k: utils.counters["stats"][k] - stats.get(k, 0) for k in ("unique_graphs", "calls_captured")}
    return Activity(
        graphs=counted["unique_graphs"],
        operations=counted["calls_captured"],
        breaks=tuple(_break(b) for b in utils.graph_break_reasons if id(b) not in seen),
        compilations=tuple(
            _compilation(m)
            for m in utils.get_compilation_metrics()
            if id(m) not in seen and m.co_name and m.graph_op_count  # else: a backward, or a frame without tensors
        ),
        kernels=max(0, metrics.generated_kernel_count - kernels),
        cache_hits=max(0, utils.counters["inductor"]["fxgraph_cache_hit"] - hits),
    )


class FirstCall:
    """What the first call of a step cost: ``seconds``, and ``activity``, what was compiled in it; None before it.

    ``step = first.around(step)`` for a step that an experiment returns; the note itself keeps no reference to it.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.activity: Activity | None = None

    def around(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """The same step, its first call timed until the card is done."""

        def noted() -> Any:
            if self.seconds is not None:
                return step()
            results: list[Any] = []
            _wait()
            start = time.perf_counter()
            self.activity = watched(lambda: results.append(step()))
            _wait()
            self.seconds = time.perf_counter() - start
            return results[0]

        noted.tokens = getattr(step, "tokens", None)  # type: ignore[attr-defined]
        return noted


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Payback:
    """When compiling has paid for itself: seconds of the first compiled step, of a later one, and of an eager one."""

    first_seconds: float
    steady_seconds: float
    eager_seconds: float

    @property
    def speedup(self) -> float:
        """How many times faster a later step is than an eager one."""
        return self.eager_seconds / self.steady_seconds

    @property
    def cold_seconds(self) -> float:
        """What the first step took beyond a later one: the price."""
        return max(0.0, self.first_seconds - self.steady_seconds)

    @property
    def steps(self) -> float:
        """The first number of steps after which the compiled run is not behind: ``cold / (eager - steady)``, rounded
        up; infinite when a compiled step is no faster."""
        gain = self.eager_seconds - self.steady_seconds
        if gain <= 0:
            return math.inf
        return max(1, math.ceil(self.cold_seconds / gain - 1e-9))

    def after(self, steps: float) -> tuple[float, float]:
        """Seconds that `steps` steps take, eager and compiled."""
        return steps * self.eager_seconds, self.cold_seconds + steps * self.steady_seconds


def compile_blocks(model: Any, **options: Any) -> Any:
    """Compile every transformer block of `model` by itself, in place; `options` go to ``torch.nn.Module.compile``.

    Blocks of one class share their code, so the first one that runs is compiled and the others take what it made:
    "regional compilation" (PyTorch, recipes/regional_compilation). Raises `UserError` when there are no blocks.
    """
    from .recipes import blocks

    for block in blocks(model):
        block.compile(**options)
    return model


@contextmanager
def fresh(folder: str | Path | None = None) -> Iterator[Path]:
    """Compile as on the first day: nothing in memory, and `folder` (a new empty one, removed afterwards, unless given)
    as the cache on disk. Yields the folder. Given the folder of an earlier `fresh`, the start is warm.

    Afterwards the caches are those from before, and nothing compiled inside is used again.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-compile-", ignore_cleanup_errors=True) as made:
        place = Path(folder) if folder is not None else Path(made)
        place.mkdir(parents=True, exist_ok=True)
        forget()
        old = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place)
        os.environ["TRITON_CACHE_DIR"] = str(place / "triton")
        try:
            yield place
        finally:
            for name, value in old.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            forget()


def forget() -> None:
    """Drop all compiled code and the caches in memory; what lies on disk stays."""
    import torch
    from torch._inductor.utils import clear_inductor_caches

    torch.compiler.reset()
    clear_inductor_caches()


def why_not(device: torch.device | str | None = None) -> str | None:
    """Why Inductor, the default backend, cannot compile for `device` (the lesson's unless given) here, in one sentence;
    None when it can.

    For the processor it needs a C++ compiler, for a card Triton, a C compiler and compute capability 7.0; for both
    Python's headers.
    """
    import torch

    from .machine import device as default_device

    place = torch.device(device) if device is not None else default_device()
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers (Python.h) are missing: install python3-dev, or use conda's Python"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # InvalidCxxCompiler, or what a broken compiler raises when it is asked for its version
        return f"no C++ compiler was found (install g++ or clang; conda: cxx-compiler): {type(error).__name__}"
    if place.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton is missing: pip install triton (on Windows: triton-windows)"
        capability = torch.cuda.get_device_capability(place)
        if capability < _LEAST_SM:
            return f"Triton needs compute capability 7.0; this card has {capability[0]}.{capability[1]}"
    return None


def _compilation(metrics: Any) -> Compilation:
    """One of torch._dynamo's CompilationMetrics as far as a lesson needs it."""
    return Compilation(
        f"{metrics.co_name} ({os.path.basename(metrics.co_filename or '?')}:{metrics.co_firstlineno})",
        int(metrics.graph_op_count),
        float(metrics.entire_frame_compile_time_s or 0.0),
        None if metrics.recompile_reason is None else _guard(metrics.recompile_reason),
    )


def _break(reason: Any) -> Break:
    """One of torch._dynamo's GraphCompileReasons: the first line of the reason, and the innermost line of the user."""
    lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
    if not reason.user_stack:
        return Break(lines[0] if lines else "no reason given", "?", "?")
    frame = reason.user_stack[-1]
    return Break(
        lines[0] if lines else "no reason given",
        f"{os.path.basename(frame.filename)}:{frame.lineno}",
        (frame.line or "?").strip(),
    )


def _guard(text: str) -> str:
    """The condition of a guard that failed, without its number and its place in the source."""
    line = next((line for line in text.strip().splitlines() if line.strip()), "no reason given")
    line = re.sub(r"^\d+/\d+:\s*", "", line.strip())
    return re.split(r"\s+#\s", line)[0].strip()


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
