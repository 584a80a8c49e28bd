"""What a run of the course survives: kills at random moments, full disks, read-only folders, clocks, two at once.

    python bench/robustness.py                 every fault, the table goes to results/robustness.md
    python bench/robustness.py --seed 2 --trials 4 --only kill

A course of four small lessons is run by the real `labkit run`. Each of its cells writes rows to the ledger and, once
the row is acknowledged, a line to a witness outside the run. Survived means: no traceback, an exit code that fits,
every acknowledged row is in the ledger, no kernel is left; and the next call goes on: what was done is not run again,
and at the end every lesson is done, with an executed notebook of full length and a report.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import nbformat

from labkit.results import Ledger
from labkit.runs import Run

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "results" / "robustness.md"
LESSONS = ("00_first", "01_second", "02_third", "03_last")
CELL = """
import os, time
from labkit.results import Ledger
ledger = Ledger(os.environ["LABKIT_RUN"] + "/ledger.jsonl")
for n in range({rows}):
    name = "{kind} {cell}.%d" % n
    ledger.append({{"kind": "{kind}", "lesson": "{lesson}", "session": str(os.getpid()), "name": name, "value": n,
                   "unit": "", "note": "x" * 3000}})
    with open(os.environ["WITNESS"], "a") as file:
        print(os.getpid(), "{lesson}", name, sep="|", file=file, flush=True)
        os.fsync(file.fileno())
    time.sleep(0.03)
print("{cell} is over")
"""
CLOCK = """
import os, time
_start, (_after, _by) = time.monotonic(), map(float, os.environ["CLOCK"].split(":"))
_real = {name: getattr(time, name) for name in ("time", "time_ns", "gmtime", "localtime", "strftime")}
def _jump(): return _by if time.monotonic() - _start > _after else 0.0
time.time = lambda: _real["time"]() + _jump()
time.time_ns = lambda: _real["time_ns"]() + int(_jump() * 1e9)
time.gmtime = lambda s=None: _real["gmtime"](time.time() if s is None else s)
time.localtime = lambda s=None: _real["localtime"](time.time() if s is None else s)
time.strftime = lambda form, t=None: _real["strftime"](form, time.localtime() if t is None else t)
"""


@dataclass
class Course:
    """A folder with a small course, a copy of the package (so that no edit of it matters) and the witness."""

    home: Path
    random: random.Random
    seconds: float = 12.0  # of a run that nothing disturbs; measured first
    said: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.home / "run"

    @property
    def witness(self) -> Path:
        return self.home / "witness"

    def start(
        self, out: Path | None = None, prepare: Callable[[], None] | None = None, **env: str
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "labkit.cli", "run", "--out", str(out or self.out)]
        paths = os.pathsep.join([*([env.pop("FIRST")] if "FIRST" in env else []), str(self.home)])
        settings = {
            "PYTHONPATH": paths,
            "LABKIT_HOME": str(self.home),
            "WITNESS": str(self.witness),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.home,
            env={**os.environ, **settings, **env}, preexec_fn=prepare, start_new_session=True,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str], *codes: int) -> str:
        """Wait for the end; what was printed. Notes a traceback, and an exit code that is none of `codes`."""
        said = process.communicate(timeout=180)[0]
        if "Traceback" in said:
            self.said.append("a traceback: " + said[said.index("Traceback") :][-300:])
        if process.returncode not in codes:
            self.said.append(f"exit code {process.returncode} (expected {codes}): {said[-300:]}")
        return said

    def moment(self) -> float:
        return self.random.uniform(0.2, self.seconds)

    def acknowledged(self) -> set[tuple[str, ...]]:
        text = self.witness.read_text() if self.witness.is_file() else ""
        return {tuple(line.split("|")) for line in text.split("\n")[:-1]}

    def check_rows(self, folder: Path | None = None) -> None:
        """Every acknowledged row is in the ledger."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a row that was in flight may be cut short
            rows = Ledger((folder or self.out) / "ledger.jsonl").rows()
        lost = self.acknowledged() - {(r["session"], r["lesson"], r["name"]) for r in rows}
        if lost:
            self.said.append(f"{len(lost)} acknowledged rows are not in the ledger, such as {sorted(lost)[0]}")

    def check_kernels(self) -> None:
        """No kernel of this course lives on."""
        until = time.monotonic() + 20
        while alive := [pid for pid in kernels() if str(self.home) in environment(pid)]:
            if time.monotonic() > until:
                self.said.append(f"kernels live on: {alive}")
                return
            time.sleep(0.2)

    def resume(self) -> None:
        """Go on, and check the whole result."""
        self.check_kernels()
        self.check_rows()
        before = Run.load(self.out)
        kept = {s.name: s.seconds for s in before.lessons if s.status == "done"} if before else {}
        self.end(self.start(), 0)
        run = Run.load(self.out)
        if run is None or run.finished is None or any(s.status != "done" for s in run.lessons):
            self.said.append("not every lesson is done after going on")
            return
        again = [s.name for s in run.lessons if s.name in kept and s.seconds != kept[s.name]]
        if again:
            self.said.append(f"run again though they were done: {again}")
        for name in LESSONS:
            book = nbformat.read(self.out / "notebooks" / f"{name}.ipynb", as_version=4)
            if sum("is over" in str(cell.get("outputs")) for cell in book.cells) != 3:
                self.said.append(f"{name}: the executed notebook lacks outputs")
        if not (self.out / "report.html").is_file():
            self.said.append("no report")
        litter = [p.name for p in self.out.rglob("*.part")]
        if litter:
            self.said.append(f"half-written files are left: {litter}")
        self.check_rows()
        self.check_kernels()


def kernels() -> list[int]:
    """Process ids of notebook kernels."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"ipykernel_launcher" in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def environment(pid: int) -> str:
    """What a process was started with; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def kill_runner(course: Course) -> None:
    """kill -9 of `labkit run`"""
    process = course.start()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(course.moment())
    process.kill()
    course.end(process, -signal.SIGKILL, 0)
    course.resume()


def kill_kernel(course: Course) -> None:
    """kill -9 of the kernel"""
    process = course.start()
    time.sleep(course.moment())
    while process.poll() is None:
        mine = [pid for pid in kernels() if str(course.home) in environment(pid)]
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if mine:
            break
        time.sleep(0.02)
    said = course.end(process, 1, 0)
    if process.returncode == 1 and "failed" not in said:
        course.said.append("the lesson whose kernel died is not named")
    course.resume()


def kill_all(course: Course) -> None:
    """kill -9 of both at once (a reboot, the machine's own memory)"""
    process = course.start()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(course.moment())
    for pid in [process.pid, *(pid for pid in kernels() if str(course.home) in environment(pid))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    course.end(process, -signal.SIGKILL, 0)
    course.resume()


def stop(course: Course) -> None:
    """Ctrl-C, a closed terminal, or kill without -9"""
    process = course.start()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(course.random.uniform(3.0, course.seconds))
    how = course.random.choice((signal.SIGINT, signal.SIGHUP, signal.SIGTERM))
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(how)
    course.end(process, 130, 128 + how, -how, 0)
    course.resume()


def power_cut(course: Course) -> None:
    """the last written file is cut short or empty (power lost)"""
    process = course.start()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(course.random.uniform(5.0, course.seconds))
    process.kill()
    course.end(process, -signal.SIGKILL, 0)
    course.check_kernels()
    files = [p for p in (course.out / "run.json", *course.out.glob("notebooks/*.ipynb")) if p.is_file()]
    if files:
        victim = max(files, key=lambda p: p.stat().st_mtime_ns)
        os.truncate(victim, course.random.choice((0, victim.stat().st_size // 2)))
    with contextlib.suppress(FileNotFoundError), (course.out / "ledger.jsonl").open("ab") as file:
        file.write(b'{"kind": "fact", "les')
    course.resume()


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """A file system of so many KiB at `folder`. Raises `PermissionError` where this user may not mount one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "labkit", str(folder)], capture_output=True)
    if done.returncode:
        raise PermissionError(done.stderr.decode().strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(course: Course) -> None:
    """the disk fills up at a random moment (a tmpfs of 4 to 180 KiB, then of 16 MiB)"""
    with small_disk(course.out, course.random.randrange(4, 180, 4)):
        course.end(course.start(), 1, 2, 0)
        subprocess.run(["mount", "-o", "remount,size=16m", str(course.out)], check=True)
        course.resume()


def large_file(course: Course) -> None:
    """no file may grow beyond 4 to 60 KiB (ulimit -f)"""
    most = course.random.randrange(4, 60) << 10
    course.end(course.start(prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))), 1, 2)
    course.resume()


def read_only(course: Course) -> None:
    """the folder turns read-only in mid-run (remounted), and is one from the start"""
    with small_disk(course.out, 16 << 10):
        process = course.start()
        time.sleep(course.random.uniform(4.0, course.seconds))
        done = subprocess.run(["mount", "-o", "remount,ro", str(course.out)], capture_output=True)
        while done.returncode and process.poll() is None:
            time.sleep(0.05)
            done = subprocess.run(["mount", "-o", "remount,ro", str(course.out)], capture_output=True)
        course.end(process, 0, 1, 2)
        said = course.end(course.start(), 2)
        if "cannot write to" not in said:
            course.said.append(f"does not say what cannot be written: {said[-200:]}")
        subprocess.run(["mount", "-o", "remount,rw", str(course.out)], check=True)
        course.resume()


def clock(course: Course) -> None:
    """the clock jumps by a day or a year, to and fro, in mid-run and between two calls"""
    folder = course.home / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK)
    by = course.random.choice((-1, 1)) * course.random.choice((3600.0, 86400.0, 3.2e7))
    process = course.start(CLOCK=f"{course.random.uniform(0, course.seconds / 2)}:{by}", FIRST=str(folder))
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(course.moment())
    process.kill()
    course.end(process, -signal.SIGKILL, 0)
    course.resume()
    run = Run.load(course.out)
    if run and any((s.seconds or 0) < 0 or (s.seconds or 0) > 120 for s in run.lessons):
        course.said.append(f"a lesson's time follows the clock: {[s.seconds for s in run.lessons]}")


def two_at_once(course: Course) -> None:
    """two runs at once in one folder, started within half a second"""
    first = course.start()
    time.sleep(course.random.uniform(0, 0.5))
    second = course.start()
    said = [course.end(process, 0, 2) for process in (first, second)]
    codes = sorted((first.returncode, second.returncode))
    if codes != [0, 2] or "another run is going on" not in said[first.returncode == 0]:
        course.said.append(f"exit codes {codes}; the second said: {said[first.returncode == 0][-200:]}")
    course.resume()


def folder_gone(course: Course) -> None:
    """somebody deletes the folder of the run in mid-run"""
    process = course.start()
    while not (course.out / "run.json").is_file():
        time.sleep(0.05)
    time.sleep(course.random.uniform(0, course.seconds / 2))
    course.out.rename(course.home / "gone")
    course.end(process, 0, 1, 2)
    shutil.rmtree(course.home / "gone")
    shutil.rmtree(course.out, ignore_errors=True)
    course.witness.unlink(missing_ok=True)
    course.resume()


FAULTS = (
    kill_runner,
    kill_kernel,
    kill_all,
    stop,
    power_cut,
    full_disk,
    large_file,
    read_only,
    clock,
    two_at_once,
    folder_gone,
)


def make(home: Path, seed: int) -> Course:
    """A fresh course in the folder `home`."""
    shutil.copytree(ROOT / "labkit", home / "labkit", ignore=shutil.ignore_patterns("__pycache__", "grading"))
    (home / "notebooks").mkdir()
    for lesson in LESSONS:
        book = nbformat.v4.new_notebook(metadata={"labkit": {"title": lesson}})
        for cell, (kind, rows) in enumerate((("begin", 1), ("fact", 8), ("fact", 8)), 1):
            source = CELL.format(kind=kind, lesson=lesson, cell=cell, rows=rows)
            book.cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{cell}"))
        nbformat.write(book, home / "notebooks" / f"{lesson}.ipynb")
    return Course(home, random.Random(seed))


def trial(fault: Callable[[Course], None] | None, seed: int, seconds: float) -> Course:
    """One course, one fault; the course says what went wrong."""
    home = Path(tempfile.mkdtemp(prefix="labkit-robust-"))
    course = make(home, seed)
    course.seconds = seconds
    try:
        if fault is None:
            started = time.monotonic()
            course.end(course.start(), 0)
            course.seconds = time.monotonic() - started
            course.resume()
        else:
            fault(course)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return course


def main() -> int:
    """Every fault so many times; the exit code is 1 when one was not survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=6, help="of each fault")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    wish = parser.parse_args()
    calm = trial(None, wish.seed, 0)
    if calm.said:
        print("\n".join(calm.said))
        return 1
    lines, failed = [], 0
    for fault in FAULTS:
        if wish.only not in fault.__name__:
            continue
        said: list[str] = []
        tried = 0
        for number in range(wish.trials):
            try:
                course = trial(fault, wish.seed * 1000 + number, calm.seconds)
            except PermissionError as error:
                said.append(f"not tried here: {error}")
                break
            tried += 1
            if course.said:
                failed += 1
                said.append(f"seed {wish.seed * 1000 + number}: {'; '.join(course.said)}")
        survived = tried - sum(one.startswith("seed") for one in said)
        row = f"| {(fault.__doc__ or fault.__name__).strip()} | {tried} | {survived} | {' / '.join(said)} |"
        print(row, flush=True)
        lines.append(row)
    if not wish.only:
        write(lines, wish.seed, calm.seconds)
    return 1 if failed else 0


def write(lines: list[str], seed: int, seconds: float) -> None:
    """The table as a file."""
    said = " ".join((__doc__ or "").split("\n\n")[2].split())
    text = [
        "# What a run of the course survives", "",
        f"{said} Undisturbed the run takes {seconds:.0f} s; moments are drawn with seed {seed}."
        " Made by `make bench-robustness`.", "",
        "| fault | tried | survived | what went wrong |", "| --- | --- | --- | --- |", *lines,
    ]  # fmt: skip
    OUT.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
