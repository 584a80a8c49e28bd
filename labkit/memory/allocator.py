"""A replay of PyTorch's caching allocator: which block each request gets, and so what the three counters show.

The rules and their constants are those of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.8 to 2.13). Each stream has
pools of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from ..units import MiB

ROUNDING = 512  # kMinBlockSize
SMALL = 1 * MiB  # kSmallSize: requests up to this come from the small pool
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer
MEDIUM_SEGMENT = 20 * MiB  # kLargeBuffer: segments for requests below MEDIUM
MEDIUM = 10 * MiB  # kMinLargeAlloc
LARGE_ROUNDING = 2 * MiB  # kRoundLarge


class OutOfMemory(Exception):
    """The replay could not serve a request within its capacity."""

    def __init__(self, wanted_bytes: int, free_bytes: int, scattered_bytes: int):
        super().__init__(f"{wanted_bytes} bytes wanted, {free_bytes} free")
        self.wanted_bytes, self.free_bytes, self.scattered_bytes = wanted_bytes, free_bytes, scattered_bytes


@dataclass(slots=True)
class Block:
    """A piece of a segment; ``before`` and ``after`` are its neighbours there."""

    address: int
    nbytes: int
    small: bool
    requested: int = 0
    free: bool = False
    before: Block | None = None
    after: Block | None = None
    stream: int = 0


def rounded(nbytes: int) -> int:
    """The block size that a request of `nbytes` asks for."""
    return max(ROUNDING, -(-nbytes // ROUNDING) * ROUNDING)


def segment_bytes(size: int) -> int:
    """The segment that is taken from the driver for a block of `size` bytes when no cached block serves."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MEDIUM:
        return MEDIUM_SEGMENT
    return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING


class Allocator:
    """Serves requests as the caching allocator would, under an optional limit on what it reserves.

    ``allocated``, ``requested`` and ``reserved`` are bytes now; ``peaks()`` gives their highest values since the last
    ``reset_peaks()``.
    """

    least_rest = SMALL + 1  # of a large block, below which nothing is split off

    def __init__(self, capacity_bytes: int | None = None):
        self.capacity = capacity_bytes
        self.allocated = self.requested = self.reserved = 0
        self.peak_allocated = self.peak_requested = self.peak_reserved = 0
        self._pools: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {0: ([], [])}
        # by stream: large, small; of each free block (size, address)
        self._blocks: dict[int, Block] = {}  # free blocks by address
        self._driver = _Driver()

    def take(self, nbytes: int, stream: int = 0) -> Block:
        """The block for a request of `nbytes` on a stream. Raises `OutOfMemory`."""
        size = (nbytes + 511) & -512 or ROUNDING
        small = size <= SMALL
        if stream not in self._pools:
            self._pools[stream] = ([], [])
        pool = self._pools[stream][small]
        index = bisect_left(pool, (size, 0))
        if index < len(pool):
            block = self._blocks.pop(pool.pop(index)[1])
        else:
            block = self._obtain(size, small, nbytes)
            block.stream = stream
        rest = block.nbytes - size
        if rest >= (ROUNDING if small else self.least_rest):
            tail = Block(block.address + size, rest, small, free=True, before=block, after=block.after, stream=stream)
            if block.after is not None:
                block.after.before = tail
            block.after, block.nbytes = tail, size
            self._cache(tail)
        block.free, block.requested = False, nbytes
        self.allocated += block.nbytes
        self.requested += nbytes
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        return block

    def give(self, block: Block) -> None:
        """Return a block; it merges with free neighbours and stays cached."""
        self.allocated -= block.nbytes
        self.requested -= block.requested
        left, right = block.before, block.after
        if right is not None and right.free:
            self._uncache(right)
            block.nbytes += right.nbytes
            block.after = right.after
            if right.after is not None:
                right.after.before = block
        if left is not None and left.free:
            self._uncache(left)
            left.nbytes += block.nbytes
            left.after = block.after
            if block.after is not None:
                block.after.before = left
            block = left
        self._cache(block)

    def empty_cache(self) -> None:
        """Give every segment that holds no live block back to the driver."""
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._uncache(block)
                self._driver.give(block.address, block.nbytes)
                self.reserved -= block.nbytes

    def reset_peaks(self) -> None:
        """Start new peaks at the present values."""
        self.peak_allocated, self.peak_requested = self.allocated, self.requested
        self.peak_reserved = self.reserved

    def peaks(self) -> tuple[int, int, int]:
        """Highest allocated, requested and reserved bytes since the last reset."""
        return self.peak_allocated, self.peak_requested, self.peak_reserved

    @property
    def cached_bytes(self) -> int:
        """Bytes reserved and not allocated."""
        return self.reserved - self.allocated

    def _cache(self, block: Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._pools[block.stream][block.small], (block.nbytes, block.address))

    def _uncache(self, block: Block) -> None:
        pool = self._pools[block.stream][block.small]
        del pool[bisect_left(pool, (block.nbytes, block.address))]
        del self._blocks[block.address]

    def _obtain(self, size: int, small: bool, nbytes: int) -> Block:
        """A block that is not cached, from the driver."""
        total = segment_bytes(size)
        self._admit(total, nbytes)
        self._hold(total)
        return Block(self._driver.take(total), total, small)

    def _admit(self, total: int, nbytes: int) -> None:
        """Raise `OutOfMemory` if `total` more bytes are beyond the limit, the cache emptied."""
        if self.capacity is not None and self.reserved + total > self.capacity:
            self.empty_cache()
            if self.reserved + total > self.capacity:
                raise OutOfMemory(nbytes, self.capacity - self.allocated, self.cached_bytes)

    def _hold(self, total: int) -> None:
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)


class _Driver:
    """Where the driver places segments. Of blocks of one size the allocator takes the one with the lowest address,
    so the order of addresses decides which block is split.

    Observed on an H200 (driver 580): what the context left over comes first, rising; then the driver reserves chunks
    of whole 32 MiB downwards, and hands out what is left in them to the first request that fits, lowest address first.
    """

    CHUNK = 32 * MiB
    LEFT_OVER = ((0, 2), (102, 189), (328, 11))  # in units of 2 MiB, before the two cuBLAS workspaces are there

    def __init__(self) -> None:
        self._floor = 1 << 46
        self._longest = 1 << 60
        self._free = [(self._floor + 2 * MiB * start, 2 * MiB * length) for start, length in self.LEFT_OVER]

    def take(self, nbytes: int) -> int:
        """The address of a new segment."""
        nbytes = -(-nbytes // (2 * MiB)) * 2 * MiB
        if nbytes <= self._longest:
            for i, (start, length) in enumerate(self._free):
                if length >= nbytes:
                    self._free[i : i + 1] = [(start + nbytes, length - nbytes)] if length > nbytes else []
                    return start
            self._longest = max((length for _, length in self._free), default=0)
        chunk = -(-nbytes // self.CHUNK) * self.CHUNK
        self._floor -= chunk
        if chunk > nbytes:
            insort(self._free, (self._floor + nbytes, chunk - nbytes))
            self._longest = max(self._longest, chunk - nbytes)
        return self._floor

    def give(self, address: int, nbytes: int) -> None:
        """A segment goes back to the driver."""
        self._longest = 1 << 60  # not known until the next search in vain
        i = bisect_left(self._free, (address, 0))
        self._free.insert(i, (address, nbytes))
        while i + 1 < len(self._free) and sum(self._free[i]) == self._free[i + 1][0]:
            self._free[i : i + 2] = [(self._free[i][0], self._free[i][1] + self._free[i + 1][1])]
        if i and sum(self._free[i - 1]) == self._free[i][0]:
            self._free[i - 1 : i + 1] = [(self._free[i - 1][0], self._free[i - 1][1] + self._free[i][1])]


def replay(events: Iterable[int], sizes: list[int], allocator: Allocator, alive: dict[int, Block]) -> None:
    """Feed `events` (an identity for a birth, its complement ``~identity`` for a death) to `allocator`.

    ``sizes`` holds requested bytes by identity; `alive` the blocks that live on. Raises `OutOfMemory`.
    """
    for event in events:
        if event >= 0:
            alive[event] = allocator.take(sizes[event])
        else:
            allocator.give(alive.pop(~event))
