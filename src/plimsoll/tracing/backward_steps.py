"""Returns the trace of a step whose optimizer steps parameters while backward runs, each as soon as its gradient is
complete, and frees the gradient.

The optimizer is traced one parameter at a time (see ``optimizer``), and its ops are inserted into backward. They have the phase
of backward, because activations and other gradients are alive when they run.

Some parameters cannot be stepped there. Backward may complete a gradient several times or not at all, forward may write to the
parameter, or backward may recompute values from a parameter after its gradient is complete. The last happens to parameters that
decide about something without a gradient, such as a routing: its indices are rebuilt after the router's weight has changed.

Known weakness: a storage that is freed at the moment when a gradient becomes complete counts as freed before the step of that
parameter.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch import nn
from torch.optim import Optimizer

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Storage, Trace, TraceOp
from plimsoll.tracing.kernels import runs_gpu_kernels
from plimsoll.tracing.optimizer import OptimizerLog, trace_optimizer

CALL_OF_OPTIMIZER = "call of the optimizer for one parameter"
"""The name of the op that represents the host's work in a call of the optimizer for one parameter."""


def steppable_parameters(trace: Trace, held: Collection[str]) -> dict[str, int]:
    """Return the parameters of a trace that can be stepped in backward, by name, with the bytes of their gradients, in the
    order of completion. ``held`` are the names of the parameters that the optimizer holds.

    A gradient that shares memory with the gradient of a parameter that cannot be stepped there counts as 0 bytes: it stays.
    """
    read_until = _last_rebuilding(trace)
    chosen = {
        each.name: each.gradient
        for each in sorted(trace.parameters, key=lambda each: each.whole_at)
        if each.name in held
        and each.is_trainable
        and not each.is_written
        and each.whole_at >= 0
        and each.gradient >= 0
        and read_until.get(each.storage, -1) < each.whole_at
    }
    kept = {each.gradient for each in trace.parameters if each.name not in chosen}
    counted: set[int] = set(kept)
    found: dict[str, int] = {}
    for name, gradient in chosen.items():
        found[name] = 0 if gradient in counted else trace.storages[gradient].bytes
        counted.add(gradient)
    return found


def gradient_bytes(trace: Trace) -> int:
    """Return the bytes of all gradients that a traced step makes."""
    found = {each.gradient for each in trace.parameters if each.gradient >= 0}
    return sum(trace.storages[gradient].bytes for gradient in found)


def temporary_bytes(trace: Trace) -> list[int]:
    """Return, for each parameter that a trace steps in backward, in the order of the steps, the most bytes that its step
    allocates at the same time and frees again.
    """
    step_of: dict[int, int] = {}
    """The number of the step that each op of the optimizer in backward belongs to, by tick."""
    count = 0
    for tick, op in enumerate(trace.ops):
        if op.name == CALL_OF_OPTIMIZER:
            step_of[tick] = count
            count += 1
        elif tick - 1 in step_of and op.phase is Phase.BACKWARD and op.module == trace.ops[tick - 1].module:
            step_of[tick] = step_of[tick - 1]
    changes: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(count)]
    for storage in trace.storages:
        if storage.born in step_of:
            change = changes[step_of[storage.born]]
            change[storage.born] += storage.bytes
            change[storage.dies] -= storage.bytes
    return [max(itertools.accumulate(change[tick] for tick in sorted(change)), default=0) for change in changes]


def _last_rebuilding(trace: Trace) -> dict[int, int]:
    """Return, by the storage of a parameter, the last tick at which backward first reads a saved tensor that was computed from
    this parameter. A plan may rebuild the tensor at that tick.
    """
    names = {each.storage: 1 << at for at, each in enumerate(trace.parameters) if each.storage >= 0}
    made_from: defaultdict[int, int] = defaultdict(int)
    """The parameters that the contents of each storage depend on, as a mask of bits."""
    last: dict[int, int] = {}
    for call in trace.regions:
        graph = call.graph
        sources = {
            value.id: names.get(value.storage, 0) if value.origin is Origin.PARAMETER else made_from[value.storage]
            for value in graph.values
            if value.producer < 0
        }
        for op in graph.ops:
            mask = 0
            for value in op.reads:
                mask |= sources.get(value, 0)
            for value in op.writes:
                sources[value] = mask
                made_from[graph.values[value].storage] |= mask
        for slot in graph.slots:
            if slot.is_managed and slot.unpacked >= 0:
                mask = sources.get(slot.value, 0)
                last[mask] = max(last.get(mask, -1), slot.unpacked)
    found: dict[int, int] = {}
    for storage, bit in names.items():
        found[storage] = max((tick for mask, tick in last.items() if mask & bit), default=-1)
    return found


@dataclass(frozen=True, slots=True)
class _Piece:
    """Data: the step of one parameter. Its ops are the ops of the optimizer's log from ``start`` to ``stop``, and they are
    inserted before the op at tick ``at``.
    """

    at: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of inserted ops: the ops of the step, and the op of the call."""
        return self.stop - self.start + 1


class _Shift:
    """Where the ticks of a trace are after pieces were inserted. ``pieces`` are in the order of their ticks."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._at = [piece.at for piece in pieces]
        self._before = [0]
        for piece in pieces:
            self._before.append(self._before[-1] + piece.length)

    def op(self, tick: int) -> int:
        """Return the new tick of an op. Ticks below 0 mean "never" and stay."""
        return tick + self._before[bisect.bisect_right(self._at, tick)] if tick >= 0 else tick

    def end(self, tick: int) -> int:
        """Return the new tick before which something ends that ended before this tick."""
        return tick + self._before[bisect.bisect_left(self._at, tick)] if tick >= 0 else tick

    def piece(self, number: int) -> int:
        """Return the new tick of the first op of a piece."""
        return self._at[number] + self._before[number]

    @property
    def inserted(self) -> int:
        return self._before[-1]


def in_backward(trace: Trace, optimizer: Optimizer, model: nn.Module, parameters: Collection[str]) -> Trace:
    """Return a trace with the forward of ``trace``, whose optimizer steps ``parameters`` (names) in backward. The step of the
    other parameters, and of those that do not have a gradient in this trace, follows at the end.

    Raises:
        TracingFailed: as ``trace`` raises it.
    """
    whole_at = {each.name: each.whole_at for each in trace.parameters}
    order = list(steppable_parameters(trace, parameters))
    without = frozenset(each.name for each in trace.parameters if each.gradient < 0)
    on_gpu = runs_gpu_kernels(trace.device)
    log = trace_optimizer(optimizer, model, without, on_gpu=on_gpu, chunks=[(name,) for name in order])
    pieces = [_Piece(whole_at[name], *log.starts[at : at + 2]) for at, name in enumerate(order)]
    staying = dataclasses.replace(log, starts=(), chunk_of={})  # no state moves between the host and the device
    return _inserted(trace, staying, pieces, {name: at for at, name in enumerate(order)})


def _inserted(trace: Trace, log: OptimizerLog, pieces: Sequence[_Piece], number_of: dict[str, int]) -> Trace:
    shift = _Shift(pieces)
    end_of_backward = next((t for t, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER), len(trace.ops))
    stepped = log.ops()
    rest = stepped[pieces[-1].stop :] if pieces else stepped
    ops = list(_ops(trace, end_of_backward, pieces, stepped, log.name))
    first_of_rest = len(ops)
    ops += rest
    last = len(ops)

    def ends(storage: Storage) -> int:
        if storage.dies >= len(trace.ops):
            return last
        if storage.dies >= end_of_backward:  # what the loop holds until backward has ended
            return first_of_rest
        return shift.op(storage.dies) if storage.is_overwritten else shift.end(storage.dies)

    freed = _freed(trace, pieces, shift, number_of)
    kept = [s for s in trace.storages if s.born < end_of_backward and s.category is not Category.OPTIMIZER_STATE]
    assert [s.id for s in kept] == list(range(len(kept)))
    storages = [
        msgspec.structs.replace(s, born=shift.op(s.born), dies=min(ends(s), freed.get(s.id, last))) for s in kept
    ]

    def moved(tick: int, *, is_end: bool) -> int:
        """Return the new tick of a tick of the optimizer's log."""
        for number, piece in enumerate(pieces):
            if piece.start < tick <= piece.stop if is_end else piece.start <= tick < piece.stop:
                return shift.piece(number) + 1 + tick - piece.start
        return first_of_rest + tick - (pieces[-1].stop if pieces else 0)

    for storage in log.storages(first_id=len(kept), first_tick=0):
        born = moved(storage.born, is_end=False) if storage.born >= 0 else -1
        dies = last if storage.dies >= log.ticks else moved(storage.dies, is_end=True)
        storages.append(msgspec.structs.replace(storage, born=born, dies=dies))
    call = OpSpec(name=CALL_OF_OPTIMIZER, flops=0, moved_bytes=0, dtype="")
    return msgspec.structs.replace(
        trace,
        ops=tuple(ops),
        specs=trace.specs | log.specs() | {CALL_OF_OPTIMIZER: call},
        storages=tuple(storages),
        regions=tuple(_shifted(call, shift) for call in trace.regions),
        parameters=tuple(msgspec.structs.replace(each, whole_at=shift.op(each.whole_at)) for each in trace.parameters),
    )


def _ops(
    trace: Trace, end_of_backward: int, pieces: Sequence[_Piece], stepped: Sequence[TraceOp], optimizer: str
) -> Iterator[TraceOp]:
    """Yield the ops of forward and backward, with the steps of single parameters where their gradients are complete."""
    done = 0
    for tick in range(end_of_backward + 1):
        while done < len(pieces) and pieces[done].at == tick:
            piece = pieces[done]
            yield TraceOp(name=CALL_OF_OPTIMIZER, module=optimizer, phase=Phase.BACKWARD, cost_key=CALL_OF_OPTIMIZER)
            for op in stepped[piece.start : piece.stop]:
                yield msgspec.structs.replace(op, phase=Phase.BACKWARD)
            done += 1
        if tick < end_of_backward:
            yield trace.ops[tick]


def _freed(trace: Trace, pieces: Sequence[_Piece], shift: _Shift, number_of: dict[str, int]) -> dict[int, int]:
    """Return the new tick at which each gradient's storage is freed: after the steps of all parameters whose gradients are
    in it.
    """
    ends: dict[int, int] = {}
    stays: set[int] = set()
    for each in trace.parameters:
        number = number_of.get(each.name)
        if number is None:
            stays.add(each.gradient)
        else:
            end = shift.piece(number) + pieces[number].length
            ends[each.gradient] = max(ends.get(each.gradient, 0), end)
    return {storage: end for storage, end in ends.items() if storage not in stays}


def _shifted(call: RegionCall, shift: _Shift) -> RegionCall:
    slots = tuple(
        msgspec.structs.replace(
            slot,
            unpacked=shift.op(slot.unpacked),
            released=shift.op(slot.released) if slot.is_overwritten else shift.end(slot.released),
        )
        for slot in call.graph.slots
    )
    first, stop = call.backward
    return msgspec.structs.replace(
        call,
        graph=msgspec.structs.replace(call.graph, slots=slots),
        backward=(shift.op(first), shift.end(stop)),
    )
