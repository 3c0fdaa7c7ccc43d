"""Cut the ops of one region call (a call of a module that a plan manages) out of the log of a step's ops.

The result is a torch-free ``RegionGraph`` with its own ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.region import Origin, RegionGraph, RegionOp, Slot, Value
from plimsoll.tracing.recorder.recorder import RecordedOp, RecordedValue


@dataclass(slots=True)
class SlotRecord:
    """Data about one saved tensor, as the saved-tensor hooks saw it.

    ``value`` is the id of its value in the log, or ``-1`` for a tensor that is not managed. ``packed``, ``unpacked`` and
    ``released`` are the ticks (positions in the log) when it was saved, first read and freed.
    """

    value: int
    storage: int = -1
    packed: int = -1
    unpacked: int = -1
    released: int = -1


@dataclass(frozen=True, slots=True)
class LocalIds:
    """Data: two mappings between ids. ``to_local`` leads from ids of the log of the whole step to ids of one module call's
    graph, and ``to_log`` leads back.
    """

    to_local: dict[int, int]
    to_log: tuple[int, ...]


def build_region_graph(
    values: Sequence[RecordedValue],
    ops: Sequence[RecordedOp],
    slots: Sequence[SlotRecord],
    outputs: Sequence[int],
    backward_order: Sequence[int],
    leaves: Mapping[int, tuple[Origin, str]],
    prefix: str,
    steady: Collection[int] = (),
) -> tuple[RegionGraph, LocalIds]:
    """Cut a region (planned module) out of the log: its ops, and its saved tensors (slots) in the order of saving. Return the
    region's graph, and the mappings between ids of the log and ids of the graph.

    ``backward_order`` is backward's order of reading the slots (the reverse order of saving if unknown). ``leaves`` are values
    that the region did not make, with origin and name, in an order that is the same in every region of one kind. ``steady`` are
    leaves that forward does not write any more. The module path ``prefix`` is removed from names, so that equal blocks have
    equal graphs.
    """
    made = {write: op for op in ops for write in op.writes}
    obstacles = _external_writes(values, ops)
    storable = {slot.value for slot in slots if slot.value >= 0}
    used = {value for op in ops for value in (*op.reads, *op.writes)} | storable | leaves.keys()
    rank = {log_id: position for position, log_id in enumerate(leaves)}
    first_reads = _first_reads(ops, slots)
    order = sorted(
        used, key=lambda v: (v in made, rank.get(v, len(rank)), -1 if v in made else first_reads.get(v, -1), v)
    )
    leaves = {**leaves, **_numbered([v for v in order if v not in made and v not in leaves])}
    local = {log_id: position for position, log_id in enumerate(order)}
    op_ids = {op.id: position for position, op in enumerate(ops)}
    graph = RegionGraph(
        values=tuple(
            msgspec.structs.replace(
                _value(values[log_id], position, made.get(log_id), op_ids, leaves.get(log_id), storable, prefix),
                is_steady=log_id in steady,
            )
            for position, log_id in enumerate(order)
        ),
        ops=tuple(
            RegionOp(
                id=position,
                name=op.name,
                reads=tuple(local[v] for v in op.reads),
                writes=tuple(local[v] for v in op.writes),
                cost_key=op.cost_key,
                tick=op.id,
                obstacle=op.obstacle or obstacles.get(op.id, ""),
                line=op.line,
                is_random=op.is_random,
            )
            for position, op in enumerate(ops)
        ),
        slots=tuple(
            Slot(
                index=index,
                value=local.get(slot.value, -1),
                packed=slot.packed,
                unpacked=slot.unpacked,
                released=slot.released,
            )
            for index, slot in enumerate(slots)
        ),
        outputs=tuple(local[v] for v in outputs if v in local),
        backward_order=tuple(backward_order),
    )
    return graph, LocalIds(to_local=local, to_log=tuple(order))


def _first_reads(ops: Sequence[RecordedOp], slots: Sequence[SlotRecord]) -> dict[int, int]:
    """Return a mapping from value to the position of its first use in a region.

    The position is the same in a trace of the whole step and in a recording of the region only.
    """
    met = [*(value for op in ops for value in op.reads), *(slot.value for slot in slots)]
    return {value: position for position, value in reversed(list(enumerate(met)))}


def _numbered(outside: Sequence[int]) -> dict[int, tuple[Origin, str]]:
    """Return an origin and a name such as ``external#0`` for each of these values. They come from outside the region and are
    neither arguments nor parameters, such as another block's keys.
    """
    return {value: (Origin.EXTERNAL, f"external#{number}") for number, value in enumerate(outside)}


def _value(
    value: RecordedValue,
    position: int,
    producer: RecordedOp | None,
    op_ids: Mapping[int, int],
    leaf: tuple[Origin, str] | None,
    storable: set[int],
    prefix: str,
) -> Value:
    if producer is not None:
        origin, name = Origin.OP, relative_name(value.name, prefix)
    else:
        assert leaf is not None, "every value is made here, or is a leaf"
        origin, name = leaf
    return Value(
        id=position,
        name=name,
        bytes=value.bytes,
        storage=value.storage,
        origin=origin,
        producer=-1 if producer is None else op_ids[producer.id],
        is_storable=value.id in storable or origin is Origin.INPUT,
    )


def _external_writes(values: Sequence[RecordedValue], ops: Sequence[RecordedOp]) -> dict[int, str]:
    """Return a mapping from an op's id to the reason why the op cannot run again: it uses memory from outside that the region
    overwrites.
    """
    made_here = {storage for op in ops for storage in op.births}
    overwritten = {values[w].storage for op in ops for w in op.writes} - made_here
    obstacles: dict[int, str] = {}
    for op in ops:
        if any(values[w].storage in overwritten for w in op.writes):
            obstacles[op.id] = "writes to memory from outside the region"
        elif any(values[r].storage in overwritten for r in op.reads):
            obstacles[op.id] = "reads memory from outside that the region overwrites"
    return obstacles


def relative_name(name: str, prefix: str) -> str:
    """Return a name relative to the module path ``prefix``.

    For ``model.layers.3.mlp.act_fn::silu#0`` and the prefix ``model.layers.3``, the result is ``mlp.act_fn::silu#0``.
    """
    if not prefix:
        return name
    return name.removeprefix(prefix + "::").removeprefix(prefix + ".")
