"""Make the parts of a ``Trace`` from the log of a step, without torch objects: ops with their regions (planned modules),
storages with their lives, region graphs.

A life is the time from the allocation of a storage until it is freed. The time when only the saved tensors (slots) of a region
hold the storage is not part of its life, because plans decide about those. The time when slots outside of regions hold it, or
slots that a plan must not touch, is part of its life.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Storage, TraceOp, TraceParameter
from plimsoll.tracing.capture import RegionLog, StepLog
from plimsoll.tracing.optimizer import OptimizerLog
from plimsoll.tracing.recorder.collectives import WITHOUT_ALIASES
from plimsoll.tracing.recorder.graph import SlotRecord, build_region_graph
from plimsoll.tracing.recorder.recorder import RecordedOp, RecordedValue
from plimsoll.tracing.tracer import BUFFER, StepTracer

_STATIC_CATEGORIES = {
    Origin.PARAMETER: Category.PARAMETER,
    Origin.BUFFER: Category.BUFFER,
    Origin.INPUT: Category.INPUT,
}


@dataclass(frozen=True, slots=True)
class Assembled:
    """Data: the parts of a ``Trace`` that `assemble` makes. ``ids`` maps the tracer's storage ids to storage ids of the
    trace.
    """

    ops: tuple[TraceOp, ...]
    specs: dict[str, OpSpec]
    storages: tuple[Storage, ...]
    regions: tuple[RegionCall, ...]
    parameters: tuple[TraceParameter, ...]
    ids: dict[int, int]


def assemble(log: StepLog, optimizer: OptimizerLog | None, *, beside: Mapping[str, int]) -> Assembled:
    """Return the parts of a trace: find the region of each op, the life of each storage, and a name for each storage.

    ``beside`` maps a name to the bytes that wrappers and libraries hold before, during and after the step.
    """
    op_regions = _attribute(log)
    ops, specs = _ops(log, op_regions), dict(log.tracer.specs)
    storages, ids = _storages(log, optimizer, beside)
    if optimizer is not None:
        ops += optimizer.ops()
        specs |= optimizer.specs()
    # From here on storage ids are the trace's. Placeholders that backward read do not get one, and regions do not know them.
    values = [replace(value, storage=ids.get(value.storage, -1)) for value in log.tracer.values]
    logged = [replace(op, births=tuple(ids[born] for born in op.births if born in ids)) for op in log.tracer.ops]
    return Assembled(
        ops=tuple(ops),
        specs=specs,
        storages=tuple(storages),
        regions=tuple(_region(log, index, values, logged, op_regions) for index in range(len(log.regions))),
        parameters=tuple(
            msgspec.structs.replace(
                parameter, storage=ids.get(parameter.storage, -1), gradient=ids.get(parameter.gradient, -1)
            )
            for parameter in log.parameters
        ),
        ids=ids,
    )


def _attribute(log: StepLog) -> list[int]:
    """Return a list with the index of the region of each op, or -1 for an op outside of regions.

    In forward, the position of the op decides. In backward, the autograd node that runs the op decides.
    """
    tracer = log.tracer
    regions = [-1] * len(tracer.ops)
    for index, region in enumerate(log.regions):
        regions[region.start : region.end] = [index] * (region.end - region.start)
    spans = sorted((r.sequence_start, r.sequence_end, i) for i, r in enumerate(log.regions))
    starts = [start for start, _, _ in spans]
    current = -1
    for tick, context in enumerate(tracer.contexts):
        if context.phase is not Phase.BACKWARD:
            continue
        if 0 <= context.node < 2**63:
            place = bisect.bisect_right(starts, context.node) - 1
            while place >= 0 and context.node >= spans[place][1]:  # not in this span: try an enclosing region
                place -= 1
            current = spans[place][2] if place >= 0 else -1
        regions[tick] = current
    return regions


def _ops(log: StepLog, op_regions: list[int]) -> list[TraceOp]:
    tracer = log.tracer
    return [
        TraceOp(
            name=op.name,
            module=op.module or (log.regions[region].name if region >= 0 else context.node_name),
            phase=context.phase,
            cost_key=op.cost_key,
            region=region,
        )
        for op, context, region in zip(tracer.ops, tracer.contexts, op_regions, strict=True)
    ]


def _storages(
    log: StepLog, optimizer: OptimizerLog | None, beside: Mapping[str, int]
) -> tuple[list[Storage], dict[int, int]]:
    """Return the storages of the step, and a mapping from the tracer's ids to their ids.

    The ids do not have gaps, and the optimizer's storages are last: a plan that steps the optimizer otherwise replaces them.
    """
    tracer = log.tracer
    last = tracer.tick + (0 if optimizer is None else optimizer.ticks)
    dies = _deaths(log, last)
    owners = {
        storage: index
        for index, region in enumerate(log.regions)
        for op in tracer.ops[region.start : region.end]
        for storage in op.births
    }
    buffers = {storage: label for storage, label in _buffers(log).items() if storage not in owners}
    ids = {storage: position for position, storage in enumerate(sorted(tracer.born))}
    found = []
    for storage in ids:
        first = tracer.first_value(storage)
        is_unnamed = first.origin is Origin.EXTERNAL and first.name == "external"
        found.append(
            Storage(
                id=ids[storage],
                bytes=tracer.most_bytes[storage],
                category=_category(log, storage, buffers),
                label=buffers.get(storage) or ("constant" if is_unnamed else first.name),
                born=tracer.born[storage],
                dies=dies[storage],
                region=owners.get(storage, -1),
            )
        )
    for storage, lives in sorted(tracer.fillings.items()):
        ids[storage] = len(found)
        found += [
            Storage(
                id=len(found) + number,
                bytes=life.bytes,
                category=Category.PARAMETER,
                label=tracer.first_value(storage).name,
                born=life.born,
                dies=life.dies if life.dies >= 0 else last,
            )
            for number, life in enumerate(lives)
        ]
    for label, held_bytes in beside.items():
        if held_bytes:
            category = Category.COMMUNICATION
            found.append(Storage(id=len(found), bytes=held_bytes, category=category, label=label, born=-1, dies=last))
    if optimizer is not None:
        found += optimizer.storages(first_id=len(found), first_tick=tracer.tick)
    return found, ids


def _managed_slots(region: RegionLog) -> list[bool]:
    """Return a list that says for each slot (saved tensor) of a region whether a plan may decide about it.

    A plan may not decide if the slot holds a parameter, or a tensor that was written after it was saved.
    """
    return [
        record.value >= 0 and not is_parameter and region.latest.get(record.storage) == record.value
        for record, is_parameter in zip(region.book.records, region.book.is_parameter_slot, strict=True)
    ]


def _deaths(log: StepLog, last: int) -> dict[int, int]:
    """Return a mapping from storage to the tick (position in the log) when it is freed.

    If a saved tensor that plans must not touch holds the storage, the storage lives at least until the tensor is freed.
    """
    dies = {storage: log.tracer.dies.get(storage, last) for storage in log.tracer.born}
    fixed = [record for record in log.outside if record.storage >= 0]
    for region in log.regions:
        slots = zip(region.book.records, _managed_slots(region), strict=True)
        fixed += [record for record, is_managed in slots if not is_managed]
    for record in fixed:
        if record.storage in dies:
            dies[record.storage] = max(dies[record.storage], _released(log, record))
    return dies


def _released(log: StepLog, record: SlotRecord) -> int:
    """Return the tick (position among the ops) when a slot (a saved tensor) is freed. If its graph outlives backward, that is
    the end of backward.
    """
    return record.released if record.released >= 0 else log.backward_end


def _buffers(log: StepLog) -> dict[int, str]:
    """Return a mapping from storage to label, for storages that only carry other tensors through a collective.

    They are made in the step, outside of regions, and are not gradients.
    """
    tracer = log.tracer
    found: dict[int, str] = {}
    for op in tracer.ops:
        if op.func.namespace == WITHOUT_ALIASES:
            touched = {tracer.values[value].storage for value in (*op.reads, *op.writes)}
            found |= {s: f"{BUFFER}{op.name}" for s in touched if tracer.born.get(s, -1) >= 0}
    return {storage: label for storage, label in found.items() if storage not in log.gradients}


def _category(log: StepLog, storage: int, buffers: Mapping[int, str]) -> Category:
    tracer = log.tracer
    value = tracer.first_value(storage)
    born = tracer.born[storage]
    if storage in log.gradients or value.name.startswith("gradient:"):
        return Category.GRADIENT
    if storage in buffers or value.name.startswith(BUFFER):
        return Category.COMMUNICATION
    if born < 0:
        return _STATIC_CATEGORIES.get(value.origin, Category.BUFFER)
    return Category.ACTIVATION if tracer.contexts[born].phase is Phase.FORWARD else Category.TEMPORARY


def _region(
    log: StepLog, index: int, values: Sequence[RecordedValue], ops: Sequence[RecordedOp], op_regions: list[int]
) -> RegionCall:
    region = log.regions[index]
    slots = [
        SlotRecord(
            value=record.value if is_managed else -1,
            storage=record.storage,
            packed=record.packed,
            unpacked=record.unpacked,
            released=_released(log, record),
        )
        for record, is_managed in zip(region.book.records, _managed_slots(region), strict=True)
    ]
    graph, _ = build_region_graph(
        values,
        ops[region.start : region.end],
        slots,
        [value for value in region.outputs if value >= 0],
        region.book.order,
        region.leaves,
        region.name,
        region.steady,
    )
    touched = [tick for tick in range(region.end, log.backward_end) if op_regions[tick] == index]
    touched += [slot.unpacked for slot in slots if slot.unpacked >= 0]
    backward = (min(touched), max(max(touched) + 1, *(slot.released for slot in slots), 0)) if touched else (-1, -1)
    return RegionCall(
        index=index,
        name=region.name,
        call=region.call,
        kind=kind_of(graph),
        graph=graph,
        forward=(region.start, region.end),
        backward=backward,
        value_read=region.value_read,
        is_emptied=_is_emptied(log.tracer, region, backward[0]),
    )


def _is_emptied(tracer: StepTracer, region: RegionLog, until: int) -> bool:
    """Return True if the storage of a parameter is emptied between the forward and the backward of a region."""
    storages = [
        tracer.values[value].storage for value, (origin, _) in region.leaves.items() if origin is Origin.PARAMETER
    ]
    deaths = [life.dies for storage in storages for life in tracer.fillings.get(storage, ())]
    deaths += [tracer.dies.get(storage, -1) for storage in storages]  # ZeRO-3 gathers into new memory every time
    return any(region.end <= dies <= until for dies in deaths)


def kind_of(graph: RegionGraph) -> str:
    """Return a hash of the graph of a region. Calls with equal graphs have equal hashes: ids of storages, and ticks (positions
    among the ops), do not count.
    """
    storages = {s: i for i, s in enumerate(dict.fromkeys(value.storage for value in graph.values))}
    parts = (
        [(v.name, v.bytes, storages[v.storage], v.origin.value, v.producer, v.is_storable) for v in graph.values],
        [(op.name, op.reads, op.writes, op.cost_key, op.obstacle) for op in graph.ops],
        [slot.value for slot in graph.slots],
        graph.outputs,
        graph.backward_order,
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
