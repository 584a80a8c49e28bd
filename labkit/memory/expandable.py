"""The caching allocator with ``expandable_segments:True``: each pool is one segment of pages that come and go.

The rules are those of ``try_allocate_expandable_block``, ``map_block`` and ``unmap_block`` in
``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import insort

from .allocator import MEDIUM_SEGMENT, ROUNDING, SMALL_SEGMENT, Allocator, Block, segment_bytes

_SPACE = (1 << 30) * MEDIUM_SEGMENT  # addresses of a pool, a whole number of pages, never exhausted


class ExpandableAllocator(Allocator):
    """As `Allocator`; pages of 2 MiB (small pool) or 20 MiB (large pool) are mapped where a request needs them, joined
    with the free block before them, and unmapped out of the middle of free blocks when the cache is emptied."""

    least_rest = ROUNDING

    def __init__(self, capacity_bytes: int | None = None):
        super().__init__(capacity_bytes)
        self._holes: dict[bool, list[Block]] = {
            small: [Block((1 + small) * _SPACE, _SPACE, small)] for small in (False, True)
        }  # ranges without memory, by rising address

    def take(self, nbytes: int, stream: int = 0) -> Block:
        """As `Allocator.take`; one pair of pools stands for those of all streams."""
        return super().take(nbytes)

    def empty_cache(self) -> None:
        """Unmap every whole page that lies in a free block."""
        for block in list(self._blocks.values()):
            page, base = _page(block.small), (1 + block.small) * _SPACE
            first = base + -(-(block.address - base) // page) * page
            last = base + (block.address + block.nbytes - base) // page * page
            if last <= first:
                continue
            self._uncache(block)
            hole = Block(first, last - first, block.small)
            if first > block.address:
                self._link(Block(block.address, first - block.address, block.small), block.before, hole)
                self._cache(hole.before)  # type: ignore[arg-type]
            else:
                self._link(hole, block.before, None)
            end = block.address + block.nbytes
            if end > last:
                rest = Block(last, end - last, block.small)
                self._link(rest, hole, block.after)
                self._cache(rest)
            else:
                _join(hole, block.after)
            self.reserved -= hole.nbytes
            self._add_hole(hole)

    def _obtain(self, size: int, small: bool, nbytes: int) -> Block:
        self._admit(segment_bytes(size), nbytes)
        start = next(found for hole in self._holes[small] if (found := self._room(hole, size)) is not None)
        if start.free:
            self._uncache(start)
            start.free = False
        else:
            start = self._map(start, min(size, start.nbytes))
        while start.nbytes < size:
            assert start.after is not None
            more = self._map(start.after, min(size - start.nbytes, start.after.nbytes))
            start.nbytes += more.nbytes
            _join(start, more.after)
            self._absorb(start)
        return start

    def _room(self, hole: Block, size: int) -> Block | None:
        """Where a run of free and unmapped blocks of at least `size` begins, at `hole` or just before it."""
        start = hole.before if hole.before is not None and hole.before.free else hole
        block: Block | None = start
        have = 0
        while block is not None and have < size and (block.free or self._is_hole(block)):
            have += block.nbytes
            block = block.after
        return start if have >= size else None

    def _is_hole(self, block: Block) -> bool:
        return any(block is hole for hole in self._holes[block.small])

    def _map(self, hole: Block, nbytes: int) -> Block:
        """Memory for the first whole pages of `hole` that `nbytes` need; the new block takes in a free one after it."""
        page = _page(hole.small)
        grown = -(-nbytes // page) * page
        block = Block(hole.address, grown, hole.small)
        before = hole.before
        if grown < hole.nbytes:
            hole.address += grown
            hole.nbytes -= grown
            self._link(block, before, hole)
        else:
            self._holes[hole.small] = [h for h in self._holes[hole.small] if h is not hole]
            self._link(block, before, hole.after)
            self._absorb(block)
        self._hold(grown)
        return block

    def _absorb(self, block: Block) -> None:
        after = block.after
        if after is not None and after.free:
            self._uncache(after)
            block.nbytes += after.nbytes
            _join(block, after.after)

    def _add_hole(self, hole: Block) -> None:
        holes = self._holes[hole.small]
        for neighbour in (hole.before, hole.after):
            if neighbour is not None and any(neighbour is h for h in holes):
                holes[:] = [h for h in holes if h is not neighbour]
                if neighbour is hole.before:
                    hole.address = neighbour.address
                    hole.nbytes += neighbour.nbytes
                    hole.before = neighbour.before
                    if hole.before is not None:
                        hole.before.after = hole
                else:
                    hole.nbytes += neighbour.nbytes
                    _join(hole, neighbour.after)
        insort(holes, hole, key=lambda h: h.address)

    @staticmethod
    def _link(block: Block, before: Block | None, after: Block | None) -> None:
        block.before = before
        if before is not None:
            before.after = block
        _join(block, after)


def _join(block: Block, after: Block | None) -> None:
    block.after = after
    if after is not None:
        after.before = block


def _page(small: bool) -> int:
    return SMALL_SEGMENT if small else MEDIUM_SEGMENT
