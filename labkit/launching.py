"""Several processes of one job, started with torchrun from a notebook; what each rank returns comes back.

    def worker(size):
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.full((size,), float(dist.get_rank()))
        dist.all_reduce(x)
        return {"sum": x[0].item()}

    rows = launching.torchrun(worker, processes=2, size=4)   # [{"rank": 0, "sum": 1.0}, {"rank": 1, "sum": 1.0}]

    ranks = launching.Ranks(2)                               # started once, called as often as you like
    rows = ranks.run(worker, size=4)

The function travels by value (cloudpickle), so it may be defined in a notebook; modules that it names are imported
where it runs: a process that uses CUDA cannot be forked from a notebook's kernel. It is the same
`torch.distributed.run` that ``torchrun train.py`` calls, with a free port of this machine for the rendezvous.

A rank that fails, dies or is not done in time ends the whole job, since the others would wait for it in their next
collective; the error names the rank and says where it was. The next call starts a new job. When the process that
started them ends, however it ends, they end too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection as wire
from pathlib import Path
from typing import Any

from . import places
from .units import UserError

MOST_PROCESSES = 64
START_SECONDS = 180  # until all processes have imported what they need to say hello
LEAVE_SECONDS = 15  # for leaving a process group
KEY = "LABKIT_RANKS_KEY"
# NVLink multicast, where a host has it: what two ranks gain by it is little, it takes memory outside the allocator,
# and this module ends ranks by force, which must not leave a multicast group behind on the host.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class RankError(RuntimeError):
    """A rank failed or died: ``rank`` says which; the job has ended."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def torchrun(
    worker: Callable[..., dict[str, Any]],
    processes: int,
    *,
    timeout: float = 300,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Call ``worker(**arguments)`` once in each of `processes` new processes: `Ranks`, started, run and closed.

    Returns and raises what `Ranks.run` does.
    """
    with Ranks(processes, environment=environment) as ranks:
        return ranks.run(worker, timeout=timeout, **arguments)


class Ranks:
    """`processes` processes of one torchrun job that wait for workers.

    They start at once and in the background. A worker finds ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` in its
    environment, to which `environment` is added; the processor's cores are shared out. What one call leaves behind in
    a process (a process group, memory) the next one finds. They end with `close`, with this process, and with a `with`
    block. Everything in this process's own environment is handed on; `NO_MULTICAST` is set where nothing else is.
    Each process imports the modules `imports` while nothing is asked of it yet. Raises `UserError` for a number of
    processes that is none.
    """

    def __init__(self, processes: int, *, environment: dict[str, str] | None = None, imports: Sequence[str] = ()):
        if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= MOST_PROCESSES:
            raise UserError(f"processes must be a whole number from 1 to {MOST_PROCESSES}, not {processes!r}")
        self.processes = processes
        self._start = functools.partial(_Job, processes, environment, tuple(imports))
        self._job: _Job | None = self._start()

    def run(
        self, worker: Callable[..., dict[str, Any] | None], *, timeout: float = 300, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Call ``worker(**arguments)`` in every process; what each returned, by rank, with its ``rank``.

        A worker returns a dict of JSON values (or None); what it prints is not shown. Raises `TimeoutError` after
        `timeout` seconds (starting not counted), with the calls in which each rank was that had not answered;
        `RankError` with the rank, the error and the end of its traceback when a worker fails, or when a process dies.
        All processes are ended then, and the next call starts new ones.
        """
        if self._job is None:
            self._job = self._start()
        try:
            return self._job.run(_by_value(worker, arguments), timeout)
        except BaseException:  # also on Ctrl-C: ranks that are out of step cannot be used again
            self.close(kindly=False)
            raise

    def close(self, kindly: bool = True) -> None:
        """End the processes; `kindly` lets them leave their process group by themselves first."""
        job, self._job = self._job, None
        if job is not None:
            job.end(kindly)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(kindly=kind is None)


class _Job:
    """One torchrun with its processes, each at the other end of a connection."""

    def __init__(self, processes: int, extra: dict[str, str] | None, imports: tuple[str, ...]):
        self.processes = processes
        self._folder = tempfile.TemporaryDirectory(prefix="labkit-ranks-")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=processes)
        self._key = os.urandom(16)
        self._connections: dict[int, Any] = {}
        self._pids: dict[int, int] = {}
        self._log = open(Path(self._folder.name, "said"), "w+", errors="replace")  # noqa: SIM115 - lives with the job
        port = self._listener.getsockname()[1]
        self._process = subprocess.Popen(
            _command(processes, port, self._folder.name, imports),
            env=environment(processes, {**(extra or {}), KEY: self._key.hex()}),
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._finalizer = weakref.finalize(self, _stop, self._process, self._pids)

    def run(self, task: bytes, timeout: float) -> list[dict[str, Any]]:
        self._greet()
        deadline = time.monotonic() + timeout
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # a process that is gone: its silence is found below
                connection.send_bytes(task)
        waiting: dict[Any, int] = {connection: rank for rank, connection in self._connections.items()}
        rows: dict[int, dict[str, Any]] = {}
        while waiting:
            ready = wire.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(self._late(waiting.values(), timeout))
            for connection in ready:
                rank = waiting.pop(connection)
                rows[rank] = self._answer(rank, connection)
        return [{"rank": rank, **rows[rank]} for rank in sorted(rows)]

    def _greet(self) -> None:
        """Wait until every process has said its rank."""
        deadline = time.monotonic() + START_SECONDS
        self._listener.settimeout(0.2)
        while len(self._connections) < self.processes:
            try:
                incoming, _ = self._listener.accept()
            except TimeoutError:
                silent = [rank for rank in range(self.processes) if rank not in self._connections]
                if self._process.poll() is not None:
                    raise RankError(silent[0], f"{_names(silent)} did not start\n{self._said()}") from None
                if time.monotonic() > deadline:
                    late = f"{_names(silent)} had not started after {START_SECONDS} s; all ranks were ended"
                    raise TimeoutError(late) from None
                continue
            incoming.settimeout(None)
            connection = wire.Connection(incoming.detach())
            wire.deliver_challenge(connection, self._key)
            hello = json.loads(connection.recv_bytes())
            self._connections[hello["rank"]], self._pids[hello["rank"]] = connection, hello["pid"]

    def _answer(self, rank: int, connection: Any) -> dict[str, Any]:
        try:
            answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise RankError(rank, f"rank {rank} ended without a result\n{self._said()}") from None
        if "error" in answer:
            raise RankError(rank, f"rank {rank} of {self.processes} failed: {answer['error']}")
        return dict(answer["row"])

    def _late(self, ranks: Iterable[int], timeout: float) -> str:
        """Which ranks had not answered, and the lines at which they were."""
        late = sorted(ranks)
        lines = [f"{_names(late)} of {self.processes} not done after {timeout:g} s; all ranks were ended"]
        for rank in late:
            where = self._stack(rank)
            lines += [f"  rank {rank} was at {where}"] if where else []
        return "\n".join(lines)

    def _stack(self, rank: int) -> str:
        """The innermost calls of a rank, as its own faulthandler writes them."""
        file = Path(self._folder.name, f"stack-{rank}")
        with contextlib.suppress(ProcessLookupError, AttributeError):  # no SIGUSR1 on Windows
            os.kill(self._pids[rank], signal.SIGUSR1)
        end = time.monotonic() + 2
        while time.monotonic() < end and (not file.exists() or not file.read_text().strip()):
            time.sleep(0.02)
        time.sleep(0.05)  # for the rest of it
        frames = file.read_text().splitlines() if file.exists() else []
        calls = [line.split('"')[1:] for line in frames if line.strip().startswith("File ")]
        return " < ".join(f"{Path(name).name}:{_line_and_name(rest)}" for name, rest in (c[:2] for c in calls[:5]))

    def _said(self) -> str:
        """The end of what launcher and workers wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the launcher says last what it saw
            self._process.wait(timeout=3)
        self._log.seek(0)
        return "\n".join(self._log.read().strip().splitlines()[-8:])

    def end(self, kindly: bool) -> None:
        for connection in self._connections.values():
            connection.close()  # a waiting process takes this as its end
        if kindly and len(self._connections) == self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=LEAVE_SECONDS)
        self._finalizer()
        self._listener.close()
        self._log.close()
        self._folder.cleanup()


def environment(processes: int = 1, extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment that ranks get: this process's own, its cores shared out, and `NO_MULTICAST` unless set."""
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    return {**NO_MULTICAST, **places.environment(OMP_NUM_THREADS=threads, **(extra or {}))}


def _stop(process: subprocess.Popen[bytes], pids: dict[int, int]) -> None:
    """End a launcher and its workers by force."""
    if process.poll() is None:
        for pid in pids.values():  # its children, which it has not waited for: the numbers are still theirs
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        process.terminate()
        try:
            process.wait(timeout=35)  # it gives workers that it started and that never said hello 30 s
        except subprocess.TimeoutExpired:
            process.kill()
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _by_value(worker: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    """The task, with the code of the worker's own module in it: the other processes may not find that module."""
    import cloudpickle

    module = sys.modules.get(worker.__module__)
    ours = module is not None and module.__name__.split(".")[0] == __package__
    if module is None or module.__name__ == "__main__" or ours:  # goes by value anyway, or is found there
        return bytes(cloudpickle.dumps((worker, arguments)))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((worker, arguments)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _command(processes: int, port: int, folder: str, imports: tuple[str, ...]) -> list[str]:
    # what --standalone does, with an address in place of the name localhost, which not every container resolves
    meeting = [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={uuid.uuid4()}",
        "--local-addr=127.0.0.1",
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={processes}"]
    return [*launcher, "-m", "labkit.launched", str(port), folder, *imports]


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _line_and_name(rest: str) -> str:
    """``", line 12 in f"`` as ``12 (f)``."""
    line, _, name = rest.removeprefix(", line ").partition(" in ")
    return f"{line} ({name})"
