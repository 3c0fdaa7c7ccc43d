"""Allocations and releases in order, and what a caching allocator reserves for them. No torch in here."""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.trace import Category

DEFAULT_STREAM = 0
COMMUNICATION_STREAM = 1
"""The stream on which the buffers of collectives are allocated; streams do not share cached memory."""


class AllocationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """``bytes`` of ``block`` are allocated (positive) or let go (negative); ``instant`` is that of the simulated step.

    A block that ``lasts`` is there before the step and after it: a second step neither allocates it nor lets it go.
    """

    instant: int
    block: int
    bytes: int
    label: str
    category: Category
    stream: int = DEFAULT_STREAM
    lasts: bool = False


class AllocatorUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated allocator holds over a repeated step.

    Allocated bytes are those of blocks in use, each as large as the allocator makes it. Fragmentation is what is reserved
    beyond that at the moment when most is reserved; ``inactive_split_bytes`` is the part of it in pieces of segments that
    are otherwise in use, and so cannot be given back. ``steps`` were run until the figures repeated.
    """

    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    fragmentation_bytes: int
    inactive_split_bytes: int
    segments: int
    device_allocations: int
    """How often memory was asked from the device in the first step (``cudaMalloc``, or mappings of expandable segments)."""
    steady_device_allocations: int
    """The same in the last step: 0 where training does not wait for the device's allocator."""
    retries: int
    """How often cached memory was given back because the device had no more."""
    steps: int
