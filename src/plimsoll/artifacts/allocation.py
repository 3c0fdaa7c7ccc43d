"""Allocations and releases in order, and what a caching allocator reserves for them. No torch in here."""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.trace import Category

DEFAULT_STREAM = 0
COMMUNICATION_STREAM = 1
"""The stream on which the buffers of collectives are allocated; streams do not share cached memory."""


class AllocationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """``bytes`` of ``block`` are allocated (positive) or let go (negative); ``instant`` is that of the simulated step.

    A block that ``lasts`` is there before the step and after it: a second step neither allocates it nor lets it go. The very
    first step allocates it at the instant ``made``: the optimizer's state where the optimizer runs.
    """

    instant: int
    block: int
    bytes: int
    label: str
    category: Category
    stream: int = DEFAULT_STREAM
    lasts: bool = False
    made: int = 0


class AllocatorUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated allocator holds over a step that is repeated until nothing changes any more.

    Requested bytes are those of tensors, allocated ones those of their blocks (each a multiple of 512 bytes), reserved ones
    those of all segments.
    """

    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    inactive_split_bytes: int
    """When most is reserved: free pieces of segments that are otherwise in use, which cannot be given back."""
    segments: int
    device_allocations: int
    """How often memory was asked from the device in the first step (``cudaMalloc``; mappings of expandable segments)."""
    steady_device_allocations: int
    """The same in the last step: above 0, every step waits for the device's own allocator."""
    retries: int
    """How often cached memory was given back because the device had no more."""
    steps: int
    """How many steps were run."""
    refused_bytes: int = 0
    """The request that the device had no room for; 0 where all fits. The figures are then those until that moment."""
    refused_label: str = ""

    @property
    def rounding_bytes(self) -> int:
        """What blocks take beyond what was asked for."""
        return self.allocated_peak_bytes - self.requested_peak_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """What is reserved beyond the most that blocks ever take at once."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes
