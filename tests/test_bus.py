"""The bus, the host's settings, and the peak of a load in the host's memory."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import pytest
import torch

from labkit import bus
from labkit.results import Timing
from labkit.units import MiB

linux = platform.system() == "Linux"


def test_a_transfer_knows_its_rate_and_its_spread() -> None:
    transfer = bus.Transfer("to host", True, 100_000_000, Timing(0.01, 0.002, 20))
    assert transfer.rate == pytest.approx(1e10)
    low, high = transfer.spread()
    assert low == pytest.approx(1e10 / 1.1) and high == pytest.approx(1e10 * 1.1)
    assert transfer.kind == "to host, pinned"


def test_without_a_card_the_hosts_own_memory_is_measured() -> None:
    found = bus.measure_bus(["1MiB", 4 * MiB], device="cpu", repeats=3)
    assert [(t.kind, t.nbytes) for t in found] == [
        ("within the host, pageable", MiB),
        ("within the host, pageable", 4 * MiB),
    ]
    assert all(1e7 < t.rate < 1e12 for t in found)


def test_the_host_tells_its_settings() -> None:
    found = bus.host()
    if linux:
        assert found.memory_bytes and found.available_bytes and found.memory_bytes >= found.available_bytes > MiB
        assert found.swappiness is None or 0 <= found.swappiness <= 200
        assert found.memlock == "unlimited" or found.memlock_bytes is not None
    assert (found.link is None) == (found.link_most is None) or found.link_most is None


def test_the_rate_of_a_link_is_the_standards() -> None:
    host = bus.Host(None, None, None, "unlimited", None, (1, 16), (4, 16))
    assert host.link_rate == pytest.approx(31.5e9, rel=0.01)
    assert bus.Host(None, None, None, "unlimited", None, None, None).link_rate is None


def test_the_peak_counts_own_memory_apart_from_files(tmp_path: Path) -> None:
    def twice() -> torch.Tensor:
        kept = torch.ones(5_000_000)
        passing = torch.ones(10_000_000)
        time.sleep(0.05)  # the memory is read from time to time only
        return kept * passing[0]

    found = bus.host_peak(twice)
    assert found.result.shape == (5_000_000,) and found.seconds > 0.05
    if not linux:
        assert found.own_bytes is None and found.file_bytes is None
        return
    assert found.own_bytes is not None
    assert 59e6 < found.own_bytes < 82e6  # 20 MB kept and 40 passing, then 20 more for the product

    file = tmp_path / "weights.pt"
    torch.save({"w": torch.ones(10_000_000)}, file)

    def read_all() -> None:
        weights = torch.load(file, mmap=True, weights_only=True)
        weights["w"].sum()
        time.sleep(0.05)

    mapped = bus.host_peak(read_all)
    assert mapped.own_bytes is not None and mapped.file_bytes is not None
    assert mapped.own_bytes < 5e6 and 39e6 < mapped.file_bytes < 50e6
    plain = bus.host_peak(lambda: torch.load(file, weights_only=True))
    assert plain.own_bytes is not None and 39e6 < plain.own_bytes < 50e6


def test_an_error_passes_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bus.host_peak(lambda: torch.load(tmp_path / "none.pt"))


@pytest.mark.gpu
def test_pinned_copies_are_not_slower_than_pageable_ones() -> None:
    found = {t.kind: t for t in bus.measure_bus(["64MiB"])}
    assert set(found) == {f"{d}, {k}" for d in ("to host", "to card") for k in ("pinned", "pageable")}
    for direction in ("to host", "to card"):
        assert found[f"{direction}, pinned"].rate > 0.9 * found[f"{direction}, pageable"].rate
        most = bus.host().link_rate
        assert most is None or found[f"{direction}, pinned"].rate < 1.1 * most
