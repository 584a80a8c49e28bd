"""Run lessons headless on this machine: a live table, a folder of results, and a report at the end.

A run is a folder: executed notebooks in ``notebooks/``, every row in ``ledger.jsonl``, the state in ``run.json``, the
page ``report.html``, and what lessons leave behind in ``scratch/``. Everything is written as it happens and in one
step, so a kill costs the lesson in flight and nothing else; the next call goes on where the run stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import __version__, executing, machine, places, progress, report, summary
from .results import Ledger
from .runs import Run, State
from .units import UserError

CELL_SECONDS = 1200.0


def run(
    lessons: Sequence[str] = (),
    *,
    out: Path | str | None = None,
    resume: bool = True,
    timeout: float = CELL_SECONDS,
    notebooks: Path | None = None,
) -> int:
    """Run `lessons` (names, numbers such as ``"01"``; all by default) and return the exit code: 1 when one failed.

    `out` is the run's folder, a new one in runs/ by default. With `resume`, the newest unfinished run of the same
    lessons goes on, and what is done there stays. `timeout` is what one cell may take, in seconds. Raises `UserError`
    for an unknown lesson, a time that is none, a wrong ``LABKIT_BUDGET`` or ``LABKIT_CARD``, a folder that cannot be
    written, and a folder in which another run is going on.
    """
    if not 1 <= timeout <= 10**7:  # also refuses nan
        raise UserError(f"a cell may take from 1 to 10000000 seconds, not {timeout:g}")
    books = choose(lessons, notebooks or places.home() / "notebooks")
    here = machine.here()
    line = f"labkit {__version__}  ·  {here.line()}"  # raises for a wrong budget or card, before a folder is made
    identity = _identity(here)
    states = tuple(State(path.stem, _title(path), _made_of(path, identity)) for path in books)
    folder = Path(out).expanduser() if out else _folder(states, here, resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            return _run(folder.resolve(), states, books, asdict(here), line, resume, timeout)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def choose(wanted: Sequence[str], folder: Path) -> list[Path]:
    """The notebooks in `folder` that are meant, in order. Raises `UserError` naming the lessons when one is unknown."""
    books = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not books:
        raise UserError(f"no lessons in {folder}: run this inside the course's folder, or set LABKIT_HOME to it")
    chosen = {}
    for wish in wanted or books:
        name = Path(wish).stem if wish.endswith((".ipynb", ".py")) else wish
        found = [b for b in books if b == name or (name.isdigit() and b.split("_")[0] == name.zfill(2))]
        if not found:
            raise UserError(f"unknown lesson {wish!r}: {', '.join(books)}")
        chosen[found[0]] = books[found[0]]
    return [chosen[name] for name in sorted(chosen)]


def _run(
    folder: Path,
    states: tuple[State, ...],
    books: list[Path],
    here: dict[str, Any],
    line: str,
    resume: bool,
    timeout: float,
) -> int:
    before = Run.load(folder)
    done = [s for s in before.lessons if s.status == "done"] if before and resume else []
    wanted = {(s.name, s.made_of) for s in states}
    there = [s for s in done if (folder / "notebooks" / f"{s.name}.ipynb").is_file()]
    kept = {s.name: s for s in there if (s.name, s.made_of) in wanted}
    states = tuple(kept.get(s.name, s) for s in states)
    now = Run(before.started if before and kept else _now(), here, line, states)
    now.save(folder)
    ledger = Ledger(folder / "ledger.jsonl")
    with progress.table(line, [s.name for s in states]) as table:
        for path, state in zip(books, states, strict=True):
            if state.status != "done":
                state = replace(state, status="running")
                now = now.changed(state)
                now.save(folder)
                table.start(state.name)
                state = _lesson(folder, path, state, timeout, table)
                now = now.changed(state)
                now.save(folder)
            table.end(state, _summaries(ledger).get(state.name), again=state.name in kept)
    now = replace(now, finished=_now())
    now.save(folder)
    page = report.write(folder)
    failed = [s for s in now.lessons if s.status == "failed"]
    progress.ending(page, [(s.name, s.where()) for s in failed])
    return 1 if failed else 0


def _lesson(folder: Path, path: Path, state: State, timeout: float, table: progress.Table) -> State:
    scratch = folder / "scratch" / path.stem
    if scratch.is_dir():
        shutil.rmtree(scratch)
    environment = {"LABKIT_RUN": str(folder), "LABKIT_HOME": str(places.home())}
    ending = executing.execute(
        path,
        folder / "notebooks" / path.name,
        folder=scratch,
        environment=environment,
        timeout=timeout,
        on_cell=lambda cell, cells: table.cell(state.name, cell, cells),
    )
    if scratch.is_dir() and not any(scratch.iterdir()):
        scratch.rmdir()
    return replace(
        state,
        status=ending.status,
        seconds=round(ending.seconds, 1),
        cell=ending.cell,
        cell_id=ending.cell_id,
        error=ending.error,
        traceback=ending.traceback,
    )


def _summaries(ledger: Ledger) -> dict[str, summary.Summary]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a broken line is said once, by the report
        return summary.by_lesson(ledger.rows())


def _folder(states: tuple[State, ...], here: machine.Machine, resume: bool) -> Path:
    """The newest run in runs/ that these lessons can go on in, or the name of a new one."""
    runs = places.home() / "runs"
    if resume and runs.is_dir():
        for folder in sorted((p for p in runs.iterdir() if p.name != "interactive"), reverse=True):
            old = Run.load(folder)
            if old is None or [s.name for s in old.lessons] != [s.name for s in states]:
                continue
            unfinished = old.finished is None or any(s.status != "done" for s in old.lessons)
            same = {s.made_of for s in old.lessons if s.status == "done"} & {s.made_of for s in states}
            if unfinished and (same or not any(s.status == "done" for s in old.lessons)):
                print(f"going on in {folder.name} (--fresh starts anew)")
                return folder
            break
    card = re.sub(r"nvidia|geforce|tesla|[^a-z0-9]+", "", (here.card or "no gpu").lower())
    name = f"{time.strftime('%Y-%m-%dT%H-%M')}-{card}"
    again = 1
    while (runs / name).exists():
        again += 1
        name = f"{time.strftime('%Y-%m-%dT%H-%M')}-{card}-{again}"
    return runs / name


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held while a run writes to `folder`; the system lets go of it when the process ends, however it ends."""
    with (folder / ".lock").open("a+") as file:
        try:
            if os.name == "nt":
                import msvcrt

                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another run is going on in {folder}: wait for it, or choose another folder") from None
        yield


def _identity(here: machine.Machine) -> str:
    """What besides the notebook decides a lesson's numbers: this package's source, the machine, the budget."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update(repr((here, os.environ.get("LABKIT_BUDGET"), os.environ.get("LABKIT_CARD"))).encode())
    return digest.hexdigest()


def _made_of(path: Path, identity: str) -> str:
    return hashlib.sha256(path.read_bytes() + identity.encode()).hexdigest()[:16]


def _title(path: Path) -> str:
    found = executing.read_json(path)
    try:
        return str(found["metadata"]["labkit"]["title"])
    except (TypeError, KeyError):
        return path.stem.replace("_", " ")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
