"""A simulation of PyTorch's CUDA caching allocator: the address of each request, and the total memory reserved.

Algorithm: best fit among cached blocks of the same stream and pool. A block that is too large is split; a freed block is merged
with its free neighbours. If no cached block fits, the allocator requests a segment from the device. If the device is full, the
allocator returns all segments that are entirely free and requests again.

Synonyms: block pool allocator, best-fit allocator with coalescing. Source: c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.h of torch 2.13, reimplemented. Known weaknesses: segments get rising addresses (the driver may
return old ones), and addresses decide between free blocks of equal size. Pools of CUDA graphs, garbage collection by age
(``garbage_collection_threshold``) and rounding to powers of two (``roundup_power2_divisions``) are not simulated. A block that
another stream still uses is free at once.

A training step is repeated until it reaches a steady state. The first step differs from later ones: it allocates what lasts,
with the parameters first. Optimizer state is allocated at the end, as torch's optimizers make it, and goes into memory that
backward left in the cache. Repetition stops after a step that does not request memory from the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plimsoll.artifacts.memory_use import AllocationEvent, AllocatorUse
from plimsoll.estimator.allocator_sim.blocks import (
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALLEST_BYTES,
    Block,
    Pool,
    extend,
    round_up,
    segment_bytes,
    unmap,
)

_FIRST_ADDRESS = 1 << 32
_ADDRESS_SPACE_BYTES = 1 << 44
"""The distance between the address spaces of expandable segments. It is larger than the memory of any device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of ``PYTORCH_CUDA_ALLOC_CONF``, and the device memory available for this process's tensors.

    ``limit_bytes`` is that memory; ``None`` means that it is unlimited. Blocks of ``max_split_bytes`` or more are neither split
    nor used for smaller requests; ``None`` means that all blocks may be split.
    """

    limit_bytes: int | None = None
    max_split_bytes: int | None = None
    is_expandable: bool = False


class DeviceFull(Exception):
    """Raised if the device is out of memory, even after every segment that is entirely free was returned to it."""


class CachingAllocator:
    """The simulated allocator of one device.

    It counts the bytes that are allocated and the bytes that are reserved from the device.

    Example:
        >>> allocator = CachingAllocator(AllocatorSettings())
        >>> block = allocator.allocate(3 * 1024 * 1024, stream=0)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (3145728, 20971520)
        >>> allocator.release(block)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (0, 20971520)
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.segments = 0
        self.device_allocations = 0
        self.retries = 0
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.next_address = _FIRST_ADDRESS
        """The address that the next segment gets."""

    def allocate(self, requested_bytes: int, *, stream: int) -> Block:
        """Allocate a block of at least ``requested_bytes`` (more than 0).

        Raises:
            DeviceFull: the device is out of memory.
        """
        size = round_up(requested_bytes, SMALLEST_BYTES)
        pool = self._pool(stream, is_small=size <= SMALL_BYTES)
        block = self._cached(pool, size) or self._reserve(pool, size)
        if self._is_split(block, size):
            pool.free.add(block.cut(size))
        block.is_allocated = True
        self.allocated_bytes += block.size
        return block

    def release(self, block: Block) -> None:
        """Free a block: return it to the cache and merge it with free neighbours."""
        block.is_allocated = False
        self.allocated_bytes -= block.size
        block.absorb(block.before)
        block.absorb(block.after)
        block.pool.free.add(block)

    @property
    def inactive_split_bytes(self) -> int:
        """The bytes of free pieces in segments that are otherwise in use, which cannot be returned to the device.

        It is 0 with expandable segments, which unmap free pages.
        """
        if self.settings.is_expandable:
            return 0
        return sum(pool.free.split_bytes for pool in self.pools.values())

    def _pool(self, stream: int, *, is_small: bool) -> Pool:
        key = (stream, is_small)
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool(is_small=is_small)
        return pool

    def _is_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.settings.is_expandable:
            return rest >= SMALLEST_BYTES
        return rest > SMALL_BYTES and not self._is_oversize(size)

    def _is_oversize(self, size: int) -> bool:
        most = self.settings.max_split_bytes
        return most is not None and size >= most

    # From the cache ---------------------------------------------------------------------------------------------

    def _cached(self, pool: Pool, size: int) -> Block | None:
        found = self._best_fit(pool, size)
        if found is None:
            return None
        if self._is_oversize(found.size) and not self._is_oversize(size):
            return None
        if self._is_oversize(size) and found.size >= size + LARGE_SEGMENT_BYTES:
            return None
        pool.free.remove(found)
        return found

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest free block of the pool that has at least ``size`` bytes, or ``None`` if no block is large enough.

        With expandable segments a free block can be extended by the unmapped pages after it. Then return the block that is
        smallest once extended.
        """
        fitting = pool.free.from_size(size)
        found = next(fitting, None)
        if found is not None and self.settings.is_expandable:
            for other in fitting:
                if _expanded_bytes(other) >= _expanded_bytes(found):
                    break
                found = other
        return found

    # From the device --------------------------------------------------------------------------------------------

    def _reserve(self, pool: Pool, size: int) -> Block:
        block = self._ask(pool, size)
        if block is None and self._give_back_oversize(pool, size):
            block = self._ask(pool, size)
        if block is None:
            self.retries += 1
            self.give_back()
            block = self._ask(pool, size)
        if block is None:
            raise DeviceFull(size)
        return block

    def _ask(self, pool: Pool, size: int) -> Block | None:
        if self.settings.is_expandable:
            if not pool.unmapped:
                self._open(pool)
            mapped = extend(pool, size, room_bytes=self._room_bytes())
            self.device_allocations += mapped.mappings
            self.reserved_bytes += mapped.bytes
            return mapped.block
        length = segment_bytes(size)
        if length > self._room_bytes():
            return None
        block = Block(self.next_address, length, pool)
        self.next_address += length
        self.reserved_bytes += length
        self.segments += 1
        self.device_allocations += 1
        return block

    def _open(self, pool: Pool) -> None:
        """Create an expandable segment: a range of addresses that do not have memory yet."""
        block = Block(self.next_address, _ADDRESS_SPACE_BYTES // pool.page_bytes * pool.page_bytes, pool)
        block.is_mapped = False
        self.next_address += _ADDRESS_SPACE_BYTES
        pool.unmapped.append(block)
        self.segments += 1

    def _room_bytes(self) -> int:
        limit = self.settings.limit_bytes
        return _ADDRESS_SPACE_BYTES if limit is None else max(limit - self.reserved_bytes, 0)

    # Back to the device -----------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Return free segments, or free pages of expandable segments, to the device, as ``torch.cuda.empty_cache`` does."""
        for pool in sorted(self.pools.values(), key=lambda pool: pool.is_small):
            for block in pool.free:
                if self.settings.is_expandable:
                    self.reserved_bytes -= unmap(block)
                elif not block.is_split:
                    self._free(block)

    def _give_back_oversize(self, pool: Pool, size: int) -> bool:
        """Give free blocks that are too large to be split back to the device, and return whether that freed enough bytes.

        If one block suffices, the smallest such block is given back. Otherwise the largest blocks are given back until they
        suffice.
        """
        most = self.settings.max_split_bytes
        if most is None or self.settings.is_expandable:
            return False
        wanted = max(size, most)
        fitting = next(pool.free.from_size(wanted), None)
        if fitting is not None:
            if fitting.is_split:
                return False
            self._free(fitting)
            return True
        freed = 0
        while freed < wanted:
            block = pool.free.largest()
            if block is None or block.size < most or block.is_split:
                break
            freed += block.size
            self._free(block)
        return freed >= wanted

    def _free(self, block: Block) -> None:
        block.pool.free.remove(block)
        self.reserved_bytes -= block.size
        self.segments -= 1


def _expanded_bytes(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


_MOST_STEPS = 8


def simulate_allocator(
    events: Sequence[AllocationEvent], settings: AllocatorSettings | None = None, *, most_steps: int = _MOST_STEPS
) -> AllocatorUse:
    """Run a step's allocations through the caching allocator until its figures repeat.

    Events are those of one step, in order. Default settings are torch's, on a device with unlimited memory. A request that the
    device cannot satisfy ends the simulation and is named in the result. If every step requests device memory again, the
    simulation ends after ``most_steps``.

    Example:
        >>> from plimsoll.artifacts.trace import Category
        >>> def event(block: int, size: int) -> AllocationEvent:
        ...     return AllocationEvent(instant=0, block=block, bytes=size, label="x", category=Category.ACTIVATION)
        >>> use = simulate_allocator([event(0, 3_000_000), event(1, 700), event(0, -3_000_000), event(1, -700)])
        >>> use.allocated_peak_bytes, use.reserved_peak_bytes, use.segments, use.steps
        (3001344, 23068672, 2, 2)

    Source: see the module ``allocator``, which also lists known weaknesses.
    """
    run = _Run(CachingAllocator(settings or AllocatorSettings()))
    asked: list[int] = []
    try:
        while len(asked) < max(most_steps, 1):
            before = run.allocator.device_allocations
            run.step(_first_step(events) if not asked else (event for event in events if not event.lasts))
            asked.append(run.allocator.device_allocations - before)
            if not asked[-1]:
                break
    except DeviceFull:
        asked.append(run.allocator.device_allocations - sum(asked))
    return AllocatorUse(
        requested_peak_bytes=run.requested_peak_bytes,
        allocated_peak_bytes=run.allocated_peak_bytes,
        reserved_peak_bytes=run.reserved_peak_bytes,
        inactive_split_bytes=run.inactive_split_bytes,
        segments=run.most_segments,
        device_allocations=asked[0],
        steady_device_allocations=asked[-1],
        retries=run.allocator.retries,
        steps=len(asked),
        refused_bytes=run.refused.bytes if run.refused else 0,
        refused_label=run.refused.label if run.refused else "",
    )


def _first_step(events: Sequence[AllocationEvent]) -> list[AllocationEvent]:
    """Return the events of the first step. Blocks that last over all steps (such as optimizer state) are allocated at the
    moment when the first step makes them, and are never freed.
    """
    late = [event for event in events if event.lasts and event.bytes > 0 and event.made > event.instant]
    waiting = deque(sorted(late, key=lambda event: event.made))
    ordered: list[AllocationEvent] = []
    for event in events:
        if event.lasts and (event.bytes < 0 or event.made > event.instant):
            continue
        # Within an instant, frees come before allocations, so that new blocks can reuse the freed memory.
        while waiting and (event.instant, event.bytes > 0) >= (waiting[0].made, True):
            ordered.append(waiting.popleft())
        ordered.append(event)
    return [*ordered, *waiting]


@dataclass(slots=True)
class _Run:
    """The state of one simulation: the allocator, the blocks that are allocated now, and the largest figures so far."""

    allocator: CachingAllocator
    requested_bytes: int = 0
    requested_peak_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    inactive_split_bytes: int = 0
    most_segments: int = 0
    refused: AllocationEvent | None = None
    out: dict[int, Block] = field(default_factory=dict)

    def step(self, events: Iterable[AllocationEvent]) -> None:
        allocator, out = self.allocator, self.out
        for event in events:
            self.requested_bytes += event.bytes
            if event.bytes < 0:
                allocator.release(out.pop(event.block))
                continue
            try:
                out[event.block] = allocator.allocate(event.bytes, stream=event.stream)
            except DeviceFull:
                self.refused = event
                raise
            self._look()

    def _look(self) -> None:
        self.requested_peak_bytes = max(self.requested_peak_bytes, self.requested_bytes)
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocator.allocated_bytes)
        if self.allocator.reserved_bytes > self.reserved_peak_bytes:
            self.reserved_peak_bytes = self.allocator.reserved_bytes
            self.inactive_split_bytes = self.allocator.inactive_split_bytes
            self.most_segments = max(self.most_segments, self.allocator.segments)
