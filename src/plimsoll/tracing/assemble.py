"""The log of a step in, the torch-free ``Trace`` out."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.artifacts.trace import Category, Phase, RegionCall, Storage, Trace, TraceOp
from plimsoll.tracing.capture import RegionLog, StepLog
from plimsoll.tracing.lives import Lives, managed_slots, storages_of
from plimsoll.tracing.optimizer import OptimizerLog
from plimsoll.tracing.recorder.graph import SlotRecord, build_region_graph
from plimsoll.tracing.recorder.recorder import RecordedOp, RecordedValue
from plimsoll.tracing.tracer import StepTracer


def assemble(
    log: StepLog,
    *,
    model: str,
    fingerprint: str,
    signature: str,
    device: str,
    is_fake: bool,
    timings: Mapping[str, tuple[float, ...]],
    workspaces: Mapping[str, int],
    optimizer: OptimizerLog | None = None,
    bucket_bytes: int = 0,
    notes: tuple[str, ...] = (),
) -> Trace:
    """Turn a captured step into a ``Trace``: attribute ops to regions, close lives, name storages.

    ``bucket_bytes`` is what a reducer holds for gradients on their way, from before the step to after it.
    """
    op_regions = _attribute(log)
    lives = storages_of(log, optimizer)
    ops, specs = _ops(log, op_regions), dict(log.tracer.specs)
    if optimizer is not None:
        ops += optimizer_ops(optimizer)
        specs.update(optimizer.tracer.specs)
    values = _with_trace_ids(log.tracer.values, lives.ids)
    logged = _born_with_trace_ids(log.tracer.ops, lives.ids)
    return Trace(
        model=model,
        fingerprint=fingerprint,
        signature=signature,
        device=device,
        is_fake=is_fake,
        ops=tuple(ops),
        specs=specs,
        storages=(*lives.storages, *_buckets(lives, bucket_bytes, len(ops))),
        regions=tuple(
            _region(log, values, logged, index, region, op_regions) for index, region in enumerate(log.regions)
        ),
        timings=dict(timings),
        workspaces={key: size for key, size in workspaces.items() if size > 0},
        notes=notes,
        parameters=tuple(
            msgspec.structs.replace(parameter, storage=lives.ids.get(parameter.storage, -1))
            for parameter in log.parameters
        ),
    )


def _buckets(lives: Lives, size: int, last: int) -> list[Storage]:
    """The buckets of a reducer as one storage, numbered behind all others."""
    if not size:
        return []
    label = "buckets of DistributedDataParallel"
    here = Storage(id=len(lives.storages), bytes=size, category=Category.COMMUNICATION, label=label, born=-1, dies=last)
    return [here]


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


def optimizer_ops(optimizer: OptimizerLog) -> list[TraceOp]:
    """The ops of an optimizer's step."""
    return [
        TraceOp(name=op.name, module=optimizer.name, phase=Phase.OPTIMIZER, cost_key=op.cost_key)
        for op in optimizer.tracer.ops
    ]


def _with_trace_ids(values: Sequence[RecordedValue], ids: Mapping[int, int]) -> list[RecordedValue]:
    """The log's values with the trace's storage ids; what backward got as a stand-in has none, and no region knows it."""
    return [replace(value, storage=ids.get(value.storage, -1)) for value in values]


def _born_with_trace_ids(ops: Sequence[RecordedOp], ids: Mapping[int, int]) -> list[RecordedOp]:
    """The log's ops with the trace's ids of the storages that they make: compared with those of values."""
    return [replace(op, births=tuple(ids[storage] for storage in op.births if storage in ids)) for op in ops]


def _region(
    log: StepLog,
    values: Sequence[RecordedValue],
    ops: Sequence[RecordedOp],
    index: int,
    region: RegionLog,
    op_regions: list[int],
) -> RegionCall:
    tracer = log.tracer
    slots = [
        SlotRecord(
            value=record.value if is_managed else -1,
            storage=record.storage,
            packed=record.packed,
            unpacked=record.unpacked,
            released=record.released if record.released >= 0 else log.backward_end,
        )
        for record, is_managed in zip(region.book.records, managed_slots(region), strict=True)
    ]
    graph, _ = build_region_graph(
        values,
        ops[region.start : region.end],
        slots,
        [value for value in region.outputs if value >= 0],
        region.book.order,
        region.leaves,
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
        is_emptied=_is_emptied(tracer, region, backward[0]),
    )


def _is_emptied(tracer: StepTracer, region: RegionLog, until: int) -> bool:
    """Whether some parameter's storage is emptied between the region's forward and its backward."""
    storages = [
        tracer.values[value].storage for value, (origin, _) in region.leaves.items() if origin is Origin.PARAMETER
    ]
    lives = [life for storage in storages for life in tracer.fillings.get(storage, ())]
    return any(region.end <= life.dies <= until for life in lives)


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
