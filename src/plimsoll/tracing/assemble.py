"""The log of a step in, the torch-free ``Trace`` out."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping

import msgspec

from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.artifacts.trace import Category, Phase, RegionCall, Storage, Trace, TraceOp
from plimsoll.recording.graph import SlotRecord, build_region_graph
from plimsoll.tracing.capture import RegionLog, StepLog

_STATIC_CATEGORIES = {
    Origin.PARAMETER: Category.PARAMETER,
    Origin.BUFFER: Category.BUFFER,
    Origin.INPUT: Category.INPUT,
}


def assemble(
    log: StepLog,
    *,
    model: str,
    fingerprint: str,
    signature: str,
    device: str,
    is_fake: bool,
    workspaces: Mapping[str, int],
    notes: tuple[str, ...] = (),
) -> Trace:
    """Turn a captured step into a ``Trace``: attribute ops to regions, close lives, name storages."""
    tracer = log.tracer
    last = tracer.tick
    op_regions = _attribute(log)
    lives = _lives(log, last)
    owners = {
        storage: index
        for index, region in enumerate(log.regions)
        for op in tracer.ops[region.start : region.end]
        for storage in op.births
    }
    storages = tuple(
        _storage(log, storage, born, lives[storage], owners.get(storage, -1))
        for storage, born in sorted(tracer.born.items())
    )
    ops = tuple(
        TraceOp(
            name=op.name,
            module=_module(log, op.module, context.node_name, region),
            phase=context.phase,
            cost_key=op.cost_key,
            region=region,
        )
        for op, context, region in zip(tracer.ops, tracer.contexts, op_regions, strict=True)
    )
    return Trace(
        model=model,
        fingerprint=fingerprint,
        signature=signature,
        device=device,
        is_fake=is_fake,
        ops=ops,
        specs=dict(tracer.specs),
        storages=_dense(storages),
        regions=tuple(_region(log, index, region, op_regions) for index, region in enumerate(log.regions)),
        timings={key: tuple(samples) for key, samples in tracer.timings.items()},
        workspaces={key: size for key, size in workspaces.items() if size > 0},
        notes=notes,
    )


def _dense(storages: tuple[Storage, ...]) -> tuple[Storage, ...]:
    """Storage ids are positions: fill the places of storages that never lived in the step."""
    if not storages:
        return ()
    by_id = {storage.id: storage for storage in storages}
    absent = {"bytes": 0, "category": Category.TEMPORARY, "label": "", "born": 0, "dies": 0}
    return tuple(by_id.get(i) or Storage(id=i, **absent) for i in range(storages[-1].id + 1))


def _attribute(log: StepLog) -> list[int]:
    """The region of every op: by position in forward, by the autograd node that runs it in backward."""
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
            current = spans[place][2] if place >= 0 and context.node < spans[place][1] else -1
        regions[tick] = current
    return regions


def _lives(log: StepLog, last: int) -> dict[int, int]:
    """Last tick of every storage, with what unmanaged slots hold added."""
    tracer = log.tracer
    dies = {storage: tracer.dies.get(storage, last) for storage in tracer.born}
    fixed = [record for record in log.outside.records if record.storage >= 0]
    for region in log.regions:
        managed = _managed(region)
        fixed += [r for r, is_managed in zip(region.book.records, managed, strict=True) if not is_managed]
    for record in fixed:
        if record.storage in dies:
            released = record.released if record.released >= 0 else last
            dies[record.storage] = max(dies[record.storage], released)
    return dies


def _managed(region: RegionLog) -> list[bool]:
    """Which slots of a region a plan may decide about: not parameters, and not what was written after it was saved."""
    return [
        record.value >= 0 and not is_parameter and region.latest.get(record.storage) == record.value
        for record, is_parameter in zip(region.book.records, region.book.is_parameter_slot, strict=True)
    ]


def _storage(log: StepLog, storage: int, born: int, dies: int, owner: int) -> Storage:
    tracer = log.tracer
    value = tracer.first_value(storage)
    if storage in log.gradients:
        category = Category.GRADIENT
    elif born < 0:
        category = _STATIC_CATEGORIES.get(value.origin, Category.ACTIVATION)
        if value.name.startswith("gradient:"):
            category = Category.GRADIENT
        if value.name.startswith("optimizer state:"):
            category = Category.OPTIMIZER_STATE
    elif tracer.contexts[born].phase is Phase.FORWARD:
        category = Category.ACTIVATION
    else:
        category = Category.TEMPORARY
    return Storage(
        id=storage, bytes=value.bytes, category=category, label=value.name, born=born, dies=dies, region=owner
    )


def _module(log: StepLog, module: str, node_name: str, region: int) -> str:
    if module:
        return module
    if region >= 0:
        return log.regions[region].name
    return node_name


def _region(log: StepLog, index: int, region: RegionLog, op_regions: list[int]) -> RegionCall:
    tracer = log.tracer
    slots = [
        SlotRecord(
            value=record.value if is_managed else -1,
            storage=record.storage,
            packed=record.packed,
            unpacked=record.unpacked,
            released=record.released if record.released >= 0 else tracer.tick,
        )
        for record, is_managed in zip(region.book.records, _managed(region), strict=True)
    ]
    graph, _ = build_region_graph(
        tracer.values,
        tracer.ops[region.start : region.end],
        slots,
        [value for value in region.outputs if value >= 0],
        region.book.order,
        _leaves(log, region),
        region.name,
    )
    touched = [tick for tick in range(log.backward_end) if op_regions[tick] == index and tick >= region.end]
    touched += [slot.unpacked for slot in slots if slot.unpacked >= 0]
    backward = (min(touched), max(max(touched) + 1, *(slot.released for slot in slots), 0)) if touched else (-1, -1)
    obstacle = "reads the value of a tensor in Python (.item(), a branch on data)" if region.value_reads else ""
    return RegionCall(
        index=index,
        name=region.name,
        call=region.call,
        kind=_kind(graph),
        graph=graph,
        forward=(region.start, region.end),
        backward=backward,
        obstacle=obstacle,
    )


def _leaves(log: StepLog, region: RegionLog) -> dict[int, tuple[Origin, str]]:
    """Names of what the region finds when it starts: its inputs by position, its own parameters and buffers by name."""
    tracer = log.tracer
    leaves: dict[int, tuple[Origin, str]] = {}
    for name, buffer in region.module.named_buffers():
        leaves.setdefault(tracer.value_at(buffer, region.start), (Origin.BUFFER, f"buffer:{name}"))
    for name, parameter in region.module.named_parameters():
        leaves[tracer.value_at(parameter, region.start)] = (Origin.PARAMETER, f"parameter:{name}")
    for position, value in enumerate(region.inputs):
        leaves.setdefault(value, (Origin.INPUT, f"input:{position}"))
    leaves.pop(-1, None)
    return leaves


def _kind(graph: RegionGraph) -> str:
    """Equal for equal graphs wherever they stand: ids of storages and ticks are left out."""
    storages = {s: i for i, s in enumerate(dict.fromkeys(value.storage for value in graph.values))}
    parts = (
        [(v.name, v.bytes, storages[v.storage], v.origin.value, v.producer, v.is_storable) for v in graph.values],
        [(op.name, op.reads, op.writes, op.cost_key, op.obstacle) for op in graph.ops],
        [slot.value for slot in graph.slots],
        graph.outputs,
        graph.backward_order,
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
