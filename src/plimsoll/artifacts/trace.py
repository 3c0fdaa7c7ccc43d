"""Data of a traced training step: all ops, all storages with their lifetimes, and all calls of regions.

A region is a module whose saved activations Plimsoll may manage. A slot is one tensor that autograd saved for backward.

Time is counted in *ticks*: op ``t`` of ``Trace.ops`` runs at tick ``t``. A storage is alive during the ticks ``[born, dies)``;
``born`` is ``-1`` for storages that existed before the step. **Lifetimes do not include what the saved slots of regions hold**:
a plan decides about those slots, so the simulator adds them back. Lifetimes do include slots saved outside every region (the
loss, the head), because plans never change them.
"""

from __future__ import annotations

import enum
import html

import msgspec

from plimsoll.artifacts.region import RegionGraph
from plimsoll.units import format_bytes

SCHEMA_VERSION = 1


class Phase(enum.StrEnum):
    """The part of a training step that an op runs in."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Category(enum.StrEnum):
    """What a storage is used for: the memory categories of torch's profiler, and one for the buffers of collectives."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    GRADIENT = "gradient"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    OPTIMIZER_STATE = "optimizer state"
    COMMUNICATION = "communication"


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one allocation of the traced step.

    It is alive from tick ``born`` until before tick ``dies``. A tick is the position of an op: op ``t`` runs at tick ``t``.
    """

    id: int
    bytes: int
    category: Category
    label: str
    born: int
    dies: int
    region: int = -1
    """The position of the region call (a call of a module that the plan decides about) whose forward allocated the storage;
    ``-1`` if it was allocated outside all regions.
    """
    is_overwritten: bool = False
    """Whether the op at tick (position) ``dies`` reads the storage last and reuses this memory for its own output."""


class TraceOp(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one op of the traced step; ``cost_key`` names the op together with its shapes.

    ``Trace.ops`` has the order of execution. ``region`` is the position of the region call (a call of a module that the plan
    decides about) in ``Trace.regions``; ``-1`` for an op outside all regions.
    """

    name: str
    module: str
    phase: Phase
    cost_key: str
    region: int = -1


class OpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Data: what a roofline needs to compute the time of one distinct op: FLOPs, bytes read and written, arithmetic's dtype.

    For a collective, ``group`` is the dimension of the layout over which it runs (``tp``, ``cp``, ``ep``, ``dp``, ``pp``), and
    ``moved_bytes`` is the size of the whole tensor on one rank: the gathered, reduced or exchanged tensor. For a matrix
    product, ``product`` is batch, rows, columns and inner size. ``is_causal`` marks attention whose kernel skips the masked
    half of the scores; ``flops`` counts that half too. ``beside`` lists cost keys of matrix products that overlap with this
    collective, which then runs in pieces. ``copies`` is the number of ranks that get each row of an exchange, if the exchange
    never sends a row twice to the same rank or node; otherwise it is 0.
    """

    name: str
    flops: int
    moved_bytes: int
    dtype: str
    group: str = ""
    product: tuple[int, int, int, int] | None = None
    is_causal: bool = False
    beside: tuple[str, ...] = ()
    copies: float = 0.0


class TraceParameter(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one parameter of the traced model.

    ``storage`` is the id of the parameter's storage in the trace (``-1``: the step does not use the parameter). ``aliases`` are
    the other names of a tied parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: int
    is_trainable: bool = True
    is_written: bool = False
    """Whether forward or backward writes to the parameter in place, for example to update a moving average."""
    aliases: tuple[str, ...] = ()
    gradient: int = -1
    """The id of the storage that holds the gradient when backward ends; ``-1`` without a gradient."""
    whole_at: int = -1
    """The tick (position of an op) before which backward completes the gradient. ``-1`` if backward does not, or adds to the
    gradient several times.
    """


class RegionCall(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one call of one region (a module that Plimsoll manages) in the step.

    ``kind`` is the same text for all calls with equal graphs (names without the region's own prefix), so that these calls can
    share decisions. ``forward`` and ``backward`` are half-open ranges of ticks. ``obstacle`` is empty if recipes (lists of ops
    that rebuild dropped values) can handle this region; otherwise it says why they cannot, and the region stays untouched.
    """

    index: int
    name: str
    call: int
    kind: str
    graph: RegionGraph
    forward: tuple[int, int]
    backward: tuple[int, int]
    obstacle: str = ""
    value_read: str = ""
    """The first line of the model's code in the region (a module that the plan decides about) that reads values of tensors
    (``moe.py:62``), or "". Another batch may then run other ops here, or ops of other sizes.
    """
    is_emptied: bool = False
    """Whether parameters that the region reads are freed between its forward and its backward, as a sharded model frees
    gathered parameters. Then nothing in the region can be rebuilt before the region's own backward.
    """
    is_compiled: bool = False
    """Whether torch.compile runs the region. A dropped value is then freed after its last use in forward, not only when the
    region's forward ends.
    """
    copied_inputs: tuple[str, ...] = ()
    """Inputs of compiled code that backward reads as copies, because they change before backward runs. An entry ``key:`` names
    a graph by a key made of its inputs; an entry ``key:input#3`` names an input that changes outside that graph."""
    unpacks_at_once: bool = False
    """Whether values may be compressed or offloaded although torch.compile runs the region. All these values are then packed
    when the region's forward ends, and unpacked when its backward begins.
    """


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the record of one training step of one model on one batch, with its ops and storages. Plans are made from it."""

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    signature: str
    device: str
    is_fake: bool
    ops: tuple[TraceOp, ...]
    specs: dict[str, OpSpec]
    storages: tuple[Storage, ...]
    regions: tuple[RegionCall, ...]
    timings: dict[str, tuple[float, ...]]
    """Maps a cost key to the measured seconds of its op, one number for each measurement, taken while tracing on a real device.
    Empty for a fake trace, which does not compute anything."""
    workspaces: dict[str, int]
    """Maps a cost key to the bytes that its op allocates and frees inside itself, measured by allocator events."""
    notes: tuple[str, ...] = ()
    parameters: tuple[TraceParameter, ...] = ()
    """The model's parameters, each once, in the order of ``named_parameters``; empty in traces of older versions."""
    written_buffers: tuple[str, ...] = ()
    """Names of the buffers that forward or backward writes to."""

    def __repr__(self) -> str:
        kept_bytes = sum(storage.bytes for storage in self.storages)
        return (
            f"Trace of {self.model} on {self.device}{' (fake)' if self.is_fake else ''}\n  batch {self.signature}\n"
            f"  {len(self.ops)} ops, {len(self.regions)} region calls, {len(self.storages)} storages of "
            f"{format_bytes(kept_bytes)} in all"
        )

    def _repr_html_(self) -> str:
        """Return the trace as HTML, for notebooks."""
        return f"<pre>{html.escape(repr(self))}</pre>"

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the parameters that forward or backward writes to in place."""
        return tuple(parameter.name for parameter in self.parameters if parameter.is_written)

    @property
    def state_bytes(self) -> int:
        """The bytes of the optimizer's state."""
        return sum(storage.bytes for storage in self.storages if storage.category is Category.OPTIMIZER_STATE)


class WatchedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the record of one step that ran unmodified, including what the step does by itself to save memory.

    An example is checkpointing. In a trace for planning, lifetimes of storages do not include the time that saved tensors hold
    them. Here they do, and ``trace`` includes the ops of forward that run again in backward.

    ``trace`` does not have regions. Ticks below ``forward_end`` belong to forward, ticks from there to ``backward_end`` to
    backward. ``recomputed`` lists the ticks of ops that ran forward again within backward. ``output_ends`` maps each storage of
    the step's output to the tick at which it would be freed if the output did not hold it. ``first_writes`` maps a gradient's
    storage that existed before the step to the tick at which it is first written. ``without_gradient`` names the parameters
    that do not get a gradient.
    """

    trace: Trace
    regions: tuple[str, ...]
    forward_end: int
    backward_end: int
    recomputed: tuple[int, ...] = ()
    output_ends: dict[int, int] = {}
    first_writes: dict[int, int] = {}
    without_gradient: tuple[str, ...] = ()


def runs_gpu_kernels(device_name: str) -> bool:
    """Return True if a device of this name runs GPU kernels: True unless the name contains "cpu".

    Example:
        >>> runs_gpu_kernels("H100-SXM"), runs_gpu_kernels("laptop-CPU")
        (True, False)
    """
    return "cpu" not in device_name.lower()
