"""Memory other than activations: the optimizer's state, and what the caching allocator reserves."""

from __future__ import annotations

import enum

import msgspec

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.trace import Category


class StepForm(enum.StrEnum):
    """How an optimizer step iterates over the parameters.

    ``LOOP``: one parameter after the other. ``FOREACH``: all parameters together, op by op (torch's choice on a GPU).
    ``FUSED``: one kernel, without temporaries.
    """

    LOOP = "loop"
    FOREACH = "foreach"
    FUSED = "fused"


class Temporary(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that an optimizer step allocates and that is alive at the step's peak."""

    label: str
    bytes: int


class OptimizerUse(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer over the parameters that one rank updates.

    ``state_bytes``: state on the device, by parameter name. ``host_state_bytes``: state on the host (the step counters of
    loop and foreach forms). ``master_bytes``: float32 copies of the weights, by parameter name. ``temporaries``: tensors alive
    together at the step's peak. ``moved_bytes`` and ``flops``: what the step reads and writes, and computes. The relative
    error applies to the bytes of state, masters and temporaries.
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
    """Bytes that a step transfers between device and host, both directions together."""
    host_bytes: int = 0
    """Bytes that the host reads and writes if it runs the step."""
    notes: tuple[str, ...] = ()
    """Which convention was followed where optimizers differ (what Muon leaves to AdamW, what stays in 32 bits)."""

    @property
    def total_state_bytes(self) -> int:
        """State of all parameters on the device, in bytes."""
        return sum(self.state_bytes.values())

    @property
    def total_master_bytes(self) -> int:
        """Master weights of all parameters, in bytes."""
        return sum(self.master_bytes.values())

    @property
    def temporary_bytes(self) -> int:
        """Extra bytes that the step needs at its peak."""
        return sum(temporary.bytes for temporary in self.temporaries)


DEFAULT_STREAM = 0
COMMUNICATION_STREAM = 1
"""The stream on which buffers of collectives are allocated; the allocator does not share cached memory between streams."""


class AllocationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Allocation (positive ``bytes``) or free (negative) of ``block``, at ``instant`` of the simulated step.

    A block that ``lasts`` exists before the step and after it: later steps neither allocate nor free it. The first step
    allocates it at the instant ``made``; optimizer state is made when the optimizer first runs.
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
    """Memory of the simulated allocator while a step is repeated until its figures no longer change.

    Requested bytes are the sizes of tensors, allocated bytes the sizes of their blocks (multiples of 512 bytes), reserved
    bytes the sizes of all segments.
    """

    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    inactive_split_bytes: int
    """Free pieces of segments that are otherwise in use, and so cannot be returned, when reserved memory is at its peak."""
    segments: int
    device_allocations: int
    """How often the first step asked the device for memory (``cudaMalloc``; mappings of expandable segments)."""
    steady_device_allocations: int
    """The same for the last step: above 0, every step waits for the device's own allocator."""
    retries: int
    """How often cached memory was returned because the device did not have any more."""
    steps: int
    """How many steps were simulated."""
    refused_bytes: int = 0
    """Size of the request that the device could not satisfy; 0 if all fit. The other figures then cover the steps until it."""
    refused_label: str = ""

    @property
    def rounding_bytes(self) -> int:
        """Bytes of blocks in excess of the requested bytes."""
        return self.allocated_peak_bytes - self.requested_peak_bytes
