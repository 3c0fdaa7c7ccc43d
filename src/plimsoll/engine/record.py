"""Record a call of a region (a module whose saved tensors a plan manages): run it while every op is noted. Then make the
`Program`, the object that drops and later rebuilds saved tensors in calls that look like the recorded call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from plimsoll.artifacts.plan import RegionPlan
from plimsoll.artifacts.region import SMALL_BUFFER_BYTES, Origin, RegionGraph
from plimsoll.engine.call_stream import StreamRecorder, references
from plimsoll.engine.capturing import WARM_UP, refuse_capture
from plimsoll.engine.guards import NO_OFFSET, Entry, SignatureReader
from plimsoll.engine.hooks import GONE, Cell, OpenCall, unpack
from plimsoll.engine.open_numbers import has_unknown
from plimsoll.engine.program import Program, Shared
from plimsoll.engine.replay_code import RecordedRegion
from plimsoll.engine.replay_plan import DropChoice, ParameterSource, ReplayPlan, choose
from plimsoll.engine.replay_rng import RandomPoints
from plimsoll.engine.service import Service
from plimsoll.engine.torch_calls import Stream
from plimsoll.engine.torch_flags import Flags, flags_for
from plimsoll.engine.verifying import VerifyingRecorder
from plimsoll.planning.replay_schedule import recipe_ops
from plimsoll.tracing.local_tensors import beside_weights, is_sharded, local_of, settled, version_of
from plimsoll.tracing.recorder.calling import ModuleStack, call_tensors, output_tensors
from plimsoll.tracing.recorder.collectives import is_collective, peers_of
from plimsoll.tracing.recorder.graph import LocalIds, SlotRecord, build_region_graph
from plimsoll.tracing.recorder.recorder import RecordedOp, Ref
from plimsoll.tracing.recorder.storages import Geometry, has_lazy_bits, is_plain
from plimsoll.tracing.torch_internals import sequence_number, without_torch_function
from plimsoll.tracing.zero import is_gathered_by_zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Data: the result of recording one call of a region. It holds the call's torch functions, its graph, and the ops that can
    rebuild its values.

    A graph value is the content of one storage; its id is an integer. ``sources`` maps a graph value to the parameter or buffer
    that has this content. ``unsaved`` are the ids of source values that autograd did not save; recipes (the ops that rebuild a
    dropped value) read a copy of them. ``scratched`` are the ids of buffers that the region itself writes. ``not_rebuildable``
    maps a value to the reason why recipes cannot rebuild it. ``first_input`` is the graph value of the first argument.
    ``nodes`` is the number of autograd nodes that the call made. ``casts`` is how many of these nodes came from casts, which
    autocast caches.
    """

    name: str
    device_type: str
    flags: Flags
    stream: Stream
    graph: RegionGraph
    region: RecordedRegion
    sources: Mapping[int, ParameterSource]
    unsaved: frozenset[int]
    scratched: frozenset[int]
    not_rebuildable: Mapping[int, str]
    first_input: int | None
    nodes: int
    casts: int
    is_self_compiling: bool
    has_unseen_callers: bool
    """Whether ops were run by code whose torch calls are not seen (TorchScript, extensions).

    At another input size, such code may run other ops.
    """
    reads_values: bool
    """Whether the call has read values of tensors, so that another call may run other ops."""
    is_opaque: bool
    """Whether code ran that may behave differently although the torch calls are the same.

    Such code is: unseen code, operators from outside of torch, and the user's modes.
    """

    def program(self, plan: RegionPlan, shared: Shared, *, is_linked: bool) -> Program:
        """Return the program for later calls that look like the recorded call. In forward it drops what the plan drops, and in
        backward it rebuilds what was dropped.

        ``is_linked`` says whether the region that ran before this one can rebuild the first argument, so that this region need
        not hold it.
        """
        if not self.reads_values:  # values that depend on data may be missing
            shared.unmet.note(plan, self.graph)
        return self.serve(self.replay_plan(plan, shared, is_linked=is_linked), plan, shared)

    def replay_plan(self, plan: RegionPlan, shared: Shared, *, is_linked: bool) -> ReplayPlan:
        """Return the replay plan: what happens to each value of the region (a module that the plan decides about) under this
        plan.

        ``is_linked`` is as in `program`.
        """
        links = frozenset[int]()
        if plan.is_boundary_dropped and is_linked and self.first_input is not None:
            links = frozenset({self.first_input})
        packer = shared.packer
        choice = choose(
            self.graph, self._names_to_drop(plan), self.not_rebuildable, links, plan.packed, packer.keeps_sign_only
        )
        return ReplayPlan(
            name=self.name,
            call=plan.call,
            device_type=self.device_type,
            flags=self.flags,
            graph=self.graph,
            recording=self.region,
            choice=choice,
            codecs={value: packer.codec(form) for value, form in choice.packed.items()},
            parameters=self._parameters(choice, shared),
            not_rebuildable=self.not_rebuildable,
            steady=frozenset(value.id for value in self.graph.values if value.name in plan.steady_inputs),
            is_input_lossy=plan.is_input_lossy,
        )

    def _names_to_drop(self, plan: RegionPlan) -> frozenset[str]:
        """Return the names of the values to drop.

        If the region reads values, this call may have gone another way than the planned one. The plan's peak does not contain
        the values that the plan does not know. They are dropped if they take more bytes than the plan has to spare for them.
        """
        if not self.reads_values or plan.spare_bytes is None:
            return plan.dropped
        known = {decision.value for decision in plan.decisions}
        saved = {slot.value for slot in self.graph.slots if slot.is_managed}
        unknown = [value for value in self.graph.values if value.name not in known]
        sizes = {value.storage: value.bytes for value in unknown if value.id in saved and value.origin is Origin.OP}
        # If sizes are inputs of the recipe, the bytes are unknown.
        if not any(map(has_unknown, sizes.values())) and sum(sizes.values()) <= plan.spare_bytes:
            return plan.dropped
        return plan.dropped | frozenset(value.name for value in unknown)

    def serve(self, made: ReplayPlan, plan: RegionPlan, shared: Shared, like: Program | None = None) -> Program:
        """Return the program that carries out a replay plan (what happens to each value of the region).

        ``like`` is the program for calls of other sizes, or ``None``. The new program takes over what ``like`` knows about
        backward's order of reading tensors.
        """
        shares = {d.value: d.held_bytes / d.bytes for d in plan.decisions if d.is_packed and d.bytes}
        # Autocast caches casts of parameters, so a later call may make fewer nodes than the recorded call.
        node_counts = range(self.nodes - self.casts, self.nodes + 1)
        if self.is_opaque:
            shared.inspector.suspect(self.name)
        return Program(made, node_counts, shares, shared, is_self_compiling=self.is_self_compiling, like=like)

    def _parameters(self, choice: DropChoice, shared: Shared) -> tuple[tuple[int, ParameterSource], ...]:
        """Return the parameters and buffers that recipes read, as pairs of graph value and source (where a call finds the
        tensor).

        If the region itself writes a buffer, replays write to a scratch copy, which starts with the buffer's contents at that
        time.
        """
        read = self.sources.keys() if shared.links.is_used else _read_by_recipes(self.graph, choice)
        copied = self.unsaved & read
        unchecked = self.scratched | copied
        return tuple(
            (value, replace(source, is_copied=value in copied, is_checked=False) if value in unchecked else source)
            for value, source in self.sources.items()
            if value in read or value in self.scratched
        )


def _read_by_recipes(graph: RegionGraph, choice: DropChoice) -> frozenset[int]:
    stored = choice.stored | choice.packed.keys()
    made = (value for value in choice.dropped if graph.values[value].origin is Origin.OP)
    return frozenset(
        read for value in made for op in recipe_ops(graph, value, stored)[0] for read in graph.ops[op].reads
    )


SMALL_PARAMETER_BYTES = 1 << 16
"""The largest parameter vector in bytes that is copied in each call, if autograd did not save it (a bias, for example)."""


@dataclass(frozen=True, slots=True)
class RegionForward:
    """Data about the module to record: its name, the module, its forward without Plimsoll's wrapper, its device type."""

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    device_type: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """Data: the outcome of recording a call. It has a program, or the obstacle (the reason, in words) why there is none."""

    program: Program | None
    recording: Recording | None = None
    """The facts that were recorded; ``None`` if the program was known before."""
    obstacle: str = ""
    peers: tuple[int, ...] = ()
    """The global ranks that the region's collectives communicate with."""
    stream: Stream = ()
    reads_values: bool = False
    """Whether the call has read values of tensors, or its sizes depend on them."""
    writes_buffers: bool = False
    """Whether the call has written to parameters or buffers of the region."""
    is_misfit: bool = False
    """Whether the torch calls were known, but the call saved other tensors than the call that was recorded before."""


class _RecordedCall(OpenCall):
    """The pack hook of a call that is being recorded.

    Like every `OpenCall` it holds the saved tensors until forward ends. It also notes the states of random generators, and
    which recorded value each saved tensor is a view of.
    """

    __slots__ = ("geometries", "recorder", "records")

    def __init__(
        self,
        recorder: VerifyingRecorder,
        sources: Sequence[torch.Tensor | None],
        storages: Mapping[int, torch.UntypedStorage],
    ) -> None:
        super().__init__({}, sources, storages)
        self.recorder = recorder
        self.records: list[SlotRecord] = []
        self.geometries: list[Geometry] = []

    def pack(self, tensor: torch.Tensor) -> Cell:
        recorder = self.recorder
        local = settled(tensor)
        recorder.suspended, before = True, recorder.suspended
        recorder.points.at_slot(len(self.records))
        recorder.suspended = before
        if is_plain(local) and not has_lazy_bits(local):
            value = recorder.add_leaf(local, Origin.EXTERNAL, "external")
            is_ours = not isinstance(tensor, nn.Parameter) or self._has_own_memory(tensor, value)
            self.records.append(SlotRecord(value=value, storage=recorder.table.find(local)) if is_ours else _UNMANAGED)
        else:
            self.records.append(_UNMANAGED)
        cell = super().pack(tensor)
        assert cell.tensor is not None, "an open cell holds what was saved"
        self.geometries.append(_slot_geometry(cell.tensor))
        return cell

    def _has_own_memory(self, parameter: nn.Parameter, value: int) -> bool:
        """Return whether a parameter was saved with the memory that it had before the region began.

        If not, the parameter may get its earlier memory back before backward. Backward would then read that memory, while
        recipes would rebuild other contents.
        """
        origin = self.recorder.values[value].origin
        if any(parameter is source for source in self.sources):
            return origin in (Origin.PARAMETER, Origin.BUFFER)
        return origin is not Origin.OP

    def end(self) -> None:
        """Collect the saved tensors of the recorded call after the region has returned.

        Mark tensors that autograd has already freed as unmanaged.
        """
        super().end()
        for index, (cell, tensor) in enumerate(zip(self.cells, self.tensors, strict=True)):
            if cell is GONE:
                self.records[index] = _UNMANAGED
            else:
                self.geometries[index] = _slot_geometry(tensor)


_UNMANAGED = SlotRecord(value=-1)


@dataclass(frozen=True, slots=True)
class _Watched:
    """Data of one recorded call: its inputs, its output, and what the recorder saw."""

    recorder: VerifyingRecorder
    saved: _RecordedCall
    sources: dict[int, ParameterSource]
    inputs: list[torch.Tensor]
    input_values: list[tuple[int, int]]
    """Position and value id of each input that is a plain tensor, or a DTensor around a plain tensor."""
    versions: list[int]
    output: Any
    first_node: int
    """The sequence number that autograd gave to the first node of this call."""
    nodes: int
    stream: StreamRecorder
    flags: Flags
    has_modes: bool
    """Whether the user had function modes or dispatch modes active during the call."""


def record_call(
    subject: RegionForward,
    service: Service,
    entry: Entry,
    reader: SignatureReader,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: Shared,
) -> tuple[Any, Recorded]:
    """Run the region once, record its ops, and drop already in this call what the plan drops.

    Each op runs twice to verify that the second run gives the same bits. Return the region's output and the result of the
    recording. If ``service`` knows a program for the same torch calls, and the call saved the same tensors as the call recorded
    for it, that program is used again. ``shared.sensor``, if not ``None``, measures what lossy codecs would do to the saved
    values while all of them are still held.

    Raises:
        CaptureRefused: a CUDA graph is being captured.
    """
    refuse_capture(
        subject.device_type,
        f"A call of region {subject.name!r} that has not been recorded yet",
        why="recording runs every op twice and compares the results, so the host waits for the device",
        next=WARM_UP,
    )
    unpack_hook = unpack if shared.sensor is None else shared.sensor.unpack(subject.name, service.plan.call)
    call = _watch(subject, entry, reader, args, kwargs, shared, unpack_hook)
    with without_torch_function():  # the user's modes do not see how we process the call
        return call.output, _settle(call, subject, service, shared)


def record_again(
    subject: RegionForward,
    entry: Entry,
    reader: SignatureReader,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: Shared,
) -> tuple[list[torch.Tensor], Recording | None]:
    """Record the forward of a region when it runs a second time, in backward.

    Return the tensors that it saved, by slot, and the recording. The recording is ``None`` if recipes may not repeat the ops,
    or if they communicate with other ranks, which then have to agree.
    """
    call = _watch(subject, entry, reader, args, kwargs, shared, unpack)
    saved = [tensor.detach() for tensor in call.saved.tensors]
    communicates = any(is_collective(op.func) for op in call.recorder.ops)
    recording = None if communicates or _obstacle(call) else _recording(call, subject)
    call.saved.close()
    return saved, recording


def _settle(call: _Watched, subject: RegionForward, service: Service, shared: Shared) -> Recorded:
    """Find the known program for a recorded call or make a new one, and let the program drop what the plan drops.

    Return the outcome. If there is an obstacle, the call keeps all its saved tensors.
    """
    plan, sensor = service.plan, shared.sensor
    try:
        shared.transfers.leave(call.output)
    except BaseException:
        call.saved.keep_all()
        raise
    recorder, saved = call.recorder, call.saved
    found = Recorded(
        None,
        obstacle=_obstacle(call),
        peers=tuple(sorted({rank for op in recorder.ops for rank in peers_of(op.func, op.args, op.kwargs)})),
        stream=call.stream.stream,
        reads_values=call.stream.reads_values,
        writes_buffers=_writes_buffers(call),
    )
    if found.obstacle:
        saved.keep_all()
        return found
    saved.states = recorder.points.states
    program = service.find(found.stream)
    is_misfit = program is not None and not program.guard.holds(saved, call.nodes)
    if program is None or is_misfit or program.plan.choice.link is not None:
        recording = _recording(call, subject)
        program = recording.program(plan, shared, is_linked=shared.links.has_made_first(call.inputs))
        found = replace(found, recording=recording)
    if sensor is not None:
        sensor.saw(subject.name, plan.call, program.plan.graph, saved.tensors, call.output, call.first_node)
    link = shared.links.find(program.plan, call.inputs)
    if not program.drop(saved, call.inputs, call.versions, call.output, link):
        saved.keep_all()
        return replace(found, obstacle="an in-place operation changes an input that its recipes need in backward")
    return replace(found, program=program, is_misfit=is_misfit)


def _watch(
    subject: RegionForward,
    entry: Entry,
    reader: SignatureReader,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: Shared,
    unpack_hook: Callable[[Cell], torch.Tensor],
) -> _Watched:
    stack = ModuleStack()
    points = RandomPoints(shared.generators)
    recorder = VerifyingRecorder(lambda: stack.path, points, repeats_collectives=shared.repeats_collectives)
    with without_torch_function():
        sources = _register(recorder, subject.module, reader)
        inputs = call_tensors(args, kwargs)
        input_values = [
            (i, recorder.add_leaf(t, Origin.INPUT, f"input:{i}")) for i, t in enumerate(inputs) if is_plain(local_of(t))
        ]
        versions = [version_of(tensor) for tensor in inputs]
        recorder.mark_outside()
        held = entry.memory(source.place for source in sources.values() if source.is_held)
    saved = _RecordedCall(recorder, entry.sources, held)
    stream = StreamRecorder(references((*entry.sources, *entry.inputs)))
    recorder.is_called = lambda: stream.is_within
    recorder.note_read, recorder.note_size = stream.note_read, stream.note_size
    # copies: the closure must not hold the entry, which holds the call's tensors
    device_type, flags = subject.device_type, entry.flags
    recorder.is_flagged = lambda: flags_for(device_type) != flags
    before = sequence_number()
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            stack.watch(subject.module),
            saved_tensors_hooks(saved.pack, unpack_hook),
            stream,
            recorder,
        ):
            output = subject.forward(*args, **kwargs)
    except BaseException:
        saved.keep_all()
        raise
    points.end()
    stream.end()
    with without_torch_function():
        saved.end()
    nodes = sequence_number() - before
    return _Watched(
        recorder,
        saved,
        sources,
        inputs,
        input_values,
        versions,
        output,
        before,
        nodes,
        stream,
        entry.flags,
        entry.modes is not None,
    )


def _obstacle(call: _Watched) -> str:
    """Return the reason why this recorded call must keep everything, or "" if recipes may repeat its ops."""
    recorder = call.recorder
    recorder.notice([*call.saved.tensors, *map(local_of, output_tensors(call.output))])
    if recorder.has_hidden_writes:
        return "it writes to memory in a way that PyTorch cannot see (numpy, raw pointers)"
    if any(value in call.sources for _, value in call.input_values):
        return "one of its own parameters or buffers is passed to it as an input"
    return call.stream.obstacle


def _register(recorder: VerifyingRecorder, module: nn.Module, reader: SignatureReader) -> dict[int, ParameterSource]:
    """Register the parameters and buffers of the region with the recorder.

    Return a mapping from value id to the source: where later calls find this parameter or buffer.
    """
    sources: dict[int, ParameterSource] = {}
    places = {(id(holder), key): place for place, (holder, key) in enumerate(reader.places)}
    for path, inner in module.named_modules():
        prefix = f"{path}." if path else ""
        holders = ((Origin.PARAMETER, "parameter", inner._parameters), (Origin.BUFFER, "buffer", inner._buffers))
        for origin, kind, holder in holders:
            for key, tensor in holder.items():
                place = places.get((id(holder), key))
                if tensor is None or place is None:
                    continue
                value = recorder.add_leaf(tensor, origin, f"{kind}:{prefix}{key}")
                nbytes = local_of(tensor).untyped_storage().nbytes()
                is_copied = origin is Origin.BUFFER and nbytes <= SMALL_BUFFER_BYTES
                name = f"{kind} {prefix}{key}"
                is_gathered = is_gathered_by_zero(tensor)
                source = ParameterSource(name, place, is_copied, not is_copied, is_sharded(tensor), is_gathered)
                sources.setdefault(value, source)
    for key, holder, attribute in beside_weights(module):
        place = places.get((id(holder), attribute))
        if place is not None:
            value = recorder.add_leaf(holder[attribute], Origin.PARAMETER, f"parameter:{key}")
            sources.setdefault(value, ParameterSource(f"parameter {key}", place, False, True, False))
    return sources


def _recording(call: _Watched, subject: RegionForward) -> Recording:
    """Return what later calls need to know about this call, as a `Recording`. The result does not hold the call's tensors."""
    recorder, sources = call.recorder, call.sources
    scratched = _refuse_readers_of_scratch(recorder)
    outputs = [_reference(recorder, tensor) for tensor in output_tensors(call.output)]
    leaves = {value: (recorder.values[value].origin, recorder.values[value].name) for value in sources}
    for position, value in call.input_values:
        leaves.setdefault(value, (Origin.INPUT, f"input:{position}"))
    records = [
        SlotRecord(value=_managed_value(recorder, record, sources), storage=record.storage)
        for record in call.saved.records
    ]
    graph, ids = build_region_graph(
        recorder.values,
        recorder.ops,
        records,
        [ref.value for ref in outputs if ref is not None],
        # no backward was seen yet; assume that backward reads in reverse order of saving
        tuple(reversed(range(len(records)))),
        leaves,
        "",
    )
    local = ids.to_local
    unsaved = _unsaved_parameters(call)
    return Recording(
        name=subject.name,
        device_type=subject.device_type,
        flags=call.flags,
        stream=call.stream.stream,
        graph=graph,
        region=_recorded_region(call, ids, outputs),
        sources={local[value]: source for value, source in sources.items() if value in local},
        unsaved=frozenset(local[value] for value in unsaved if value in local),
        scratched=frozenset(local[v] for v in sources if v in local and recorder.values[v].storage in scratched),
        not_rebuildable={local[v]: reason for v, reason in recorder.not_rebuildable.items() if v in local},
        first_input=local[call.input_values[0][1]] if call.input_values else None,
        nodes=call.nodes,
        casts=sum(op.name == "_to_copy" for op in recorder.ops),
        is_self_compiling=recorder.takes_functions,
        has_unseen_callers=recorder.has_unseen_callers,
        reads_values=call.stream.reads_values,
        is_opaque=recorder.has_unseen_callers or call.has_modes or any(map(_is_from_outside, recorder.ops)),
    )


def _is_from_outside(op: RecordedOp) -> bool:
    """Return whether an operator is neither one of torch's own nor one of torch's collectives."""
    return op.func.namespace != "aten" and not is_collective(op.func)


def _unsaved_parameters(call: _Watched) -> set[int]:
    """Return the value ids of parameter vectors (such as biases) that require a gradient and that autograd did not save.

    An unmanaged model allows that they are written between forward and backward, so recipes read a copy.
    """
    saved = {record.value for record in call.saved.records}
    values, tensors = call.recorder.values, call.saved.sources
    return {
        value
        for value, source in call.sources.items()
        if value not in saved
        and (tensor := tensors[source.place]) is not None
        and tensor.requires_grad
        and values[value].origin is Origin.PARAMETER
        and values[value].bytes <= SMALL_PARAMETER_BYTES
        and len(values[value].base.size) <= 1
    }


def _recorded_region(call: _Watched, ids: LocalIds, outputs: list[Ref | None]) -> RecordedRegion:
    recorder, saved = call.recorder, call.saved
    return RecordedRegion(
        ops=tuple(recorder.ops),
        values=tuple(recorder.values[log_id] for log_id in ids.to_log),
        to_local=ids.to_local,
        generators=recorder.points.generators,
        slot_geometries=tuple(saved.geometries),
        layouts={cell.index: cell.shell.layout for cell in saved.cells if cell.shell is not None},
        output_refs=tuple(outputs),
    )


def _slot_geometry(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of a saved tensor: size, strides, offset and dtype.

    For sparse tensors, strides and offset are empty.
    """
    return Geometry.of(tensor) if is_plain(tensor) else Geometry(tuple(tensor.shape), (), NO_OFFSET, tensor.dtype)


def _reference(recorder: VerifyingRecorder, tensor: torch.Tensor) -> Ref | None:
    """Return the id of the value that an output tensor is a view of, with the view's geometry. Return ``None`` if no recipe can
    rebuild the output.
    """
    local = local_of(tensor)
    value = -1 if has_lazy_bits(local) else recorder.value_of(local)
    return Ref(value, Geometry.of(local)) if value >= 0 else None


def _writes_buffers(call: _Watched) -> bool:
    """Return whether the call has written to parameters or buffers of the region.

    Batch norm writes its running averages without declaring it.
    """
    recorder = call.recorder
    scratched = {storage for op in recorder.ops for storage in op.scratch}
    storages = {value: recorder.values[value].storage for value in call.sources}
    return any(recorder.current[storage] != value or storage in scratched for value, storage in storages.items())


def _refuse_readers_of_scratch(recorder: VerifyingRecorder) -> set[int]:
    """Mark ops as not repeatable if they read a buffer that another op writes without declaring it.

    Return the ids of the storages that are written in that way.
    """
    scratched = {storage for op in recorder.ops for storage in op.scratch}
    for op in recorder.ops:
        if not op.obstacle and any(recorder.values[read].storage in scratched for read in op.reads):
            op.obstacle = "reads a buffer that another op writes without declaring it"
    return scratched


def _managed_value(recorder: VerifyingRecorder, record: SlotRecord, sources: dict[int, ParameterSource]) -> int:
    """Return the id of the value that a saved tensor shows, or -1 if a plan must not decide about it.

    A plan must not decide about parameters, or about values that were written after they were saved.
    """
    if record.value < 0 or record.value in sources or recorder.current.get(record.storage) != record.value:
        return -1
    return record.value
