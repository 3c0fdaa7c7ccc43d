"""A pool with an expandable segment in, a block of the wanted size out: pages are mapped at need, and unmapped when free.

Every stream has one such segment per pool: a stretch of addresses longer than the device's memory. Memory is mapped into it in
pages of 2 MiB (small pool) or 20 MiB (large pool), at the lowest address where the request fits.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from plimsoll.estimator.allocator_sim.blocks import Block, Pool, round_up


@dataclass(frozen=True, slots=True)
class Mapped:
    """What extending a segment gave: a block outside of the pool's free ones (``None``: no room), and what was mapped."""

    block: Block | None
    bytes: int
    mappings: int


def extend(pool: Pool, size: int, *, room_bytes: int) -> Mapped:
    """Map pages behind a free block, or behind the segment's end, until ``size`` bytes are there.

    Args:
        pool: has unmapped addresses.
        size: of the block that is wanted.
        room_bytes: what the device has left. Where that ends, the pages mapped so far stay with the pool, as torch leaves
            them.
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
    """Take the memory from all whole pages of a free block; what is left of it stays free.

    Returns:
        The bytes that go back to the device.
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
    """The lowest unmapped block, or the free one right before it, from which on ``size`` bytes are free or unmapped."""
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
