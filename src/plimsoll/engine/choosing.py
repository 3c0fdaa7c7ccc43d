"""The names in a plan and a region's graph in, what to drop, what to pack and what to hold out, and why not more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.planning.replay_schedule import Unreachable, recipe_ops


@dataclass(slots=True)
class Choice:
    """What to drop and what to pack, resolved to ids of the region's graph."""

    dropped: frozenset[int]
    stored: frozenset[int]
    link: int | None
    obstacles: dict[str, str] = field(default_factory=dict)
    packed: dict[int, str] = field(default_factory=dict)
    """Codec or link by value."""

    @property
    def gone(self) -> frozenset[int]:
        """Values whose tensors are let go."""
        return self.dropped | self.packed.keys()


def choose(
    graph: RegionGraph,
    names: frozenset[str],
    not_rebuildable: Mapping[int, str],
    links: frozenset[int],
    forms: Mapping[str, str] | None = None,
    is_private: Callable[[str], bool] = lambda form: False,
) -> Choice:
    """Resolve the names that a plan drops. What cannot be rebuilt is kept, and ``obstacles`` says why.

    ``links`` are inputs that the region before can make again (for a dropped boundary), ``forms`` the codec or the link of
    values that are packed, and ``is_private`` whether a form is of no use to anybody but the value's own slots.
    """
    slot_values = {slot.value for slot in graph.slots if slot.is_managed}
    packed = {v: forms[graph.values[v].name] for v in slot_values - links if forms and graph.values[v].name in forms}
    always = {value.id for value in graph.values if value.origin in (Origin.PARAMETER, Origin.BUFFER, Origin.INPUT)}
    always -= packed.keys()
    wanted = {v for v in slot_values if graph.values[v].name in names and graph.values[v].origin is Origin.OP}
    obstacles = {graph.values[v].name: not_rebuildable[v] for v in sorted(wanted) if v in not_rebuildable}
    dropped = {v for v in wanted if v not in not_rebuildable}
    while True:
        stored = always | (slot_values - dropped - packed.keys())
        failed: set[int] = set()
        for value in sorted(dropped):
            try:
                leaves = recipe_ops(graph, value, frozenset(stored | packed.keys()))[1]
                useless = next((leaf for leaf in leaves if leaf in packed and is_private(packed[leaf])), None)
                if useless is not None:
                    failed.add(value)
                    obstacles[graph.values[value].name] = (
                        f"{graph.values[useless].name}, which it is made of, is held as {packed[useless]} alone"
                    )
            except Unreachable as unreachable:
                failed.add(value)
                obstacles[graph.values[value].name] = unreachable.obstacle
        if not failed:
            break
        dropped -= {min(failed)}
    gone = dropped | (links & slot_values)
    return Choice(frozenset(gone), frozenset(stored), next(iter(links), None), obstacles, packed)
