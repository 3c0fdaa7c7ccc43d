"""A simulated step in, its allocations and releases out, one by one: what a simulated allocator is fed with.

Within an instant things happen in this order: what is over is let go; what begins is allocated; replays run, with every
buffer of theirs coming and going on its own. So the highest sum of an instant, once the first of these is done, is the byte
count of the simulator (where two unlinked regions replay before the same op, which the simulator adds up, it is less).
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.allocation import COMMUNICATION_STREAM, DEFAULT_STREAM, AllocationEvent
from plimsoll.artifacts.trace import Category, Phase, Storage
from plimsoll.planning.replay import Replay, replay
from plimsoll.planning.simulate import Simulation, actual_cover, chains, links_of
from plimsoll.planning.step import Span, StepIndex, merge

_LET_GO, _ALLOCATED, _REPLAYED = range(3)
_Entry = tuple[int, int, AllocationEvent]
_AT_START = {
    Category.PARAMETER: 0,
    Category.BUFFER: 1,
    Category.OPTIMIZER_STATE: 2,
    Category.GRADIENT: 3,
    Category.INPUT: 4,
}


def allocation_events(simulation: Simulation) -> tuple[AllocationEvent, ...]:
    """Every allocation and release of a simulated step, in order.

    A storage that is rebuilt comes as a new block; micro-batches that wait in a pipeline come first, one block for each of
    what they hold. Blocks of zero bytes are left out. Buffers of collectives are on a stream of their own.

    Args:
        simulation: one step under one plan.

    Example:
        >>> sum(event.bytes for event in allocation_events(simulation))  # doctest: +SKIP
        0
    """
    index = simulation.index
    linked = links_of(index, simulation.choices)
    replays = [replay(index, chain, linked) for chain in chains(index, simulation.choices, linked)]
    log = _Log(index)
    log.storages(replays, linked)
    for outcome in replays:
        log.copies(outcome)
    log.workspaces()
    for outcome in replays:
        log.rebuilt(outcome)
    return log.sorted()


class _Log:
    """Entries (instant, rank within it, event), sorted at the end; equal keys stay in the order of noting."""

    def __init__(self, index: StepIndex) -> None:
        self.index = index
        self.entries: list[_Entry] = []
        self.blocks = 0
        optimizer = (tick for tick, op in enumerate(index.trace.ops) if op.phase is Phase.OPTIMIZER)
        self.optimizer_instant = 2 * next(optimizer, len(index.trace.ops))

    def sorted(self) -> tuple[AllocationEvent, ...]:
        self.entries.sort(key=lambda entry: entry[:2])
        return tuple(event for _, _, event in self.entries)

    def storages(self, replays: Sequence[Replay], linked: dict[int, frozenset[int]]) -> None:
        """Storages of the trace, alive by themselves or through slots, parameters first."""
        holds: dict[int, list[Span]] = {}
        for outcome in replays:
            for storage, spans in outcome.holds.items():
                holds.setdefault(storage, []).extend(spans)
        for storage_ in sorted(self.index.trace.storages, key=_place_at_start):
            cover = actual_cover(self.index, storage_.id, linked)
            spans = merge([*cover, *holds[storage_.id]]) if storage_.id in holds else cover
            is_state = storage_.born < 0 and storage_.category is not Category.INPUT
            is_shared = is_state and _contains(self.index.covered(storage_.id), self.index.handover)
            for span in spans:
                lasts = is_state and span[1] >= 2 * len(self.index.trace.ops)
                self._span(span, storage_.bytes, storage_.label, storage_.category, lasts=lasts)
                if not is_shared:
                    self._waiting(span, storage_.bytes, storage_.label, storage_.category)

    def copies(self, outcome: Replay) -> None:
        """Copies of inputs, payloads of packed values, and what making these takes."""
        for (start, stop), size, label in (*outcome.copies, *outcome.payloads, *outcome.packing):
            span = (start, max(start, stop))
            self._span(span, size, label, Category.ACTIVATION)
            self._waiting(span, size, label, Category.ACTIVATION)

    def workspaces(self) -> None:
        """What ops allocate for themselves, while they run."""
        sizes = self.index.trace.workspaces
        for tick, op in enumerate(self.index.trace.ops):
            size = sizes.get(op.cost_key, 0)
            if size:
                self._span((2 * tick + 1, 2 * tick + 2), size, f"workspace of {op.name}", Category.TEMPORARY)

    def rebuilt(self, outcome: Replay) -> None:
        """Buffers of one replay, in the order in which it allocates them and lets them go."""
        first = self.blocks
        for buffer in outcome.buffers:
            if buffer.bytes:
                rank = _LET_GO if buffer.is_due else _REPLAYED
                self._note(buffer.instant, rank, first + buffer.buffer, buffer.bytes, buffer.label, Category.ACTIVATION)
        self.blocks += 1 + max((buffer.buffer for buffer in outcome.buffers), default=0)

    def _waiting(self, span: Span, size: int, label: str, category: Category) -> None:
        """What is alive at the handover from forward to backward is held once more by every micro-batch that waits."""
        stop = min(self.index.last_wait, self.index.instants)
        if _contains([span], self.index.handover):
            for _ in range(self.index.waiting):
                self._span((0, stop), size, f"waiting: {label}", category, lasts=stop == self.index.instants)

    def _span(self, span: Span, size: int, label: str, category: Category, *, lasts: bool = False) -> None:
        start, stop = span
        if not size or stop <= start:
            return
        self._note(start, _ALLOCATED, self.blocks, size, label, category, lasts=lasts)
        self._note(stop, _LET_GO, self.blocks, -size, label, category, lasts=lasts)
        self.blocks += 1

    def _note(
        self, instant: int, rank: int, block: int, size: int, label: str, category: Category, *, lasts: bool = False
    ) -> None:
        stream = COMMUNICATION_STREAM if category is Category.COMMUNICATION else DEFAULT_STREAM
        event = AllocationEvent(
            instant=instant,
            block=block,
            bytes=size,
            label=label,
            category=category,
            stream=stream,
            lasts=lasts,
            made=self.optimizer_instant if lasts and category is Category.OPTIMIZER_STATE else instant,
        )
        self.entries.append((instant, rank, event))


def _contains(spans: Sequence[Span], instant: int) -> bool:
    return any(start <= instant < stop for start, stop in spans)


def _place_at_start(storage: Storage) -> tuple[int, int]:
    """What is there before the step comes in the order in which training makes it; all else as the trace has it."""
    return (_AT_START.get(storage.category, len(_AT_START)) if storage.born < 0 else len(_AT_START), storage.id)
