"""What a watched call of a region has shown, apart from any plan, and the program that a plan makes of it.

A recording holds no tensors of the call. So it outlives the plan under which it was made: another plan for the same model
makes its own programs from it, and recordings at several sizes say what the region does at others (see ``any_size``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plimsoll.artifacts.plan import RegionPlan
from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.engine.call_stream import Stream
from plimsoll.engine.program import Program, Shared
from plimsoll.engine.replay_code import RecordedRegion
from plimsoll.engine.replay_plan import DropChoice, ParameterSource, ReplayPlan, choose
from plimsoll.engine.torch_flags import Flags
from plimsoll.planning.replay_schedule import recipe_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One call of a region: its torch calls, its graph, and the ops by which values can be made again.

    ``sources`` has the parameters and buffers by graph value, ``unsaved`` those of them that recipes must read from a copy
    because autograd did not save them; ``scratched`` are buffers that the region itself writes. ``first_input`` is the graph
    value of the first argument. ``nodes`` autograd nodes were made, ``casts`` of them by casts, which autocast caches.
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
    """Whether code whose torch calls are not seen (TorchScript, extensions) has run ops: it may do others at another size."""

    def program(self, plan: RegionPlan, shared: Shared, *, is_linked: bool) -> Program:
        """What serves such calls under a plan. ``is_linked``: the region before can make the first argument again."""
        return self.serve(self.replay_plan(plan, shared, is_linked=is_linked), plan, shared)

    def replay_plan(self, plan: RegionPlan, shared: Shared, *, is_linked: bool) -> ReplayPlan:
        """What becomes of every value under a plan."""
        links = frozenset[int]()
        if plan.is_boundary_dropped and is_linked and self.first_input is not None:
            links = frozenset({self.first_input})
        packer = shared.packer
        choice = choose(self.graph, plan.dropped, self.not_rebuildable, links, plan.packed, packer.keeps_sign_only)
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
        )

    def serve(self, made: ReplayPlan, plan: RegionPlan, shared: Shared, like: Program | None = None) -> Program:
        """The program of a replay plan. ``like``: one that serves calls of other sizes, and may have seen backward's order."""
        shares = {d.value: d.held_bytes / d.bytes for d in plan.decisions if d.is_packed and d.bytes}
        # Casts of parameters are cached inside of autocast, so that a later call may make fewer nodes than the recorded one.
        node_counts = range(self.nodes - self.casts, self.nodes + 1)
        return Program(made, node_counts, shares, shared, is_self_compiling=self.is_self_compiling, like=like)

    def _parameters(self, choice: DropChoice, shared: Shared) -> tuple[tuple[int, ParameterSource], ...]:
        """Where recipes read parameters and buffers. Of a buffer that the region itself writes, replays get scratch copies,
        whatever it holds by then.
        """
        copied = self.unsaved if shared.links.is_used else self.unsaved & _read_by_recipes(self.graph, choice)
        unchecked = self.scratched | copied
        return tuple(
            (value, replace(source, is_copied=value in copied, is_checked=False) if value in unchecked else source)
            for value, source in self.sources.items()
        )


def _read_by_recipes(graph: RegionGraph, choice: DropChoice) -> frozenset[int]:
    stored = choice.stored | choice.packed.keys()
    made = (value for value in choice.dropped if graph.values[value].origin is Origin.OP)
    return frozenset(
        read for value in made for op in recipe_ops(graph, value, stored)[0] for read in graph.ops[op].reads
    )
