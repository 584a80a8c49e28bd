"""Does the host have room: memory, shared memory, disk, and the models that lessons read?"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
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
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # versions 2 and 1
        limit = Path("/sys/fs/cgroup") / name
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            total, available = min(total, int(text)), min(available, int(text))
    return total, available


def shared_memory() -> Check | None:
    """Room for the batches that DataLoader workers hand over."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    detail = f"/dev/shm has {show_bytes(usage.total)}, {show_bytes(usage.free)} free"
    if usage.total <= _SHARED_NEEDED:
        fix = "start the container with --shm-size=1g (or --ipc=host)"
        return Check("shared memory", WARN, f"{detail}: DataLoader workers may be killed", fix)
    if usage.free <= _SHARED_NEEDED:
        fix = "delete what ended programs left there: ls -la /dev/shm"
        return Check("shared memory", WARN, f"{detail}: DataLoader workers may be killed", fix)
    return Check("shared memory", OK, detail)


def disk() -> Check:
    """Room for runs and models, and the right to write there."""
    folder = home()
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Check("disk", FAIL, f"no permission to write in {folder}", "copy the course to a folder of your own")
    if free < _DISK_NEEDED:
        return Check("disk", WARN, f"{show_bytes(free)} free in {folder}; {show_bytes(_DISK_NEEDED)} are wanted")
    return Check("disk", OK, f"{show_bytes(free)} free in {folder}")


def caches() -> Check:
    """Whether downloads and compiled kernels can be kept, and where."""
    wrong, told = [], []
    for what, folder in _caches().items():
        there = folder
        while not there.exists() and there != there.parent:
            there = there.parent
        free = shutil.disk_usage(there).free
        told.append(f"{what} in {folder}")
        if not os.access(there, os.W_OK):
            wrong.append(f"no permission to write in {folder} ({what})")
        elif free < _DISK_NEEDED:
            wrong.append(f"{show_bytes(free)} free in {folder} ({what})")
    if wrong:
        fix = "point HF_HOME, TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to a folder with room"
        return Check("caches", WARN, "; ".join(wrong), fix)
    return Check("caches", OK, ", ".join(told))


def _caches() -> dict[str, Path]:
    """The folders that Hugging Face's libraries, Inductor and Triton keep things in, as their documentation says."""
    own = Path("~").expanduser()
    hub = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or own / ".cache") / "huggingface"
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    triton = os.environ.get("TRITON_CACHE_DIR") or own / ".triton" / "cache"
    return {"models": Path(hub), "compiled code": Path(compiled), "kernels": Path(triton)}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no name for this user, as in some containers
        return "unknown"


def models() -> Check:
    """Whether the pretrained models that the lessons here name are in data/."""
    missing = fetch.needed_by(sorted((home() / "notebooks").glob("*.ipynb")))
    if missing:
        return Check("models", WARN, f"{', '.join(missing)} not fetched yet, and lessons need it", "labkit fetch")
    here = [name for name in fetch.MODELS if fetch.is_here(name)]
    return Check("models", OK, f"{', '.join(here)} in data/" if here else "none fetched, and no lesson here needs one")
