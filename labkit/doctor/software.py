"""Compiled parts: a compiler for `torch.compile`, bitsandbytes' library, and what is optional."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from .. import compiling, extras, machine
from .check import OK, WARN, Check, first_line

_COMPILERS = ("clang", "gcc", "cc")  # in the order that Triton asks for them (triton/runtime/build.py)


def compiler() -> Check:
    """Whether `torch.compile` can build kernels for where lessons run: the card, or the processor without one."""
    name = "compiler"
    device = machine.device()
    wrong = compiling.why_not(device)
    if wrong is None and device.type == "cuda":
        wrong = _no_c_compiler()
    if wrong:
        return Check(name, WARN, f"torch.compile cannot build for {device.type}: {wrong}", _repair(wrong))
    built = f"C compiler {Path(found).name}" if (found := _c_compiler()) else "a C++ compiler"
    triton = f", Triton {version}" if device.type == "cuda" and (version := _version("triton")) else ""
    return Check(name, OK, f"torch.compile builds for {device.type}: {built}{triton}")


def _c_compiler() -> str | None:
    wish = os.environ.get("CC")
    return next((path for name in ([wish] if wish else _COMPILERS) if (path := shutil.which(name))), None)


def _no_c_compiler() -> str | None:
    if os.name == "nt" or _c_compiler():  # triton-windows brings its own
        return None
    wish = os.environ.get("CC")
    return f"CC={wish} is no program" if wish else "Triton finds no C compiler (clang, gcc or cc)"


def _repair(wrong: str) -> str:
    if "CC=" in wrong:
        return "unset CC, or name a compiler that is there"
    if "Triton needs compute" in wrong:
        return "lessons run without compiling on this card"
    if "Triton is missing" in wrong:
        return "pip install triton (on Windows: triton-windows)"
    return "apt install g++ python3-dev (conda: cxx-compiler); without it lesson 07 predicts and explains only"


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def bitsandbytes() -> Check:
    """Whether the library behind 8-bit optimizers and 4-bit weights loads, is the one for torch's CUDA, and works."""
    import torch

    name, fix = "bitsandbytes", "pip install -U bitsandbytes; then: python -m bitsandbytes"
    try:
        import bitsandbytes
        from bitsandbytes import cextension
    except Exception as error:
        return Check(name, WARN, f"cannot be imported ({first_line(error)}): lesson 04 needs it", fix)
    version = bitsandbytes.__version__
    library = getattr(cextension, "lib", None)
    if library is None or type(library).__name__ == "ErrorHandlerMockBNBNativeLibrary":
        there = _libraries(Path(bitsandbytes.__file__).parent)
        detail = f"{version}: its compiled library does not load; lesson 04 needs it"
        if torch.version.cuda:
            detail += f" (torch has CUDA {torch.version.cuda}, there are libraries for {', '.join(there) or 'none'})"
        wish = os.environ.get("BNB_CUDA_VERSION")
        return Check(name, WARN, detail, f"unset BNB_CUDA_VERSION={wish}" if wish else fix)
    if machine.has_gpu():
        if not getattr(library, "compiled_with_cuda", False):
            return Check(name, WARN, f"{version}: loaded without CUDA kernels; lesson 04 needs them", fix)
        if wrong := _wrong_on_card():
            return Check(name, WARN, f"{version}: {wrong}", fix)
        return Check(name, OK, f"{version} with {_file(library)}; 8-bit values made on the card are right")
    return Check(name, OK, f"{version} loads")


def _file(library: Any) -> str:
    return Path(str(getattr(getattr(library, "_lib", None), "_name", "its library"))).name


def _libraries(folder: Path) -> list[str]:
    """CUDA versions that this bitsandbytes has libraries for, as ``12.6``."""
    digits = sorted(file.stem.removeprefix("libbitsandbytes_cuda") for file in folder.glob("libbitsandbytes_cuda*"))
    return [f"{d[:-1]}.{d[-1]}" for d in digits if d.isdigit()]


def _wrong_on_card() -> str | None:
    """Quantise a few values to 8 bits on the card and back; what is wrong with them, or None."""
    import torch
    from bitsandbytes import functional

    values = torch.linspace(-1, 1, 4096, device="cuda")
    try:
        back = functional.dequantize_blockwise(*functional.quantize_blockwise(values))
        off = float((back - values).abs().max())
    except Exception as error:
        return f"its kernels do not run on this card ({first_line(error)})"
    return f"8-bit values come back wrong by {off:.3f}" if off > 0.05 else None


def optional() -> Check:
    """Rare parts that single lessons use when they are there."""
    here = [f"{name} {extras.version(name) or ''}".strip() for name in extras.EXTRAS if extras.has(name)]
    away = [name for name in extras.EXTRAS if not extras.has(name)]
    told = [f"{', '.join(here)} installed"] if here else []
    told += [f"{', '.join(away)} not installed: single cells say what they would show"] if away else []
    fix = f"if you want them: pip install 'gpt2-small-gpu-lab[{','.join(away)}]'" if away else ""
    return Check("optional parts", OK, "; ".join(told), fix)
