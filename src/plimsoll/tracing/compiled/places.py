"""What a unit was compiled to, and where its graphs stand in the step.

Regions inside of a unit that run eagerly, since torch.compiler.disable keeps them out of the graphs, break it into stretches:
each graph belongs to one, in forward and in backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from plimsoll.artifacts.trace import Phase, RegionCall, Trace
from plimsoll.tracing.compiled.joint import JointGraph, Kernel

Stretch = tuple[Phase, int]
"""A phase, and how many regions that run eagerly inside of a unit lie before."""


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """What one unit was compiled to: its graphs in the order of forward, and which inputs of each are parameters or buffers."""

    path: str
    graphs: tuple[JointGraph, ...]
    statics: tuple[frozenset[fx.Node], ...]

    def outer(self, name: str) -> str:
        """The path in the whole model of a module inside of the unit."""
        return ".".join(part for part in (self.path, name) if part)


@dataclass
class UnitPlace:
    """Where the ops of one unit stood in the eager step, and where its kernels stand now.

    Regions inside that run eagerly (``inner``) break it into stretches; ``stretch_of`` says in which of them each graph lies.
    """

    call: RegionCall
    part: CompiledPart
    inner: tuple[RegionCall, ...]
    ops: dict[int, Stretch] = field(default_factory=dict)
    """Its own ops in the eager step, by tick."""
    stretch_of: tuple[int, ...] = ()
    forward: dict[Kernel, int] = field(default_factory=dict)
    backward: dict[Kernel, int] = field(default_factory=dict)
    ends: dict[Stretch, int] = field(default_factory=dict)
    """Where the kernels of each stretch end."""
    made: dict[Stretch, list[int]] = field(default_factory=dict)
    """The storages that its ops left to others."""

    @classmethod
    def of(cls, call: RegionCall, eager: Trace, part: CompiledPart) -> UnitPlace:
        inner = tuple(
            other
            for other in eager.regions
            if other.index != call.index
            and call.forward[0] <= other.forward[0]
            and other.forward[1] <= call.forward[1]
            and (not call.name or other.name.startswith(call.name + "."))
        )
        place = cls(call, part, inner)
        modules: defaultdict[int, set[str]] = defaultdict(set)
        for tick, op in enumerate(eager.ops):
            if op.region == call.index:
                is_backward = op.phase is Phase.BACKWARD
                before = [i.backward[0] > tick if is_backward else i.forward[1] <= tick for i in inner]
                place.ops[tick] = (op.phase, sum(before))
                if not is_backward:
                    modules[sum(before)].add(op.module)
        place.stretch_of = place._assigned(modules)
        return place

    def _assigned(self, modules: Mapping[int, set[str]]) -> tuple[int, ...]:
        """The stretch of each graph: in turn where there is one for each, else that with most of its modules, in order."""
        graphs, stretches = self.part.graphs, sorted(modules) or [0]
        if len(graphs) == len(stretches):
            return tuple(stretches)
        found: list[int] = []
        for graph in graphs:
            own = {self.part.outer(kernel.module) for kernel in graph.kernels}
            later = [stretch for stretch in stretches if stretch >= max(found, default=0)]
            found.append(max(later, key=lambda stretch: len(own & modules[stretch])) if modules else 0)
        return tuple(found)

    def kernels(self, stretch: Stretch) -> list[Kernel]:
        """The kernels of a stretch, and those before it that have no place yet."""
        phase, at = stretch
        is_backward = phase is Phase.BACKWARD
        placed = self.backward if is_backward else self.forward
        graphs = list(zip(self.part.graphs, self.stretch_of, strict=True))
        due = [
            g for g, own in (reversed(graphs) if is_backward else graphs) if (own >= at if is_backward else own <= at)
        ]
        return [k for graph in due for k in graph.kernels if k.is_backward is is_backward and k not in placed]

    def ticks(self) -> dict[Kernel, int]:
        return self.forward | self.backward
