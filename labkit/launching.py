"""Several processes of one job, started with torchrun from a notebook; what each rank returns comes back.

    def worker(size):
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.full((size,), float(dist.get_rank()))
        dist.all_reduce(x)
        return {"sum": x[0].item()}

    rows = launching.torchrun(worker, processes=2, size=4)   # [{"rank": 0, "sum": 1.0}, {"rank": 1, "sum": 1.0}]

The function travels by value (cloudpickle), so it may be defined in a notebook, and imports what it needs itself: a
process that uses CUDA cannot be forked from a notebook's kernel. It is the same `torch.distributed.run` that
``torchrun train.py`` calls, with a free port of this machine for the rendezvous.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import places
from .units import UserError

MOST_PROCESSES = 64


def torchrun(
    worker: Callable[..., dict[str, Any]],
    processes: int,
    *,
    timeout: float = 300,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Call ``worker(**arguments)`` in each of `processes` processes; what each returned, by rank, with its ``rank``.

    A worker finds ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` in its environment, to which `environment` is added, and
    returns a dict of JSON values (or None). The processor's cores are shared out. Raises `UserError` for a number of
    processes that is none; `TimeoutError` after `timeout` seconds, when all are ended; `RuntimeError` with the rank,
    the error and the end of its traceback when a worker fails.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= MOST_PROCESSES:
        raise UserError(f"processes must be a whole number from 1 to {MOST_PROCESSES}, not {processes!r}")
    with tempfile.TemporaryDirectory(prefix="labkit-ranks-") as name:
        folder = Path(name)
        (folder / "task").write_bytes(_by_value(worker, arguments))
        said = _run(_command(processes, folder), _environment(processes, environment), timeout)
        return _collected(folder, processes, said)


def _by_value(worker: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    """The task, with the code of the worker's own module in it: the other processes may not find that module."""
    import cloudpickle

    module = sys.modules.get(worker.__module__)
    if module is None or module.__name__ == "__main__":  # goes by value anyway
        return bytes(cloudpickle.dumps((worker, arguments)))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((worker, arguments)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _command(processes: int, folder: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, "-m", "labkit.launching", str(folder)]


def _environment(processes: int, extra: dict[str, str] | None) -> dict[str, str]:
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    return places.environment(OMP_NUM_THREADS=threads, **(extra or {}))


def _run(command: list[str], environment: dict[str, str], timeout: float) -> str:
    """What launcher and workers said together. All of them form one group, which ends as one."""
    job = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the processes were not done after {timeout:g} s and were ended") from None
    finally:  # also on Ctrl-C; workers are in sessions of their own and end with their launcher's SIGTERM
        if job.poll() is None:
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.communicate(timeout=35)  # the launcher gives its workers 30 s
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(job.pid, signal.SIGKILL)
    return said


def _collected(folder: Path, processes: int, said: str) -> list[dict[str, Any]]:
    failed = sorted(folder.glob("rank-*.error"), key=lambda file: file.stat().st_mtime_ns)
    if failed:  # the first is the cause; the others fail because it is gone
        rank = failed[0].stem.split("-")[1]
        raise RuntimeError(f"rank {rank} of {processes} failed: {failed[0].read_text()}")
    rows = [folder / f"rank-{rank}.json" for rank in range(processes)]
    missing = [row.stem for row in rows if not row.exists()]
    if missing:
        end = "\n".join(said.strip().splitlines()[-8:])
        raise RuntimeError(f"{', '.join(missing)} ended without a result\n{end}")
    return [{"rank": rank, **json.loads(row.read_text())} for rank, row in enumerate(rows)]


def _main(folder: Path) -> int:
    """What each process runs: the worker, and then the end of the process group that it left open."""
    import cloudpickle
    import torch.distributed as dist

    rank = os.environ["RANK"]
    try:
        worker, arguments = cloudpickle.loads((folder / "task").read_bytes())
        (folder / f"rank-{rank}.part").write_text(json.dumps(worker(**arguments) or {}))
    except BaseException as error:
        end = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
        (folder / f"rank-{rank}.error").write_text(f"{type(error).__name__}: {error}\n{end}")
        return 1
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    (folder / f"rank-{rank}.part").replace(folder / f"rank-{rank}.json")
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
