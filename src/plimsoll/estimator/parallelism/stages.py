"""Cuts a traced step into the stages of a pipeline, each with a trace of its own, without torch.

The region calls are cut into consecutive runs, as even as possible: if they do not divide, the first and the last stage get the
smaller runs, since they also hold embedding and head. Ops before the regions belong to the first stage, ops after them to the
last, ops between the regions of two stages to the earlier one.

At a boundary there is one new tensor on each side. A tensor that the previous stage made and this stage reads is *received*: it
lives from this stage's first op to the end of its backward. The previous stage holds what it *sent* to the end of its backward
too, and then also the gradient that it receives: the caller of backward has both (Megatron can free the sent data). Tensors
that forward computes before the first region (positions, masks, rotary tables) are not sent: every stage that reads one
computes it again.

torch.distributed.pipelining allocates receive buffers for all micro-batches in advance and never frees them; that is not
modelled here.

Known weakness: ops outside regions do not say what they read. A value of an early stage that only the head reads is
recognised by when it dies, a gradient at a boundary by its size and lifetime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import Category, Phase, RegionCall, Storage, Trace
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.parallelism.editing import moved_slot
from plimsoll.estimator.parallelism.members import (
    Crossings,
    Membership,
    assign,
    even_counts,
    find_crossings,
    tied_parameters,
)


@dataclass(frozen=True, slots=True)
class StageTrace:
    """One stage of a pipeline, as data: its own step as a trace, and what it exchanges with its neighbours per micro-batch.

    ``regions`` are indices of the whole trace's region calls (calls of modules that the plan decides about). ``received_bytes``
    come from the previous stage in forward; in backward, as many bytes go back for tensors that have a gradient.
    """

    index: int
    trace: Trace
    regions: tuple[int, ...]
    received_bytes: int


def split_stages(
    trace: Trace, layout: Layout, *, counts: Sequence[int] | None = None, keeps_sent: bool = True
) -> tuple[StageTrace, ...]:
    """Cut the step of one micro-batch into stages, and return the trace of each stage.

    The trace must not contain an optimizer step. ``counts`` are region calls (calls of modules that the plan decides about) per
    stage, by default as even as possible. Stages are in the order of the model, and each op is in one of them; a single stage
    has the trace unchanged. ``keeps_sent`` says whether a stage holds what it sent until its backward, as torch's schedules do;
    Megatron-Core frees it (``deallocate_pipeline_outputs``).

    Raises:
        InvalidLayout: more stages than region calls, or counts that do not add up.

    Example:
        >>> stages = split_stages(trace, Layout(pp=4))  # doctest: +SKIP
        >>> [stage.regions for stage in stages]  # doctest: +SKIP
        [(0, 1), (2, 3), (4, 5), (6, 7)]

    Source: Narayanan et al. 2021, section 2.2; boundaries as schedules.py of Megatron-LM holds them.
    """
    if layout.stages == 1:
        return (StageTrace(0, trace, tuple(range(len(trace.regions))), received_bytes=0),)
    counts = _checked(trace, layout, counts)
    members = assign(trace, counts)
    crossings = find_crossings(trace, members)
    stages = []
    storages = _storages_of_stages(trace, members, crossings)
    for index, start in enumerate(members.starts):
        part = _Stage(trace, members, crossings, index, keeps_sent=keeps_sent)
        stages.append(
            StageTrace(
                index=index,
                trace=part.build(storages[index]),
                regions=tuple(range(start, start + counts[index])),
                received_bytes=sum(trace.storages[s].bytes for s in crossings.received[index]),
            )
        )
    return tuple(stages)


def _storages_of_stages(trace: Trace, members: Membership, crossings: Crossings) -> list[list[Storage]]:
    """Return, for each stage, its storages in the order of the trace: those that its ops make, those that it holds from the
    start, and those that it receives.
    """
    brought: dict[int, set[int]] = {}
    for index, received in enumerate(crossings.received):
        for number in received:
            brought.setdefault(number, set()).add(index)
    found: list[list[Storage]] = [[] for _ in members.starts]
    for storage in trace.storages:
        own = members.static_stages[storage.id] if storage.born < 0 else (members.op_stages[storage.born],)
        for index in {*own, *brought.get(storage.id, ()), *crossings.made_anew.get(storage.id, ())}:
            found[index].append(storage)
    return found


def _checked(trace: Trace, layout: Layout, counts: Sequence[int] | None) -> tuple[int, ...]:
    calls = len(trace.regions)
    if layout.stages > calls:
        raise InvalidLayout(
            f"The layout has {layout.stages} stages, but {trace.model} has {calls} blocks.",
            why="every stage needs at least one block",
            next=f"use {calls} stages or fewer",
        )
    if counts is None:
        return even_counts(calls, layout.stages)
    if len(counts) != layout.stages or sum(counts) != calls or min(counts) < 1:
        raise InvalidLayout(
            f"The split {tuple(counts)} does not cut {calls} blocks into {layout.stages} stages.",
            why="every stage needs at least one block, and every block belongs to one stage",
            next=f"pass {layout.stages} numbers that add up to {calls}, such as {even_counts(calls, layout.stages)}",
        )
    return tuple(counts)


class _Stage:
    """Builds the trace of one pipeline stage from the trace of the whole step. Ticks (positions of ops), storages and regions
    (modules that the plan decides about) get new numbers.
    """

    def __init__(
        self, trace: Trace, members: Membership, crossings: Crossings, index: int, *, keeps_sent: bool
    ) -> None:
        self.trace = trace
        self.keeps_sent = keeps_sent
        self.members = members
        self.crossings = crossings
        self.index = index
        self.before = [0]
        for stage in members.op_stages:
            self.before.append(self.before[-1] + (stage == index))
        self.ops = [op for op, stage in zip(trace.ops, members.op_stages, strict=True) if stage == index]
        self.forward_ops = sum(op.phase is Phase.FORWARD for op in self.ops)
        self.first_region = members.starts[index]
        self.ids: dict[int, int] = {}
        self.storages: list[Storage] = []

    def tick(self, tick: int) -> int:
        """Convert a tick (the position of an op) of the whole step to a tick of this pipeline stage. -1 (before the step) stays
        -1.
        """
        return tick if tick < 0 else self.before[min(tick, len(self.trace.ops))]

    def build(self, storages: Sequence[Storage]) -> Trace:
        """Return the stage's own trace, with these storages of the whole trace."""
        for storage in storages:
            self._add(storage)
        self._add_received_gradients()
        self._complete_gradients()
        calls = [self._region(call) for call in self.trace.regions if self.members.stage_of[call.index] == self.index]
        keys = {op.cost_key for op in self.ops}
        return replace(
            self.trace,
            ops=tuple(replace(op, region=op.region - self.first_region) if op.region >= 0 else op for op in self.ops),
            specs={key: spec for key, spec in self.trace.specs.items() if key in keys},
            timings={key: seconds for key, seconds in self.trace.timings.items() if key in keys},
            workspaces={key: size for key, size in self.trace.workspaces.items() if key in keys},
            storages=tuple(self.storages),
            regions=tuple(calls),
            notes=(*self.trace.notes, *self._notes()),
            parameters=tuple(
                replace(parameter, storage=self.ids.get(parameter.storage, -1))
                for parameter, stages in zip(self.trace.parameters, self.members.parameter_stages, strict=True)
                if self.index in stages
            ),
        )

    # Storages ---------------------------------------------------------------------------------------------------

    def _keep(self, storage: Storage, **changes: object) -> None:
        self.ids[storage.id] = len(self.storages)
        region = storage.region - self.first_region if storage.region >= 0 else -1
        fields = {"region": region} | changes
        self.storages.append(replace(storage, id=len(self.storages), **fields))

    def _add(self, storage: Storage) -> None:
        end = len(self.ops)
        if storage.born < 0:
            if self.index in self.members.static_stages[storage.id]:
                self._keep(storage, dies=self.tick(storage.dies))
        elif storage.id in self.crossings.received[self.index]:
            self._keep(storage, label=f"received {storage.label}", region=-1, born=0, dies=end)
        elif self.members.op_stages[storage.born] == self.index:
            dies = self.tick(storage.dies)
            is_sent = self.index + 1 < self.members.stages and storage.id in self.crossings.received[self.index + 1]
            if is_sent and self.keeps_sent:
                dies = end
            self._keep(storage, born=self.tick(storage.born), dies=dies)
        elif self.index in self.crossings.made_anew.get(storage.id, ()):
            self._keep(storage, region=-1, born=0, dies=max(1, self.tick(storage.dies)))

    def _add_received_gradients(self) -> None:
        for sent, gradient in self.crossings.gradients[self.index]:
            original = self.trace.storages[gradient]
            self.storages.append(
                replace(
                    original,
                    id=len(self.storages),
                    label=f"received gradient of {self.trace.storages[sent].label}",
                    born=self.forward_ops,
                    dies=len(self.ops),
                )
            )

    def _complete_gradients(self) -> None:
        """Give a tied parameter a gradient in each stage that holds the parameter. In the trace of the whole step there is only
        one such gradient, in one stage, because the step adds them up there.
        """
        tied = [p for p in tied_parameters(self.trace, self.members) if p.is_trainable and p.storage in self.ids]
        mine = [p for p, s in zip(self.trace.parameters, self.members.parameter_stages, strict=True) if self.index in s]
        wanted = Counter(p.bytes for p in mine if p.is_trainable)
        found = Counter(s.bytes for s in self.storages if s.category is Category.GRADIENT)
        for parameter in tied:
            if found[parameter.bytes] >= wanted[parameter.bytes]:
                continue
            candidates = [
                s
                for s in self.storages
                if s.bytes == parameter.bytes and s.category is Category.TEMPORARY and s.born >= self.forward_ops
            ]
            if candidates:
                chosen = max(candidates, key=lambda s: s.dies)
                self.storages[chosen.id] = replace(chosen, category=Category.GRADIENT, dies=len(self.ops))
                found[parameter.bytes] += 1

    # Regions ----------------------------------------------------------------------------------------------------

    def _region(self, call: RegionCall) -> RegionCall:
        graph = replace(
            call.graph,
            values=tuple(replace(value, storage=self.ids.get(value.storage, -1)) for value in call.graph.values),
            ops=tuple(replace(op, tick=self.tick(op.tick)) for op in call.graph.ops),
            slots=tuple(moved_slot(slot, self.tick) for slot in call.graph.slots),
        )
        return replace(
            call,
            index=call.index - self.first_region,
            graph=graph,
            forward=(self.tick(call.forward[0]), self.tick(call.forward[1])),
            backward=(self.tick(call.backward[0]), self.tick(call.backward[1])),
        )

    def _notes(self) -> list[str]:
        notes = [f"stage {self.index + 1} of {self.members.stages}"]
        anew = [s for s, stages in self.crossings.made_anew.items() if self.index in stages]
        if anew:
            total = sum(self.trace.storages[s].bytes for s in anew)
            notes.append(
                f"this stage computes {len(anew)} tensors of {total} bytes itself, because they depend only on the batch"
            )
        tied = [p.name for p in tied_parameters(self.trace, self.members) if p.storage in self.ids]
        if tied:
            notes.append(
                f"{', '.join(tied)}: tied, with a copy in every stage that uses it; the stages add up the copies' gradients"
            )
        return notes
