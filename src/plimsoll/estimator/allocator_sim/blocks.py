"""Pieces of device memory: blocks that know their neighbours, and free ones in the order of best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

KIB = 1024
MIB = 1024 * KIB
SMALLEST_BYTES = 512
"""Every block is a multiple of this."""
SMALL_BYTES = 1 * MIB
"""Up to here a request goes to the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size, rounded up."""
SEGMENT_ROUNDING_BYTES = 2 * MIB


def round_up(size: int, multiple: int) -> int:
    """The next multiple that is no less.

    Example:
        >>> round_up(1, 512), round_up(512, 512)
        (512, 512)
    """
    return -(-size // multiple) * multiple


def segment_bytes(size: int) -> int:
    """What is asked from the device for a block of ``size`` bytes.

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
    """A piece of one segment. Unmapped pieces of expandable segments have addresses, but no memory."""

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
        """Whether the segment has other pieces."""
        return self.before is not None or self.after is not None

    def cut(self, size: int) -> Block:
        """Make this block ``size`` bytes long; the rest is a block of its own behind it."""
        rest = Block(self.address + size, self.size - size, self.pool)
        rest.is_mapped = self.is_mapped
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest

    def absorb(self, other: Block | None) -> None:
        """Become one with a neighbour, if that is free and has memory just if this one has; it leaves its pool."""
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
    """Free blocks, smallest first, of equal ones the lowest address.

    Free neighbours are merged at once, so whether a block is a piece of a segment does not change while it is in here.
    """

    def __init__(self) -> None:
        self.split_bytes = 0
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter([self._blocks[address] for _, address in self._order])

    def add(self, block: Block) -> None:
        """Put a block where its size belongs."""
        insort(self._order, (block.size, block.address))
        self._blocks[block.address] = block
        self.split_bytes += block.size if block.is_split else 0

    def remove(self, block: Block) -> None:
        """Take a block out."""
        del self._order[bisect_left(self._order, (block.size, block.address))]
        del self._blocks[block.address]
        self.split_bytes -= block.size if block.is_split else 0

    def from_size(self, size: int) -> Iterator[Block]:
        """Blocks of at least ``size`` bytes, best fit first."""
        for position in range(bisect_left(self._order, (size, 0)), len(self._order)):
            yield self._blocks[self._order[position][1]]

    def largest(self) -> Block | None:
        """The largest block, if there is one."""
        return self._blocks[self._order[-1][1]] if self._order else None


class Pool:
    """What one stream has cached for small or for large requests."""

    __slots__ = ("free", "is_small", "unmapped")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free = FreeBlocks()
        self.unmapped: list[Block] = []

    @property
    def page_bytes(self) -> int:
        """What an expandable segment maps at once."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES
