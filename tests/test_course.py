"""Running lessons headless: failures named, runs resumed, locks, time limits, and the kernel that is used."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit import course, executing, machine, progress
from labkit.guesses import Answer
from labkit.results import Ledger, Peaks, Report
from labkit.runs import Run, State
from labkit.summary import Summary
from labkit.units import GiB, UserError

NO_GPU = machine.Machine("3.11", "Linux", "2.13", None, None, None, None, None, None, 0)
# a lesson of the tests writes its row without importing torch: what it takes is the kernel's start
ROW = """
import os
from labkit.results import Ledger
ledger = Ledger(os.environ["LABKIT_RUN"] + "/ledger.jsonl")
ledger.append({{"kind": "begin", "lesson": "{0}", "session": str(os.getpid())}})
"""


@pytest.fixture(autouse=True)
def _quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "here", lambda: NO_GPU)


def notebook(folder: Path, name: str, *cells: str, title: str = "A lesson") -> Path:
    book = nbformat.v4.new_notebook(metadata={"labkit": {"title": title}})
    book.cells = [nbformat.v4.new_markdown_cell("# Title", id="title")]
    book.cells += [nbformat.v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(cells, 1)]
    folder.mkdir(exist_ok=True)
    nbformat.write(book, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def state_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {s["name"]: s for s in json.loads((folder / "run.json").read_text())["lessons"]}


def wait(condition: Callable[[], Any], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.1)


def test_a_failing_lesson_is_named_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books, out = tmp_path / "notebooks", tmp_path / "run"
    notebook(books, "00_first", ROW.format("00_first"), "import sys; print(sys.executable); print(os.getcwd())")
    notebook(books, "01_breaks", "print('before')", "1 / 0", "print('never')", title="It breaks")
    notebook(books, "02_last", ROW.format("02_last"), "open('left_behind.txt', 'w').write('x')")
    assert course.run(out=out, notebooks=books) == 1
    said = capsys.readouterr().out
    assert "failed  01_breaks, cell 3 (cell-2): ZeroDivisionError: division by zero" in said
    assert "no GPU" in said and "report.html" in said
    states = state_of(out)
    assert [s["status"] for s in states.values()] == ["done", "failed", "done"]
    assert states["01_breaks"]["title"] == "It breaks" and "division by zero" in states["01_breaks"]["traceback"]
    assert "\x1b" not in states["01_breaks"]["traceback"]
    first = nbformat.read(out / "notebooks" / "00_first.ipynb", as_version=4)
    printed = "".join(o["text"] for o in first.cells[2].outputs)
    assert printed.splitlines()[0] == sys.executable, "the kernel is this Python, whatever is installed"
    assert printed.splitlines()[1] == str(out.resolve() / "scratch" / "00_first")
    broken = nbformat.read(out / "notebooks" / "01_breaks.ipynb", as_version=4)
    assert broken.cells[1].outputs and not broken.cells[3].outputs, "what ran until the error is kept"
    assert (out / "scratch" / "02_last" / "left_behind.txt").read_text() == "x"
    assert not (out / "scratch" / "00_first").exists(), "an empty scratch folder is removed"
    assert [r["lesson"] for r in Ledger(out / "ledger.jsonl").rows()] == ["00_first", "02_last"]
    page = (out / "report.html").read_text()
    assert "It breaks" in page and "cell 3 (cell-2)" in page
    assert json.loads((out / "run.json").read_text())["finished"]


def test_an_installed_kernel_of_that_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "jupyter" / "kernels" / "python3"
    trap.mkdir(parents=True)
    (trap / "kernel.json").write_text(
        json.dumps({"argv": ["/bin/false"], "display_name": "trap", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("mine = 1")
    path = notebook(tmp_path / "n", "00_a", "assert 'mine' not in globals()")
    ending = executing.execute(path, tmp_path / "out.ipynb", folder=tmp_path / "work", environment={}, timeout=60)
    assert ending.status == "done", ending


@pytest.mark.parametrize(
    ("source", "say"),
    [("import time; time.sleep(60)", "took longer than 2 s"), ("import os; os._exit(1)", "the kernel died")],
)
def test_a_cell_that_hangs_or_kills_its_kernel(tmp_path: Path, source: str, say: str) -> None:
    path = notebook(tmp_path / "n", "00_a", "1", source)
    ending = executing.execute(path, tmp_path / "out.ipynb", folder=tmp_path / "work", environment={}, timeout=2)
    assert ending.status == "failed" and say in str(ending.error) and (ending.cell, ending.cell_id) == (3, "cell-2")
    assert (tmp_path / "out.ipynb").is_file() and ending.seconds < 40


RUNNER = """
import sys
from labkit import course, machine
from pathlib import Path
machine.here = lambda: machine.Machine("3.11", "Linux", "2.13", None, None, None, None, None, None, 0)
course._identity = lambda here: "the same"  # also while somebody edits the package
sys.exit(course.run(out=Path(sys.argv[1]), notebooks=Path(sys.argv[2])))
"""


def start(out: Path, books: Path) -> subprocess.Popen[str]:
    root = str(Path(course.__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(out), str(books)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_killed_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    books, out, gate = tmp_path / "notebooks", tmp_path / "run", tmp_path / "gate"
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('{{}} ')"
    slow = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.1)"
    notebook(books, "00_first", ROW.format("00_first"), count.format("first"))
    notebook(
        books,
        "01_slow",
        ROW.format("01_slow"),
        f"open({str(tmp_path / 'kernel')!r}, 'w').write(str(os.getpid()))",
        slow,
    )
    notebook(books, "02_last", ROW.format("02_last"), count.format("last"))
    first = start(out, books)
    wait((tmp_path / "kernel").exists)
    with pytest.raises(UserError, match="another run is going on"):
        course.run(out=out, notebooks=books, timeout=5)
    first.send_signal(how)
    first.wait(30)
    assert first.returncode != 0
    states = state_of(out)
    assert [s["status"] for s in states.values()] == ["done", "running", "pending"]
    kernel = int((tmp_path / "kernel").read_text())
    wait(lambda: not _alive(kernel), 30)
    (out / "ledger.jsonl").open("a").write('{"kind": "report", "les')  # the row in flight
    gate.write_text("")
    second = start(out, books)
    said = second.communicate(timeout=120)[0]
    assert second.returncode == 0, said
    assert (tmp_path / "count").read_text() == "first last ", "what was done is not run again"
    assert [s["status"] for s in state_of(out).values()] == ["done"] * 3 and "kept" in said
    with pytest.warns(UserWarning, match="not a complete row"):
        rows = Ledger(out / "ledger.jsonl").rows()
    assert [r["lesson"] for r in rows] == ["00_first", "01_slow", "01_slow", "02_last"]
    assert "is not a complete row" in (out / "report.html").read_text()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Ran(list[str]):
    """A stand-in for the kernel: which lessons were run."""

    def __call__(self, path: Path, out: Path, **_: Any) -> executing.Ending:
        self.append(path.stem)
        out.parent.mkdir(exist_ok=True)
        out.write_text("{}")
        status = "failed" if path.stem in self.failing else "done"
        return (
            executing.Ending(status, 1.0, 2, "cell-1", "ValueError: no")
            if status == "failed"
            else executing.Ending(status, 1)
        )

    failing: tuple[str, ...] = ()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    made = Ran()
    monkeypatch.setattr(executing, "execute", made)
    return made


def test_a_lesson_that_changed_runs_again_and_others_are_kept(tmp_path: Path, ran: Ran) -> None:
    books, out = tmp_path / "notebooks", tmp_path / "run"
    notebook(books, "00_a", "1")
    notebook(books, "01_b", "1")
    assert course.run(out=out, notebooks=books) == 0
    notebook(books, "01_b", "2")
    assert course.run(out=out, notebooks=books) == 0
    assert ran == ["00_a", "01_b", "01_b"]
    assert course.run(out=out, notebooks=books, resume=False) == 0
    assert ran[3:] == ["00_a", "01_b"]


def test_a_lesson_whose_executed_notebook_is_gone_runs_again(
    tmp_path: Path, ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    books, out = tmp_path / "notebooks", tmp_path / "run"
    notebook(books, "00_a", "1")
    notebook(books, "01_b", "1")
    assert course.run(out=out, notebooks=books) == 0
    (out / "notebooks" / "01_b.ipynb").unlink()
    capsys.readouterr()
    assert course.run(out=out, notebooks=books) == 0
    assert ran == ["00_a", "01_b", "01_b"] and capsys.readouterr().out.count("kept") == 1


@pytest.mark.parametrize("name", ["LABKIT_BUDGET", "LABKIT_CARD"])
def test_a_wrong_setting_leaves_no_folder(tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    notebook(tmp_path / "notebooks", "00_a", "1")
    monkeypatch.setenv(name, "foo")
    with pytest.raises(UserError, match="foo"):
        course.run(out=tmp_path / "run", notebooks=tmp_path / "notebooks")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 0.5, -1])
def test_a_time_limit_that_is_none_is_one_sentence(tmp_path: Path, ran: Ran, timeout: float) -> None:
    notebook(tmp_path / "notebooks", "00_a", "1")
    with pytest.raises(UserError, match="a cell may take"):
        course.run(out=tmp_path / "run", notebooks=tmp_path / "notebooks", timeout=timeout)


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "run.json").write_text("before")
    with pytest.raises(OSError, match="No space"):
        executing.write_text(tmp_path / "run.json", "after")
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"] and (tmp_path / "run.json").read_text() == "before"


def test_another_machine_or_budget_keeps_nothing(tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    books, out = tmp_path / "notebooks", tmp_path / "run"
    notebook(books, "00_a", "1")
    course.run(out=out, notebooks=books)
    monkeypatch.setenv("LABKIT_BUDGET", "4GiB")
    course.run(out=out, notebooks=books)
    other = machine.Machine(
        "3.11", "Linux", "2.13", "13.0", "580", "13.0", "NVIDIA GeForce RTX 2070", (7, 5), 8 * GiB, 1
    )
    monkeypatch.setattr(machine, "here", lambda: other)
    monkeypatch.setattr(machine, "default_budget", lambda: 7 * GiB)
    course.run(out=out, notebooks=books)
    assert ran == ["00_a"] * 3


def test_by_default_an_unfinished_run_goes_on_and_a_finished_one_does_not(
    tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    for name in ("00_a", "01_b"):
        notebook(tmp_path / "notebooks", name, "1")
    ran.failing = ("01_b",)
    assert course.run() == 1
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 1 and runs[0].name.endswith("-nogpu")
    ran.failing = ()
    assert course.run() == 0 and ran == ["00_a", "01_b", "01_b"]
    assert f"going on in {runs[0].name}" in capsys.readouterr().out
    assert course.run() == 0 and len(list((tmp_path / "runs").iterdir())) == 2
    assert course.run(["01"]) == 0 and ran[-1] == "01_b" and len(list((tmp_path / "runs").iterdir())) == 3


def test_lessons_are_chosen_by_number_name_or_file(tmp_path: Path) -> None:
    for name in ("00_environment", "01_baseline_oom", "10_inference"):
        notebook(tmp_path, name, "1")

    def chosen(*wanted: str) -> list[str]:
        return [p.stem for p in course.choose(wanted, tmp_path)]

    assert chosen() == ["00_environment", "01_baseline_oom", "10_inference"]
    assert chosen("10", "1", "01_baseline_oom") == ["01_baseline_oom", "10_inference"]
    assert chosen("notebooks/00_environment.ipynb") == ["00_environment"]
    for wrong in ("2", "baseline", "", "01_baseline"):
        with pytest.raises(UserError, match="unknown lesson .*00_environment, 01_baseline_oom, 10_inference"):
            chosen(wrong)
    with pytest.raises(UserError, match="no lessons in"):
        course.choose([], tmp_path / "empty")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, ran: Ran) -> None:
    notebook(tmp_path / "notebooks", "00_a", "1")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        course.run(out=tmp_path / "file" / "run", notebooks=tmp_path / "notebooks")


def _state(lesson: dict[str, Any] | None = None, **changes: Any) -> str:
    one = {"name": "00_a", "title": "A", "made_of": "x", **(lesson or {})}
    return json.dumps({"started": "2026-12-01T10:22:00Z", "machine": {}, "line": "", "lessons": [one], **changes})


def test_a_sound_state_is_read(tmp_path: Path) -> None:
    machine_of = {"card": "x", "capability": [7, 5], "memory_bytes": 8 * GiB}
    (tmp_path / "run.json").write_text(_state({"seconds": 3, "status": "done"}, machine=machine_of))
    assert Run.load(tmp_path) is not None


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", '{"lessons": [{"nom": 1}]}', "null", "[" * 100_000, _state(started=None), _state(line=3),
        _state(machine=None), _state(machine={"card": "x", "capability": 3}), _state(machine={"memory_bytes": "8"}),
        _state(lessons=None), _state({"name": 3}), _state({"seconds": "long"}), _state({"seconds": float("nan")}),
        _state({"title": None}), _state({"status": ["done"]}), _state(finished=1),
    ],
)  # fmt: skip
def test_a_damaged_state_starts_anew(tmp_path: Path, ran: Ran, damage: str) -> None:
    notebook(tmp_path / "notebooks", "00_a", "1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(damage)
    assert Run.load(tmp_path / "run") is None
    assert course.run(out=tmp_path / "run", notebooks=tmp_path / "notebooks") == 0 and ran == ["00_a"]


def summary() -> Summary:
    answers = tuple(Answer(str(i), "?", "GiB", float(g), None, 10.0, "measured") for i, g in enumerate((10, 9, 30)))
    fits = Report("a", "ok", "measured", "x", steady=Peaks(GiB, GiB, GiB))
    return Summary("00_a", (fits, Report("b", "oom", "measured", "x")), answers)


def test_the_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.table("the machine", ["00_a", "01_b"]) as table:
        table.start("00_a")
        table.cell("00_a", 3, 9)
        table.end(State("00_a", "A", "x", "done", 72.4), summary())
        table.end(State("01_b", "B", "x", "failed", 1.0), None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the machine" and lines[1].split() == list(progress.HEAD)
    assert lines[2].split("  ")[0].strip() == "00 a" and "1:12" in lines[2]
    assert "1.00 GiB, 1 OOM" in lines[2] and "2/3 in 20 %" in lines[2]
    assert "failed" in lines[3]


def test_the_live_table_shows_where_a_lesson_is() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    live = progress._Live("the machine", ["00_a", "01_b"], console)
    live.start("00_a")
    live.cell("00_a", 14, 41)
    console.print(live)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "running" in shown and "####--------" in shown and "cell 14/41" in shown and "pending" in shown
    live.end(State("00_a", "A", "x", "done", 5.0), summary(), again=True)
    console.print(live)
    assert "kept" in console.file.getvalue()  # type: ignore[attr-defined]
