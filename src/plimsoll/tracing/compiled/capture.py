"""Run one step of a compiled model op by op, in order to capture its joint graphs. A joint graph has the forward and the
backward of a compiled function.

Each unit (a module that torch.compile compiles) is compiled with a partitioner that records the joint graph and leaves the rest
to torch. The resulting graphs are run op by op, so a step costs tracing but no code generation.

Private to torch, seen in 2.9 to 2.15: ``CustomPartitionerFn``, ``min_cut_rematerialization_partition``, ``fx_graph_cse``.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.exc import Unsupported
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from plimsoll.artifacts.trace import Phase, RegionCall, Trace
from plimsoll.errors import InvalidModel
from plimsoll.tracing.compiled.joint import JointGraph, Kernel
from plimsoll.tracing.compiled.nodes import (
    IS_BEFORE,
    ancestors,
    changed_inputs,
    input_names,
    inputs_key,
    is_epilogue,
    is_tensor,
)
from plimsoll.tracing.compiled.units import Unit, install_alone
from plimsoll.tracing.local_tensors import version_of
from plimsoll.tracing.meters.memory import storage_of

Stretch = tuple[Phase, int]
"""A part of a compiled module's forward or backward, between regions (planned modules) inside it that run eagerly.

It is a pair of the phase and the number of such regions before the part, in forward's order.
"""


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """Data about the compilation of one call of a unit (compiled module).

    ``graphs`` are the joint graphs in forward order. ``statics`` has, for each graph, the inputs that are parameters or
    buffers.
    """

    path: str
    graphs: tuple[JointGraph, ...]
    statics: tuple[frozenset[fx.Node], ...]
    copied: Collection[str] = ()
    """Names of inputs of the compiled graphs that backward reads as copies, because other code changes the inputs before (see
    `Partitioner.changed`).
    """

    def outer(self, name: str) -> str:
        """Return the path in the whole model of a module that is inside of the unit (compiled module)."""
        return ".".join(part for part in (self.path, name) if part)


@dataclass
class UnitPlace:
    """Data about one call of a unit (a module under torch.compile): where its ops were in the eager step, and where its kernels
    are in the compiled step.

    Regions inside the unit that run eagerly (``inner``) divide the unit into stretches. ``stretch_of`` has the stretch of each
    graph. ``forward`` and ``backward`` map kernels to ticks (positions among the step's ops).
    """

    call: RegionCall
    part: CompiledPart
    inner: tuple[RegionCall, ...]
    ops: dict[int, Stretch] = field(default_factory=dict)
    """A mapping from tick (position among the ops) to stretch, for the own ops of this compiled module in the eager step.

    A stretch is a part of the module's forward or backward, between regions inside it that run eagerly.
    """
    stretch_of: tuple[int, ...] = ()
    forward: dict[Kernel, int] = field(default_factory=dict)
    backward: dict[Kernel, int] = field(default_factory=dict)
    ends: dict[Stretch, int] = field(default_factory=dict)
    """A mapping from stretch (part of the compiled module's forward or backward) to the tick (position among the ops) where the
    stretch's kernels end.

    A tick is a position among the step's ops.
    """
    made: dict[Stretch, list[int]] = field(default_factory=dict)
    """A mapping from stretch (part of the compiled module's forward or backward) to the storages that its ops made for
    others.
    """

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
        """Return a tuple with the number of the stretch that each graph of the compiled module belongs to.

        A stretch is a part of the module's forward or backward, between regions inside it that run eagerly. ``modules`` maps a
        stretch to the modules that ran in it. If there are as many graphs as stretches, the position decides. Otherwise a graph
        gets the stretch that shares most modules with it, in order.
        """
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
        """Return the kernels to insert in a stretch, which is a part of the compiled module's forward or backward.

        They are the kernels of its graphs, and kernels of earlier stretches that were not placed yet.
        """
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


Partitioned = tuple[fx.GraphModule, fx.GraphModule]


class Partitioner(CustomPartitionerFn):
    """Base class of Plimsoll's partitioners for torch.compile. A partitioner gets each joint graph after equal ops are merged,
    records or marks its nodes, and lets torch split the graph by the marks.

    inductor deep-copies its configuration, so a partitioner returns itself as its copy.
    """

    changed: Collection[str] = ()
    """Inputs that other code changes before backward, as texts such as ``key:input#3``, and ``key:`` for each known graph.

    See `inputs_key` and `input_names`.
    """
    has_copied: bool = False
    """Whether the backward of some graph reads copies of inputs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self

    def uuid(self) -> str | None:
        return None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Partitioned:
        # torch would do this next; done here first, so that the marked graph is what torch partitions
        gm.graph = fx_graph_cse(gm.graph)
        self.has_copied |= _copy_what_changes(gm.graph, options["num_fwd_outputs"], self.changed)
        self.mark(gm.graph, **options)
        # A budget of torch's own, set after the plan was made, would influence the partition too.
        with functorch_config.patch(activation_memory_budget=1.0):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        self.finish(forward, backward, **options)
        return forward, backward

    @abstractmethod
    def mark(self, graph: fx.Graph, **options: Any) -> None:
        """Mark, in a joint graph, the forward nodes that are saved for backward and the nodes that backward recomputes. Or only
        record the graph.
        """

    def finish(self, forward: fx.GraphModule, backward: fx.GraphModule, **options: Any) -> None:
        """Change the forward graph and the backward graph that torch has made from the joint graph. By default, they are not
        changed.
        """


def _copy_what_changes(graph: fx.Graph, forward_outputs: int, changed_later: Collection[str]) -> bool:
    """Add copies of inputs that change before backward reads them. Return True if at least one input is copied.

    Forward makes the copies at its beginning, and backward and other readers use them. Otherwise backward would read the
    changed input: a buffer that is counted up or averaged, or an activation that is changed in place. In an unknown graph, any
    input without a gradient may change later.
    """
    nodes = list(graph.nodes)
    first = next(node for node in nodes if node.op != "placeholder")
    outputs: Any = graph.output_node().args[0]
    needed = ancestors(node for node in outputs[forward_outputs:] if node is not None)
    names, key = input_names(nodes), inputs_key(nodes)
    known = {name.removeprefix(f"{key}:") for name in changed_later if name.startswith(f"{key}:")}
    later = [node for node in names if names[node] in known]
    if changed_later and not known:
        given = (node for node in nodes if node.op == "placeholder")
        pairs = zip(given, outputs[forward_outputs:], strict=False)
        later = [node for node, gradient in pairs if gradient is None and node in names]
    has_copied = False
    for changed in dict.fromkeys([*changed_inputs(graph), *later]):
        readers = [user for user in changed.users if is_tensor(user) and user.op != "output" and not is_epilogue(user)]
        if needed.isdisjoint(readers):
            continue
        with graph.inserting_before(first):
            before = graph.call_function(torch.ops.aten.clone.default, (changed,))
        stack = min(readers).meta
        before.meta = {each: stack[each] for each in ("nn_module_stack", "fwd_nn_module_stack") if each in stack}
        with changed.meta["val"].fake_mode:
            before.meta |= {"val": changed.meta["val"].clone(), IS_BEFORE: True}
        for each in readers:
            each.replace_input_with(changed, before)
        has_copied = True
    return has_copied


class _Spy(Partitioner):
    """A partitioner that changes nothing. It records the graphs of one call of a unit, and which inputs have changed when the
    step is over.
    """

    def __init__(self, regions: Sequence[str], changed: Collection[str]) -> None:
        self._regions = regions
        self.changed = changed
        self.graphs: list[JointGraph] = []
        self.statics: list[frozenset[fx.Node]] = []
        self.keys: set[str] = set()
        """The prefixes that the names of this call's graphs have in `changed`."""
        self._handled: set[str] = set()
        """Names of the inputs that the last graph itself changes."""
        self._given: list[tuple[str, weakref.ref[torch.Tensor], int, int]] = []

    def mark(self, graph: fx.Graph, **options: Any) -> None:
        self._handled = {node.name for node in changed_inputs(graph)}
        self.keys.add(f"{inputs_key(graph.nodes)}:")
        self.graphs.append(JointGraph(graph, options["num_fwd_outputs"], self._regions))
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.statics.append(frozenset(inputs[at] for at in options.get("static_lifetime_input_indices") or ()))

    def run(self, module: fx.GraphModule, _: Sequence[Any], *, is_backward: bool = False, **__: Any) -> Any:
        """Return a function that runs torch's graph op by op. This method takes the place of inductor, which would generate
        code.
        """
        if is_backward or not self.graphs:
            return make_boxed_func(module.forward)
        nodes = self.graphs[-1].nodes
        key = inputs_key(nodes)
        names = {node.name: f"{key}:{name}" for node, name in input_names(nodes).items()}
        given = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        places = [None if name in self._handled else names.get(name) for name in given]

        def forward(*tensors: Any) -> Any:
            named = ((name, each) for name, each in zip(places, tensors, strict=False) if name is not None)
            self._given += [(name, weakref.ref(each), storage_of(each), version_of(each)) for name, each in named]
            return module.forward(*tensors)

        return make_boxed_func(forward)

    def changed_later(self, written: Collection[int]) -> set[str]:
        """Return the names of the inputs that were written after forward read them, or whose storages are among ``written``."""
        found = set()
        for name, reference, storage, version in self._given:
            tensor = reference()
            if storage in written or (tensor is not None and version_of(tensor) != version):
                found.add(name)
        return found


def _place(error: Unsupported) -> str:
    """Return a text with the user's function and line that Dynamo could not trace."""
    frames = getattr(error, "real_stack", None)
    return f"{frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else "the model"


def capture(
    units: Sequence[Unit],
    regions: Mapping[str, Sequence[str]],
    run: Callable[[], object],
    written: Iterable[torch.Tensor] = (),
) -> dict[tuple[str, int], CompiledPart]:
    """Run one training step, and return the joint graphs of each call of each unit. The key is a pair of the unit's path and
    the call's number.

    Each call is compiled separately, so that its graphs are known. If other code changes an input that backward may read, such
    as a buffer or a frozen parameter that averages others, the graphs are captured once more with copies.

    Args:
        units: the modules that torch.compile compiles.
        regions: the paths of each unit's regions, from the unit's module.
        run: a function that runs the step.
        written: the parameters and buffers that the step writes to.

    Raises:
        InvalidModel: a graph breaks although ``fullgraph=True`` forbids it.
    """
    storages = set(map(storage_of, written))
    spies = _spied(units, regions, run, {})
    changed: dict[str, set[str]] = {unit.path: set() for unit in units}
    for (path, _), spy in spies.items():
        changed[path] |= spy.changed_later(storages)
    # All ranks take part in each step. So with several ranks the second step always runs, whatever this rank has found.
    if any(changed.values()) or (dist.is_available() and dist.is_initialized()):
        for (path, _), spy in spies.items():
            changed[path] |= spy.keys if changed[path] else set()
        spies = _spied(units, regions, run, changed)
    parts = {(unit.path, 0): CompiledPart(unit.path, (), ()) for unit in units}
    for (path, number), spy in spies.items():
        copied = spy.keys | changed[path] if spy.has_copied else ()
        parts[path, number] = CompiledPart(path, tuple(spy.graphs), tuple(spy.statics), copied)
    return parts


def _spied(
    units: Sequence[Unit],
    regions: Mapping[str, Sequence[str]],
    run: Callable[[], object],
    changed: Mapping[str, Collection[str]],
) -> dict[tuple[str, int], _Spy]:
    spies: dict[tuple[str, int], _Spy] = {}

    def spied_on(unit: Unit) -> Callable[..., Any]:
        numbers = itertools.count()

        def call(*args: Any, **kwargs: Any) -> Any:
            # Calls may share a graph or have one each, and torch does not show which graph ran. So each call is compiled anew
            # (docs/project/design/plans-inside-torch-compile.md).
            spy = _Spy(regions[unit.path], changed.get(unit.path, ()))
            if torch.is_grad_enabled():
                spies[unit.path, next(numbers)] = spy
            return unit.call.captured(spy, spy.run)(unit.module, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for unit in units:  # as under a plan: with a different hook Dynamo orders a graph's inputs differently
            stack.callback(install_alone(unit, spied_on(unit)))
        try:
            run()
        except Unsupported as error:
            raise InvalidModel(
                "torch.compile(fullgraph=True) cannot compile this model as one graph.",
                why=f"{str(error).partition(chr(10))[0]}, in {_place(error)}",
                next="remove the code that breaks the graph, or omit fullgraph=True: then each graph is planned",
            ) from error
    return spies
