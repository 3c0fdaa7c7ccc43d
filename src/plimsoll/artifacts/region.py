"""One region call as a graph: the ops it ran, the values between them, and the slots that autograd saved.

A *value* is one version of one storage: views of it cost nothing and do not appear, and a write to it makes a new value. An
*op* reads values and produces values. A *slot* is one tensor that autograd saved for backward; slots are in saving order.
"""

from __future__ import annotations

import enum

import msgspec

IS_COLLECTIVE = "is a collective"
"""The obstacle of ops that communicate with other ranks."""


class Origin(enum.StrEnum):
    """Where a value comes from."""

    OP = "op"
    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    EXTERNAL = "external"


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one storage.

    ``bytes`` is what rebuilding it allocates: the size of the whole storage, or of one iteration's part if a loop runs the
    region and the storage holds the values of all iterations. ``storage`` is the trace-wide id of that storage: two values
    with the same ``storage`` are versions of the same memory and are counted once. ``producer`` is the op that
    wrote it (``-1`` for leaves). A value that ``is_storable`` may be held from forward to backward (autograd saves it,
    or it is an input). An input ``is_steady`` if forward made it and no longer writes to it once the region has received it.
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
    """One op of the region's forward.

    ``reads`` and ``writes`` are value ids. An in-place op reads the old version and writes the new one (both have the same
    ``storage``). ``cost_key`` names the op with its shapes in ``Costs``; ``tick`` is its position in the traced step.
    ``obstacle`` is empty for an op that may be recomputed; otherwise it says why it may not.
    """

    id: int
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost_key: str
    tick: int = -1
    obstacle: str = ""
    is_random: bool = False

    @property
    def is_replayable(self) -> bool:
        return not self.obstacle


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that autograd saved.

    ``value`` is ``-1`` for tensors that Plimsoll does not manage (parameters, tensors whose storage it never saw). ``packed``,
    ``unpacked`` and ``released`` are ticks of the traced step: the slot is saved before op ``packed`` starts, first read
    before op ``unpacked`` starts (``-1``: never), and freed before op ``released`` starts. If it ``is_overwritten``, op
    ``released`` is its last reader and writes over it.
    """

    index: int
    value: int
    packed: int = -1
    unpacked: int = -1
    released: int = -1
    is_overwritten: bool = False

    @property
    def is_managed(self) -> bool:
        return self.value >= 0


class RegionGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The ops, values and slots of one region call; ids are positions in the tuples."""

    values: tuple[Value, ...]
    ops: tuple[RegionOp, ...]
    slots: tuple[Slot, ...]
    outputs: tuple[int, ...]
    backward_order: tuple[int, ...]
    """Slot indices, ordered by when backward first reads them."""
