"""How the card is reached: the bus to the host, and whether the driver spills what does not fit."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from .. import machine
from ..bus import Host
from .check import OK, WARN, Check

_SPILLS_SINCE = (536, 40)  # NVIDIA, "System Memory Fallback for Stable Diffusion", support article 5490


def bus() -> Check | None:
    """Generation and width of each card's link, now and at most. An idle card lowers the generation only."""
    library = machine.nvml()
    if library is None:
        return None
    told, narrow = [], []
    for index in range(int(library.nvmlDeviceGetCount())):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        try:
            now = library.nvmlDeviceGetCurrPcieLinkGeneration(handle), library.nvmlDeviceGetCurrPcieLinkWidth(handle)
            most = library.nvmlDeviceGetMaxPcieLinkGeneration(handle), library.nvmlDeviceGetMaxPcieLinkWidth(handle)
        except library.NVMLError:  # a virtual card may not say
            told.append(f"card {index} does not say")
            continue
        rate = Host(None, None, None, "", None, now, (most[0], now[1])).link_rate
        speed = f", at most {rate / 1e9:.1f} GB/s in one direction" if rate else ""
        idle = "" if now[0] == most[0] else f" (now {now[0]}: idle cards slow down)"
        told.append(f"card {index}: PCIe {most[0]}{idle} x{now[1]} of x{most[1]}{speed}")
        if now[1] < most[1]:
            narrow.append(index)
    if not told:
        return None
    if narrow:
        fix = "another slot, no riser cable, or BIOS: with fewer lanes offload and loading are slower by as much"
        return Check("bus", WARN, "; ".join(told), fix)
    return Check("bus", OK, "; ".join(told))


def spill() -> Check | None:
    """Whether running out of memory is an error, or becomes slow: the driver of Windows (and WSL on it) moves what
    does not fit into the host's memory."""
    library = machine.nvml()
    where = "Windows" if os.name == "nt" else "WSL" if _wsl() else None
    if library is None:
        return None
    if where is None:
        return Check("spill", OK, "running out of the card's memory is an error here, as it should be")
    if where == "Windows" and _own_model(library):
        return Check("spill", OK, "the card is in TCC or MCDM mode: running out of its memory is an error")
    version = library.nvmlSystemGetDriverVersion()
    numbers = tuple(int(p) for p in (version.decode() if isinstance(version, bytes) else version).split(".")[:2])
    if numbers < _SPILLS_SINCE:
        return Check("spill", OK, f"{where}, and a driver from before the fallback to the host's memory")
    return Check(
        "spill",
        WARN,
        f"{where}: the driver may move what does not fit to the host's memory, slowly and without an error",
        "NVIDIA control panel, 3D settings: CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback",
    )


def _wsl() -> bool:
    return Path("/dev/dxg").exists() or "microsoft" in platform.release().lower()


def _own_model(library: object) -> bool:
    """Whether the first card's driver model is another than WDDM (0), the display's."""
    ask = getattr(library, "nvmlDeviceGetCurrentDriverModel", None)
    handle = library.nvmlDeviceGetHandleByIndex(0)  # type: ignore[attr-defined]
    try:
        return ask is not None and int(ask(handle)) != 0
    except library.NVMLError:  # type: ignore[attr-defined]
        return False
