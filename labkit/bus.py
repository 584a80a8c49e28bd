"""The way to the host and what waits there: how fast the bus copies, how it is linked, and what a load takes of memory.

`measure_bus` times copies, `host` reads the settings that offloading depends on, `host_peak` runs a function and says
how much memory of the host it took.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import machine
from .results import Timing
from .timing import time_step
from .units import MiB, parse_size

if TYPE_CHECKING:
    import torch

SIZES = (MiB // 16, MiB, 16 * MiB, 256 * MiB)


@dataclass(frozen=True)
class Transfer:
    """Copies of ``nbytes`` in one direction (``"to host"``, ``"to card"``, ``"within the host"``), from or to pinned
    or pageable memory of the host. Pinned pages stay where they are, so that the card reads them by itself; what is
    pageable goes through a pinned buffer of the driver's first."""

    direction: str
    pinned: bool
    nbytes: int
    timing: Timing

    @property
    def rate(self) -> float:
        """Bytes per second at the median."""
        return self.nbytes / self.timing.median_seconds

    @property
    def kind(self) -> str:
        """``"to host, pinned"``."""
        return f"{self.direction}, {'pinned' if self.pinned else 'pageable'}"

    def spread(self) -> tuple[float, float]:
        """The rate divided and multiplied by what half an interquartile range is beside the median time."""
        off = 1 + self.timing.spread_seconds / 2 / self.timing.median_seconds
        return self.rate / off, self.rate * off


def measure_bus(
    sizes: Iterable[int | str] = SIZES, *, device: torch.device | str | None = None, repeats: int = 20
) -> list[Transfer]:
    """Copies of each of `sizes` bytes between the host and `device`, pinned and pageable, in both directions.

    Without a card: copies within the host's own memory, by its processor. Times are medians of up to
    `repeats` copies after a warm-up (see `labkit.timing.time_step`).
    """
    import torch

    device = torch.device(device) if device is not None else machine.device()
    found = []
    for nbytes in map(parse_size, sizes):
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for pinned in (True, False) if device.type == "cuda" else (False,):
            host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
            ways: dict[str, tuple[torch.Tensor, torch.Tensor]] = {"to host": (there, host), "to card": (host, there)}
            if device.type != "cuda":
                ways = {"within the host": (host, there)}
            for direction, (source, target) in ways.items():
                timing = time_step(
                    lambda s=source, t=target: t.copy_(s, non_blocking=True),  # type: ignore[misc]
                    device=device, repeats=repeats, max_seconds=0.3,
                )  # fmt: skip
                found.append(Transfer(direction, pinned, nbytes, timing))
    return found


@dataclass(frozen=True)
class Host:
    """The settings of the host that offloading depends on; None where this system does not say.

    ``swappiness``: how readily Linux swaps pages of programs out (0 to 200). ``memlock_bytes``: the limit that
    ``ulimit -l`` shows (None: no limit or not known, see ``memlock``). ``link`` and ``link_most``: generation and
    width of the PCIe link, now (idle cards slow it down) and at most.
    """

    memory_bytes: int | None
    available_bytes: int | None
    swappiness: int | None
    memlock: str
    memlock_bytes: int | None
    link: tuple[int, int] | None
    link_most: tuple[int, int] | None

    @property
    def link_rate(self) -> float | None:
        """Bytes per second that the link at its most carries in one direction after encoding (PCI-SIG)."""
        if self.link_most is None:
            return None
        lane = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}.get(self.link_most[0])
        return None if lane is None else lane * self.link_most[1]


def host() -> Host:
    """The host, read now."""
    memory = _numbers(Path("/proc/meminfo"))
    swappiness = _first_number(Path("/proc/sys/vm/swappiness"))
    memlock, memlock_bytes = "not known", None
    if platform.system() != "Windows":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        memlock_bytes = None if soft == resource.RLIM_INFINITY else soft
        memlock = "unlimited" if memlock_bytes is None else f"{memlock_bytes} bytes"
    now, most = _link()
    return Host(
        memory.get("MemTotal"), memory.get("MemAvailable"), swappiness, memlock, memlock_bytes, now, most
    )  # fmt: skip


def _link() -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Generation and width of the first card's link: now, and at most."""
    library = machine.nvml()
    if library is None:
        return None, None
    found: list[tuple[int, int] | None] = []
    for which in ("Curr", "Max"):
        try:
            handle = machine.nvml_card(library)
            generation = getattr(library, f"nvmlDeviceGet{which}PcieLinkGeneration")(handle)
            found.append((generation, getattr(library, f"nvmlDeviceGet{which}PcieLinkWidth")(handle)))
        except library.NVMLError:  # a virtual card may not say
            found.append(None)
    return found[0], found[1]


def _numbers(file: Path) -> dict[str, int]:
    """``Name:  123 kB`` lines as bytes; empty where there is no such file (not Linux)."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if ":" in line]
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs if rest.strip().endswith("kB")}


def _first_number(file: Path) -> int | None:
    try:
        return int(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _give_back() -> None:
    """Let the C library hand what is free back to the system, or what is needed next might fit in there unseen."""
    gc.collect()
    if platform.system() == "Linux":
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True)
class HostPeak:
    """What a function took of the host's memory at its peak, beyond what was there before.

    ``own_bytes``: memory that only this process has. ``file_bytes``: pages of files that are mapped; the system may
    drop them at any time, as the file has them. None where the system does not tell the two apart.
    """

    own_bytes: int | None
    file_bytes: int | None
    seconds: float
    result: Any


def host_peak(function: Callable[[], Any], *, every_seconds: float = 0.0005) -> HostPeak:
    """Run `function` and read this process's memory all the while, from a second thread (Linux; None elsewhere)."""
    status, done = Path("/proc/self/status"), threading.Event()
    _give_back()
    before = _numbers(status)
    highest = {"RssAnon": 0, "RssFile": 0}

    def look() -> None:
        now = _numbers(status)
        for name in highest:
            highest[name] = max(highest[name], now.get(name, 0) - before.get(name, 0))

    def watch() -> None:
        while not done.wait(every_seconds):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    try:
        result = function()
    finally:
        seconds = time.perf_counter() - start
        look()
        done.set()
        watcher.join()
    known = "RssAnon" in before
    return HostPeak(highest["RssAnon"] if known else None, highest["RssFile"] if known else None, seconds, result)
