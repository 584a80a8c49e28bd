"""Does the host have room: memory, shared memory, disk, and the models that lessons read?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .. import fetch
from ..places import home
from ..units import GiB, show_bytes
from .check import FAIL, OK, WARN, Check

_DISK_NEEDED = 2 * GiB
_SHARED_NEEDED = 64 * 2**20  # below this, DataLoader workers that hand over batches die with a bus error
_HOST_NEEDED = 4 * GiB


def memory() -> Check:
    """Cores and memory of the host."""
    total, available = _meminfo()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if total is None:
        return Check("host", OK, f"{cores} cores")
    detail = f"{cores} cores, {show_bytes(available)} of {show_bytes(total)} memory available"
    if available is not None and available < _HOST_NEEDED:
        return Check("host", WARN, f"{detail}; some lessons want {show_bytes(_HOST_NEEDED)}", "close other programs")
    return Check("host", OK, detail)


def _meminfo() -> tuple[int | None, int | None]:
    """MemTotal and MemAvailable in bytes, within what a container may use; None where the system has no such file."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return None, None
    rows = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
    total, available = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total, available = min(total, int(text)), min(available, int(text))
    return total, available


def shared_memory() -> Check | None:
    """Room for the batches that DataLoader workers hand over."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    size = shutil.disk_usage(folder).total
    if size <= _SHARED_NEEDED:
        fix = "start the container with --shm-size=1g (or --ipc=host)"
        return Check("shared memory", WARN, f"/dev/shm has {show_bytes(size)}: DataLoader workers may be killed", fix)
    return Check("shared memory", OK, f"/dev/shm has {show_bytes(size)}")


def disk() -> Check:
    """Room for runs and models, and the right to write there."""
    folder = home()
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Check("disk", FAIL, f"no permission to write in {folder}", "copy the course to a folder of your own")
    if free < _DISK_NEEDED:
        return Check("disk", WARN, f"{show_bytes(free)} free in {folder}; {show_bytes(_DISK_NEEDED)} are wanted")
    return Check("disk", OK, f"{show_bytes(free)} free in {folder}")


def models() -> Check:
    """Whether the pretrained models that the lessons here name are in data/."""
    missing = fetch.needed_by(sorted((home() / "notebooks").glob("*.ipynb")))
    if missing:
        return Check("models", WARN, f"{', '.join(missing)} not fetched yet, and lessons need it", "labkit fetch")
    here = [name for name in fetch.MODELS if fetch.is_here(name)]
    return Check("models", OK, f"{', '.join(here)} in data/" if here else "none fetched, and no lesson here needs one")
