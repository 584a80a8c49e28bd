"""Is the card there, does its driver carry this torch, and can it be used?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from .. import machine
from ..units import show_bytes
from .check import FAIL, OK, WARN, Check, first_line

# The oldest driver branch that runs a CUDA major version, Linux and Windows. NVIDIA, "CUDA Compatibility", minor
# version compatibility, table 1 (Linux); CUDA 12 and 11 release notes, table 2 (Windows).
OLDEST_DRIVER = {13: ((580, 0), (580, 0)), 12: ((525, 60), (528, 33)), 11: ((450, 80), (452, 39))}
# The wheel index to take torch from, by the newest CUDA major version that the driver carries. PyTorch, RELEASE.md,
# CUDA support matrix of 2.13: 13.0 (Turing to Blackwell) and 12.6 (Maxwell to Hopper).
WHEELS = {13: "https://download.pytorch.org/whl/cu130", 12: "https://download.pytorch.org/whl/cu126"}


def torch_build() -> Check:
    """Whether PyTorch can be imported, and what it was built for."""
    try:
        import torch
    except Exception as error:  # a broken binary raises OSError, a missing one ImportError
        return Check("torch", FAIL, f"cannot be imported ({first_line(error)})", "make setup")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA (CPU build)"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}: not supported, lessons predict"
    return Check("torch", OK, f"{torch.__version__}, {build}")


def driver() -> Check | None:
    """Whether the driver carries the CUDA version that torch was built with; the driver bounds the toolkit."""
    import torch

    name, built, card = "driver and CUDA", torch.version.cuda, nvidia_card()
    have, carries = _driver()
    if built is None:
        if card is None and have is None:
            return None
        shown = card or f"driver {have}"
        return Check(
            name,
            FAIL,
            f"there is an NVIDIA card ({shown}), but this torch is a CPU build",
            _other_wheel(carries or "13.0"),
        )
    if have is None:
        if card is None:
            return Check(name, WARN, f"torch was built for CUDA {built}, and there is no NVIDIA driver")
        return Check(
            name,
            FAIL,
            f"there is an NVIDIA card ({card}), but its driver does not answer",
            "install or reload the NVIDIA driver, then see that nvidia-smi works",
        )
    least = OLDEST_DRIVER.get(int(built.split(".")[0]))
    oldest = least[os.name == "nt"] if least else (0, 0)
    detail = f"driver {have} (carries CUDA {carries or '?'}), torch built with CUDA {built}"
    if _numbers(have) < oldest:
        detail = f"{detail}: CUDA {built.split('.')[0]} needs driver {oldest[0]} or newer"
        return Check(name, FAIL, detail, f"update the driver, or {_other_wheel(carries)}")
    return Check(name, OK, detail)


def _other_wheel(carries: str | None) -> str:
    """How to get a torch for a driver that carries this CUDA version, by the Makefile's one variable."""
    index = WHEELS.get(min(int(carries.split(".")[0]), max(WHEELS))) if carries else None
    if index is None:
        return "note that no current torch runs with a driver so old"
    how = "python tools\\setup.py --torch-index " if os.name == "nt" else "make setup TORCH_INDEX="
    return f"take torch from another index: {how}{index}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _driver() -> tuple[str | None, str | None]:
    library = machine.nvml()
    if library is None:
        return None, None
    version = library.nvmlSystemGetDriverVersion()
    number = library.nvmlSystemGetCudaDriverVersion_v2()
    return version.decode() if isinstance(version, bytes) else version, f"{number // 1000}.{number % 1000 // 10}"


def nvidia_card() -> str | None:
    """How an NVIDIA card shows itself on this machine without PyTorch; None where nothing hints at one."""
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.split(":", 1)[1].strip()
    if Path("/dev/nvidia0").exists():
        return "/dev/nvidia0"
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        if vendor.read_text().strip() == "0x10de" and (vendor.parent / "class").read_text().startswith("0x03"):
            return f"PCI device {vendor.parent.name}"
    if Path("/dev/dxg").exists() and shutil.which("nvidia-smi"):
        return "through WSL"
    return None


def usable() -> Check:
    """Whether there is a card, and whether a product computed on it is right."""
    import torch

    if not machine.has_gpu():
        preset = machine.preset()
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if torch.version.cuda and hidden is None and (cards := _cards_of_driver()):
            why = _why_not()
            return Check(
                "card", FAIL, f"the driver sees {cards} card(s), torch none ({why})", "nvidia-smi, then reboot"
            )
        return Check(
            "card",
            WARN,
            f"no GPU that torch can use: memory is predicted for {preset.name} ({preset.sm}), "
            "speeds come from reference rows; every number says so",
            "another card's memory: LABKIT_CARD=t4 (or rtx4090, ...)",
        )
    here = machine.here()
    detail = f"{here.card}, {here.sm}, {show_bytes(here.memory_bytes)}" + (
        f", {here.cards} cards" if here.cards > 1 else ""
    )
    if here.sm and not _compiled_for(here.capability):
        return Check(
            "card",
            FAIL,
            f"{detail}: this torch has no kernels for {here.sm} (it has {', '.join(torch.cuda.get_arch_list())})",
            _other_wheel("12" if here.capability and here.capability < (10, 0) else "13"),
        )
    a = torch.randint(-8, 8, (64, 64)).float()
    try:
        right = torch.equal((a.cuda() @ a.cuda()).cpu(), a @ a)
    except Exception as error:
        return Check("card", FAIL, f"{detail}: a product on it fails ({first_line(error)})", "nvidia-smi")
    if not right:
        return Check("card", FAIL, f"{detail}: a small product comes out wrong", "check the card and its driver")
    return Check("card", OK, f"{detail}; a product computed on it is right")


def _cards_of_driver() -> int:
    library = machine.nvml()
    return int(library.nvmlDeviceGetCount()) if library is not None else 0


def _why_not() -> str:
    """What CUDA says when it is asked to start."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError or AssertionError, by what is missing
        return first_line(error)
    return "it gives no reason"


def _compiled_for(capability: tuple[int, int] | None) -> bool:
    """Whether torch has kernels for the card: of the same major version and not newer, or PTX that can be compiled."""
    import torch

    if capability is None:
        return True
    for arch in torch.cuda.get_arch_list():
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built[0] == capability[0] and built <= capability:
            return True
        if kind == "compute" and built <= capability:
            return True
    return False


def dtypes() -> Check | None:
    """Which number formats each card multiplies natively; `is_bf16_supported()` also counts emulation."""
    if not machine.has_gpu():
        return None
    import torch

    here = machine.here()
    assert here.capability is not None
    others = {torch.cuda.get_device_capability(i) for i in range(1, here.cards)}
    lines, wrong = [], False
    for capability in (here.capability, *sorted(others - {here.capability})):
        found = machine.native_dtypes(capability)
        native = ", ".join(name for name, dtype in found.items() if dtype.native)
        wrong |= not found["bf16"].native
        reason = "" if found["bf16"].native else f"; {found['bf16'].reason}"
        which = f"sm_{capability[0]}{capability[1]}: " if others - {here.capability} else ""
        lines.append(f"{which}native: {native}{reason}")
    fix = "precision fp16 in recipes, fp16=True (not bf16) in TrainingArguments" if wrong else ""
    return Check("number formats", WARN if wrong else OK, "; ".join(lines), fix)


def memory() -> Check | None:
    """How much of each card is free, who holds the rest, and whether the budget fits the first."""
    budget = machine.default_budget()
    if not machine.has_gpu():
        return None
    import torch

    free, total = torch.cuda.mem_get_info()
    detail = f"{show_bytes(free)} of {show_bytes(total)} free, budget {show_bytes(budget)}"
    if holders := _holders():
        detail += f"; held by {', '.join(holders)}"
    for index in range(1, torch.cuda.device_count()):
        rest, whole = torch.cuda.mem_get_info(index)
        held = _holders(index)
        detail += f"; card {index}: {show_bytes(rest)} of {show_bytes(whole)} free"
        detail += f", held by {', '.join(held)}" if held else ""
    if budget > total:
        return Check("card memory", FAIL, f"{detail}: the budget is larger than the card", "LABKIT_BUDGET=6GiB, say")
    if budget > free:
        fix = "close what holds it (restart old notebook kernels, kill PID), or choose a card: CUDA_VISIBLE_DEVICES=1"
        return Check("card memory", WARN, f"{detail}: the budget does not fit beside that", fix)
    return Check("card memory", OK, detail)


def _holders(index: int = 0) -> list[str]:
    """Other processes on a card, with name and memory where the driver tells; the largest first."""
    library = machine.nvml()
    if library is None:
        return []
    handle = library.nvmlDeviceGetHandleByIndex(index)
    found: dict[int, int] = {}
    for ask in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        try:
            processes = getattr(library, ask)(handle)
        except library.NVMLError:  # not supported on every card and system
            continue
        for process in processes:
            if process.pid != os.getpid():
                found[process.pid] = max(found.get(process.pid, 0), process.usedGpuMemory or 0)
    rows = sorted(found.items(), key=lambda item: -item[1])
    told = [f"{_name(library, pid)} ({show_bytes(used) if used else 'unknown'})" for pid, used in rows[:5]]
    return told + ([f"{len(rows) - 5} more"] if len(rows) > 5 else [])


def _name(library: Any, pid: int) -> str:
    """``process 42 python``, or without a name where the system does not tell it (another user's, a container's)."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        try:
            told = library.nvmlSystemGetProcessName(pid)
            name = Path((told.decode(errors="replace") if isinstance(told, bytes) else told).split(" ")[0]).name
        except (library.NVMLError, AttributeError, OSError):
            name = ""
    return f"process {pid} {name}".rstrip()
