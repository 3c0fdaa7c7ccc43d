"""One call of a region (a module that a plan decides about) as a graph: the ops that it ran, the values between them, and the
slots (tensors that autograd saved).

A *value* is one version of one storage: views of it cost nothing and do not appear, and a write to it makes a new value. An
*op* reads values and produces values. A *slot* is one tensor that autograd saved for backward; slots are in saving order.
"""

from __future__ import annotations

import enum

import msgspec

IS_COLLECTIVE = "is a collective"
"""The text of ``RegionOp.obstacle`` for ops that communicate with other ranks."""

SMALL_BUFFER_BYTES = 1 << 20
"""The largest buffer in bytes that each call copies if recipes (ops that rebuild dropped tensors) read it. The model may write
to a buffer before backward, and most buffers that models write to are small.

A larger buffer is held instead and must not change before backward.
"""


class Origin(enum.StrEnum):
    """Where a value of a region comes from: an op of the region, or from outside."""

    OP = "op"
    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    EXTERNAL = "external"


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one version of one storage, in the graph of a region. Each write to a storage makes a new value.

    ``bytes`` is the number of bytes that rebuilding the value allocates: the size of the whole storage, or of one iteration's
    part if a loop runs the region and the storage holds the values of all iterations. ``storage`` is the id of the storage in
    the trace. Two values with the same ``storage`` are versions of the same memory, which is counted once. ``producer`` is the
    op that wrote the value (``-1`` for a value from outside the region). A value that ``is_storable`` may be held from forward
    to backward, because autograd saves it or because it is an input. An input ``is_steady`` if forward made it and does not
    write to it any more after the region has received it.
    """

    id: int
    name: str
    bytes: int
    storage: int
    origin: Origin
    producer: int = -1
    is_storable: bool = False
    is_steady: bool = False


class RegionOp(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one op of the forward of a region.

    ``reads`` and ``writes`` are ids of values. An in-place op reads the old version of a storage and writes the new version.
    ``cost_key`` names the op with its shapes in ``Costs``; ``tick`` is the op's position in the traced step. ``obstacle`` is
    empty for an op that may run again in backward; otherwise it says why the op may not, and ``line`` is the line of the
    model's code that runs the op.
    """

    id: int
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost_key: str
    tick: int = -1
    obstacle: str = ""
    line: str = ""
    is_random: bool = False

    @property
    def is_replayable(self) -> bool:
        """Whether the op may run again in backward."""
        return not self.obstacle

    @property
    def refusal(self) -> str:
        """A text that says why the op may not run again: its name, its obstacle, and its line in the model's code."""
        return f"{self.name}: {self.obstacle}{f' ({self.line})' if self.line else ''}"


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one tensor that autograd saved for backward.

    ``value`` is ``-1`` for tensors that Plimsoll does not manage (parameters, tensors whose storage it never saw). ``packed``,
    ``unpacked`` and ``released`` are ticks of the traced step (one tick per op): the tensor is saved before op ``packed``
    starts, first read before op ``unpacked`` starts (``-1``: never), and freed before op ``released`` starts. If
    ``is_overwritten`` is true, op ``released`` is the last reader of its tensor and writes over the tensor.
    """

    index: int
    value: int
    packed: int = -1
    unpacked: int = -1
    released: int = -1
    is_overwritten: bool = False

    @property
    def is_managed(self) -> bool:
        """Whether the tensor is a value that Plimsoll knows, so that a plan decides about it."""
        return self.value >= 0


class RegionGraph(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the graph of one call of a region: its ops, values and slots (tensors that autograd saved). An id is a position in
    its tuple.

    ``outputs`` are the ids of the values that the region returns.
    """

    values: tuple[Value, ...]
    ops: tuple[RegionOp, ...]
    slots: tuple[Slot, ...]
    outputs: tuple[int, ...]
    backward_order: tuple[int, ...]
    """Indices of the saved tensors (slots) that backward reads, sorted by backward's first read."""
