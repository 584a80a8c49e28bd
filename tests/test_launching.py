"""Processes started with torchrun: results by rank, failures by name, nothing left running."""

from __future__ import annotations

import os
import time

import pytest

from labkit import launching
from labkit.units import UserError

pytestmark = pytest.mark.slow


def summed(start: float) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(x)
    return {"sum": x.item(), "world": dist.get_world_size()}


def test_each_rank_returns_its_row():
    assert launching.torchrun(summed, processes=2, start=1.0) == [
        {"rank": 0, "sum": 3.0, "world": 2},
        {"rank": 1, "sum": 3.0, "world": 2},
    ]


def test_a_function_of_a_notebook_travels_by_value():
    names: dict = {}
    exec("factor = 3\ndef worker(x):\n    import os\n    return {'y': factor * x + int(os.environ['RANK'])}", names)
    names["worker"].__module__ = "__main__"
    assert [row["y"] for row in launching.torchrun(names["worker"], processes=2, x=5)] == [15, 16]


def test_the_rank_that_fails_first_is_named():
    def worker() -> None:
        import os
        import time

        if os.environ["RANK"] == "1":
            raise ValueError("no such layer")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed: ValueError: no such layer"):
        launching.torchrun(worker, processes=2)
    assert time.monotonic() - start < 50  # rank 0 was not waited for


def test_a_process_that_dies_is_said():
    def worker() -> None:
        import os

        os._exit(3)

    with pytest.raises(RuntimeError, match="rank-0 ended without a result"):
        launching.torchrun(worker, processes=1)


def test_a_job_that_hangs_is_ended_with_its_workers(tmp_path):
    file = tmp_path / "pid"

    def worker(file: str) -> None:
        import os
        import time
        from pathlib import Path

        Path(file).write_text(str(os.getpid()))
        time.sleep(600)

    with pytest.raises(TimeoutError, match="not done after 45 s"):
        launching.torchrun(worker, processes=1, timeout=45, file=str(file))
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize("processes", [0, 65, 1.0, True, "2"])
def test_a_number_of_processes_that_is_none(processes):
    with pytest.raises(UserError, match="whole number"):
        launching.torchrun(summed, processes=processes, start=0.0)
