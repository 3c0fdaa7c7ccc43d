"""What holds memory besides activations: the optimizer's state, and what the caching allocator reserves."""

from __future__ import annotations

import enum

import msgspec

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.trace import Category


class StepForm(enum.StrEnum):
    """How a step walks over the parameters.

    ``LOOP``: one after the other. ``FOREACH``: all at once, op by op (torch's choice on a GPU). ``FUSED``: one kernel that
    makes no temporaries.
    """

    LOOP = "loop"
    FOREACH = "foreach"
    FUSED = "fused"


class Temporary(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that is alive at the highest moment of a step and was not there before it."""

    label: str
    bytes: int


class OptimizerUse(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer over the parameters that one rank updates.

    ``state_bytes``: by parameter name, what lies on the device. ``host_state_bytes``: on the host (the step counters of
    loop and foreach forms). ``master_bytes``: by parameter name, copies of the weights in f32. ``temporaries``: alive together
    at the highest moment of the step. ``moved_bytes`` and ``flops``: what the step reads and writes, and computes. The relative
    error holds for the bytes of state, masters and temporaries.
    """

    name: str
    form: StepForm
    state_bytes: dict[str, int]
    host_state_bytes: int
    master_bytes: dict[str, int]
    temporaries: tuple[Temporary, ...]
    moved_bytes: int
    flops: int
    relative_error: float
    basis: Basis
    link_bytes: int = 0
    """What a step sends between the device and the host, both ways together."""
    host_bytes: int = 0
    """What the host reads and writes where it runs the step."""
    notes: tuple[str, ...] = ()
    """Which rule was followed where there is a choice (what Muon leaves to AdamW, what stays in 32 bits)."""

    @property
    def total_state_bytes(self) -> int:
        """State of all parameters on the device."""
        return sum(self.state_bytes.values())

    @property
    def total_master_bytes(self) -> int:
        """Master weights of all parameters."""
        return sum(self.master_bytes.values())

    @property
    def temporary_bytes(self) -> int:
        """What the step needs besides at its highest moment."""
        return sum(temporary.bytes for temporary in self.temporaries)


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
