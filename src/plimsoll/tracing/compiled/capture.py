"""Runs one step of a compiled model op by op to see its joint graphs, without generating code.

Every unit is compiled with a partitioner that notes the joint graph and leaves the rest to torch. The graphs that come out are
run as they are, op by op, so a step costs tracing and not code generation.

Private to torch, seen in 2.9 to 2.13: ``CustomPartitionerFn``, ``min_cut_rematerialization_partition``, ``fx_graph_cse``.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from plimsoll.tracing.compiled.joint import JointGraph
from plimsoll.tracing.compiled.places import CompiledPart
from plimsoll.tracing.compiled.units import Unit, in_place

Partitioned = tuple[fx.GraphModule, fx.GraphModule]


class Partitioner(CustomPartitionerFn):
    """Sees each joint graph once equal ops are one, then lets torch partition it by the marks that are on it.

    inductor copies its configuration deeply; a partitioner is never copied.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self

    def uuid(self) -> str | None:
        return None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Partitioned:
        gm.graph = fx_graph_cse(gm.graph)  # torch does it next; done first, what is marked here is what it partitions
        self.mark(gm.graph, **options)
        # A budget of torch's own that was set since the plan was made would decide as well.
        with functorch_config.patch(activation_memory_budget=1.0):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        self.finish(backward)
        return forward, backward

    @abstractmethod
    def mark(self, graph: fx.Graph, **options: Any) -> None:
        """Mark the forward nodes to save, and those to compute again."""

    def finish(self, backward: fx.GraphModule) -> None:
        """Change what torch has made of backward."""


class _Spy(Partitioner):
    def __init__(self, regions: Sequence[str]) -> None:
        self._regions = regions
        self.graphs: list[JointGraph] = []
        self.statics: list[frozenset[fx.Node]] = []

    def mark(self, graph: fx.Graph, **options: Any) -> None:
        self.graphs.append(JointGraph(graph, options["num_fwd_outputs"], self._regions))
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.statics.append(frozenset(inputs[at] for at in options.get("static_lifetime_input_indices") or ()))


def capture(
    units: Sequence[Unit], regions: Mapping[str, Sequence[str]], run: Callable[[], object]
) -> dict[str, CompiledPart]:
    """The joint graphs of every unit that ``run``, one training step, comes through.

    ``regions`` are the paths of each unit's regions, from the unit's module.
    """
    spies = {unit.path: _Spy(regions[unit.path]) for unit in units}
    with in_place(units, lambda unit: functools.partial(unit.call.captured(spies[unit.path]), unit.module)):
        run()
    return {path: CompiledPart(path, tuple(spy.graphs), tuple(spy.statics)) for path, spy in spies.items()}
