"""The log of a step in, its storages with their lives out, numbered without gaps.

A life leaves out what regions' saved slots hold. What slots outside of regions hold is added, and so is what a slot holds
that no plan may touch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Category, Phase, Storage
from plimsoll.tracing.capture import RegionLog, StepLog
from plimsoll.tracing.meters.workspaces import COLLECTIVES
from plimsoll.tracing.optimizer import OptimizerLog
from plimsoll.tracing.tracer import BUFFER

_STATIC_CATEGORIES = {
    Origin.PARAMETER: Category.PARAMETER,
    Origin.BUFFER: Category.BUFFER,
    Origin.INPUT: Category.INPUT,
}


@dataclass(frozen=True, slots=True)
class Lives:
    """Storages of the trace, and the trace's id of each storage of the tracer's table."""

    storages: tuple[Storage, ...]
    ids: dict[int, int]


def storages_of(log: StepLog, optimizer: OptimizerLog | None) -> Lives:
    """Every storage that lives in the step; those of the optimizer come last."""
    tracer = log.tracer
    last = tracer.tick + (0 if optimizer is None else optimizer.tracer.tick)
    dies = _deaths(log, last)
    owners = {
        storage: index
        for index, region in enumerate(log.regions)
        for op in tracer.ops[region.start : region.end]
        for storage in op.births
    }
    ids = {storage: position for position, storage in enumerate(sorted(tracer.born))}
    buffers = {storage: label for storage, label in _buffers(log).items() if storage not in owners}
    found = [
        Storage(
            id=ids[storage],
            bytes=tracer.first_value(storage).bytes,
            category=_category(log, storage, buffers),
            label=buffers.get(storage) or _label(log, storage),
            born=tracer.born[storage],
            dies=dies[storage],
            region=owners.get(storage, -1),
        )
        for storage in ids
    ]
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
    if optimizer is not None:
        found += optimizer_storages(optimizer, first_id=len(found), first_tick=tracer.tick)
    return Lives(tuple(found), ids)


def managed_slots(region: RegionLog) -> list[bool]:
    """Which slots of a region a plan may decide about: not parameters, and not what was written after it was saved."""
    return [
        record.value >= 0 and not is_parameter and region.latest.get(record.storage) == record.value
        for record, is_parameter in zip(region.book.records, region.book.is_parameter_slot, strict=True)
    ]


def _deaths(log: StepLog, last: int) -> dict[int, int]:
    """The tick at which every storage is gone, with what unmanaged slots hold added."""
    tracer = log.tracer
    dies = {storage: tracer.dies.get(storage, last) for storage in tracer.born}
    fixed = [record for record in log.outside.records if record.storage >= 0]
    for region in log.regions:
        fixed += [r for r, is_managed in zip(region.book.records, managed_slots(region), strict=True) if not is_managed]
    for record in fixed:
        if record.storage in dies:
            released = record.released if record.released >= 0 else log.backward_end
            dies[record.storage] = max(dies[record.storage], released)
    return dies


def _buffers(log: StepLog) -> dict[int, str]:
    """What only carries other tensors through a collective: made in the step, outside of regions, and no gradient."""
    tracer = log.tracer
    found: dict[int, str] = {}
    for op in tracer.ops:
        if op.func.namespace == COLLECTIVES:
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


def _label(log: StepLog, storage: int) -> str:
    value = log.tracer.first_value(storage)
    return "constant" if value.origin is Origin.EXTERNAL and value.name == "external" else value.name


def optimizer_storages(optimizer: OptimizerLog, first_id: int, first_tick: int) -> list[Storage]:
    """The state and the temporaries of an optimizer's step, numbered from ``first_id``, its first op at ``first_tick``."""
    tracer = optimizer.tracer
    found: list[Storage] = []
    for storage, born in sorted(tracer.born.items()):
        is_state = storage in optimizer.states
        if born < 0 and not is_state:
            continue
        found.append(
            Storage(
                id=first_id + len(found),
                bytes=tracer.first_value(storage).bytes,
                category=Category.OPTIMIZER_STATE if is_state else Category.TEMPORARY,
                label=tracer.first_value(storage).name,
                born=-1 if born < 0 else first_tick + born,
                dies=first_tick + tracer.dies.get(storage, tracer.tick),
            )
        )
    return found
