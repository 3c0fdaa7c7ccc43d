"""A traced step and the stage of every op in, what goes over the boundaries between stages out. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.artifacts.trace import Category, Phase, Storage, Trace
from plimsoll.estimator.parallelism.members import Membership, readers_of


@dataclass(frozen=True, slots=True)
class Crossings:
    """Storages at the boundaries, by stage.

    ``received``: made by an earlier stage, needed by this one or a later one. ``gradients``: (sent storage, its gradient
    that a later stage made). ``made_anew``: by storage, the later stages that make it once more from the batch.
    """

    received: tuple[frozenset[int], ...]
    gradients: tuple[tuple[tuple[int, int], ...], ...]
    made_anew: dict[int, frozenset[int]]


def find_crossings(trace: Trace, members: Membership) -> Crossings:
    """Find what every boundary carries.

    Args:
        trace: the whole step.
        members: the stage of every op.
    """
    readers = readers_of(trace, members.stage_of)
    received: list[set[int]] = [set() for _ in range(members.stages)]
    made_anew: dict[int, frozenset[int]] = {}
    first = trace.regions[0].forward[0]
    for storage in trace.storages:
        later = _later_readers(trace, members, storage, readers.get(storage.id, set()))
        if not later:
            continue
        if storage.born < first:
            made_anew[storage.id] = frozenset(later)
            continue
        for stage in range(members.op_stages[storage.born] + 1, max(later) + 1):
            received[stage].add(storage.id)
    return Crossings(
        received=tuple(frozenset(each) for each in received),
        gradients=tuple(
            _gradients(trace, members, stage, received[stage + 1]) if stage + 1 < members.stages else ()
            for stage in range(members.stages)
        ),
        made_anew=made_anew,
    )


def _later_readers(trace: Trace, members: Membership, storage: Storage, readers: set[int]) -> set[int]:
    """Stages after the one that made a storage of forward which read it; the head reads what dies while it runs."""
    if storage.born < 0 or trace.ops[storage.born].phase is not Phase.FORWARD:
        return set()
    home, last = members.op_stages[storage.born], members.stages - 1
    later = {stage for stage in readers if stage > home}
    head = trace.regions[-1].forward[1]
    is_backward = storage.dies >= len(trace.ops) or trace.ops[storage.dies].phase is not Phase.FORWARD
    if home < last and storage.born >= trace.regions[0].forward[0] and storage.dies > head and not is_backward:
        later.add(last)
    return later


def _gradients(trace: Trace, members: Membership, stage: int, sent: set[int]) -> tuple[tuple[int, int], ...]:
    """Pairs of what a stage sent and the gradient of it that is alive when its backward begins, matched by size."""
    begins = next(
        (t for t, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD and members.op_stages[t] == stage), -1
    )
    if begins < 0:
        return ()
    alive = [
        storage
        for storage in trace.storages
        if 0 <= storage.born < begins < storage.dies
        and trace.ops[storage.born].phase is Phase.BACKWARD
        and members.op_stages[storage.born] > stage
        and storage.category is Category.TEMPORARY
    ]
    alive.sort(key=lambda storage: storage.born)
    pairs = []
    for each in sorted(sent, reverse=True):
        size = trace.storages[each].bytes
        found = next((storage for storage in reversed(alive) if storage.bytes == size), None)
        if found is not None:
            alive.remove(found)
            pairs.append((each, found.id))
    return tuple(pairs)
