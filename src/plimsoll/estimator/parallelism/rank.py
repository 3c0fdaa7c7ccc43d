"""Turns a stage's trace into one rank's trace: adds memory and ops of ZeRO, data parallelism and optimizer, without torch.

Added to the trace are ZeRO's shards and gathered copies, collectives as ops with their buffers, gradients that last over
micro-batches, optimizer state, master weights, and the optimizer's step as one op at the end. The trace stays that of one
micro-batch; the module ``overlap`` computes what happens once per step, and which collectives run during compute.

ZeRO-3 is modelled on FSDP2 (torch 2.13, ``torch.distributed.fsdp._fully_shard``) with its defaults: ``fully_shard`` on every
block and on the model, resharding after forward (the root stays), implicit prefetch in forward, explicit in backward.

    forward of a block    all_gather into one buffer, after the rank's own shards were copied into it; copy out into one
                          tensor per parameter, freed when the block returns; the buffer is freed when the next block's gather
                          is done, the last buffer when forward ends
    backward of a block   copy out of the buffer that was gathered during the previous block, then free it; gather the next
                          block's; parameters are freed when the block's backward ends
    its gradients         copied into one padded buffer and freed; reduce-scatter into the shards; the buffer is freed when
                          the next block's gradients are copied

ZeRO-2 reduces gradients in the same way, and holds whole parameters: they are gathered again after the step.

With several micro-batches gradients exist from the start; every backward makes new ones, adds them and frees them. DDP
(torch's, ``gradient_as_bucket_view=True``; Megatron's buffers are alike) keeps all gradients in buckets, which exist from the
start as well: a new gradient is copied to its place and freed. A bucket is reduced as soon as its last gradient exists. Buckets
have 25 MiB, the first 1 MiB, and are filled as backward makes gradients (DDP's order after its first step).

Source: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp, torch 2.13. Known weakness: only the
default buffers are modelled; resharding to a smaller group is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.memory_use import OptimizerUse
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Storage, Trace, TraceParameter
from plimsoll.estimator.parallelism.editing import REPLICAS, REPLICAS_REDUCE, Edit, Inserted
from plimsoll.estimator.parallelism.units import (
    AS_COMPUTED,
    Gradients,
    HeldTypes,
    ShardedUnit,
    find_units,
    gradients_of,
    in_f32,
    shard_bytes,
    shard_of,
)
from plimsoll.planning.costing.host import HOST_COPY, HOST_STEP
from plimsoll.units import MIB

_FIRST_BUCKET_BYTES = MIB
_BUCKET_BYTES = 25 * MIB
_TICKS_TO_ACCUMULATE = 2
"""How many ops a new gradient lives for: while it is made, and while it is added to the accumulated gradient."""


def accumulate(edit: Edit, gradients: Sequence[Gradients], held: HeldTypes) -> None:
    """Change the trace so that gradients exist from the start of the step, as when micro-batches accumulate.

    A new gradient then lives only until it is added to the existing one.
    """
    for each in gradients:
        times = each.unit.times(is_wide=held.gradients)
        for storage in each.storages:
            edit.add(times * storage.bytes, Category.GRADIENT, f"accumulated {storage.label}", -1, None)
            _make_passing(edit, storage, held)


def step_early(edit: Edit, gradients: Sequence[Gradients], optimizer: OptimizerUse) -> None:
    """Change the trace so that every gradient is freed right after its parameter is updated, and add the memory that one such
    update allocates.
    """
    spec = OpSpec(name="early_step", flops=0, moved_bytes=0, dtype="f32")  # the whole step's op carries the seconds
    makers = {storage.born for each in gradients for storage in each.storages}
    for each in gradients:
        for storage in each.storages:
            done = storage.born + 1
            while done in makers:  # one autograd node makes the gradients of weight and bias, and ends before the step
                done += 1
            step = edit.op(min(done, edit.last_tick), optimizer.name, "early_step()", spec, Phase.BACKWARD)
            edit.change(storage.id, storage.born, step.done)
            for temporary in optimizer.temporaries:
                size = min(temporary.bytes, storage.bytes)
                edit.add(size, Category.TEMPORARY, f"{optimizer.name}: {temporary.label}", step, step.done)


def reduce_in_buckets(edit: Edit, gradients: Sequence[Gradients], held: HeldTypes) -> None:
    """Change the trace so that gradients are kept in buckets, as DDP does, and add an all-reduce for each bucket when it is
    full.
    """
    for is_expert in (False, True):
        mine = [each for each in gradients if each.unit.is_expert is is_expert]
        storages = [storage for each in mine for storage in each.storages]
        storages.sort(key=lambda storage: storage.born)
        kind = "expert gradients" if is_expert else "gradients"
        for number, bucket in enumerate(_buckets(storages)):
            times = mine[0].unit.times(is_wide=held.gradients)
            size = times * sum(storage.bytes for storage in bucket)
            edit.add(size, Category.GRADIENT, f"bucket {number} of {kind}", -1, None)
            for storage in bucket:
                _make_passing(edit, storage, held)
            full = min(bucket[-1].born + 1, edit.last_tick)
            dtype = "f32" if times > 1 else mine[0].unit.gradient_dtype
            edit.collective(full, "all_reduce", f"bucket {number} of {kind}", size, dtype)


def _make_passing(edit: Edit, storage: Storage, held: HeldTypes) -> None:
    """Shorten the life of a new gradient in the trace: it lives only until it is added to the accumulated gradient.

    A chunked loss makes its gradients in forward; they are added when backward starts.

    If ``held`` says that gradients in the model's dtype last as well, a storage for this one is added. A chunked loss makes its
    gradients in forward; they are added when backward starts.
    """
    if held.own_gradients:
        edit.add(storage.bytes, Category.GRADIENT, f"own type of {storage.label}", -1, None)
    ops = edit.trace.ops
    made = storage.born
    if ops[made].phase is Phase.FORWARD:
        made = next((tick for tick, op in enumerate(ops) if op.phase is Phase.BACKWARD), made)
    edit.change(storage.id, storage.born, min(made + _TICKS_TO_ACCUMULATE, edit.last_tick))


def _buckets(storages: Sequence[Storage]) -> list[list[Storage]]:
    """Split gradients into consecutive buckets. The gradient that fills a bucket is the bucket's last."""
    found: list[list[Storage]] = []
    room = 0
    for storage in storages:
        if room <= 0:
            found.append([])
            room = _BUCKET_BYTES if len(found) > 1 else _FIRST_BUCKET_BYTES
        found[-1].append(storage)
        room -= storage.bytes
    return found


@dataclass(slots=True)
class Sharding:
    """Inserts the collectives and buffers of ZeRO-2 and ZeRO-3 into a trace, in order of execution."""

    edit: Edit
    layout: Layout
    units: Sequence[ShardedUnit]
    held: HeldTypes = AS_COMPUTED
    is_stepping_early: bool = False
    _waiting: list[int] = field(default_factory=list)
    """The gather buffers that are freed when the next gather in forward is done."""
    _prefetched: dict[str, list[tuple[ShardedUnit, int]]] = field(default_factory=dict)
    _last_input: int = -1
    """The id of the input buffer of the latest reduce-scatter. It is -1 before the first reduce-scatter."""

    def shard_parameters(self) -> tuple[TraceParameter, ...]:
        """Add the shard of each parameter to the trace as a storage. Return the parameters as the rank holds them."""
        ranks = {p.name: unit.ranks for unit in self.units for p in unit.parameters}
        found = []
        for parameter in self.edit.trace.parameters:
            if ranks[parameter.name] == 1 or parameter.storage < 0:
                found.append(parameter)
                continue
            shard = shard_of(parameter, ranks[parameter.name])
            shard = in_f32(shard) if self.held.shards else shard
            label = f"parameter:{parameter.name}"
            held_bytes = 0 if self.held.on_host else shard.bytes
            found.append(replace(shard, storage=self.edit.add(held_bytes, Category.PARAMETER, label, -1, None)))
        return tuple(found)

    def gather_in_forward(self) -> None:
        """Insert the gathers of ZeRO-3 in forward.

        The parameters outside blocks (the root) are gathered first, for the whole step. Then each block is gathered before it
        runs.
        """
        sharded = [unit for unit in self.units if unit.ranks > 1]
        roots = [unit for unit in sharded if not unit.calls]
        self._copy_out_in_forward(0, [(unit, self._gather(0, unit)) for unit in roots])
        for unit in roots:
            for parameter in unit.parameters:
                if parameter.storage >= 0:
                    self.edit.change(parameter.storage, -1, self.edit.last_tick, label=_unsharded(parameter))
        for call in self.edit.trace.regions:
            mine = [unit for unit in sharded if unit.calls and unit.name == call.name]
            copied = self._copy_out_in_forward(call.forward[0], [(u, self._gather(call.forward[0], u)) for u in mine])
            for unit, moment in zip(mine, copied, strict=True):
                self._unshard(unit, moment, call.forward[1], is_first=call.index == unit.calls[0].index)
        handover = next((t for t, op in enumerate(self.edit.trace.ops) if op.phase is not Phase.FORWARD), None)
        for buffer in self._waiting:
            self.edit.end(buffer, handover)

    def _gather(self, tick: int, unit: ShardedUnit) -> int:
        if self.held.on_host:
            shards = [shard_of(parameter, unit.ranks) for parameter in unit.parameters]
            size = sum((in_f32(shard) if self.held.shards else shard).bytes for shard in shards)
            sent = self.edit.host_op(tick, HOST_COPY, unit.label, size)
            arrived = self.edit.add(size, Category.COMMUNICATION, f"shards of {unit.label}", sent, None)
        moment = self.edit.collective(tick, "all_gather", unit.label, unit.padded_bytes, unit.dtype)
        if self.held.on_host:
            self.edit.end(arrived, moment.done)
        label = f"all-gather buffer of {unit.label}"
        return self.edit.add(unit.padded_bytes, Category.COMMUNICATION, label, moment, None)

    def _copy_out(self, tick: int, unit: ShardedUnit) -> Inserted:
        return self.edit.copy(tick, "split_with_sizes_copy", unit.label, 2 * unit.padded_bytes, unit.dtype)

    def _copy_out_in_forward(self, tick: int, gathered: Sequence[tuple[ShardedUnit, int]]) -> list[Inserted]:
        copied = [self._copy_out(tick, unit) for unit, _ in gathered]
        if copied:
            for buffer in self._waiting:
                self.edit.end(buffer, copied[0])
            self._waiting = [buffer for _, buffer in gathered]
        return copied

    def _unshard(self, unit: ShardedUnit, born: Inserted, dies: int, *, is_first: bool) -> None:
        for parameter in unit.parameters:
            size = unit.ranks * shard_bytes(parameter, unit.ranks)
            if parameter.storage < 0:
                continue
            if is_first:
                self.edit.change(parameter.storage, born, dies, bytes=size, label=_unsharded(parameter))
            else:
                self.edit.add(size, Category.PARAMETER, _unsharded(parameter), born, dies)

    def run_backward(self, gradients: Sequence[Gradients], *, is_gathering: bool) -> None:
        """Insert gathers (ZeRO-3) and reductions of gradients in backward, from the last block to the first.

        The root's gradients are reduced at the end.
        """
        trace = self.edit.trace
        calls = sorted((call for call in trace.regions if call.backward[0] >= 0), key=lambda call: call.backward[0])
        pending = list(gradients)
        if is_gathering and calls:
            begins = next(t for t, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
            self._prefetch(begins, calls[0])
        for place, call in enumerate(calls):
            while pending and pending[0].whole <= call.backward[0]:
                self._reduce(pending.pop(0))
            if is_gathering:
                for unit, buffer in self._prefetched.pop(call.name, []):
                    copied = self._copy_out(call.backward[0], unit)
                    self.edit.end(buffer, copied.done)
                    self._unshard(unit, copied, call.backward[1], is_first=False)
                if place + 1 < len(calls):
                    self._prefetch(call.backward[0], calls[place + 1])
        for each in pending:
            self._reduce(each)

    def _prefetch(self, tick: int, call: RegionCall) -> None:
        mine = [unit for unit in self.units if unit.ranks > 1 and unit.calls and unit.name == call.name]
        self._prefetched[call.name] = [(unit, self._gather(tick, unit)) for unit in mine]

    def _reduce(self, gradients: Gradients) -> None:
        """Insert the reduction of the gradients of one unit (parameters that are gathered together): a copy into one buffer,
        after which the gradients are freed, and a reduce-scatter of the buffer.

        With several micro-batches, the result is added to existing shards.
        """
        unit, tick, edit = gradients.unit, gradients.whole, self.edit
        own_bytes, times = unit.padded_gradient_bytes, unit.times(is_wide=self.held.reduced)
        whole_bytes, dtype = times * own_bytes, "f32" if times > 1 else unit.gradient_dtype
        copied = edit.copy(tick, "chunk_cat", unit.label, own_bytes + whole_bytes, unit.gradient_dtype)
        if self._last_input >= 0:
            edit.end(self._last_input, copied)
        label = f"reduce-scatter buffer of {unit.label}"
        self._last_input = edit.add(whole_bytes, Category.COMMUNICATION, label, copied, None)
        for storage in gradients.storages:
            edit.change(storage.id, storage.born, copied.done)
        reduced = edit.collective(tick, "reduce_scatter", unit.label, whole_bytes, dtype)
        edit.end(self._last_input, reduced.done if tick == edit.last_tick else edit.last_tick)
        if self.layout.replicas > 1:
            size = whole_bytes // unit.ranks
            spec = OpSpec(name=REPLICAS_REDUCE, flops=0, moved_bytes=size, dtype=dtype, group=REPLICAS)
            reduced = edit.op(tick, unit.label, f"{REPLICAS_REDUCE}({dtype};{size})", spec)
        kept = unit.times(is_wide=self.held.gradients) * own_bytes
        self._keep_shard(unit, reduced, tick, (whole_bytes // unit.ranks, kept // unit.ranks))

    def _keep_shard(self, unit: ShardedUnit, reduced: Inserted, tick: int, sizes: tuple[int, int]) -> None:
        """Add the reduced shard of a unit's gradients (of one block, for example) to the trace as a storage that lasts.

        ``sizes`` are the shard's bytes as reduced and as kept, which may differ in dtype.
        """
        edit, label = self.edit, f"gradient shards of {unit.label}"
        size, kept = sizes
        is_adding = self.layout.micro_batches > 1
        if self.held.on_host:  # the host adds it to its own copy
            sent = edit.host_op(tick, HOST_COPY, unit.label, size)
            edit.add(size, Category.COMMUNICATION, f"reduced gradients of {unit.label}", reduced, sent.done)
        elif is_adding or size != kept:
            added = edit.copy(
                tick, "add_" if is_adding else "to", unit.label, size + kept * (1 + is_adding), unit.gradient_dtype
            )
            edit.add(size, Category.COMMUNICATION, f"reduced gradients of {unit.label}", reduced, added.done)
            edit.add(kept, Category.GRADIENT, label, -1 if is_adding else added, None)
        else:
            edit.add(kept, Category.GRADIENT, label, reduced, reduced.done if self.is_stepping_early else None)

    def gather_after_step(self) -> None:
        """Insert, for ZeRO-1 and ZeRO-2, the gather of the parts that the ranks updated.

        It happens in place, after the optimizer's step.
        """
        for unit in self.units:
            if unit.ranks > 1:
                whole_bytes = sum(p.bytes for p in unit.parameters if p.is_trainable)
                tick = self.edit.last_tick
                self.edit.collective(tick, "all_gather", unit.label, whole_bytes, unit.gradient_dtype, Phase.OPTIMIZER)


def _unsharded(parameter: TraceParameter) -> str:
    return f"unsharded parameter:{parameter.name}"


PARTLY_SHARDED = 2
_PARAMETER_SHARDS = 3
"""The first stage of ZeRO (1, 2 or 3) that shards parameters. ``PARTLY_SHARDED`` is the first stage that shards gradients."""


def rank_trace(
    stage_trace: Trace,
    layout: Layout,
    optimizer: OptimizerUse | None = None,
    held: HeldTypes = AS_COMPUTED,
    *,
    is_stepping_early: bool = False,
) -> Trace:
    """Return the trace of the step that one rank of a stage runs.

    The stage's trace is one micro-batch without an optimizer step. ``optimizer`` must be made for
    ``rank_parameters(stage_trace, layout)``; ``None`` means that there is neither state nor a step. ``held`` says what is
    float32 although the model is not. With ``is_stepping_early`` the optimizer updates each parameter once its gradient exists.
    The effects of ``tp`` and ``sp`` are already in the trace.

    The result describes a rank with full shards. Its collectives over the data-parallel ranks are ops of the group ``shards``,
    their buffers have the category COMMUNICATION, and its parameters are those that the rank updates.

    Example:
        >>> trace = rank_trace(stage.trace, Layout(dp=8, zero=3), use)  # doctest: +SKIP
        >>> sum(p.bytes for p in trace.parameters)  # doctest: +SKIP
        2007565312

    Source: Rajbhandari et al. 2020 (ZeRO), section 5; buffers and their order as in torch 2.13's FSDP2 and DDP. ZeRO-1 and -2
    cut every parameter along its first dimension, as FSDP2 does; DeepSpeed cuts the flattened whole,
    ZeroRedundancyOptimizer gives whole parameters to ranks: the sums are the same up to rounding.
    """
    edit = Edit(stage_trace)
    units = find_units(stage_trace, layout)
    sharding = Sharding(edit, layout, units, held, is_stepping_early)
    gradients = gradients_of(stage_trace, units)
    alone = [each for each in gradients if each.unit.ranks == 1]
    spread = [each for each in gradients if each.unit.ranks > 1]
    parameters = stage_trace.parameters
    if layout.zero == _PARAMETER_SHARDS:
        parameters = sharding.shard_parameters()
        sharding.gather_in_forward()
    elif held.shards:  # float32 shards in addition to the parameters that are gathered once a step
        parameters = sharding.shard_parameters()
    if layout.zero >= PARTLY_SHARDED:
        sharding.run_backward(spread, is_gathering=layout.zero == _PARAMETER_SHARDS)
    elif spread:
        reduce_in_buckets(edit, spread, held)
    if layout.micro_batches > 1 or held.gradients:
        accumulate(edit, alone, held)
    elif is_stepping_early and optimizer is not None:
        step_early(edit, alone, optimizer)
    if optimizer is not None:
        _step(edit, optimizer)
    if 0 < layout.zero < _PARAMETER_SHARDS:
        sharding.gather_after_step()
    notes = (f"one rank of {layout}", *sharding_notes(layout), *(optimizer.notes if optimizer is not None else ()))
    return edit.finish(parameters=parameters, notes=notes)


def _step(edit: Edit, optimizer: OptimizerUse) -> None:
    """Add the optimizer to the trace. Its state and master weights exist from the start. Its step is one op, with the
    temporaries that are alive at the step's own peak.
    """
    for name, size in optimizer.state_bytes.items():
        edit.add(size, Category.OPTIMIZER_STATE, f"optimizer state:{name}", -1, None)
    for name, size in optimizer.master_bytes.items():
        edit.add(size, Category.OPTIMIZER_STATE, f"master weight:{name}", -1, None)
    spec = OpSpec(name="optimizer_step", flops=optimizer.flops, moved_bytes=optimizer.moved_bytes, dtype="f32")
    key = f"optimizer_step({optimizer.name};{optimizer.form};{optimizer.flops};{optimizer.moved_bytes})"
    step = edit.op(edit.last_tick, optimizer.name, key, spec, Phase.OPTIMIZER)
    for name, size in ((HOST_STEP, optimizer.host_bytes), (HOST_COPY, optimizer.link_bytes)):
        if size:
            edit.host_op(edit.last_tick, name, optimizer.name, size, Phase.OPTIMIZER)
    for temporary in optimizer.temporaries:
        edit.add(temporary.bytes, Category.TEMPORARY, f"{optimizer.name}: {temporary.label}", step, step.done)


def sharding_notes(layout: Layout) -> tuple[str, ...]:
    """Return notes for the user on choices that the estimate makes: how ZeRO and expert parallelism are assumed to run."""
    notes = []
    if layout.zero == _PARAMETER_SHARDS and layout.shards > 1:
        notes.append(
            "FSDP2's defaults: every block and the model are sharded; blocks reshard after forward, the rest after backward"
        )
    if layout.zero >= PARTLY_SHARDED and layout.shards > 1 and layout.micro_batches > 1:
        notes.append("gradients are reduce-scattered after every micro-batch")
    if layout.ep > 1:
        ranks = layout.shards // layout.ep
        notes.append(
            f"{ranks} ranks hold the same experts; their collectives are priced as if among {layout.shards} ranks"
            if ranks > 1
            else "every data-parallel rank has its own experts, whose gradients are neither reduced nor sharded"
        )
    return tuple(notes)
