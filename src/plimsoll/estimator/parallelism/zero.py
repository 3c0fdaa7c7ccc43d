"""A stage's trace under way and its units in; shards, gathered parameters and reduced gradients of ZeRO-2 and -3 put in.

ZeRO-3 is what FSDP2 does (torch 2.13, ``torch.distributed.fsdp._fully_shard``), with its defaults: ``fully_shard`` on every
block and on the model, resharding after forward (the root stays), implicit prefetch in forward, explicit in backward.

    forward of a block    all_gather into one buffer, in which the rank's own shards were copied first; copy out into one
                          tensor per parameter, freed when the block returns; the buffer goes when the next block's gather is
                          done, the last one when forward ends
    backward of a block   copy out of the buffer that was gathered during the block before, which is freed; gather the next
                          block's; parameters are freed when the block's backward ends
    its gradients         copied into one padded buffer and freed; reduce-scatter into the shards; the buffer goes when the
                          next block's gradients are copied

ZeRO-2 reduces gradients in the same way, and holds the parameters whole: they are gathered again after the step.

Known weakness: the buffers are as the defaults have them; mixed-precision policies of FSDP2 (gathering in another dtype),
CPU offload and resharding to a smaller group are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from plimsoll.artifacts.layout import Layout
from plimsoll.artifacts.trace import Category, Phase, RegionCall, TraceParameter
from plimsoll.estimator.parallelism.editing import Edit, Inserted
from plimsoll.estimator.parallelism.gradients import Gradients
from plimsoll.estimator.parallelism.units import Unit, shard_bytes, shard_of


@dataclass(slots=True)
class Sharding:
    """Puts the collectives and buffers of ZeRO-2 and -3 into an edit, in the order in which they happen."""

    edit: Edit
    layout: Layout
    units: Sequence[Unit]
    _waiting: list[int] = field(default_factory=list)
    """Gather buffers that the next gather in forward frees."""
    _prefetched: dict[str, list[tuple[Unit, int]]] = field(default_factory=dict)
    _last_input: int = -1
    """The latest reduce-scatter's input buffer."""

    def shard_parameters(self) -> tuple[TraceParameter, ...]:
        """Every parameter's shard as a storage of its own; the parameters as the rank holds them."""
        ranks = {p.name: unit.ranks for unit in self.units for p in unit.parameters}
        found = []
        for parameter in self.edit.trace.parameters:
            if ranks[parameter.name] == 1 or parameter.storage < 0:
                found.append(parameter)
                continue
            shard = shard_of(parameter, ranks[parameter.name])
            label = f"parameter:{parameter.name}"
            found.append(replace(shard, storage=self.edit.add(shard.bytes, Category.PARAMETER, label, -1, None)))
        return tuple(found)

    def gather_in_forward(self) -> None:
        """The root first, for the whole step; then every block before it runs."""
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

    def _gather(self, tick: int, unit: Unit) -> int:
        moment = self.edit.collective(tick, "all_gather", unit.label, unit.padded_bytes, unit.dtype)
        label = f"all-gather buffer of {unit.label}"
        return self.edit.add(unit.padded_bytes, Category.COMMUNICATION, label, moment, None)

    def _copy_out(self, tick: int, unit: Unit) -> Inserted:
        return self.edit.copy(tick, "split_with_sizes_copy", unit.label, 2 * unit.padded_bytes, unit.dtype)

    def _copy_out_in_forward(self, tick: int, gathered: Sequence[tuple[Unit, int]]) -> list[Inserted]:
        copied = [self._copy_out(tick, unit) for unit, _ in gathered]
        if copied:
            for buffer in self._waiting:
                self.edit.end(buffer, copied[0])
            self._waiting = [buffer for _, buffer in gathered]
        return copied

    def _unshard(self, unit: Unit, born: Inserted, dies: int, *, is_first: bool) -> None:
        for parameter in unit.parameters:
            size = unit.ranks * shard_bytes(parameter, unit.ranks)
            if parameter.storage < 0:
                continue
            if is_first:
                self.edit.change(parameter.storage, born, dies, bytes=size, label=_unsharded(parameter))
            else:
                self.edit.add(size, Category.PARAMETER, _unsharded(parameter), born, dies)

    def run_backward(self, gradients: Sequence[Gradients], *, is_gathering: bool) -> None:
        """Blocks from the last to the first: gather (ZeRO-3), then reduce; the root's gradients at the end."""
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
        """Copy in, free, reduce-scatter; with several micro-batches add to the shards that are there."""
        unit, tick, edit = gradients.unit, gradients.whole, self.edit
        whole_bytes = unit.padded_gradient_bytes
        copied = edit.copy(tick, "chunk_cat", unit.label, 2 * whole_bytes, unit.dtype)
        if self._last_input >= 0:
            edit.end(self._last_input, copied)
        label = f"reduce-scatter buffer of {unit.label}"
        self._last_input = edit.add(whole_bytes, Category.COMMUNICATION, label, copied, None)
        for storage in gradients.storages:
            edit.change(storage.id, storage.born, copied.done)
        reduced = edit.collective(tick, "reduce_scatter", unit.label, whole_bytes, unit.dtype)
        edit.end(self._last_input, reduced.done if tick == edit.last_tick else edit.last_tick)
        self._keep_shard(unit, reduced, tick, whole_bytes // unit.ranks)

    def _keep_shard(self, unit: Unit, reduced: Inserted, tick: int, size: int) -> None:
        edit, label = self.edit, f"gradient shards of {unit.label}"
        if self.layout.micro_batches == 1:
            edit.add(size, Category.GRADIENT, label, reduced, None)
            return
        added = edit.copy(tick, "add_", unit.label, 3 * size, unit.dtype)
        edit.add(size, Category.COMMUNICATION, f"reduced gradients of {unit.label}", reduced, added.done)
        edit.add(size, Category.GRADIENT, label, -1, None)

    def gather_after_step(self) -> None:
        """ZeRO-1 and -2: every rank sends the others what it has updated, in place."""
        for unit in self.units:
            if unit.ranks > 1:
                whole_bytes = sum(p.bytes for p in unit.parameters if p.is_trainable)
                tick = self.edit.last_tick
                self.edit.collective(tick, "all_gather", unit.label, whole_bytes, unit.dtype, Phase.OPTIMIZER)


def _unsharded(parameter: TraceParameter) -> str:
    return f"unsharded parameter:{parameter.name}"
