"""A sandbox for what learners wrote: bubblewrap, an unprivileged user, limits, no network, and nothing to see.

Inside there are the system's libraries, this Python, ``/course`` with `labkit` and ``data/``, and an empty home in
memory: no lessons, no hidden tests, no other submissions, no grades. ``/usr`` is shown whole: it holds what a
distribution installs, which is no secret, and libraries load each other from all over it; where the course or a folder
of the grader's lies below it, or below this Python's own folders, an empty one is put in its place. All processes end
with the sandbox. Limits of a process do not bind root: where the grader runs as root, the first thing inside is to
become another user. Arguments and environment go to bubblewrap through a pipe, for its command line can be read inside.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import places
from ..units import UserError
from . import guard, scratch, seccomp, wire

SHARED_BYTES = 256 * 2**20  # of /dev/shm, which is memory
HOME = "/home/learner"
COURSE = "/course"
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
FONTS = "/tmp/matplotlib"
_NAMES = {  # what looks up "localhost", as launchers of several processes do
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "hosts: files\n",
}
INSTALL = "bubblewrap is not installed (apt install bubblewrap, or dnf install bubblewrap)"
_FIRST_USER = 61_000  # of those that sandboxes run as; each has its own, for processes are counted by user
_users = itertools.count()


@dataclass(frozen=True)
class Limits:
    """Bytes of data of one process (``memory``) and of all together with what they share (``total``; what several have
    mapped counts for each), their number, the bytes of one file, the number of open files, and the bytes of everything
    in home and of everything in /tmp (``scratch``, which is memory, too)."""

    memory: int = 6 * 2**30
    total: int = 8 * 2**30
    processes: int = 256
    file: int = 256 * 2**20
    files: int = 1024
    scratch: int = 512 * 2**20


def why_not() -> str | None:
    """Why no sandbox can be made here, in words; None when one can."""
    if not sys.platform.startswith("linux"):
        return "the sandbox needs Linux"
    if shutil.which("bwrap") is None:
        return INSTALL
    if not seccomp.known():
        return f"the sandbox knows no processor of the kind {os.uname().machine}"
    return _trial()


@functools.cache
def _trial() -> str | None:
    with _handed([*_walls(), *_system()]) as (command, pipes):
        tried = subprocess.run([*command, "--", "/bin/true"], capture_output=True, text=True, pass_fds=pipes)
    if tried.returncode == 0:
        return None
    return f"bubblewrap cannot make a sandbox here: {(tried.stderr.strip().splitlines() or ['no reason given'])[-1]}"


def require() -> None:
    """Raises `UserError` saying what to do when no sandbox can be made."""
    reason = why_not()
    if reason:
        raise UserError(f"{reason}; --no-sandbox grades without, which is only for submissions that you trust")


class Sandbox:
    """Starts Python modules of labkit behind walls (``walled``), or, for submissions that one trusts, without. The
    folders `hide`, and the course's own, are not seen, wherever they lie."""

    def __init__(
        self, limits: Limits | None = None, *, walled: bool = True, threads: int = 2, hide: Sequence[Path] = ()
    ):
        self.limits, self.walled, self.threads = limits or Limits(), walled, threads
        self._hide = [Path(os.path.realpath(folder)) for folder in (places.home(), *hide)]
        self._folders: list[str] = []

    def setup(self, **more: Any) -> dict[str, Any]:
        """The first message to a process of this sandbox; see `inside.restrict`."""
        if not self.walled:
            return more
        limits = {k: v for k, v in asdict(self.limits).items() if k not in ("total", "scratch")}
        user = _FIRST_USER + (os.getpid() * 31 + next(_users)) % 4000 if os.getuid() == 0 else None
        return {"limits": limits, "user": user, "walled": True, **more}

    def launch(self, module: str) -> wire.Process:
        """Start ``python -m module`` in a sandbox of its own; it ends with `wire.Process.kill`."""
        if not self.walled:
            folder = scratch.make("unwalled")
            self._folders.append(folder)
            return wire.Process([sys.executable, "-m", module], _outside(folder, self.threads), folder)
        # what lies under /tmp or the home (an environment, the course) is shown after those are made empty
        arguments = [*_walls(), *_system(), *_masks(SYSTEM, self._hide), *_home(self.limits.scratch)]
        arguments += [*_python(), *_masks(_pythons(), self._hide), *_course(), *_card(), *_environment(self.threads)]
        with _handed([*arguments, "--remount-ro", "/"]) as (command, pipes):
            most, kept = self.limits.total, 2 * self.limits.scratch + SHARED_BYTES
            return guard.Watched([*command, "--", sys.executable, "-m", module], most, kept, pipes)

    def close(self) -> None:
        """Remove what processes without walls left behind."""
        while self._folders:
            scratch.remove(self._folders.pop())


@contextlib.contextmanager
def _handed(arguments: Sequence[str]) -> Iterator[tuple[list[str], list[int]]]:
    """A command that reads these arguments, the filter of calls and a few small files from pipes, and the pipes' ends
    for it."""
    pipes: list[int] = []

    def pipe_of(content: bytes) -> str:
        reading, writing = os.pipe()
        pipes.append(reading)
        with os.fdopen(writing, "wb") as pipe:
            os.set_blocking(pipe.fileno(), False)  # it holds 64 KiB, more than there will be
            pipe.write(content)
        return str(reading)

    try:
        command = ["bwrap", "--perms", "0755", "--dir", "/etc"]
        for place, text in _NAMES.items():
            command += ["--perms", "0644", "--file", pipe_of(text.encode()), place]
        command += ["--args", pipe_of("\0".join(arguments).encode() + b"\0")]
        command += ["--seccomp", pipe_of(seccomp.program(card=bool(_devices())))]
        yield command, pipes
    finally:
        for pipe_end in pipes:
            os.close(pipe_end)


def _walls() -> list[str]:
    """New namespaces for everything. Root keeps only the right to become another user, and gives that up inside. For an
    ordinary user no process of bubblewrap's own is in there (``--as-pid-1``): answers, being of the same user, could
    take its pipes and speak to the grader."""
    command = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--hostname", "course"]
    if os.getuid() == 0:
        return [*command, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*command, "--unshare-user", "--as-pid-1"]


def _system() -> list[str]:
    command = [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--perms",
        "1777",
        "--size",
        str(SHARED_BYTES),
        "--tmpfs",
        "/dev/shm",
    ]
    for folder in SYSTEM:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += ["--ro-bind", folder, folder]
    for file in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/fonts", "/etc/localtime"):
        command += ["--ro-bind-try", file, file]
    return command


def _python() -> list[str]:
    """This Python and its packages, read-only, at their own places."""
    return [word for folder in _pythons() for word in _shown(folder, folder)]


def _pythons() -> list[str]:
    inside: list[str] = []
    for folder in sorted({os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), sys.prefix}):
        if not any(folder == above or folder.startswith(above + os.sep) for above in [*inside, "/usr"]):
            inside.append(folder)
    return inside


def _masks(shown: Iterable[str], secrets: Iterable[Path]) -> list[str]:
    """Empty folders over those of `secrets` that lie below a folder that is `shown`."""
    above = [Path(os.path.realpath(folder)) for folder in shown]
    hidden = sorted({str(s) for s in secrets if s.is_dir() and any(a in s.parents for a in above)})
    return [word for folder in hidden for word in ("--tmpfs", folder, "--remount-ro", folder)]


def _course() -> list[str]:
    """`labkit` and data/, and what links in data/ point to."""
    package, data = Path(__file__).resolve().parents[1], places.home() / "data"
    command = _shown(str(package), f"{COURSE}/labkit")
    if data.is_dir():
        command += _shown(str(data.resolve()), f"{COURSE}/data")
        for entry in [*data.iterdir(), *data.glob("models/*")]:
            if entry.is_symlink() and entry.exists():
                command += _shown(str(entry.resolve()), str(entry.resolve()))
    return command


def _card() -> list[str]:
    """The devices of a card, where there is one."""
    devices = _devices()
    command = [word for device in devices for word in ("--dev-bind", device, device)]
    return [*command, "--ro-bind", "/sys", "/sys"] if devices else command


def _devices() -> list[str]:
    return [str(p) for p in sorted(Path("/dev").glob("nvidia*"))]


def _home(scratch: int) -> list[str]:
    command = [*_parents(HOME), "--perms", "1777", "--size", str(scratch), "--tmpfs", HOME]
    command += ["--perms", "1777", "--size", str(scratch), "--tmpfs", "/tmp", "--chdir", HOME]
    command += ["--perms", "1777", "--dir", FONTS]
    return command + [word for f in _fonts() for word in ("--ro-bind", f, f"{FONTS}/{Path(f).name}")]


@functools.cache
def _fonts() -> list[str]:
    """matplotlib's list of fonts: making it takes seconds, in each sandbox anew."""
    import matplotlib.font_manager  # importing it makes the list

    return [str(p) for p in Path(matplotlib.get_cachedir()).glob("fontlist-*.json")]


def _environment(threads: int) -> list[str]:
    values = {
        "PATH": "/usr/bin:/bin", "HOME": HOME, "USER": "learner", "LOGNAME": "learner", "LANG": "C.UTF-8",
        "PYTHONPATH": COURSE, "PYTHONDONTWRITEBYTECODE": "1", "LABKIT_HOME": COURSE, "LABKIT_RUN": f"{HOME}/run",
        "MPLCONFIGDIR": FONTS, "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    values |= {k: os.environ[k] for k in ("LABKIT_CARD", "LABKIT_BUDGET", "CUDA_VISIBLE_DEVICES") if k in os.environ}
    return ["--clearenv", *(word for k, v in values.items() for word in ("--setenv", k, v))]


def _outside(folder: str, threads: int) -> dict[str, str]:
    return places.environment(LABKIT_RUN=f"{folder}/run", LABKIT_HOME=str(places.home()), OMP_NUM_THREADS=str(threads))


def _shown(source: str, target: str) -> list[str]:
    return [*_parents(target), "--ro-bind", source, target]


def _parents(target: str) -> Iterable[str]:
    """Folders above a mount, readable for everybody: bubblewrap makes them for root alone."""
    for folder in reversed(list(Path(target).parents)[:-1]):
        if str(folder) not in ("/usr", "/bin", "/lib"):
            yield from ("--perms", "0755", "--dir", str(folder))
