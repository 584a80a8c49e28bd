"""The caching allocator's rules, each against an answer worked out by hand."""

import itertools
import random

import pytest
import torch

from labkit import memory
from labkit.memory.allocator import Allocator, OutOfMemory, replay, rounded, segment_bytes
from labkit.memory.expandable import ExpandableAllocator
from labkit.units import KiB, MiB


@pytest.mark.parametrize(
    ("asked", "block"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MiB, MiB), (3 * MiB + 1, 3 * MiB + 512)]
)
def test_requests_are_rounded_to_512_bytes(asked, block):
    assert rounded(asked) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),  # the last size of the small pool
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),  # the first that gets a segment of its own, in steps of 2 MiB
        (11 * MiB, 12 * MiB),
    ],
)
def test_segments_by_size(block, segment):
    assert segment_bytes(block) == segment
    allocator = Allocator()
    allocator.take(block)
    assert allocator.reserved == segment


def test_a_small_block_is_split_down_to_512_bytes_and_a_large_one_only_above_one_mebibyte():
    allocator = Allocator()
    first = allocator.take(512)
    allocator.take(2 * MiB - 1024)  # a large request: the small pool serves no more than 1 MiB
    assert first.nbytes == 512 and allocator.reserved == 22 * MiB

    allocator = Allocator()
    whole = allocator.take(20 * MiB)
    allocator.give(whole)
    exact = allocator.take(19 * MiB)  # 1 MiB would remain: too little to split off
    assert exact.nbytes == 20 * MiB and allocator.allocated == 20 * MiB and allocator.requested == 19 * MiB
    allocator.give(exact)
    cut = allocator.take(19 * MiB - 512)  # now more than 1 MiB would remain
    assert cut.nbytes == 19 * MiB - 512 and allocator.reserved == 20 * MiB


def test_best_fit_takes_the_smallest_cached_block_that_serves():
    allocator = Allocator()
    blocks = [allocator.take(n * MiB) for n in (40, 12, 24)]
    for block in blocks:
        allocator.give(block)
    assert allocator.take(11 * MiB).address == blocks[1].address
    assert allocator.take(13 * MiB).address == blocks[2].address
    assert allocator.reserved == 76 * MiB


def test_of_equal_blocks_the_lowest_address_is_taken():
    allocator = Allocator()
    blocks = [allocator.take(24 * MiB) for _ in range(40)]
    for block in blocks:
        allocator.give(block)
    assert allocator.take(24 * MiB).address == min(b.address for b in blocks)


def test_free_neighbours_merge_in_every_order():
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = Allocator()
        blocks = [allocator.take(6 * MiB) for _ in range(3)]  # three of one 20 MiB segment, 2 MiB left over
        for index in order:
            allocator.give(blocks[index])
        assert allocator.take(20 * MiB - 512).nbytes == 20 * MiB and allocator.reserved == 20 * MiB


def test_pools_do_not_lend_to_each_other():
    allocator = Allocator()
    allocator.give(allocator.take(20 * MiB))
    allocator.take(512)
    assert allocator.reserved == 22 * MiB


def test_peaks_start_again_at_the_present_value():
    allocator = Allocator()
    block = allocator.take(30 * MiB)
    kept = allocator.take(512)
    allocator.give(block)
    assert allocator.peaks() == (30 * MiB + 512, 30 * MiB + 512, 32 * MiB)
    allocator.reset_peaks()
    assert allocator.peaks() == (512, 512, 32 * MiB)
    allocator.give(kept)
    assert allocator.allocated == allocator.requested == 0 and allocator.cached_bytes == 32 * MiB


def test_under_a_cap_cached_segments_are_given_back_before_it_fails():
    allocator = Allocator(64 * MiB)
    allocator.give(allocator.take(40 * MiB))
    allocator.take(50 * MiB)
    assert allocator.reserved == 50 * MiB

    allocator = Allocator(64 * MiB)
    large = allocator.take(40 * MiB)
    allocator.give(large)
    allocator.take(4 * MiB)  # splits the cached segment, which can no longer be given back
    with pytest.raises(OutOfMemory) as failure:
        allocator.take(50 * MiB)
    assert failure.value.wanted_bytes == 50 * MiB
    assert failure.value.free_bytes == 60 * MiB  # of the cap, not allocated
    assert failure.value.scattered_bytes == 36 * MiB  # of it, inside the reserved segment
    allocator.take(24 * MiB)  # and it can still serve what fits


def test_expandable_segments_grow_by_pages_and_do_not_strand_memory():
    usual, expandable = Allocator(), ExpandableAllocator()
    for allocator in (usual, expandable):
        for n in (30, 50, 70):
            allocator.give(allocator.take(n * MiB))
    assert usual.reserved == 150 * MiB
    assert expandable.reserved == 80 * MiB  # one segment, in pages of 20 MiB
    expandable.empty_cache()
    assert expandable.reserved == 0
    expandable.take(512 * KiB)
    assert expandable.reserved == 2 * MiB


def test_expandable_blocks_are_split_down_to_512_bytes():
    allocator = ExpandableAllocator()
    allocator.take(19 * MiB)
    allocator.take(1 * MiB + 512)  # the last mebibyte of the page is 512 bytes short: a second one is mapped
    assert allocator.reserved == 40 * MiB and allocator.allocated == 20 * MiB + 512
    allocator.take(20 * MiB - 512)
    assert allocator.reserved == 40 * MiB and allocator.cached_bytes == 0


def test_pages_inside_a_free_block_are_unmapped_and_mapped_again():
    allocator = ExpandableAllocator()
    first, middle, last = (allocator.take(n * MiB) for n in (30, 60, 30))
    assert allocator.reserved == 120 * MiB
    allocator.give(middle)  # from 30 to 90 MiB: the pages 40 to 80 are whole
    allocator.empty_cache()
    assert allocator.reserved == 80 * MiB and allocator.allocated == 60 * MiB
    again = allocator.take(55 * MiB)  # the 10 MiB left before the hole, its two pages, and part of what follows it
    assert again.address == first.address + 30 * MiB and allocator.reserved == 120 * MiB
    for block in (first, again, last):
        allocator.give(block)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0
    assert allocator.take(200 * MiB).address == first.address


def test_an_expandable_pool_respects_the_cap():
    allocator = ExpandableAllocator(50 * MiB)
    kept = allocator.take(30 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.take(30 * MiB)
    allocator.give(kept)
    allocator.take(40 * MiB)


def test_random_requests_keep_the_books_of_an_expandable_pool():
    rng, allocator, alive = random.Random(0), ExpandableAllocator(), []
    for _ in range(3000):
        if alive and rng.random() < 0.5:
            allocator.give(alive.pop(rng.randrange(len(alive))))
        else:
            alive.append(allocator.take(rng.choice((100, 70_000, 3 * MiB, 25 * MiB, 47 * MiB))))
        if rng.random() < 0.02:
            allocator.empty_cache()
        assert allocator.allocated == sum(block.nbytes for block in alive) <= allocator.reserved
    ranges = sorted((block.address, block.nbytes) for block in alive)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
    while alive:
        allocator.give(alive.pop())
    allocator.empty_cache()
    assert allocator.allocated == allocator.reserved == 0


def test_a_stream_of_events_is_replayed_in_order():
    allocator, alive = Allocator(), {}
    replay([0, 1, ~0, 2], [12 * MiB, 14 * MiB, 12 * MiB], allocator, alive)
    assert sorted(alive) == [1, 2] and allocator.requested == 26 * MiB and allocator.reserved == 26 * MiB


def test_an_experiment_that_empties_the_cache_reserves_less():
    def build(device, empty):
        large = torch.empty(300 * MiB, dtype=torch.uint8, device=device)
        small = torch.empty(30 * MiB, dtype=torch.uint8, device=device)
        del large
        if empty:
            torch.cuda.empty_cache()
        more = torch.empty(400 * MiB, dtype=torch.uint8, device=device)
        return lambda: more.numel() + small.numel()

    kept, emptied = (memory.predict(lambda d, e=e: build(d, e), trace=False) for e in (False, True))
    assert kept.steady.allocated_bytes == emptied.steady.allocated_bytes
    assert kept.steady.reserved_bytes - emptied.steady.reserved_bytes == 300 * MiB


def test_a_step_that_empties_the_cache_does_so_each_time():
    def build(device):
        def step():
            torch.empty(300 * MiB, dtype=torch.uint8, device=device)
            torch.cuda.empty_cache()
            torch.empty(400 * MiB, dtype=torch.uint8, device=device)
            torch.cuda.empty_cache()

        return step

    report = memory.predict(build, trace=False, stateless=True)
    assert 400 * MiB <= report.steady.reserved_bytes < 500 * MiB
