"""Blocks of device memory with links to their neighbours, free blocks in best-fit order, and expandable segments.

With expandable segments, every stream has one segment per pool: a range of addresses longer than the device's memory. Memory
is mapped into it in pages of 2 MiB (small pool) or 20 MiB (large pool), at the lowest address where the request fits. Whole
pages are unmapped when they are free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.units import MIB

SMALLEST_BYTES = 512
"""The size of each block is a multiple of this number of bytes."""
SMALL_BYTES = 1 * MIB
"""Requests up to this size are served from the small pool, larger requests from the large pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""Requests of at least this size get a segment of their own size, rounded up."""
SEGMENT_ROUNDING_BYTES = 2 * MIB


def round_up(size: int, multiple: int) -> int:
    """Round ``size`` up to the next multiple of ``multiple``.

    Example:
        >>> round_up(1, 512), round_up(512, 512)
        (512, 512)
    """
    return -(-size // multiple) * multiple


def segment_bytes(size: int) -> int:
    """Return the bytes that the allocator requests from the device for a block of ``size`` bytes.

    Example:
        >>> segment_bytes(512) // MIB, segment_bytes(3 * MIB) // MIB, segment_bytes(11 * MIB) // MIB
        (2, 20, 12)
    """
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size, SEGMENT_ROUNDING_BYTES)


class Block:
    """A piece of one segment, allocated or free.

    Unmapped pieces of expandable segments have addresses but do not have memory.
    """

    __slots__ = ("address", "after", "before", "is_allocated", "is_mapped", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_allocated = False
        self.is_mapped = True

    @property
    def is_split(self) -> bool:
        """Whether the block is only one of several pieces of its segment."""
        return self.before is not None or self.after is not None

    def cut(self, size: int) -> Block:
        """Shrink this block to ``size`` bytes; return the rest as a new block after it."""
        rest = Block(self.address + size, self.size - size, self.pool)
        rest.is_mapped = self.is_mapped
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest

    def absorb(self, other: Block | None) -> None:
        """Merge this block with a neighbour and remove the neighbour from its pool.

        Nothing happens if the neighbour is allocated, or if only one of the two is mapped to memory.
        """
        if other is None or other.is_allocated or other.is_mapped is not self.is_mapped:
            return
        if other.is_mapped:
            self.pool.free.remove(other)
        else:
            self.pool.unmapped.remove(other)
        if other is self.before:
            self.address = other.address
            self.before = other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size


class FreeBlocks:
    """An ordered list of free blocks, smallest first. Blocks of equal size are ordered by address.

    Free neighbours are merged at once, so ``is_split`` of a block does not change while the block is in this list.
    """

    def __init__(self) -> None:
        self.split_bytes = 0
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter([self._blocks[address] for _, address in self._order])

    def add(self, block: Block) -> None:
        """Insert a block at its place by size."""
        insort(self._order, (block.size, block.address))
        self._blocks[block.address] = block
        self.split_bytes += block.size if block.is_split else 0

    def remove(self, block: Block) -> None:
        """Remove a block from the list."""
        del self._order[bisect_left(self._order, (block.size, block.address))]
        del self._blocks[block.address]
        self.split_bytes -= block.size if block.is_split else 0

    def from_size(self, size: int) -> Iterator[Block]:
        """Yield the blocks of at least ``size`` bytes, the smallest first."""
        for position in range(bisect_left(self._order, (size, 0)), len(self._order)):
            yield self._blocks[self._order[position][1]]

    def largest(self) -> Block | None:
        """Return the largest block, or ``None`` if the list is empty."""
        return self._blocks[self._order[-1][1]] if self._order else None


class Pool:
    """The cached memory of one stream, for small or for large requests."""

    __slots__ = ("free", "is_small", "unmapped")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free = FreeBlocks()
        self.unmapped: list[Block] = []

    @property
    def page_bytes(self) -> int:
        """The bytes of one page of an expandable segment in this pool."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES


@dataclass(frozen=True, slots=True)
class Mapped:
    """Data: the result of extending a segment: a block that is not in the free list, the bytes of memory that were mapped for
    it, and the number of mappings.

    ``block`` is ``None`` if the device is out of memory.
    """

    block: Block | None
    bytes: int
    mappings: int


def extend(pool: Pool, size: int, *, room_bytes: int) -> Mapped:
    """Map pages after a free block, or at the segment's end, until a block of ``size`` bytes exists.

    If ``room_bytes``, the device's remaining memory, run out, the pages mapped so far stay in the pool, as in torch.
    """
    block = _candidate(pool, size)
    total = mappings = 0
    while not block.is_mapped or block.size < size:
        is_first = not block.is_mapped
        target = block if is_first else block.after
        assert target is not None, "a free block that is too small has unmapped addresses behind it"
        wanted = min(size if is_first else size - block.size, target.size)
        length = round_up(wanted, pool.page_bytes)
        if length > room_bytes - total:
            return Mapped(None, total, mappings)
        _map(target, length)
        total += length
        mappings += 1
        block = target
    pool.free.remove(block)
    return Mapped(block, total, mappings)


def unmap(block: Block) -> int:
    """Unmap each page that lies wholly inside a free block, and return the number of bytes that were unmapped. The rest of the
    block stays free.
    """
    pool = block.pool
    page_bytes = pool.page_bytes
    origin = _origin(block)
    first = origin + round_up(block.address - origin, page_bytes)
    last = origin + (block.address + block.size - origin) // page_bytes * page_bytes
    if first >= last:
        return 0
    pool.free.remove(block)
    if last < block.address + block.size:
        pool.free.add(block.cut(last - block.address))
    if first > block.address:
        rest = block.cut(first - block.address)
        pool.free.add(block)
        block = rest
    block.is_mapped = False
    block.absorb(block.before)
    block.absorb(block.after)
    insort(pool.unmapped, block, key=_address)
    return last - first


def _candidate(pool: Pool, size: int) -> Block:
    """Find the lowest address of the pool's segment with ``size`` bytes after it that are free or unmapped.

    Return the unmapped block at that address. If a free block lies right before it, return the free block instead.
    """
    for block in pool.unmapped:
        before = block.before
        start = before if before is not None and not before.is_allocated else block
        if _has_room(start, size):
            return start
    raise AssertionError("the addresses of a segment never run out")


def _has_room(start: Block, size: int) -> bool:
    at: Block | None = start
    found = 0
    while found < size:
        if at is None or at.is_allocated:
            return False
        found += at.size
        at = at.after
    return True


def _map(block: Block, length: int) -> None:
    pool = block.pool
    pool.unmapped.remove(block)
    if length < block.size:
        insort(pool.unmapped, block.cut(length), key=_address)
    block.is_mapped = True
    block.absorb(block.before)
    block.absorb(block.after)
    pool.free.add(block)


def _origin(block: Block) -> int:
    at = block
    while at.before is not None:
        at = at.before
    return at.address


def _address(block: Block) -> int:
    return block.address
