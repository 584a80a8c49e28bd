"""The sandbox's walls themselves: what code inside can see, reach and take, whatever notices it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_grading_ordinary
from grading_samples import HOME

from labkit import places
from labkit.grading import cgroups, guard, running, sandbox, wire
from labkit.grading.runner import Runner
from labkit.grading.slicing import Cell, Piece

pytestmark = pytest.mark.grading

LOOK = """
import ctypes, glob, os, socket

def tried(action):
    try:
        return str(action())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

def connect():
    with socket.socket() as one:
        one.settimeout(3)
        one.connect(("192.0.2.1", 80))

seen = {
    "user": os.getresuid(), "groups": os.getgroups(), "root": sorted(os.listdir("/")),
    "course": sorted(os.listdir("/course")), "home": sorted(os.listdir("/home")),
    "secrets": [f for top in ("/course", "/home", "/tmp") for f in glob.glob(f"{top}/**/*00_env*", recursive=True)],
    "submissions": tried(lambda: os.listdir("@FOLDER@")),
    "processes": len([p for p in os.listdir("/proc") if p.isdigit()]),
    "localhost": tried(lambda: socket.gethostbyname("localhost")), "passwords": os.path.exists("/etc/passwd"),
    "network": tried(connect), "interfaces": sorted(n for _, n in socket.if_nameindex()),
    "write labkit": tried(lambda: open("/course/labkit/checks.py", "a")),
    "write python": tried(lambda: open(os.__file__, "a")),
    "write home": tried(lambda: open("mine.txt", "w").write("x")),
    "become root": tried(lambda: os.setuid(0)),
    "mount": ctypes.CDLL(None, use_errno=True).mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "environment": sorted(os.environ),
}
"""
FILL = """
import os
written = 0
try:
    for number in range(10_000):
        with open(f"/tmp/{number}", "wb") as file:
            written += file.write(b"x" * 2**22)
except OSError as error:
    seen = {"written": written, "error": error.errno}
"""
LARGE = (
    "import resource\nseen = resource.getrlimit(resource.RLIMIT_FSIZE)[0], resource.getrlimit(resource.RLIMIT_NPROC)[0]"
)
SPAWN = """
import os, signal
children = []
try:
    for _ in range(500):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
    seen = len(children)
except OSError:
    seen = len(children)
"""
CALLS = """
import ctypes, mmap, os

def tried(action):
    try:
        return str(action())
    except OSError as error:
        return error.errno

libc = ctypes.CDLL(None)
seen = {
    "namespaces": libc.unshare(0x10000000 | 0x00020000), "memfd": tried(lambda: os.memfd_create("x")),
    "shared": tried(lambda: mmap.mmap(-1, 2**20)), "system v": libc.shmget(0, 4096, 0o1600),
    "own": len(mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)),
    "its memory": tried(lambda: open(f"/proc/{os.getppid()}/mem", "rb")),
    "its files": tried(lambda: os.listdir(f"/proc/{os.getppid()}/fd")),
    "commands": [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc") if p.isdigit()],
    "root": tried(lambda: open("/x", "w")), "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
}
"""
SHARE = """
import mmap, time
maps = []
for number in range(2):
    file = open(f"/tmp/{number}", "wb+")
    file.truncate(100 * 2**20)
    one = mmap.mmap(file.fileno(), 0)
    one[:] = b"x" * len(one)
    maps.append(one)
time.sleep(20)
seen = len(maps)
"""
ALONE = 3 if os.getuid() == 0 else 2  # processes that an answer sees: bubblewrap's own, where that cannot be reached
LIMITS = sandbox.Limits(scratch=64 * 2**20, processes=40)


def running_there() -> Iterator[Runner]:
    """A runner of answers in a sandbox of small limits."""
    if sandbox.why_not():
        pytest.fail(f"make test-grading needs the sandbox: {sandbox.why_not()}")
    box = sandbox.Sandbox(LIMITS)
    made = Runner(lambda: box.launch("labkit.grading.inside"), box.setup(preload=[]))
    yield made
    made.close()


runner = pytest.fixture(scope="module")(running_there)


def seen(runner: Runner, source: str) -> Any:
    piece = Piece(Cell("product_rate", source, "answer"))
    outcome = runner.run({"before": [], "answer": running.to_message([piece])[0], "variable": "seen", "seconds": 60})
    assert outcome.values and outcome.values[0]["kind"] == "value", (outcome.ending, outcome.reason, outcome.values)
    return wire.decode(outcome.values[0]["value"])


def test_what_can_be_seen_and_reached(runner: Runner, tmp_path: Any) -> None:
    found = seen(runner, LOOK.replace("@FOLDER@", str(tmp_path)))
    assert len(set(found["user"])) == 1 and found["user"][0] != 0 and 0 not in found["groups"]
    mounted = {"course", "home", "tmp", "usr", "lib", "lib64", "bin", "sbin", "etc", "dev", "proc", "sys"}
    assert set(found["root"]) <= mounted | {Path(p).parts[1] for p in (sys.prefix, os.path.realpath(sys.base_prefix))}
    assert found["course"] == ["data", "labkit"]
    assert found["home"] == ["learner"]
    assert found["secrets"] == []
    assert "FileNotFoundError" in found["submissions"]
    assert found["processes"] < 8
    assert (found["localhost"], found["passwords"]) == ("127.0.0.1", False)
    assert "unreachable" in found["network"] and found["interfaces"] == ["lo"]
    for place in ("write labkit", "write python"):
        assert "Read-only" in found[place] or "Permission" in found[place], found[place]
    assert found["write home"] == "1"
    assert "Error" in found["become root"] and found["mount"] == -1
    assert not [name for name in found["environment"] if "TOKEN" in name or "SECRET" in name or "PYTEST" in name]


def test_what_can_be_taken(runner: Runner) -> None:
    found = seen(runner, FILL)
    assert found["written"] <= LIMITS.scratch and found["error"] == 28
    assert seen(runner, LARGE) == (LIMITS.file, LIMITS.processes)
    assert seen(runner, SPAWN) < LIMITS.processes


def test_what_would_undo_the_walls_is_refused(runner: Runner) -> None:
    found = seen(runner, CALLS)
    assert (found["namespaces"], found["system v"], found["own"]) == (-1, -1, 2**20)
    assert (found["memfd"], found["shared"], found["root"]) == (errno.EPERM, errno.ENOMEM, errno.EROFS)
    assert found["its memory"] == found["its files"] == errno.EACCES
    assert not [c for c in found["commands"] if "bind" in c or str(places.home()) in c]
    assert found["shm"] == sandbox.SHARED_BYTES


OTHERS = """
import os
seen = {}
for process in sorted(int(p) for p in os.listdir("/proc") if p.isdigit()):
    if process != os.getpid():
        for place in ("fd/0", "fd/1", "mem", "environ"):
            try:
                open(f"/proc/{process}/{place}", "rb").close()
                seen[f"{process} {place}"] = "opened"
            except OSError as error:
                seen[f"{process} {place}"] = error.errno
"""
AS_ANYBODY = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_grading_walls as walls
made = next(walls.running_there())
print(json.dumps(walls.seen(made, walls.OTHERS)))
made.close()
"""


@pytest.mark.parametrize("ordinary", [False, True])
def test_no_other_process_can_be_reached(ordinary: bool) -> None:
    """Its pipes lead to the grader; an ordinary user's sandbox has no user of its own to keep them."""
    place = Path(tempfile.mkdtemp(prefix="labkit-anybody-"))
    place.chmod(0o755)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(HOME)
    command = [sys.executable, "-c", AS_ANYBODY]
    if ordinary:
        command = test_grading_ordinary.as_ordinary_user(command, environment, place)
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=place, timeout=200)
    shutil.rmtree(place, ignore_errors=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) == 4 * (1 if ordinary or os.getuid() else 2) and set(found.values()) == {errno.EACCES}, found


def test_memory_that_is_shared_counts() -> None:
    box = sandbox.Sandbox(dataclasses.replace(LIMITS, total=180 * 2**20, scratch=512 * 2**20))
    greedy = Runner(lambda: box.launch("labkit.grading.inside"), box.setup(preload=[]))
    (answer,) = running.to_message([Piece(Cell("product_rate", SHARE, "answer"))])
    outcome = greedy.run({"before": [], "answer": answer, "variable": "seen", "seconds": 60})
    greedy.close()
    assert outcome.ending == "crashed" and "took more than 180" in outcome.reason


SOCKETS = """
import socket
kept = []
while True:
    pair = socket.socketpair()
    pair[0].setblocking(False)
    try:
        while pair[0].send(b"x" * 2**16):
            pass
    except BlockingIOError:
        kept.append(pair)
    if len(kept) == 400:
        seen = "full"
        import os, time
        if os.fork() == 0:
            kept = []
            continue
        time.sleep(60)
"""


def test_memory_that_belongs_to_no_process_counts_where_groups_can_be_made() -> None:
    """What lies in sockets is in no process's sizes."""
    trial = cgroups.make(2**30)
    if trial is None:
        assert not os.access("/sys/fs/cgroup/memory", os.W_OK) or os.getuid() != 0
        return
    trial.remove()
    assert not trial.folder.exists()
    mine = f"labkit-{os.getpid()}-*"  # others may be grading
    before = set(trial.folder.parent.glob(mine))
    box = sandbox.Sandbox(dataclasses.replace(LIMITS, total=128 * 2**20, scratch=2**20))
    greedy = Runner(lambda: box.launch("labkit.grading.inside"), box.setup(preload=[]))
    (answer,) = running.to_message([Piece(Cell("product_rate", SOCKETS, "answer"))])
    outcome = greedy.run({"before": [], "answer": answer, "variable": "seen", "seconds": 40})
    greedy.close()
    assert outcome.ending == "crashed" and "memory" in outcome.reason
    assert set(trial.folder.parent.glob(mine)) == before, "its group is gone with it"


def test_folders_of_the_grader_below_what_is_shown_are_empty(tmp_path: Path) -> None:
    """This Python's own folder is shown; a course may be kept in it, as in /usr/src."""
    with tempfile.TemporaryDirectory(dir=sys.prefix) as kept:
        (Path(kept) / "answers.txt").write_text("all of them")
        box = sandbox.Sandbox(LIMITS, hide=[Path(kept)])
        made = Runner(lambda: box.launch("labkit.grading.inside"), box.setup(preload=[]))
        assert seen(made, f"import os\nseen = os.path.isdir({kept!r}), os.listdir({kept!r})") == (True, [])
        made.close()


def test_what_an_answer_leaves_behind_does_not_meet_the_next(runner: Runner) -> None:
    assert seen(runner, SPAWN) < LIMITS.processes
    before = runner._process
    count = "import os\nseen = len([p for p in os.listdir('/proc') if p.isdigit()])"
    assert seen(runner, count) == ALONE and runner._process is before, "children are ended, the sandbox goes on"
    leave = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nseen = 1"
    assert seen(runner, leave) == 1
    assert runner._process is None, "who leaves the group takes the sandbox along"
    assert seen(runner, count) == ALONE


def test_all_processes_end_with_the_sandbox(runner: Runner) -> None:
    seen(runner, "seen = 1")
    process = runner._process
    assert process is not None
    total, count = guard.taken(process.popen.pid)
    assert total > 0 and count > 1
    runner.close()
    assert guard.taken(process.popen.pid) == (0, 1)
