"""Runs the allocations of a training step through the simulated allocator, as often as it takes to reach a steady state.

The first step differs from all others: what lasts is allocated in it, parameters first and the optimizer's state at its end, as
torch's optimizers make it, into what backward has left in the cache. Steps are run until one asks nothing of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plimsoll.artifacts.memory_use import AllocationEvent, AllocatorUse
from plimsoll.estimator.allocator_sim.allocator import AllocatorSettings, CachingAllocator, DeviceFull
from plimsoll.estimator.allocator_sim.blocks import Block

_MOST_STEPS = 8


def simulate_allocator(
    events: Sequence[AllocationEvent], settings: AllocatorSettings | None = None, *, most_steps: int = _MOST_STEPS
) -> AllocatorUse:
    """Run a step's allocations through the caching allocator until its figures repeat.

    Events are one step's, in order; by default the settings are torch's, on a device without limit. A request that the
    device has no room for ends the simulation and is named; ``most_steps`` end it if every step asks the device anew.

    Example:
        >>> from plimsoll.artifacts.trace import Category
        >>> def event(block: int, size: int) -> AllocationEvent:
        ...     return AllocationEvent(instant=0, block=block, bytes=size, label="x", category=Category.ACTIVATION)
        >>> use = simulate_allocator([event(0, 3_000_000), event(1, 700), event(0, -3_000_000), event(1, -700)])
        >>> use.allocated_peak_bytes, use.reserved_peak_bytes, use.segments, use.steps
        (3001344, 23068672, 2, 2)

    Source: see ``allocator``, with its known weaknesses.
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
    """The step with what lasts made where the first step makes it, and never let go."""
    late = [event for event in events if event.lasts and event.bytes > 0 and event.made > event.instant]
    waiting = deque(sorted(late, key=lambda event: event.made))
    ordered: list[AllocationEvent] = []
    for event in events:
        if event.lasts and (event.bytes < 0 or event.made > event.instant):
            continue
        # Within an instant releases come first, so what is made then finds their memory.
        while waiting and (event.instant, event.bytes > 0) >= (waiting[0].made, True):
            ordered.append(waiting.popleft())
        ordered.append(event)
    return [*ordered, *waiting]


@dataclass(slots=True)
class _Run:
    """One allocator, the blocks that are out, and the highest figures so far."""

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
