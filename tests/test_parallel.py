"""What ranks do side by side. On two cards: NCCL, peaks under a budget, and ranks that cannot go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from labkit import launching, parallel
from labkit.units import MiB

WIDTH, DEPTH = 1024, 8
WEIGHTS = 4 * DEPTH * WIDTH * (WIDTH + 1)  # bytes


@pytest.fixture(scope="module")
def two_cards() -> Iterator[launching.Ranks]:
    """Two ranks, each with a card of its own."""
    with launching.Ranks(2, imports=("labkit.parallel",)) as ranks:
        yield ranks


def stack(place: parallel.Place, way: str) -> torch.nn.Module:
    """The same linear layers in every rank, made parallel in this way."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to(place.device)
    if way.startswith("DDP"):
        cards = [place.device] if place.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(
            model, device_ids=cards, gradient_as_bucket_view=way.endswith("views")
        )
    if way == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(place.device.type, (place.world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def traffic_and_gradients(way: str) -> dict[str, Any]:
    place = parallel.join()
    torch.manual_seed(1)
    batch = torch.randn(8, WIDTH, device=place.device)
    alone, model = stack(place, "one process"), stack(place, way)
    alone(batch).square().mean().backward()
    with parallel.Traffic() as traffic:
        model(batch.chunk(place.world)[place.rank]).square().mean().backward()
    off = 0.0
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        whole = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
        off = max(off, float((whole - p.grad).abs().max() / p.grad.abs().max()))
    return {"off": off, "backend": place.backend, **traffic.row(place.world)}


def peak(way: str, budget: int | None, steps: int = 2) -> dict[str, Any]:
    place = parallel.join()

    def build() -> Any:
        model = stack(place, way)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = torch.randn(4, WIDTH, device=place.device)

        def step() -> torch.Tensor:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return step

    return parallel.measured(build, place, budget=budget, steps=steps)


def test_a_ring_sends_what_the_formulas_say() -> None:
    traffic = parallel.Traffic()
    traffic.bytes = {"all_reduce": 1200}
    assert [traffic.link_bytes(world) for world in (1, 2, 4)] == [0, 1200, 1800]
    traffic.bytes = {"all_gather": 1200, "reduce_scatter": 1200}
    assert [traffic.link_bytes(world) for world in (1, 2, 4)] == [0, 1200, 1800]
    traffic.bytes = {"send": 1200}
    assert traffic.link_bytes(2) == 1200


def test_ways_are_timed_in_turn_and_the_slowest_rank_of_each_round_counts() -> None:
    said: list[str] = []
    builds = {name: lambda name=name: lambda: said.append(name) for name in "ab"}
    place = parallel.Place(0, 1, torch.device("cpu"), "gloo")
    found = parallel.in_turn(builds, place, warmup=1, rounds=2, steps=3)
    assert "".join(said) == "ab" + 2 * ("aaa" + "bbb")
    assert all(len(times) == 2 and min(times) >= 0 for times in found.values())
    ranks = [{"a": [1.0, 5.0, 3.0]}, {"a": [2.0, 4.0, 3.5]}]
    assert parallel.medians(ranks, "a") == (3.5, 1.5)  # 2, 5 and 3.5

    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = parallel.in_turn({**builds, "c": lambda: too_large}, place)
    assert found == {"a": [], "b": [], "c": []} and parallel.medians([found, found], "c") == (None, None)


def test_what_is_held_counts_shared_storage_once() -> None:
    tied = torch.nn.Linear(16, 16, bias=False)
    model = torch.nn.ModuleList([tied, torch.nn.Linear(16, 16, bias=False)])
    model[1].weight = tied.weight
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    tied(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    held = parallel.held(model, optimizer)
    assert held == {"weights": 1024, "gradients": 1024, "optimizer state": 1024, "buckets": 0}


@pytest.mark.gpu(cards=2)
def test_traffic_is_counted_and_gradients_are_those_of_one_process_on_two_cards(two_cards: launching.Ranks) -> None:
    for way in ("DDP", "DDP, views", "FSDP2"):
        for row in two_cards.run(traffic_and_gradients, way=way, timeout=60):
            assert row["backend"] == "nccl" and row["off"] < 1e-3
            if way == "FSDP2":  # each layer is gathered for forward and again for backward, or is kept in between
                assert WEIGHTS <= row["bytes"]["all_gather"] <= 2 * WEIGHTS
                assert row["bytes"]["reduce_scatter"] == WEIGHTS
            else:
                assert row["bytes"]["all_reduce"] == WEIGHTS == row["link_bytes"]


@pytest.mark.gpu(cards=2)
def test_peaks_of_two_cards_are_what_their_ways_hold(two_cards: launching.Ranks) -> None:
    ways = ("one process", "DDP", "DDP, views", "FSDP2")
    rows = {way: two_cards.run(peak, way=way, budget=1024 * MiB, timeout=60) for way in ways}
    peaks = {}
    for way, (first, second) in rows.items():
        assert first["status"] == second["status"] == "ok" and first["seconds"] > 0
        assert first["reserved_bytes"] <= 1024 * MiB
        assert first["requested_bytes"] == pytest.approx(second["requested_bytes"], rel=0.05)
        peaks[way] = first["requested_bytes"] / WEIGHTS
    one = peaks["one process"]
    assert 4 < one < 7  # weights, gradients, two states, and cuBLAS' workspaces, which all ways have
    assert peaks["DDP"] - one == pytest.approx(1, abs=0.02)  # buckets
    assert peaks["DDP, views"] - one == pytest.approx(1 / DEPTH, abs=0.02)  # the last gradient, before it is copied
    # half of it, and of a layer or two: gathered weights, their gradients, and what is sent
    assert -2 + 1 / DEPTH < peaks["FSDP2"] - one < -2 + 5.2 / DEPTH


@pytest.mark.gpu(cards=2)
def test_running_out_of_memory_in_all_ranks_is_a_result_and_the_job_goes_on(two_cards: launching.Ranks) -> None:
    for row in two_cards.run(peak, way="DDP", budget=4 * WEIGHTS + 80 * MiB, timeout=60):
        assert row["status"] == "oom" and "out of memory" in row["message"]
    for row in two_cards.run(peak, way="DDP", budget=1024 * MiB, timeout=60):
        assert row["status"] == "ok"


@pytest.mark.gpu(cards=2)
def test_ranks_that_hang_on_their_cards_are_ended(two_cards: launching.Ranks) -> None:
    def uneven() -> dict[str, Any]:
        place = parallel.join()
        if place.rank == 0:
            torch.distributed.all_reduce(torch.zeros(1, device=place.device))
            torch.cuda.synchronize()
        return {}

    with pytest.raises(TimeoutError, match="rank 0 of 2 not done after 5 s"):
        two_cards.run(uneven, timeout=5)
    for row in two_cards.run(peak, way="FSDP2", budget=1024 * MiB, timeout=60):  # new ones
        assert row["status"] == "ok"
