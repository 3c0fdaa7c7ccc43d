"""Write the ops that rebuild the dropped tensors of a region (a module that the plan decides about) as flat Python functions.
There is one function, a *segment*, for each dropped tensor (slot).

Walking a graph of objects costs more per op than a small op itself; straight-line code does not. The source contains only op
numbers and value numbers (nothing from the user reaches the source), like the methods that ``dataclasses`` and ``attrs``
generate. Equal sources are compiled once.

A segment is called as ``segment(env, leaves, parameters, states, versions, storages)``: ``env`` holds values that one segment
leaves for later ones, and ``leaves`` are the cells (objects in autograd) whose tensors the segment reads. ``parameters`` are
the parameters and buffers that forward used. ``states`` are the generator states that forward recorded. ``versions`` and
``storages`` are those that the parameters had in forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

import torch

from plimsoll.artifacts.region import RegionGraph
from plimsoll.engine.hooks import modified_in_place
from plimsoll.engine.torch_calls import Number, Unknown
from plimsoll.planning.replay_schedule import BOUNDARY, NO_OP, ReplayStep, Schedule, Segment
from plimsoll.tracing.local_tensors import local_of, version_of
from plimsoll.tracing.recorder.calling import flat_tensors
from plimsoll.tracing.recorder.recorder import RecordedOp, RecordedValue, Ref
from plimsoll.tracing.recorder.storages import Geometry

SegmentFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sources:
    """Data that says where a recipe (the ops that rebuild dropped tensors) finds its inputs. The inputs are values of the
    region's graph, given by their ids.

    ``parameters``: the position of a parameter's value in the tuple that is read at the start of a call. ``protected``: the
    positions whose tensor must not have changed since forward, with the tensor's name. ``held``: the positions whose memory the
    call holds, each with its place. ``geometries``: sizes, strides and offset of the tensors that cells hold. ``links``: the
    input that is rebuilt by recomputing the region that ran before. ``packed``: values that are held by a codec or a link (to
    host memory or disk); a separate step brings each of them back. ``sharded``: positions of parameters that are DTensors;
    recipes read their local shards.
    """

    parameters: Mapping[int, int]
    protected: Mapping[int, str]
    geometries: Mapping[int, Geometry]
    links: frozenset[int]
    packed: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedRegion:
    """The recorded ops and values of one call of a region. The index in ``ops`` and in ``values`` is the id in the region's
    graph.
    """

    ops: tuple[RecordedOp, ...]
    values: tuple[RecordedValue, ...]
    to_local: Mapping[int, int]
    generators: tuple[torch.Generator, ...]
    slot_geometries: tuple[Geometry, ...]
    layouts: Mapping[int, Any]
    """A mapping from the number of a saved DTensor (in the order of saving) to its layout on the device mesh."""
    output_refs: tuple[Ref | None, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Data: generated functions that rebuild the dropped tensors of one region. They are made for one order of backward's
    reads.

    ``segments`` has one function for each read of a dropped tensor, in this order. ``places`` maps a tensor's number (in the
    order of saving) to the position of its first read in ``segments``.
    """

    order: tuple[int, ...]
    places: Mapping[int, int]
    segments: tuple[SegmentFunction, ...]


@dataclass(frozen=True, slots=True)
class WrittenSegments:
    """Data: the compiled source of all segments (each is the function that rebuilds one dropped tensor). Numbers that may
    differ from call to call are still names in the source.
    """

    order: tuple[int, ...]
    code: CodeType
    constants: Mapping[str, Any]

    def bind(self, numbers: Sequence[Number]) -> Code:
        """Return the segments (functions that each rebuild one dropped tensor) with these numbers filled in, for calls that
        have these numbers.
        """
        namespace = {**self.constants, **{f"n{index}": number for index, number in enumerate(numbers)}}
        exec(self.code, namespace)
        functions = tuple([namespace[f"segment_{position}"] for position in range(len(self.order))])
        places = {slot: position for position, slot in reversed(list(enumerate(self.order)))}
        return Code(self.order, places, functions)


def write_segments(
    graph: RegionGraph, recording: RecordedRegion, schedule: Schedule, sources: Sources
) -> WrittenSegments:
    """Write the source of one function for each dropped tensor, in the order of the schedule, and return it compiled."""
    writer = _Writer(graph, recording, sources)
    for position, (segment, read_later) in enumerate(_with_later_reads(schedule, graph)):
        writer.segment(position, segment, schedule.leaves[segment.slot], read_later)
    constants: dict[str, Any] = {
        "as_strided": torch.as_strided,
        "copy_storage": copy_storage,
        "local_of": local_of,
        "on_storage": on_storage,
        "seen_as": seen_as,
        "version_of": version_of,
        "tensors_of": flat_tensors,
        "changed": functools.partial(refuse_changed, sources.protected),
        **writer.constants,
    }
    order = tuple(segment.slot for segment in schedule.segments)
    return WrittenSegments(order, _compiled(writer.source), constants)


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, "<plimsoll recipe>", "exec")


def copy_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view like ``tensor``, but on a copy of its whole storage."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_storage(
    like: torch.Tensor, storage: torch.UntypedStorage, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor with this size, stride and offset on ``storage``. ``like`` gives the dtype. The storage is the memory
    that a parameter had in forward.
    """
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, offset, size, stride)


def seen_as(
    base: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a view on the storage of ``base``, with another geometry and dtype."""
    return Geometry(size, stride, offset, dtype).view_on(base)


def refuse_changed(names: Mapping[int, str], position: int, expected: int, found: int) -> NoReturn:
    """Raise ``SavedTensorModified``, because a parameter has changed between forward and the recomputation that reads it.

    A parameter is checked only when a recipe reads it: an optimizer may step other parameters while backward still runs.
    """
    raise modified_in_place(names[position], expected, found)


def _with_later_reads(schedule: Schedule, graph: RegionGraph) -> list[tuple[Segment, frozenset[int]]]:
    """Return pairs of a segment (the function for one dropped tensor) and the ids of the values that later segments read."""
    found: list[tuple[Segment, frozenset[int]]] = []
    later: frozenset[int] = frozenset()
    for segment in reversed(schedule.segments):
        found.append((segment, later))
        read = {value for step in segment.steps if step.op != NO_OP for value in graph.ops[step.op].reads}
        later |= read | {segment.value}
    return found[::-1]


class _Writer:
    """Writes the Python source of all segments of one region. A segment is the function that rebuilds one dropped tensor."""

    def __init__(self, graph: RegionGraph, recording: RecordedRegion, sources: Sources) -> None:
        self._graph = graph
        self._recording = recording
        self._sources = sources
        self._lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._local: dict[int, Geometry] = {}
        self._leaves: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        return "\n".join(self._lines) + "\n"

    def segment(self, position: int, segment: Segment, leaves: tuple[int, ...], read_later: frozenset[int]) -> None:
        """Write the function that rebuilds one dropped tensor. The function loads its inputs, runs ops, frees values after
        their last use, and returns the tensor.

        ``read_later`` are the ids of values that later functions read: this function stores them in ``env``.
        """
        self._emit(f"def segment_{position}(env, leaves, parameters, states, versions, storages):", 0)
        self._local = {}
        self._leaves = leaves
        made: set[int] = set()
        for step in segment.steps:
            if step.op == NO_OP:
                self._bring_back(step.load)
                made.add(step.load)
                continue
            self._step(step)
            made.update(self._graph.ops[step.op].writes)
            for value in step.frees:
                self._forget(value, made)
        for value in sorted(made & read_later):
            if value in self._local:
                self._emit(f"env[{value}] = v{value}")
        if segment.slot == BOUNDARY:
            to_local = self._recording.to_local
            results = [ref and self._seen(to_local[ref.value], ref.geometry) for ref in self._recording.output_refs]
            self._emit(f"result = ({', '.join(map(str, results))},)")
        else:
            geometry = self._recording.slot_geometries[segment.slot]
            self._emit(f"result = {self._seen(segment.value, geometry)}")
        for value in segment.frees:
            if value not in made and value not in self._sources.links:
                self._emit(f"env.pop({value}, None)")
        for link in sorted(self._sources.links - read_later):
            self._emit(f"env.pop({link}, None)")
        self._emit("return result")

    def _step(self, step: ReplayStep) -> None:
        op = self._recording.ops[step.op]
        for value in step.copies:
            self._load(value)
            self._emit(f"c{value} = copy_storage(v{value})")
        renamed = {value: f"c{value}" for value in step.copies}
        call = self._call(op, renamed)
        if op.random_point is None:
            self._emit(call)
        else:
            self._random(op.random_point, call)
        self._bind(step, op, renamed)

    def _bring_back(self, value: int) -> None:
        """Write code that decodes or fetches a packed value (a value that a codec or a link holds). In the code after it, the
        value is an ordinary tensor, like the output of an op.
        """
        # At most once per backward: several recipes may start from this value, and the simulator counts one buffer for it
        # (docs/project/design/forms-are-leaves.md).
        self._emit(f"v{value} = leaves[{self._leaves.index(value)}].read()")
        self._local[value] = self._sources.geometries[value]

    def _random(self, point: tuple[int, int], call: str) -> None:
        """Write code that draws forward's random numbers again.

        The code always restores the generator afterwards, so that training continues with its own numbers.
        """
        generator = self._constant(self._recording.generators[point[0]], f"g{point[0]}")
        self._emit(f"now = {generator}.get_state()")
        self._emit(f"{generator}.set_state(states[{point!r}].get_state())")
        self._emit("try:")
        self._emit(call, 2)
        self._emit("finally:")
        self._emit(f"{generator}.set_state(now)", 2)

    def _call(self, op: RecordedOp, renamed: Mapping[int, str]) -> str:
        arguments = [self._argument(value, renamed, op) for value in op.args]
        arguments += [f"{name}={self._argument(value, renamed, op)}" for name, value in op.kwargs.items()]
        return f"out = {self._constant(op.func, f'f{op.id}')}({', '.join(arguments)})"

    def _bind(self, step: ReplayStep, op: RecordedOp, renamed: Mapping[int, str]) -> None:
        """Write code that binds names to the op's results.

        The results are new storages (outputs of the op) and new versions of storages that the op wrote to.
        """
        writes = set(self._graph.ops[step.op].writes)
        to_local, values = self._recording.to_local, self._recording.values
        births: dict[int, tuple[int, Geometry]] = {}
        for index, ref in enumerate(op.outputs):
            write = -1 if ref is None else to_local.get(ref.value, -1)
            if ref is not None and write in writes and values[write].storage in op.births:
                births.setdefault(write, (index, ref.geometry))
        if len(op.outputs) > 1 and births:
            self._emit("out = tensors_of(out)")
        for write, (index, geometry) in births.items():
            self._emit(f"v{write} = out" + (f"[{index}]" if len(op.outputs) > 1 else ""))
            self._local[write] = geometry
        self._emit("out = None")  # free unused parts of the result now, not when the segment returns
        for write in sorted(writes - births.keys()):
            storage = values[write].storage
            old = next((r for r in self._graph.ops[step.op].reads if values[r].storage == storage), None)
            if old is not None:  # an in-place op: the new version is in the same memory as the old version
                self._emit(f"v{write} = {renamed.get(old, f'v{old}')}")
                self._local[write] = self._local[old]
        for name in renamed.values():
            self._emit(f"{name} = None")

    def _forget(self, value: int, made: set[int]) -> None:
        if value in self._local:
            self._emit(f"v{value} = None")
            del self._local[value]
        if value not in made and value not in self._sources.links:
            self._emit(f"env.pop({value}, None)")

    def _argument(self, value: Any, renamed: Mapping[int, str], op: RecordedOp) -> str:
        if isinstance(value, Ref):
            local = self._recording.to_local[value.value]
            if self._recording.values[local].storage in op.scratch:  # a buffer that the op writes without declaring it
                return f"copy_storage({self._seen(local, value.geometry)})"
            return self._seen(local, value.geometry, renamed.get(local))
        if isinstance(value, list | tuple):
            inner = ", ".join(self._argument(item, renamed, op) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        if value is None or isinstance(value, bool | int | Unknown):
            return _number(value)
        return self._constant(value)

    def _seen(self, value: int, geometry: Geometry, name: str | None = None) -> str:
        """Return a Python expression, as source text, for a view of the value in the given geometry. ``name`` is the variable,
        if it is not ``v<value>``.
        """
        base = self._load(value)
        name = name or f"v{value}"
        if base == geometry:
            return name
        size, stride, offset = (_number(part) for part in (geometry.size, geometry.stride, geometry.offset))
        if base.dtype is geometry.dtype:
            return f"as_strided({name}, {size}, {stride}, {offset})"
        return f"seen_as({name}, {size}, {stride}, {offset}, {self._constant(geometry.dtype)})"

    def _load(self, value: int) -> Geometry:
        """Write code that loads a value into the variable ``v<value>``, if this function has not done so yet. Return the
        value's geometry (sizes, strides, offset).
        """
        known = self._local.get(value)
        if known is not None:
            return known
        if value in self._sources.parameters:
            geometry = self._parameter(value, self._sources.parameters[value])
        elif value in self._sources.packed:
            self._emit(f"v{value} = env[{value}]")
            geometry = self._sources.geometries[value]
        elif value in self._leaves:
            position = self._leaves.index(value)
            if value in self._sources.links:  # reading it replays the region before, so read it only once per backward
                self._emit(f"v{value} = env.get({value})")
                self._emit(f"if v{value} is None: v{value} = env[{value}] = leaves[{position}].read()")
            else:
                self._emit(f"v{value} = leaves[{position}].read()")
            geometry = self._sources.geometries[value]
        else:
            self._emit(f"v{value} = env[{value}]")
            geometry = self._recording.values[value].base
        self._local[value] = geometry
        return geometry

    def _parameter(self, value: int, position: int) -> Geometry:
        """Write code that binds a parameter or buffer as forward found it, and return its geometry.

        If the parameter has other memory now, the code uses the memory that the parameter had in forward.
        """
        source, recorded = f"parameters[{position}]", self._recording.values[value]
        is_sharded, geometry = position in self._sources.sharded, recorded.base
        self._emit(f"v{value} = local_of({source})" if is_sharded else f"v{value} = {source}")
        otherwise = "if"
        if position in self._sources.held:
            size, stride, offset = (_number(part) for part in (geometry.size, geometry.stride, geometry.offset))
            storage = f"storages[{self._sources.held[position]}]"
            is_part = recorded.bytes != math.prod(geometry.size) * geometry.dtype.itemsize
            or_elsewhere = f" or v{value}.storage_offset() != {offset}" if is_part else ""
            self._emit(f"if v{value}.untyped_storage() is not {storage}{or_elsewhere}:")
            self._emit(f"v{value} = on_storage(v{value}, {storage}, {size}, {stride}, {offset})", 2)
            otherwise = "elif"
        if position in self._sources.protected:
            version = f"version_of({source})" if is_sharded else f"{source}._version"
            self._emit(f"{otherwise} {version} != versions[{position}]:")
            self._emit(f"changed({position}, versions[{position}], {version})", 2)
        return geometry

    def _constant(self, value: Any, name: str | None = None) -> str:
        name = name or f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def _emit(self, line: str, indent: int = 1) -> None:
        self._lines.append("    " * indent + line)


def _number(value: Any) -> str:
    """Return source text for a number or a tuple of numbers. A number that changes from call to call becomes a name; its value
    is filled in later.
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(_number, value))},)" if value else "()"
    return f"n{value.index}" if isinstance(value, Unknown) else repr(value)
