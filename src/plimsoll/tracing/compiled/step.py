"""Make the trace of a step whose compiled parts run as kernels: take the trace of the eager step, and replace the ops of each
compiled part.

The eager step shows what is outside of compiled parts, which regions (planned modules) run eagerly, and how long parameters,
batch, gradients and the optimizer's state live. A compiled part is a joint graph (forward and backward in one graph), or
several if the graph breaks. Its kernels replace the ops that the part ran eagerly: forward kernels in its forward, backward
kernels in its backward. Its inputs and outputs keep their storages. Storages inside the part belong to the graph.
A tick is a position among the ops.

Each region of a part becomes a region call. Its slots (saved tensors) are the buffers that backward reads. If a fused kernel is
the last reader of a buffer and makes an output of equal size, the output is written into that buffer, as inductor does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch
from torch import fx

from plimsoll.artifacts.region import Origin, RegionGraph, RegionOp, Slot, Value
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Storage, Trace, TraceOp
from plimsoll.tracing.assemble import kind_of
from plimsoll.tracing.compiled.capture import CompiledPart, Stretch, UnitPlace
from plimsoll.tracing.compiled.joint import OUTSIDE, Kernel
from plimsoll.tracing.compiled.nodes import input_names, node_bytes
from plimsoll.tracing.compiled.seconds import kernel_key, kernel_spec, timed
from plimsoll.tracing.torch_internals import is_at_least

_UNCOMPILED = "torch.compile runs it eagerly"


Parts = Mapping[tuple[str, int], CompiledPart]
"""A mapping from one call of a unit (a module under torch.compile) to its compilation. The key is a pair of the unit's path and
the call's number.
"""


def with_compiled(eager: Trace, parts: Parts, device: torch.device | None) -> Trace:
    """Return a copy of the eager trace, where kernels replace the ops of the compiled units. If ``device`` is given, the
    kernels are timed on it.

    The regions of the eager trace are the units (compiled modules) and the regions planned next to them. A unit that
    torch.compile has not compiled keeps what it saves.
    """
    weaver = _Weaver(eager, parts)
    weaver.weave()
    kernels = [kernel for part in parts.values() for graph in part.graphs for kernel in graph.kernels]
    kernels += [again for kernel in kernels for again in kernel.apart]
    seconds = timed(kernels, device) if device is not None and not eager.is_fake else {}
    return msgspec.structs.replace(
        eager,
        ops=tuple(weaver.ops),
        specs={**eager.specs, **weaver.specs},
        storages=tuple(weaver.storages),
        regions=tuple(weaver.regions),
        timings={**eager.timings, **seconds},
    )


class _Weaver:
    def __init__(self, eager: Trace, parts: Parts) -> None:
        self.eager = eager
        paths = {path for path, _ in parts}
        of_units = [(call, parts.get((call.name, call.call))) for call in eager.regions if call.name in paths]
        self.places = {call.index: UnitPlace.of(call, eager, part) for call, part in of_units if part and part.graphs}
        self._uncompiled = {call.index for call, part in of_units if not (part and part.graphs)}
        self.ops: list[TraceOp] = []
        self.specs: dict[str, OpSpec] = {}
        self.storages: list[Storage] = []
        self.regions: list[RegionCall] = []
        self._new: list[int] = []
        """A list with the new tick of each old tick. For the tick of a replaced op, it is the tick where the unit's kernels
        end.
        """
        self._moments: dict[int, int] = {}
        """A mapping from the old tick of the first op that kernels replace to the new tick where these kernels begin."""

    def weave(self) -> None:
        """Fill the lists of the new trace: first the ops in order, then the storages, then the regions. The optimizer's
        storages come last, as in every trace.
        """
        self._order()
        optimizers = [s for s in self.eager.storages if self._is_optimizers(s)]
        kept = self._outer_storages([s for s in self.eager.storages if not self._is_optimizers(s)])
        numbers: dict[int, int] = {}
        for call in self.eager.regions:
            if call.index in self.places:
                _Piece(self, self.places[call.index], kept).build()
            else:
                numbers[call.index] = len(self.regions)
                self.regions.append(self._moved(call, kept))
        for storage in self.eager.storages:
            if storage.region in numbers and storage.id in kept:
                at = kept[storage.id]
                self.storages[at] = msgspec.structs.replace(self.storages[at], region=numbers[storage.region])
        self._outer_storages(optimizers)

    def _is_optimizers(self, storage: Storage) -> bool:
        is_made = storage.born >= 0 and self.eager.ops[storage.born].phase is Phase.OPTIMIZER
        return is_made or storage.category is Category.OPTIMIZER_STATE

    def _order(self) -> None:
        replaced = {tick: place for place in self.places.values() for tick in place.ops}
        for tick, op in enumerate(self.eager.ops):
            place = replaced.get(tick)
            if place is not None and place.ops[tick] not in place.ends:
                self._moments[tick] = len(self.ops)
                self._insert(place, place.ops[tick])
            self._new.append(len(self.ops) if place is None else -1)
            if place is None:
                self.ops.append(msgspec.structs.replace(op, region=-1))
        for place in self.places.values():  # a unit whose backward ran no op of its own
            self._insert(place, (Phase.FORWARD, len(place.inner) + 1))
            self._insert(place, (Phase.BACKWARD, 0 if (Phase.BACKWARD, 0) not in place.ends else -1))
        for tick, place in replaced.items():
            self._new[tick] = place.ends[place.ops[tick]]
        self._new.append(len(self.ops))

    def _insert(self, place: UnitPlace, stretch: Stretch) -> None:
        phase = stretch[0]
        ticks = place.backward if phase is Phase.BACKWARD else place.forward
        for kernel in place.kernels(stretch):
            ticks[kernel] = len(self.ops)
            key = kernel_key(kernel)
            self.specs[key] = kernel_spec(kernel)
            self.ops.append(
                TraceOp(name=kernel.name, module=place.part.outer(kernel.module), phase=phase, cost_key=key)
            )
        place.ends[stretch] = len(self.ops)

    def new_tick(self, old: int) -> int:
        """Return the tick (position among the ops of the new trace) of an op of the eager step, given by its old tick.

        For a replaced op, it is the tick where the kernels of its unit (compiled module) end.
        """
        return old if old < 0 else self._new[min(old, len(self._new) - 1)]

    def moment(self, old: int) -> int:
        """Return the tick in the new trace where an op of the eager step begins.

        For the first op that kernels replace, it is the tick where these kernels begin.
        """
        return self._moments.get(old, self.new_tick(old))

    def _moved(self, call: RegionCall, kept: Mapping[int, int]) -> RegionCall:
        """Return a copy of the call of an eager region, with all ticks changed to ticks of the new trace."""
        graph, replace = call.graph, msgspec.structs.replace
        moved = RegionGraph(
            values=tuple(replace(value, storage=kept.get(value.storage, -1)) for value in graph.values),
            ops=tuple(replace(op, tick=self.new_tick(op.tick)) for op in graph.ops),
            slots=tuple(
                replace(
                    slot,
                    packed=self.moment(slot.packed),
                    unpacked=self.moment(slot.unpacked),
                    released=self.moment(slot.released),
                )
                for slot in graph.slots
            ),
            outputs=graph.outputs,
            backward_order=graph.backward_order,
        )
        return replace(
            call,
            index=len(self.regions),
            graph=moved,
            forward=(self.moment(call.forward[0]), self.moment(call.forward[1])),
            backward=(self.moment(call.backward[0]), self.moment(call.backward[1])),
            obstacle=call.obstacle or self._obstacle(call),
        )

    def _obstacle(self, call: RegionCall) -> str:
        """Return the reason why the engine (the code that runs plans) cannot manage a region that runs eagerly, or "" if it
        can.
        """
        around = next((place.part for place in self.places.values() if call in place.inner), None)
        if around is not None and not around.path:
            return "is part of a model that torch.compile compiles as a whole"
        return _UNCOMPILED if call.index in self._uncompiled else ""

    def _outer_storages(self, storages: Iterable[Storage]) -> dict[int, int]:
        """Copy the given storages to the new trace, except storages inside of compiled units. Return a mapping from old id to
        new id.
        """
        ids: dict[int, int] = {}
        saved = {
            value.storage for call in self.eager.regions if call.index not in self.places for value in call.graph.values
        }
        for storage in storages:
            place = None
            if storage.born >= 0:
                place = self.places.get(self.eager.ops[storage.born].region)
            if place is not None:
                stretch = place.ops[storage.born]
                if self.moment(storage.dies) <= place.ends[stretch] and storage.id not in saved:
                    continue
                place.made.setdefault(stretch, []).append(len(self.storages))
            ids[storage.id] = len(self.storages)
            self.storages.append(
                msgspec.structs.replace(
                    storage,
                    id=len(self.storages),
                    born=self.new_tick(storage.born),
                    dies=self.moment(storage.dies),
                    region=-1,
                )
            )
        return ids


class _Piece:
    """Adds to the new trace what belongs to one call of a unit (a module under torch.compile): its storages and its regions."""

    def __init__(self, weaver: _Weaver, place: UnitPlace, kept: Mapping[int, int]) -> None:
        self.weaver, self.place, self.kept = weaver, place, kept
        self.ticks = place.ticks()
        self.graphs = place.part.graphs
        self.storage_of: dict[fx.Node, int] = {}
        self.maker: dict[fx.Node, Kernel] = {}
        self.readers: defaultdict[fx.Node, list[Kernel]] = defaultdict(list)
        for kernel in self.ticks:
            for node in kernel.writes:
                self.maker[node] = kernel
            for node in kernel.reads:
                self.readers[node].append(kernel)
        self.statics = frozenset().union(*place.part.statics)
        self._input_names = input_names(node for graph in self.graphs for node in graph.nodes)
        self._aliases: dict[fx.Node, fx.Node] = {}
        """A mapping from an input of a later graph to the node of an earlier graph that makes it."""
        self._handed_back: dict[fx.Node, int] = {}
        """A mapping from a gradient that a later graph makes for an earlier graph to the tick where the earlier graph's
        backward ends.
        """
        self._lasting = {n for graph in self.graphs for n in (*graph.forward_outputs, *graph.gradients)}
        self._made_in_backward = {node for node, kernel in self.maker.items() if kernel.is_backward}

    def build(self) -> None:
        """Add this unit's storages and region calls (calls of planned modules) to the step."""
        self._match_inputs()
        self._hold_tangents()
        self._match_outputs()
        for node, kernel in self.maker.items():
            if node not in self.storage_of:
                self._add(node, kernel)
        self.storage_of |= {node: self.storage_of[source] for node, source in self._aliases.items()}
        self._close_lives()
        self._regions()

    def _match_inputs(self) -> None:
        """Find out which storage of the eager step each activation input of the graphs is.

        Inputs are matched if their sizes in bytes are equal.
        """
        place = self.place
        given = [v for v in place.call.graph.values if v.origin in (Origin.INPUT, Origin.EXTERNAL)]
        waiting = list(place.inner)
        for graph, statics, stretch in zip(self.graphs, place.part.statics, place.stretch_of, strict=True):
            while len(place.inner) - len(waiting) < stretch:  # also the outputs of a region between the graphs
                region = waiting.pop(0).graph
                given[:0] = [region.values[at] for at in region.outputs]
            for node in graph.nodes:
                if node.op != "placeholder" or node in statics:
                    continue
                match = next((v for v in given if v.bytes == node_bytes(node) and v.storage in self.kept), None)
                if match is not None:
                    given.remove(match)
                    self.storage_of[node] = self.kept[match.storage]
        made: dict[fx.Node, int] = {}
        for graph in self.graphs:  # what one graph passes to the next one
            for node in graph.nodes:
                if node.op == "placeholder" and node not in self.storage_of and node not in self.statics:
                    source = next((n for n in made if made[n] == node_bytes(node)), None)
                    if source is not None:
                        self._aliases[node] = source
            made |= {node: node_bytes(node) for node in graph.forward_outputs if node.op != "placeholder"}

    def _match_outputs(self) -> None:
        """Find out which storage of the eager step each output of forward, and each gradient, is. An output without a match
        gets a storage of its own.

        Storages are matched by size. Among equal sizes, module and op decide.
        """
        place, storages = self.place, self.weaver.storages
        graphs = list(zip(self.graphs, place.stretch_of, strict=True))
        for phase, graph, stretch, nodes in (
            *((Phase.FORWARD, graph, stretch, graph.forward_outputs) for graph, stretch in graphs),
            *((Phase.BACKWARD, graph, stretch, graph.gradients) for graph, stretch in graphs),
        ):
            made = place.made.get((phase, stretch), [])
            open_ = [storages[at] for at in made if at not in self.storage_of.values()]
            by_name = {node: s for s in open_ for node in nodes if self._is_named(node, s)}
            for node in sorted(dict.fromkeys(nodes), key=lambda node: node not in by_name):
                if node not in self.maker or node in self.storage_of:
                    continue
                if node in self._handed_back:
                    self._add(node, self.maker[node], dies=self._handed_back[node])
                    continue
                same = [s for s in open_ if s.bytes == node_bytes(node)]
                match = by_name[node] if by_name.get(node) in same else next(iter(same), None)
                if match is not None:
                    open_.remove(match)
                    self.storage_of[node] = match.id
                    storages[match.id] = msgspec.structs.replace(match, born=self.ticks[self.maker[node]])
                elif phase is Phase.BACKWARD:
                    # The gradient is added to another one, or moved into a bucket, after the graph has returned it.
                    last = max(self.ticks[kernel] for kernel in graph.kernels if kernel.is_backward)
                    self._add(node, self.maker[node], category=Category.GRADIENT, dies=last + 1)

    def _is_named(self, node: fx.Node, storage: Storage) -> bool:
        """Return True if the same op of the same module made this storage in the eager step."""
        name = next((graph.names[node] for graph in self.graphs if node in graph.names), "")
        module, _, op = name.partition("#")[0].rpartition(":")
        label = f"{self.place.part.outer(module)}::{op}#"
        return storage.bytes == node_bytes(node) and storage.label.startswith(label)

    def _hold_tangents(self) -> None:
        """Let the gradients that enter a graph's backward live until that backward ends, because autograd's call holds them.

        If a later graph reads outputs of an earlier graph, it makes the gradients of these outputs. An output without a
        gradient gets zeros. From torch 2.13 on, these zeros are freed after their last reader. torch 2.9 and 2.11 were seen to
        hold them like the other inputs.
        """
        eager, place = self.weaver.eager, self.place
        for graph, stretch in zip(self.graphs, place.stretch_of, strict=True):
            first = min((tick for tick, own in place.ops.items() if own == (Phase.BACKWARD, stretch)), default=0)
            before = [s for s in eager.storages if 0 <= s.born < first < s.dies and s.category is not Category.GRADIENT]
            given = [s.bytes for s in before if s.id in self.kept and eager.ops[s.born].phase is Phase.BACKWARD]
            ticks = [self.ticks[kernel] for kernel in graph.kernels if kernel.is_backward]
            if not ticks:
                continue
            end = max(ticks) + 1
            handed = [
                gradient
                for later in self.graphs
                for node, gradient in later.gradient_of.items()
                if self._aliases.get(node) in graph.forward_outputs and gradient in self.maker
            ]
            self._handed_back |= dict.fromkeys(handed, end)
            known = given + [node_bytes(gradient) for gradient in handed]
            for node in graph.tangents:
                if node_bytes(node) in known:
                    known.remove(node_bytes(node))
                else:
                    last = max((self.ticks[reader] for reader in self.readers[node]), default=min(ticks)) + 1
                    last = last if is_at_least(2, 13) else end
                    self._new_storage(node, "zero gradient of an output", Category.TEMPORARY, min(ticks), last)

    def _add(self, node: fx.Node, kernel: Kernel, category: Category | None = None, dies: int = -1) -> None:
        tick = self.ticks[kernel]
        category = category or (Category.TEMPORARY if kernel.is_backward else Category.ACTIVATION)
        module = self.place.part.outer(kernel.module)
        label = f"{module}::{kernel.name}" if module else kernel.name
        self._new_storage(node, label, category, tick, max(dies, tick + 1))

    def _new_storage(self, node: fx.Node, label: str, category: Category, born: int, dies: int) -> None:
        at = self.storage_of[node] = len(self.weaver.storages)
        self.weaver.storages.append(
            Storage(id=at, bytes=node_bytes(node), category=category, label=label, born=born, dies=dies)
        )

    def _close_lives(self) -> None:
        """End the life of each buffer after its last reader in its own phase (forward or backward).

        If backward outside of regions reads a buffer, the buffer lives until then.
        """
        storages = self.weaver.storages
        for node, kernel in self.maker.items():
            storage = storages[self.storage_of[node]]
            readers = self.readers[node] + [r for n, s in self._aliases.items() if s is node for r in self.readers[n]]
            same = [r for r in readers if r.is_backward is kernel.is_backward]
            ends = self._ends(node, same)
            outside = [r for r in readers if r.is_backward is not kernel.is_backward and r.region == OUTSIDE]
            if outside:
                ends = max(ends, self._ends(node, outside))
            dies, is_overwritten = max((storage.dies, storage.is_overwritten), ends)
            storages[storage.id] = msgspec.structs.replace(storage, dies=dies, is_overwritten=is_overwritten)

    def _ends(self, node: fx.Node, readers: Sequence[Kernel]) -> tuple[int, bool]:
        """Return the tick when a buffer is freed, which is when the last of ``readers`` has run. Return also whether that
        kernel writes an output of its own into the buffer.
        """
        if not readers:
            return 0, False
        last = max(readers, key=self.ticks.__getitem__)
        size = node_bytes(node)
        takes_over = last.is_fused and any(node_bytes(write) == size for write in last.writes)
        rival = (
            any(
                takes_over
                and other is not node
                and node_bytes(other) == size
                and other in self.maker
                and max(map(self.ticks.__getitem__, self.readers[other])) == self.ticks[last]
                and last.reads.index(other) < last.reads.index(node)
                for other in last.reads
            )
            if node in last.reads
            else False
        )
        # The buffer exists until that kernel runs, together with tensors that are recomputed for the kernel.
        is_overwritten = takes_over and not rival and node not in self._lasting
        return self.ticks[last] + (not is_overwritten), is_overwritten

    # Regions -------------------------------------------------------------------------------------------------------

    def _regions(self) -> None:
        names = dict.fromkeys(kernel.region for kernel in self.place.forward if kernel.region != OUTSIDE)
        for name in names:
            self._region(name)

    def _region(self, name: str) -> None:
        """Add one region of the unit (compiled module) to the new trace: its ops, storages, saved tensors and graph."""
        forward = [k for k in self.place.forward if k.region == name]
        backward = [k for k in self.place.backward if k.region == name]
        index = len(self.weaver.regions)
        graph = self._graph(name, forward, backward)
        for node in (write for kernel in forward for write in kernel.writes):
            at = self.storage_of[node]
            self.weaver.storages[at] = msgspec.structs.replace(self.weaver.storages[at], region=index)
        spans = [self.ticks[k] for k in forward], [self.ticks[k] for k in backward]
        for tick in (*spans[0], *spans[1]):
            self.weaver.ops[tick] = msgspec.structs.replace(self.weaver.ops[tick], region=index)
        self.weaver.regions.append(
            RegionCall(
                index=index,
                name=self.place.part.outer(name),
                call=self.place.call.call,
                kind=kind_of(graph),
                graph=graph,
                forward=(min(spans[0]), max(spans[0]) + 1),
                backward=(min(spans[1]), max(spans[1]) + 1) if spans[1] else (-1, -1),
                is_compiled=True,
                copied_inputs=tuple(sorted(self.place.part.copied)),
                unpacks_at_once=not name and self._is_called_alone(),
            )
        )

    def _is_called_alone(self) -> bool:
        """Return True if this unit (compiled module) is a block that the step calls once and that is compiled as one graph.

        Then saved-tensor hooks around it see only what this graph saves.
        """
        calls = [call for call in self.weaver.eager.regions if call.name == self.place.call.name]
        return bool(self.place.part.path) and len(calls) == len(self.graphs) == 1 and not self.place.inner

    def _graph(self, name: str, forward: Sequence[Kernel], backward: Sequence[Kernel]) -> RegionGraph:
        """Return the graph of a region. Its ops are kernels, one for each buffer that can be recomputed alone; its values are
        buffers.
        """
        values: dict[fx.Node, Value] = {}
        runs = [(again, self.ticks[kernel]) for kernel in forward for again in kernel.again]
        own = {node: position for position, (again, _) in enumerate(runs) for node in again.writes}
        self.weaver.specs |= {kernel_key(again): kernel_spec(again) for again, _ in runs}
        names = self._input_names | {n: text for graph in self.graphs for n, text in graph.names.items()}

        def value(node: fx.Node) -> int:
            if node not in values:
                static = node in self.statics or node not in self.storage_of
                text = names.get(node, node.name)
                values[node] = Value(
                    id=len(values),
                    name=text.removeprefix(name + ".") if name else text,
                    bytes=node_bytes(node),
                    storage=self.storage_of.get(node, -1),
                    origin=Origin.OP if node in own else Origin.PARAMETER if static else Origin.INPUT,
                    producer=own.get(node, -1),
                    is_storable=True,
                )
            return values[node].id

        ops = tuple(
            RegionOp(
                id=position,
                name=again.name,
                reads=tuple(map(value, again.reads)),
                writes=tuple(map(value, again.writes)),
                cost_key=kernel_key(again),
                tick=tick,
                obstacle=again.obstacle or self._held_elsewhere(again),
                is_random=again.obstacle == "draws random numbers",
            )
            for position, (again, tick) in enumerate(runs)
        )
        slots = self._slots(backward, value)
        outputs = tuple(value(node) for node in own if self._leaves(node, name))
        order = tuple(sorted(range(len(slots)), key=lambda at: slots[at].unpacked))
        return RegionGraph(values=tuple(values.values()), ops=ops, slots=slots, outputs=outputs, backward_order=order)

    def _slots(self, backward: Sequence[Kernel], value: Callable[[fx.Node], int]) -> tuple[Slot, ...]:
        """Return a slot (saved tensor) for each forward buffer that these backward kernels read.

        Slots are ordered by the last use in forward.
        """
        read: defaultdict[fx.Node, list[Kernel]] = defaultdict(list)
        for kernel in backward:
            for node in kernel.reads:
                if node in self.storage_of and node not in self.statics and node not in self._made_in_backward:
                    read[node].append(kernel)
        slots = []
        for node, readers in read.items():
            storage = self.weaver.storages[self.storage_of[node]]
            first = min(map(self.ticks.__getitem__, readers))
            last_forward = [self.ticks[k] + 1 for k in self.readers[node] if not k.is_backward]
            packed = max([storage.born, *last_forward])
            slots.append((packed, first, *self._ends(node, readers), value(node)))
        return tuple(
            Slot(index=at, value=v, packed=packed, unpacked=first, released=last, is_overwritten=is_overwritten)
            for at, (packed, first, last, is_overwritten, v) in enumerate(sorted(slots))
        )

    def _held_elsewhere(self, kernel: Kernel) -> str:
        """Return a text that says that another region reads an output of the kernel in its backward, or "" if none does.

        A region is a planned module. Such an output is saved for all its readers, so it is not recomputed.
        """
        readers = (reader for node in kernel.writes for reader in self.readers[node])
        return "is read by another region" if any(r.is_backward and r.region != kernel.region for r in readers) else ""

    def _leaves(self, node: fx.Node, region: str) -> bool:
        """Return True if a buffer is an output of its region: another region's forward, or the caller of the compiled module,
        uses it.
        """
        return any(r.region != region and not r.is_backward for r in self.readers[node]) or any(
            node in graph.forward_outputs for graph in self.graphs
        )
