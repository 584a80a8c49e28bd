"""One notebook run headless: in a kernel of this very Python, with a time limit, stopped cleanly, errors named."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import places

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Ending:
    """How a notebook ended: ``status`` (``done``, ``failed``), seconds, and where it failed and why."""

    status: str
    seconds: float
    cell: int | None = None  # counted from 1, prose included
    cell_id: str | None = None
    error: str | None = None  # one line
    traceback: str | None = None


def execute(
    path: Path,
    out: Path,
    *,
    folder: Path,
    environment: dict[str, str],
    timeout: float,
    on_cell: Callable[[int, int], None] = lambda cell, cells: None,
) -> Ending:
    """Run the notebook at `path` with the working directory `folder` and write it, with its outputs, to `out`.

    `environment` is added to the kernel's; a cell may take `timeout` seconds; `on_cell` is told the number of the cell
    that starts and how many there are. What was executed is written also when a cell fails. On Ctrl-C the kernel is
    ended and KeyboardInterrupt is raised again.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    folder.mkdir(parents=True, exist_ok=True)
    settings = Path(
        tempfile.mkdtemp(prefix="labkit-ipython-")
    )  # a start-up file of the user's must not change a lesson
    started, at = time.monotonic(), [0]

    def note(cell: Any = None, cell_index: int = 0, **_: Any) -> None:
        at[0] = cell_index + 1
        on_cell(at[0], len(notebook.cells))

    client = NotebookClient(
        notebook,
        timeout=int(timeout),
        kernel_manager_class=_manager_class(),
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=note,
    )
    failure: list[BaseException] = []

    def work() -> None:
        try:
            with (folder / "kernel.log").open("ab") as log:
                client.execute(env={**_environment(settings), **environment}, stdout=log, stderr=log)
        except BaseException as error:  # judged below, in the main thread
            failure.append(error)

    worker = threading.Thread(target=work, daemon=True)  # nbclient takes over Ctrl-C when it runs in the main thread
    worker.start()
    try:
        while worker.is_alive():
            worker.join(0.5)
    except KeyboardInterrupt:
        _kill(client)
        worker.join(20)
        raise
    finally:
        shutil.rmtree(settings, ignore_errors=True)
        if not worker.is_alive():
            atexit.unregister(client._cleanup_kernel)  # nbclient forgets this where a kernel dies as it starts
        if (folder / "kernel.log").is_file() and not worker.is_alive():
            _drop_empty_log(folder / "kernel.log")
        write(notebook, out)
    seconds = time.monotonic() - started
    if not failure:
        return Ending("done", seconds)
    cell = notebook.cells[at[0] - 1] if at[0] else None
    return Ending("failed", seconds, at[0] or None, cell.get("id") if cell else None, *_explain(failure[0], timeout))


def write(notebook: Any, path: Path) -> None:
    """Write a notebook so that a kill leaves the old file or the new one, never half of it."""
    import nbformat

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, nbformat.writes(notebook) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` in one step."""
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:  # a full disk: half a file is of no use and takes what is left of it
        partial.unlink(missing_ok=True)
        raise


def _manager_class() -> Any:
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        """Starts the Python that runs labkit, whatever kernel is installed under the name in the notebook."""

        @property
        def kernel_spec(self) -> KernelSpec:
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=command, display_name="Python 3", language="python", resource_dir="")

    return ThisPython


def _environment(settings: Path) -> dict[str, str]:
    return places.environment(IPYTHONDIR=str(settings), PYTHONUNBUFFERED="1")


def _explain(error: BaseException, timeout: float) -> tuple[str, str | None]:
    """One line that names the error, and its traceback without colours."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    if isinstance(error, CellExecutionError):
        line = f"{error.ename}: {' '.join(str(error.evalue).split())}"[:300]
        return line, _ANSI.sub("", error.traceback)
    if isinstance(error, CellTimeoutError):
        return f"took longer than {timeout:g} s", None
    if isinstance(error, DeadKernelError):
        return "the kernel died (killed, or out of the machine's own memory)", None
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300], None


def _kill(client: Any) -> None:
    process = getattr(getattr(client.km, "provisioner", None), "process", None)
    if process is not None and process.poll() is None:
        process.kill()


def _drop_empty_log(log: Path) -> None:
    """Keep a kernel's own log only when it says more than that it talks over the loopback interface."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if not [line for line in lines if line.strip() and "TCP without encryption" not in line]:
        log.unlink()


def read_json(path: Path) -> Any:
    """The JSON in a file; None when there is none or it is not readable as JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last for what is nested too deeply
        return None
