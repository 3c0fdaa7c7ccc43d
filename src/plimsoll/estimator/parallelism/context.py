"""Turns the trace of a step at one rank's share of the sequence into the trace of a context-parallel rank, without torch.

Every rank holds ``sequence / cp`` positions of everything; only attention reads other positions. In ring attention the keys
and values of every rank travel through all other ranks, while each rank computes its own queries against the keys and values
that it currently holds. In a trace made at ``sequence / cp``, this changes the following:

- an attention op does ``cp`` times the arithmetic and reads ``cp`` times the keys and values; what it saves stays local
  (the sequence is divided into ``2 cp`` pieces, as usual, so causal attention is balanced and still skips half);
- an exchange (an op of the group ``cp``) precedes it in forward and backward. It sends the whole sequence's keys and values,
  and in backward their gradients too. Its receive buffers live until the attention op ends: twice the local keys and values,
  for those in use and those in transit, and twice that in backward.

Not modelled: partial outputs that are merged from step to step (one more local output during attention), and overlap of the
exchange with arithmetic, so its seconds are an upper bound. Basis: modelled; the assumed error of the buffers is 50%.

Source: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", 2023, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from plimsoll.artifacts.region import Origin, RegionGraph, RegionOp, Value
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Storage, Trace, TraceOp
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.parallelism.editing import TickClock, moved_slot

_ATTENTION = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn|fused)\w*")
_MASKS = {"efficient": (3, 4), "cudnn": (3, 8)}
"""For each kernel, the positions of the mask among its arguments in forward and backward.

Flash does not take a mask; a CPU's kernel takes it by name.
"""
_EXCHANGE = "plimsoll.ring_exchange"
_TENSOR = re.compile(r"(\w+)\[([\dx]+)\]")
_ELEMENT_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class _Ring:
    """What changes at one kind of attention op, as data.

    It has the exchange of keys and values before the op, and the op's new key and spec (its FLOPs and bytes).
    """

    key: str
    spec: OpSpec
    buffer_bytes: int
    attention_key: str
    attention_spec: OpSpec


def with_context_parallel(trace: Trace, cp: int) -> Trace:
    """Return the step of one rank with the sequence divided among ``cp`` ranks.

    The sequence of ``trace`` must be the local one, ``sequence / cp``; with ``cp=1`` the result is ``trace`` itself.

    Raises:
        InvalidLayout: the trace lacks fused attention, or its attention takes a mask.

    Example:
        >>> with_context_parallel(trace, 4)  # doctest: +SKIP
    """
    if cp == 1:
        return trace
    places = [tick for tick, op in enumerate(trace.ops) if _ATTENTION.fullmatch(op.name)]
    if not places:
        raise InvalidLayout(
            f"Context parallelism does not support {trace.model}, because its attention is not a single fused op.",
            why="a ring passes keys and values between calls of a fused kernel; separate products and softmax need whole rows",
            next="trace with attn_implementation='sdpa', or leave context parallelism out",
        )
    rings = {key: _ring(key, trace, cp) for key in {trace.ops[tick].cost_key for tick in places}}
    clock = TickClock(places, len(trace.ops))
    specs = {key: spec for key, spec in trace.specs.items() if key not in rings}
    for ring in rings.values():
        specs |= {ring.key: ring.spec, ring.attention_key: ring.attention_spec}
    first_id = max((storage.id for storage in trace.storages), default=-1) + 1
    buffers = _buffers(trace, places, rings, clock, first_id)
    in_graphs: dict[int, list[Storage]] = {}
    for tick, buffer in zip(places, buffers, strict=True):
        if trace.ops[tick].phase is Phase.FORWARD:
            in_graphs.setdefault(trace.ops[tick].region, []).append(buffer)
    return replace(
        trace,
        ops=_ops(trace, rings),
        specs=specs,
        storages=(*(_moved(storage, clock) for storage in trace.storages), *buffers),
        regions=tuple(_region(region, in_graphs.get(region.index, []), rings, clock, cp) for region in trace.regions),
        workspaces={rings[key].attention_key if key in rings else key: size for key, size in trace.workspaces.items()},
        timings={key: samples for key, samples in trace.timings.items() if key not in rings},
    )


def _ring(key: str, trace: Trace, cp: int) -> _Ring:
    spec = trace.specs[key]
    is_backward = spec.name.endswith("_backward")
    arguments = key.partition("(")[2].split(";")
    keys, values = arguments[2:4] if is_backward else arguments[1:3]
    places = next((places for kernel, places in _MASKS.items() if kernel in spec.name), None)
    mask = arguments[places[is_backward]] if places else key.partition("attn_mask=")[2]
    if _TENSOR.match(mask):
        raise InvalidLayout(
            f"Context parallelism does not support {trace.model}, because its attention uses a mask.",
            why="the mask has a column for every position of the sequence, but the trace has only one rank's positions",
            next="train without padding, or leave context parallelism out",
        )
    local_bytes = _bytes_of(keys) + _bytes_of(values)
    ways = 2 if is_backward else 1
    return _Ring(
        key=f"{_EXCHANGE}({keys};{values};ranks={cp};ways={ways})",
        spec=OpSpec(name=_EXCHANGE, flops=0, moved_bytes=ways * cp * local_bytes, dtype=spec.dtype, group="cp"),
        buffer_bytes=ways * _BUFFERS * local_bytes,
        attention_key=f"{key}@cp={cp}",
        attention_spec=replace(spec, flops=spec.flops * cp, moved_bytes=spec.moved_bytes + (cp - 1) * local_bytes),
    )


def _bytes_of(argument: str) -> int:
    found = _TENSOR.match(argument)
    assert found is not None, argument
    count = _ELEMENT_BYTES[found[1]]
    for size in found[2].split("x"):
        count *= int(size)
    return count


def _moved(storage: Storage, clock: TickClock) -> Storage:
    return replace(storage, born=clock.of_op(storage.born), dies=clock.before(storage.dies))


def _buffers(
    trace: Trace, places: Sequence[int], rings: Mapping[str, _Ring], clock: TickClock, first_id: int
) -> list[Storage]:
    return [
        Storage(
            id=first_id + index,
            bytes=rings[op.cost_key].buffer_bytes,
            category=Category.TEMPORARY,
            label=f"ring buffers:{op.module}",
            born=clock.before(tick),
            dies=clock.of_op(tick) + 1,
            region=op.region if op.phase is Phase.FORWARD else -1,
        )
        for index, (tick, op) in enumerate((tick, trace.ops[tick]) for tick in places)
    ]


def _ops(trace: Trace, rings: Mapping[str, _Ring]) -> tuple[TraceOp, ...]:
    out: list[TraceOp] = []
    for op in trace.ops:
        ring = rings.get(op.cost_key)
        if ring is None:
            out.append(op)
        else:
            out += [replace(op, name=_EXCHANGE, cost_key=ring.key), replace(op, cost_key=ring.attention_key)]
    return tuple(out)


def _region(
    region: RegionCall, buffers: Sequence[Storage], rings: Mapping[str, _Ring], clock: TickClock, cp: int
) -> RegionCall:
    graph = region.graph
    return replace(
        region,
        kind=f"{region.kind}-cp{cp}" if buffers else region.kind,
        graph=replace(
            _with_exchanges(graph, buffers, rings, clock),
            slots=tuple(moved_slot(slot, clock.before) for slot in graph.slots),
        ),
        forward=(clock.before(region.forward[0]), clock.before(region.forward[1])),
        backward=(clock.before(region.backward[0]), clock.before(region.backward[1])),
    )


def _with_exchanges(
    graph: RegionGraph, buffers: Sequence[Storage], rings: Mapping[str, _Ring], clock: TickClock
) -> RegionGraph:
    """Insert an exchange of keys and values before each attention op.

    The exchange reads the keys and values, and the attention op reads its result too.
    """
    ops: list[RegionOp] = []
    values: list[Value] = []
    moved: dict[int, int] = {}
    left = iter(buffers)
    for op in graph.ops:
        ring = rings.get(op.cost_key)
        if ring is not None:
            buffer = next(left)
            received = Value(
                id=len(graph.values) + len(values),
                name=f"ring_exchange#{len(values)}",
                bytes=buffer.bytes,
                storage=buffer.id,
                origin=Origin.OP,
                producer=len(ops),
            )
            values.append(received)
            ops.append(
                RegionOp(
                    id=len(ops),
                    name=_EXCHANGE,
                    reads=op.reads,
                    writes=(received.id,),
                    cost_key=ring.key,
                    tick=buffer.born,
                )
            )
            op = replace(op, reads=(*op.reads, received.id), cost_key=ring.attention_key)
        moved[op.id] = len(ops)
        ops.append(replace(op, id=len(ops), tick=clock.of_op(op.tick)))
    renumbered = [replace(v, producer=moved[v.producer]) if v.producer >= 0 else v for v in graph.values]
    return replace(graph, ops=tuple(ops), values=(*renumbered, *values))
