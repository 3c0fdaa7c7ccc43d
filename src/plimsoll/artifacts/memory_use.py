"""Data about memory other than activations: the optimizer's state, and the memory that the caching allocator reserves."""

from __future__ import annotations

import enum

import msgspec

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.trace import Category


class StepForm(enum.StrEnum):
    """Names for how an optimizer step goes through the parameters.

    ``LOOP``: one parameter after the other. ``FOREACH``: all parameters together, op by op (torch's choice on a GPU).
    ``FUSED``: one kernel, without temporaries.
    """

    LOOP = "loop"
    FOREACH = "foreach"
    FUSED = "fused"


class Temporary(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one tensor that an optimizer step allocates and that is alive at the step's peak."""

    label: str
    bytes: int


class OptimizerUse(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the memory and work of one optimizer for the parameters that one rank updates.

    ``state_bytes`` maps each parameter's name to its state on the device, ``master_bytes`` to its float32 copy of the weights.
    ``host_state_bytes`` is the state on the host (such as the step counters, if the step loops over parameters or uses
    foreach). ``temporaries`` are the tensors alive together at the peak of the optimizer's step. ``moved_bytes`` are the bytes
    that the step reads and writes, ``flops`` is its arithmetic. ``relative_error`` applies to the bytes of state, float32
    copies and temporaries.
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
    """Bytes that the optimizer's step transfers between device and host, in both directions together."""
    host_bytes: int = 0
    """Bytes that the host reads and writes if the host runs the step."""
    notes: tuple[str, ...] = ()
    """Sentences about the convention that was followed where implementations differ (which parameters Muon leaves to AdamW,
    what stays in 32 bits)."""

    @property
    def total_state_bytes(self) -> int:
        """Bytes of the optimizer's state of all parameters on the device."""
        return sum(self.state_bytes.values())

    @property
    def total_master_bytes(self) -> int:
        """Bytes of the float32 copies (master weights) of all parameters."""
        return sum(self.master_bytes.values())

    @property
    def temporary_bytes(self) -> int:
        """Bytes of the temporary tensors that the optimizer's step needs at its peak."""
        return sum(temporary.bytes for temporary in self.temporaries)


DEFAULT_STREAM = 0
COMMUNICATION_STREAM = 1
"""The number of the CUDA stream on which buffers of collectives are allocated. The allocator does not share cached memory
between streams."""


class AllocationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one allocation (positive ``bytes``) or release (negative ``bytes``) of a memory block in the simulated step.

    ``instant`` is its time in the step. A block with ``lasts`` set exists before and after the step, so later steps neither
    allocate nor free it. The first step allocates such a block at the instant ``made``: for optimizer state, this is when the
    optimizer first runs.
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
    """Data: the memory figures of torch's caching allocator, simulated for a step that repeats until the figures do not change.

    Requested bytes are the sizes of tensors, allocated bytes the sizes of their blocks (multiples of 512 bytes), and reserved
    bytes the sizes of all segments. A segment is memory that the allocator got from the device.
    """

    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    inactive_split_bytes: int
    """Bytes that are free but cannot be returned to the device, because they are inside segments that are partly in use. They
    are counted at the moment when reserved memory is at its peak."""
    segments: int
    device_allocations: int
    """How often the first step asked the device for memory, with ``cudaMalloc`` or by mapping expandable segments."""
    steady_device_allocations: int
    """How often the last step asked the device for memory. If this is above 0, each step waits for the device's allocator."""
    retries: int
    """How often the allocator returned its cached memory to the device, because the device did not have any more memory."""
    steps: int
    """How many repetitions of the training step were simulated."""
    refused_bytes: int = 0
    """Bytes of the first request that the device could not satisfy; 0 if all requests fit. If a request failed, the other
    figures cover the time before it."""
    refused_label: str = ""

    @property
    def rounding_bytes(self) -> int:
        """The bytes that rounding block sizes up costs: the peak of the blocks' bytes minus the peak of the requested bytes."""
        return self.allocated_peak_bytes - self.requested_peak_bytes
