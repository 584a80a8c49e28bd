"""Grading goes on where it stopped: what is kept, what is graded again and why, what goes; one grader at a time; and
what the machine does wrong is no student's fault."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from grading_samples import HOME, NAME, NUMBER, course, hand_in, solved

from labkit import cli
from labkit.grading import grader, occupied, outcomes, sandbox, scratch, single
from labkit.grading.outcomes import ExerciseResult, SubmissionResult
from labkit.units import UserError

OTHER = "01_baseline_oom"
QUICK = grader.Options(exercises_only=True)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grading without running anything: who was graded, in order. A student's points are the digits in the name."""
    found: list[str] = []

    def graded(course_, lesson, submission, *_):
        student = submission.entry.student
        found.append(f"{student} {lesson.name[:2]}")
        points = float("".join(c for c in student if c.isdigit()) or 0)
        tasks = [
            ExerciseResult(student, lesson.name, t.name, points, t.maximum, "partial", "so so") for t in lesson.tasks
        ]
        return SubmissionResult(student, lesson.name, submission.entry.relative, tuple(tasks))

    monkeypatch.setattr(single, "graded", graded)
    monkeypatch.setattr(grader, "require", lambda: None)
    monkeypatch.setattr(grader.session, "modules", lambda *_: [])
    for pages in (grader.feedback, grader.summary):
        monkeypatch.setattr(pages, "write", lambda out: None)
    monkeypatch.setattr(grader.Course, "digest", lambda self, lesson: str(self.files[lesson].read_bytes()))
    return found


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two submissions, where results go, and a course."""
    for student in ("ada", "bob"):
        hand_in(tmp_path / "in", student, solved())
    return tmp_path / "in", tmp_path / "out", course(tmp_path / "course")


def rows(out: Path) -> list[tuple[str, str]]:
    with (out / "scores.csv").open() as file:
        return [(row["student"], row["lesson"]) for row in csv.DictReader(file)]


def test_nothing_changed_nothing_run(place, ran, capsys):
    folder, out, home = place
    for _ in range(2):
        grader.grade(folder, out, home=home, options=QUICK)
    said = capsys.readouterr().out
    assert ran == ["ada 00", "bob 00"] and said.count("kept") == 2
    assert [line for line in said.splitlines() if line.startswith("notebooks")] == [
        "notebooks to grade: 2; graded before: 0",
        "notebooks to grade: 0; graded before: 2",
    ]
    grader.grade(folder, out, home=home, options=grader.Options(exercises_only=True, fresh=True))
    assert len(ran) == 4 and "changed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cell_seconds": 600}, "--timeout"),
        ({"answer_seconds": 60}, "the seconds of an answer"),
        ({"walled": False}, "--no-sandbox, the sandbox's limits"),
        ({"limits": sandbox.Limits(processes=9)}, "the sandbox's limits"),
        ({"exercises_only": True}, "--exercises-only, --timeout"),
        ({"LABKIT_CARD": "t4"}, "LABKIT_CARD"),
        ({"LABKIT_BUDGET": "6GiB"}, "LABKIT_BUDGET"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "the machine's card"),
        ({f"lessons/{NAME}.py": "\n"}, "the lesson, or labkit"),
        ({f"instructor/hidden/{NAME}.py": "\n"}, "the hidden tests"),
        ({"data/models/new.bin": "weights"}, "data/"),
    ],
)
def test_what_decides_a_score_has_it_graded_again_and_is_said(place, ran, capsys, monkeypatch, changed, said):
    folder, out, home = place
    for name in ("LABKIT_CARD", "LABKIT_BUDGET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    grader.grade(folder, out, home=home)
    ((name, value),) = changed.items()
    if "/" in name:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        with (home / name).open("a") as file:
            file.write(value)
    elif name.isupper():
        monkeypatch.setenv(name, value)
    options = {} if "/" in name or name.isupper() else changed
    grader.grade(folder, out, home=home, options=grader.Options(**options))
    assert f"graded again: 2 results; changed: {said}\n" in capsys.readouterr().out
    assert ran == ["ada 00", "bob 00"] * 2


def test_a_change_grades_again_what_it_affects_alone(place, ran, capsys):
    folder, out, home = place
    for part in (f"lessons/{OTHER}.py", f"instructor/hidden/{OTHER}.py"):
        (home / part).write_bytes((HOME / part).read_bytes())
    hand_in(folder, "ada", (HOME / "notebooks" / f"{OTHER}.ipynb").read_bytes(), f"{OTHER}.ipynb")
    grader.grade(folder, out, home=home, options=QUICK)
    ran.clear()
    grader.grade(folder, out, home=home, options=grader.Options(exercises_only=True, cell_seconds=9))
    assert not ran, "how long a cell may take decides nothing when no notebook is run again"
    with (home / "instructor" / "hidden" / f"{OTHER}.py").open("a") as file:
        file.write("\n")
    hand_in(folder, "bob", solved(**{NUMBER: "product_rate = 3"}))
    hand_in(folder, "eve", solved())
    capsys.readouterr()
    grader.grade(folder, out, home=home, options=QUICK)
    assert sorted(ran) == ["ada 01", "bob 00", "eve 00"]
    said = capsys.readouterr().out
    assert "graded again: 1 result; changed: the hidden tests\n" in said
    assert "graded again: 1 result; changed: the file handed in\n" in said


def test_a_result_that_grading_failed_on_is_made_again(place, ran, capsys, monkeypatch):
    folder, out, home = place
    with monkeypatch.context() as patch:
        patch.setattr(single, "graded", lambda *_: 1 / 0)
        assert grader.grade(folder, out, home=home, options=QUICK) == 1
    assert grader.grade(folder, out, home=home, options=QUICK) == 0
    assert ran == ["ada 00", "bob 00"] and "failed the last time" in capsys.readouterr().out


def test_rows_go_with_their_files_and_those_of_other_folders_stay(place, ran, capsys, tmp_path):
    folder, out, home = place
    hand_in(folder, "eve", "no notebook", "homework.ipynb")
    hand_in(tmp_path / "week 2", "zoe", solved())
    grader.grade(folder, out, home=home, options=QUICK)
    grader.grade(tmp_path / "week 2", out, home=home, options=QUICK)
    assert set(rows(out)) == {("ada", NAME), ("bob", NAME), ("eve", "homework"), ("zoe", NAME)}
    (folder / "eve" / "homework.ipynb").unlink()
    hand_in(folder, "eve", solved())
    for file in (folder / "bob").iterdir():
        file.unlink()
    capsys.readouterr()
    grader.grade(folder, out, home=home, options=QUICK)
    assert set(rows(out)) == {("ada", NAME), ("eve", NAME), ("zoe", NAME)}
    said = capsys.readouterr().out
    assert f"removed, the file is not there any more: bob {NAME}, eve homework\n" in said
    assert "not graded: bob/: empty" in said and not (out / "results" / "bob").exists()


def test_one_grader_at_a_time_and_a_dead_ones_lock_is_none(place, ran):
    folder, out, home = place
    source = (
        "import sys, time\nfrom pathlib import Path\nfrom labkit.grading import occupied\n"
        f"with occupied.only(Path({str(out)!r})):\n    print('in', flush=True)\n    time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    other = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, env=environment)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"in\n"
        with pytest.raises(UserError, match=rf"is in use: process {other.pid} on .* since .* wait until it is through"):
            grader.grade(folder, out, home=home, options=QUICK)
        assert not ran
    finally:
        other.kill()
        other.wait()
    grader.grade(folder, out, home=home, options=QUICK)
    assert len(ran) == 2


def test_folders_of_a_killed_grader_go_with_the_next_start_and_no_others(place, ran, tmp_path, monkeypatch):
    folder, out, home = place
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = (
        "import time\nfrom labkit.grading import scratch\nprint(scratch.make('trusted'), flush=True)\ntime.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(HOME), "TMPDIR": str(tmp_path)}
    other = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert other.stdout is not None
        theirs, mine = Path(other.stdout.readline().strip()), Path(scratch.make("trial"))
        (theirs / "run").mkdir()
        (tmp_path / f"{scratch.PREFIX}link").symlink_to(home)
        grader.grade(folder, out, home=home, options=QUICK)
        assert theirs.is_dir() and mine.is_dir(), "their makers are alive"
    finally:
        other.kill()
        other.wait()
    grader.grade(folder, out, home=home, options=QUICK)
    assert not theirs.exists() and mine.is_dir() and (home / "lessons").is_dir()
    scratch.remove(str(mine))
    assert not [p for p in tmp_path.glob(f"{scratch.PREFIX}*") if not p.is_symlink()]


@pytest.mark.parametrize("where", ["/proc/graded", "/dev/null", "/dev/null/graded"])
def test_results_that_cannot_be_written_anywhere_are_one_line(place, ran, capsys, monkeypatch, where):
    folder, _, home = place
    monkeypatch.setenv("LABKIT_HOME", str(home))
    with pytest.raises(SystemExit) as ended:
        cli.main(["grade", str(folder), "--out", where])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and not ran
    assert said.startswith(f"labkit: cannot write to {where}: ") and said.count("\n") == 1


@pytest.mark.parametrize("file", [f"results/bob/{NAME}.json", "scores.csv"])
def test_a_full_disk_is_the_machines_and_grading_goes_on_when_there_is_room(place, ran, file):
    folder, out, home = place
    for student in ("cid1", "dan1", "eve1"):
        hand_in(folder, student, solved())
    (out / file).parent.mkdir(parents=True)
    (out / f"{file}.part").symlink_to("/dev/full")
    with pytest.raises(occupied.Stopped, match="No space left on device. That is this machine's, no student's fault"):
        grader.grade(folder, out, home=home, options=QUICK)
    there = outcomes.load_all(out)
    assert {e.status for r in there for e in r.exercises} <= {"partial"}, "nobody has a status for it"
    assert "bob" not in {r.student for r in there} or file == "scores.csv"
    grader.grade(folder, out, home=home, options=QUICK)
    assert {student for student, _ in rows(out)} == {"ada", "bob", "cid1", "dan1", "eve1"}
    assert sorted(set(ran)) == ["ada 00", "bob 00", "cid1 00", "dan1 00", "eve1 00"]


def test_an_error_is_the_machines_by_its_number_or_when_a_disk_is_full(tmp_path, monkeypatch):
    try:
        try:
            raise OSError(28, "No space left on device", "/tmp/x")
        except OSError as cause:
            raise RuntimeError("cannot judge") from cause
    except RuntimeError as error:
        assert occupied.the_machines(error).errno == 28
        assert "/tmp/x: No space left" in str(occupied.unwritable(tmp_path, occupied.the_machines(error)))
    assert occupied.the_machines(FileNotFoundError(2, "no file")) is None and occupied.the_machines(None) is None
    assert occupied.full(tmp_path) is None
    monkeypatch.setattr(occupied, "ROOM_BYTES", 2**62)
    assert occupied.full(tmp_path).errno == 28


def test_what_ends_the_run_leaves_no_result_of_what_was_in_flight(place, ran, monkeypatch):
    """Ctrl-C ends the processes that an answer needs: what then fails is nobody's."""
    folder, out, home = place
    entered, freed = threading.Event(), threading.Event()

    def graded(*_):
        entered.set()
        freed.wait(60)
        raise RuntimeError("its process is gone")

    def interrupted(futures):
        entered.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(single, "graded", graded)
    monkeypatch.setattr(grader, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt, match="0 of 2 notebooks are graded; the same command goes on from there"):
        grader.grade(folder, out, home=home, options=QUICK)
    freed.set()
    for thread in [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]:
        thread.join(60)
    assert [file.name for file in out.rglob("*.json")] == ["not-graded.json"]


@contextlib.contextmanager
def grading(folder: Path, out: Path, home: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "labkit.cli", "grade", str(folder), "--out", str(out), "--exercises-only"]
    environment = {**os.environ, "LABKIT_HOME": str(home), "PYTHONPATH": str(HOME)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def _below(top: int) -> list[int]:
    """The processes below one, by what /proc says."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [top]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


@pytest.mark.grading
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_stopped_halfway_and_given_again_it_gives_the_same_scores(tmp_path, ending):
    if sandbox.why_not():
        pytest.fail(f"no sandbox: {sandbox.why_not()}")
    folder, home = tmp_path / "in", course(tmp_path / "course")
    wrong = {NUMBER: "product_rate = 12.0"}
    for student, made in (("a", solved()), ("b", solved(**wrong)), ("c", "{"), ("d", solved(slow_print=""))):
        hand_in(folder, student, made)
    with grading(folder, tmp_path / "whole", home) as process:
        out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    with grading(folder, tmp_path / "halves", home) as process:
        assert process.stdout is not None
        while "[1/4]" not in process.stdout.readline():
            pass
        started = _below(process.pid)
        process.send_signal(ending)
        _, err = process.communicate(timeout=300)
    assert not (tmp_path / "halves" / "scores.csv").exists() and started
    if ending == signal.SIGINT:
        assert process.returncode == 130
        (line,) = err.strip().splitlines()
        assert line.startswith("labkit: interrupted: ") and line.endswith(
            "of 4 notebooks are graded; the same command goes on from there"
        )
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()], "nothing goes on when the grader is gone"
    with grading(folder, tmp_path / "halves", home) as process:
        out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert out.count("kept") >= 1
    assert (tmp_path / "halves" / "scores.csv").read_text() == (tmp_path / "whole" / "scores.csv").read_text()
