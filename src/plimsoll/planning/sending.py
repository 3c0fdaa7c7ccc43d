"""Simulates the offloading switches of other frameworks: which values go to the host, and when each is freed and comes back.

Two schedules are supported. Neither is the engine's schedule (``choice``: one window per transfer).

*In line*, like transformers' ``offload=True``: the inputs of recomputed layers are copied on the stream that computes. They are
freed when the layer's forward ends, come back when the layer runs again, and compute waits for every copy.

*Beside*, like Megatron-Core's ``offload_modules``, with separate streams for copies. The tensors that autograd saves in a
module form one *group*. After forward has finished with a group, it is copied out on its own stream, one group after the other.
The device frees a group when its copy is done, however long the queue is. In backward, the end of every group's module (sent or
kept) requests one more group, last sent first, on another stream; the start of a group's module waits for its group. The last
layer's groups are not sent, so a group is requested one layer ahead. Of the other groups ``fraction`` is sent, in the order of
forward. Tensors with fewer than 2^20 elements stay on the device.

Source: transformers 5.23, ``activation_checkpointing_enable``; Megatron-Core's ``fine_grained_activation_offload.py`` (0.16,
the fraction from its main branch of August 2026). Known weaknesses: a value that two modules save is copied twice, as in
Megatron-Core, but is on the device only once when it is back; pipeline stages keep their last layer for every micro-batch, but
Megatron-Core keeps it for one; 2^20 elements are counted as 2 MiB.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plimsoll.artifacts.region import Origin, RegionOp, Slot
from plimsoll.planning.choice import Choice
from plimsoll.planning.costing.roofline import is_product
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import RegionView, Span, StepIndex, Transfers
from plimsoll.planning.strategies import ROUTED, core_ops, has_compressed_keys
from plimsoll.units import MIB

_LEAST_BYTES = 2 * MIB  # Megatron-Core's 2^20 elements, in a 16-bit dtype
_ATTENTION = re.compile(r"^(?:.*?\.)??(?![^.]*norm)[^.]*(?:attn|attention)[^.]*", re.IGNORECASE)
_NORM = re.compile(r"norm|(?:^|[._])ln(?:[._\d]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Sending:
    """Data: the setting of another framework's offloading switches, which says which tensors go to the host.

    They are the tensors that autograd saves in these ``modules``; if ``modules`` is empty, the inputs of recomputed layers.
    ``fraction`` is the share of all groups that is sent. A group is what autograd saves in one module of one layer.
    """

    modules: tuple[str, ...] = ()
    fraction: float = 1.0

    def run(self, index: StepIndex, choices: Sequence[Choice]) -> Simulation:
        """Simulate a step with these choices, and with another framework's switches that offload values to the host.

        Of the values that the choices keep, those that the switches select are offloaded.

        Args:
            index: the step, with forms of the host for every value that may be sent.
            choices: the choice of each region (module call); it must not compress or offload any value.
        """
        return _Beside(index, choices, self).run() if self.modules else _in_line(index, choices)


def _in_line(index: StepIndex, choices: Sequence[Choice]) -> Simulation:
    """Simulate a step that offloads the inputs of recomputed layers on the stream that computes, like transformers.

    Compute waits for every copy.
    """
    takers: dict[int, int] = {}
    for view in index.views:
        for value in view.graph.values:
            if value.origin is Origin.INPUT:
                takers[value.storage] = takers.get(value.storage, 0) + 1
    found, spans, waiting = [], dict[tuple[int, int], Span](), dict[int, float]()
    for view, choice in zip(index.views, choices, strict=True):
        region, sent = view.call.index, list[int]()
        if choice.kept != view.everything:  # masks and positions are inputs of all layers, so they are not sent
            held = (view.copied | frozenset(view.movable)) & view.forms.keys()
            sent = [value for value in held if takers.get(view.graph.values[value].storage) == 1]
        spans |= {(region, value): (2 * view.call.forward[1], index.instants) for value in sent}
        waiting[region] = sum(_both_ways(index, view.graph.values[value].bytes) for value in sent)
        found.append(_with_sent(index, view, choice, sent))
    return run_choices(index.scheduled(Transfers(spans, waiting)), found)


def _both_ways(index: StepIndex, size: int) -> float:
    """Return the seconds that ``size`` bytes need to go to the host and to come back."""
    link = index.forms.link
    assert link is not None, "forms that are sent have a link"
    return 2 * link.latency_seconds + size / link.out_bytes_per_second + size / link.in_bytes_per_second


def _with_sent(index: StepIndex, view: RegionView, choice: Choice, sent: Sequence[int]) -> Choice:
    """Return a copy of a choice (what a region keeps or recomputes) that also offloads the values ``sent``."""
    link = index.forms.link
    packed = frozenset((value, link.name) for value in sent if link is not None)
    return Choice(choice.kept - frozenset(sent), packed, is_boundary_dropped=choice.is_boundary_dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Data: the tensors that autograd saves in one module of one layer; they are sent together.

    Three fields are ticks (positions of ops in the step): forward has used the tensors for the last time before ``through``,
    backward needs the first of them at ``needed``, and has used the last of them before ``done``.
    """

    region: int
    module: str
    values: frozenset[int]
    bytes: int
    through: int
    needed: int
    done: int
    is_sent: bool = False


class _Beside:
    """The simulation of a step that offloads like Megatron-Core: one stream copies to the host, another stream copies back."""

    def __init__(self, index: StepIndex, choices: Sequence[Choice], sending: Sending) -> None:
        self.index, self.choices, self.sending = index, choices, sending
        link = index.forms.link
        assert link is not None, "forms that are sent have a link"
        self.link = link
        self.layers = _layers(index)
        self.gone: dict[tuple[int, int], list[float]] = {}
        """Maps (region, value) to a list of times in seconds: when each copy of the value to the host is done."""
        self.back: dict[tuple[int, int], list[int]] = {}
        """Maps (region, value) to a list of ticks (positions of ops): when each copy of the value back is requested."""
        self.waiting: dict[int, float] = {}

    def run(self) -> Simulation:
        """Schedule all copies to the host and back, and return the simulated step with these copies."""
        groups = self.groups
        self._send(groups)
        self._fetch(groups)
        free = self._free_of_others(groups)
        spans = {key: (2 * self._tick_at(max(self.gone[key])), 2 * min(self.back[key])) for key in free}
        found = []
        for view, choice in zip(self.index.views, self.choices, strict=True):
            sent = [value for region, value in free if region == view.call.index]
            found.append(_with_sent(self.index, view, choice, sent))
        return run_choices(self.index.scheduled(Transfers(spans, self.waiting)), found)

    @cached_property
    def groups(self) -> list[_Group]:
        """All groups (the saved tensors of one module of one layer) in the order of forward; groups to send are marked."""
        found = [
            group
            for view, choice, layer in zip(self.index.views, self.choices, self.layers, strict=True)
            for group in _groups_of(view, choice, layer, self.sending.modules)
        ]
        found.sort(key=lambda group: (group.through, -group.needed))
        last = {group.module: at for at, group in enumerate(found)}
        eligible = [at for at, group in enumerate(found) if group.bytes and at not in last.values()]
        kept = int(len(eligible) * (1 - self.sending.fraction))
        sent = frozenset(eligible[: len(eligible) - kept])
        return [replace(group, is_sent=at in sent) for at, group in enumerate(found)]

    def _free_of_others(self, groups: Sequence[_Group]) -> list[tuple[int, int]]:
        """Return the sent (region, value) pairs that the device can free.

        A value cannot be freed if a group that stays on the device saves it too.
        """
        sent = {(group.region, group.module) for group in groups if group.is_sent}
        held = {
            (region, slot.value)
            for region, layer in enumerate(self.layers)
            for module, slots in layer.slots.items()
            for slot in slots
            if (region, module) not in sent
        }
        return [key for key in self.gone if key not in held]

    @cached_property
    def clock(self) -> npt.NDArray[np.float64]:
        """An array with, for each op of the step, the seconds of compute before the op begins, including recomputed ops."""
        index = self.index
        clock: npt.NDArray[np.float64] = index.seconds_before.copy()
        for region, op in run_choices(index, self.choices).replayed:
            view = index.views[region]
            clock[view.call.backward[0] :] += index.replay_seconds(view.graph.ops[op].cost_key)
        return clock

    def _tick_at(self, seconds: float) -> int:
        """Return the position of the first op that begins when at least ``seconds`` of the step's compute are done."""
        return int(np.searchsorted(self.clock, seconds))

    def _copy_seconds(self, group: _Group, bytes_per_second: float) -> float:
        return len(group.values) * self.link.latency_seconds + group.bytes / bytes_per_second

    def _send(self, groups: Sequence[_Group]) -> None:
        """Record, for each group to send, when its copy to the host is done. The groups are copied one after the other.

        A group is what autograd saves in one module of one layer.
        """
        free = 0.0
        for group in groups:
            if group.is_sent:
                start = max(free, float(self.clock[group.through]))
                free = start + self._copy_seconds(group, self.link.out_bytes_per_second)
                for value in group.values:
                    self.gone.setdefault((group.region, value), []).append(free)

    def _fetch(self, groups: Sequence[_Group]) -> None:
        """Schedule the copy of each group back from the host, and record how long compute waits for each.

        A group is what autograd saves in one module of one layer. Its copy begins when it is requested, and the module's
        backward waits until the copy is done.
        """
        asked_for = [group for group in groups if group.is_sent]
        there: dict[tuple[int, str], float] = {}
        free = 0.0
        events = [(group.needed, 0, at) for at, group in enumerate(groups)]
        events += [(group.done, 1, at) for at, group in enumerate(groups)]
        for tick, is_asking, at in sorted(events):
            now, group = float(self.clock[tick]), groups[at]
            if is_asking and asked_for:
                group = asked_for.pop()
                free = self._fetch_group(group, tick, max(now, free), there)
            elif not is_asking and group.is_sent:
                if (group.region, group.module) not in there:  # not requested before: copy it now, when it is needed
                    self._fetch_group(group, tick, now, there)
                wait = max(0.0, there[group.region, group.module] - now)
                self.clock[tick:] += wait
                self.waiting[group.region] = self.waiting.get(group.region, 0.0) + wait

    def _fetch_group(self, group: _Group, tick: int, start: float, there: dict[tuple[int, str], float]) -> float:
        """Schedule the copy of one group back from the host, and return the time in seconds when the stream is free again.

        Values that are already back are not copied a second time.
        """
        key = (group.region, group.module)
        if key in there:
            return start
        sent = max(max(self.gone[group.region, value]) for value in group.values)
        there[key] = max(start, sent) + self._copy_seconds(group, self.link.in_bytes_per_second)
        for value in group.values:
            self.back.setdefault((group.region, value), []).append(tick)
        return there[key]


class _Layer(NamedTuple):
    """Data: the modules of one layer.

    One field names the module of each op, the other maps modules to the tensors they saved.
    """

    modules: list[str]
    slots: dict[str, list[Slot]]


def _layers(index: StepIndex) -> list[_Layer]:
    """Return one entry for each region, which is one layer here: the modules of its ops, and each module's saved tensors."""
    kinds = {view.call.kind: view for view in index.views}
    modules = {kind: modules_of(view) for kind, view in kinds.items()}
    found = []
    for view in index.views:
        layer = _Layer(modules[view.call.kind], {})
        for slot in view.graph.slots:
            if slot.is_managed and slot.unpacked >= 0:
                layer.slots.setdefault(layer.modules[_saver(index, view, slot).id], []).append(slot)
        found.append(layer)
    return found


def _groups_of(view: RegionView, choice: Choice, layer: _Layer, named: Sequence[str]) -> Iterator[_Group]:
    """Yield one group (the tensors that go to the host together) for each named module of a region.

    A group has those saved tensors of the module that the choice (what to keep or recompute) keeps, and inputs that
    recomputation starts from.
    """
    graph = view.graph
    for module in layer.slots.keys() & set(named):
        saved, ops = layer.slots[module], [op for op in graph.ops if layer.modules[op.id] == module]
        read = frozenset(value for op in ops for value in op.reads)
        values = {slot.value for slot in saved} & choice.kept
        if any(slot.value in view.everything - choice.kept for slot in saved):
            values |= read & view.copied
        values = {value for value in values & view.forms.keys() if graph.values[value].bytes >= _LEAST_BYTES}
        used = read - view.free | values
        yield _Group(
            region=view.call.index,
            module=module,
            values=frozenset(values),
            bytes=sum(graph.values[value].bytes for value in values),
            through=max((op.tick for op in graph.ops if used & frozenset(op.reads)), default=ops[-1].tick) + 1,
            needed=min(slot.unpacked for slot in saved),
            done=max(slot.unpacked for slot in saved) + 1,
        )


def _saver(index: StepIndex, view: RegionView, slot: Slot) -> RegionOp:
    """Return the op that made autograd save a tensor (a slot).

    At the moment of saving, it is either the next op, which reads the value, or the op before, which made the value. The name
    of the backward op that reads the slot (saved tensor) starts with this op's name.
    """
    ops, backward = view.graph.ops, index.trace.ops[slot.unpacked].name
    at = min(bisect.bisect_left([op.tick for op in ops], slot.packed), len(ops) - 1)
    for op in (ops[at], ops[max(at - 1, 0)]):
        if backward.startswith(op.name) and slot.value in (*op.reads, *op.writes):
            return op
    return ops[at]


def modules_of(view: RegionView) -> list[str]:
    """Return a list with, for each op of a region, the name of the Megatron-Core module that it belongs to.

    The name is found from the op and its position; it is empty for an op outside of these modules.
    """
    graph, cores = view.graph, core_ops(view)
    paths = [graph.values[op.writes[0]].name.rpartition("::")[0] if op.writes else "" for op in graph.ops]
    routed = [op.id for op in graph.ops if is_product(op.name) and ROUTED.search(paths[op.id])]
    attentions = [_ATTENTION.match(path) for path in paths]
    cores = frozenset(at for at in cores if attentions[at])
    found = []
    for op, path, attention in zip(graph.ops, paths, attentions, strict=True):
        module = ""
        if op.id in cores:
            module = "core_attn"
        elif attention is not None:
            own = [at for at in cores if paths[at].startswith(attention[0])]
            if own and op.id < min(own) and (is_product(op.name) or has_compressed_keys(view)):
                module = "qkv_linear"
            elif own and op.id > max(own) and is_product(op.name):
                module = "attn_proj"
        elif ROUTED.search(path):
            if op.id in routed[:-1]:
                module = "expert_fc1"
            elif routed and routed[0] < op.id < routed[-1]:
                module = "moe_act"
        elif _NORM.search(path) and cores:
            module = "attn_norm" if op.id < max(cores) else "mlp_norm"
        found.append(module)
    return found
