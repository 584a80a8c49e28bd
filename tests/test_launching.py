"""Processes started with torchrun: results by rank, failures by name, nothing left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit import launching
from labkit.units import UserError


@pytest.fixture(scope="module")
def ranks() -> Iterator[launching.Ranks]:
    """Two processes for all tests; a test that ends them leaves the next one new ones."""
    with launching.Ranks(2, environment={"NCCL_NVLS_ENABLE": "1", "SAID": "so"}) as started:
        yield started


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def summed(start: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    first = not dist.is_initialized()
    if first:
        dist.init_process_group("gloo")
    x = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(x)
    return {"sum": x.item(), "world": dist.get_world_size(), "first": first}


@pytest.mark.slow
def test_each_rank_returns_its_row_and_keeps_its_process_group(ranks: launching.Ranks) -> None:
    for first in (True, False):
        assert ranks.run(summed, start=1.0) == [
            {"rank": 0, "sum": 3.0, "world": 2, "first": first},
            {"rank": 1, "sum": 3.0, "world": 2, "first": first},
        ]


@pytest.mark.slow
def test_a_function_of_a_notebook_travels_by_value(ranks: launching.Ranks) -> None:
    names: dict[str, Any] = {}
    exec("factor = 3\ndef worker(x):\n    import os\n    return {'y': factor * x + int(os.environ['RANK'])}", names)
    names["worker"].__module__ = "__main__"
    assert [row["y"] for row in ranks.run(names["worker"], x=5)] == [15, 16]


@pytest.mark.slow
def test_the_environment_is_handed_on_and_multicast_is_off_unless_somebody_set_it(ranks: launching.Ranks) -> None:
    def worker() -> dict[str, Any]:
        import os

        return {name: os.environ.get(name) for name in (*wanted, "SAID", "LABKIT_RANKS_KEY")}

    wanted = list(launching.NO_MULTICAST)
    given = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    for row in ranks.run(worker):
        assert [row[name] for name in wanted] == ["1", given, os.environ.get("NVSHMEM_DISABLE_NVLS", "1")]
        assert (row["SAID"], row["LABKIT_RANKS_KEY"]) == ("so", None)


@pytest.mark.slow
def test_the_rank_that_fails_first_is_named_and_the_others_are_not_waited_for(ranks: launching.Ranks) -> None:
    def worker() -> None:
        import os
        import time

        if os.environ["RANK"] == "1":
            raise ValueError("no such layer")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(launching.RankError, match=r"rank 1 of 2 failed: ValueError: no such layer") as error:
        ranks.run(worker)
    assert error.value.rank == 1
    assert time.monotonic() - start < 50


@pytest.mark.slow
def test_ranks_that_hang_are_ended_and_it_is_said_where_they_were(ranks: launching.Ranks) -> None:
    def ready() -> dict[str, int]:
        import os

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(1))
        return {"pid": os.getpid()}

    def uneven() -> dict[str, Any]:
        import os

        import torch
        import torch.distributed as dist

        if os.environ["RANK"] == "0":  # the other rank never comes
            dist.all_reduce(torch.zeros(1))
        return {}

    pids = [row["pid"] for row in ranks.run(ready)]  # new processes: the last test has ended the old ones
    with pytest.raises(TimeoutError, match=r"rank 0 of 2 not done after 3 s(.|\n)*rank 0 was at .*all_reduce.*uneven"):
        ranks.run(uneven, timeout=3)
    assert all(map(gone, pids))


@pytest.mark.slow
def test_a_process_that_dies_is_said() -> None:
    def worker() -> None:
        import os

        print("the last words", flush=True)
        os._exit(3)

    with pytest.raises(launching.RankError, match="rank 0 ended without a result(.|\n)*exitcode *: 3"):
        launching.torchrun(worker, processes=1)


@pytest.mark.slow
def test_busy_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed by force in the middle of a call, as a notebook's kernel may be: neither launcher nor rank goes on."""
    file = tmp_path / "pids"
    code = (
        "import sys\nfrom labkit import launching\nranks = launching.Ranks(1)\n"
        "def worker(file):\n    import os\n    open(file, 'w').write(f'{os.getpid()} {os.getppid()}\\n')\n"
        "    while True:\n        sum(range(1000))\n"
        "ranks.run(worker, file=sys.argv[1])"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(file)], env=launching.environment())
    end = time.monotonic() + 120
    while time.monotonic() < end and (not file.exists() or not file.read_text().endswith("\n")):
        time.sleep(0.1)
    starter.kill()
    starter.wait()
    pids = [int(pid) for pid in file.read_text().split()]
    while time.monotonic() < end and not all(map(gone, pids)):
        time.sleep(0.1)
    assert all(map(gone, pids))


@pytest.mark.parametrize("processes", [0, 65, 1.0, True, "2"])
def test_a_number_of_processes_that_is_none(processes: Any) -> None:
    with pytest.raises(UserError, match="whole number"):
        launching.torchrun(summed, processes=processes, start=0.0)
