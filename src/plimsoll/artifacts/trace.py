"""A traced training step: every op, every storage with its life, every region call.

Time is counted in *ticks*: op ``t`` of ``Trace.ops`` runs at tick ``t``. A storage is alive during the ticks
``[born, dies)``; ``born`` is ``-1`` for what was there before the step. **Lives leave out what regions' saved slots
hold**: a plan decides about those, so the simulator adds them back. Slots saved outside of every region (the loss, the
head) are included in the lives, because no plan touches them.
"""

from __future__ import annotations

import enum

import msgspec

from plimsoll.artifacts.region import RegionGraph

SCHEMA_VERSION = 1


class Phase(enum.StrEnum):
    """The part of a training step in which an op runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Category(enum.StrEnum):
    """torch's memory categories, as users know them from its profiler, and the buffers of collectives."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    GRADIENT = "gradient"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    OPTIMIZER_STATE = "optimizer state"
    COMMUNICATION = "communication"


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation and its life (see the module's docstring for ticks)."""

    id: int
    bytes: int
    category: Category
    label: str
    born: int
    dies: int
    region: int = -1
    """The region call whose forward produced it, ``-1`` for none."""
    is_overwritten: bool = False
    """Op ``dies`` is its last reader, and writes its own output in this place."""


class TraceOp(msgspec.Struct, frozen=True, kw_only=True):
    """One op of the step, in the order of execution."""

    name: str
    module: str
    phase: Phase
    cost_key: str
    region: int = -1


class OpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a roofline needs to know about one ``cost_key``: arithmetic, bytes moved, and the dtype that does it.

    For a collective ``group`` is the dimension of the layout over which it runs (``tp``, ``cp``, ``ep``, ``dp``, ``pp``), and
    ``moved_bytes`` the size of the whole tensor on one rank: the gathered one, the one to be reduced, the one exchanged.
    For a matrix product ``product`` is batch, rows, columns and inner size. ``is_causal`` is attention whose kernel skips the
    masked half of the scores, which ``flops`` count. ``beside`` are the cost keys of products beside which a collective runs in
    pieces. ``copies`` is to how many ranks an exchange sends each row, where no rank and no node gets it twice; 0 otherwise.
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
    """One parameter of the traced model; ``storage`` is its storage in the trace (``-1``: the step does not touch it).

    ``aliases`` are the other names that a tied parameter goes by.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: int
    is_trainable: bool = True
    is_written: bool = False
    """Whether forward or backward writes to it in place, as to a moving average of others."""
    aliases: tuple[str, ...] = ()


class RegionCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of one region in the step.

    ``kind`` is equal for calls with equal graphs (names without the region's own prefix), so that choices can be shared.
    ``forward`` and ``backward`` are half-open tick ranges. ``obstacle`` is empty when recipes can serve this region;
    otherwise the region is left alone and the text says why.
    """

    index: int
    name: str
    call: int
    kind: str
    graph: RegionGraph
    forward: tuple[int, int]
    backward: tuple[int, int]
    obstacle: str = ""
    is_emptied: bool = False
    """Whether parameters that it reads are gone between its forward and its backward (a sharded model frees the gathered
    ones): nothing of it can be rebuilt before its own backward."""
    is_compiled: bool = False
    """Whether torch.compile runs it: what is dropped is gone after its last use in forward, not at the region's end."""
    copied_inputs: tuple[str, ...] = ()
    """Where backward reads copies of inputs of compiled code, as these change before: ``key:`` for each graph, by its inputs,
    and ``key:input#3`` for what something else changes than the graph itself."""
    unpacks_at_once: bool = False
    """Whether its values may take other forms although torch.compile runs it: all are packed when its forward ends, and all
    are back when its backward begins."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of one model on one batch."""

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
    """Seconds of each ``cost_key`` as seen while tracing on a real device; empty for a fake trace."""
    workspaces: dict[str, int]
    """Bytes that an op of this ``cost_key`` allocates and frees inside itself, measured by allocator events."""
    notes: tuple[str, ...] = ()
    parameters: tuple[TraceParameter, ...] = ()
    """Every parameter once, in the order of ``named_parameters``; empty in older traces."""
    written_buffers: tuple[str, ...] = ()
    """The buffers that forward or backward writes to."""

    @property
    def written(self) -> tuple[str, ...]:
        """The parameters that the step itself writes to."""
        return tuple(parameter.name for parameter in self.parameters if parameter.is_written)


class WatchedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step run as it is, with whatever it does to save memory.

    Unlike in a trace for planning, lives hold what saved tensors hold, and what forward makes again in backward is in it.

    ``trace`` has no regions. Ticks below ``forward_end`` are forward's, below ``backward_end`` backward's. ``recomputed`` are
    the ticks of ops that ran forward again within backward. ``output_ends`` says when the storages that the step's output
    holds would be gone if it did not hold them, ``first_writes`` when gradients that were there before the step are first
    written. ``without_gradient`` names the parameters that get none.
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
    """Whether a device of this name runs GPU kernels: all do that do not call themselves a CPU.

    Example:
        >>> runs_gpu_kernels("H100-SXM"), runs_gpu_kernels("laptop-CPU")
        (True, False)
    """
    return "cpu" not in device_name.lower()
