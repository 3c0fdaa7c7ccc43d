"""The partitioner that Plimsoll gives to torch.compile for a plan. It decides what each region (a module that the plan decides
about) saves for backward, and what backward recomputes.

Every buffer that backward reads is marked to be saved, except the buffers that the plan drops. Every other forward node is
marked to be recomputed, so that torch's own heuristics have nothing left to decide. Ops that must not run twice (drawing seeds,
collectives, writes) are always saved. Values that the plan compresses or offloads come first among the saved tensors, in the
order of names. So the packer, which encodes or sends them, knows each of them by its index, even if the code comes from torch's
caches. Torch still cuts the graph in two and handles symbolic sizes, the order of recomputation and random states.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config, custom_graph_pass
from torch.utils.checkpoint import CheckpointPolicy

from plimsoll.errors import PlanMismatch
from plimsoll.tracing.compiled import capture, joint, nodes
from plimsoll.tracing.compiled.capture import Partitioner
from plimsoll.tracing.compiled.joint import JointGraph

Dropped = Mapping[str, frozenset[str]]
"""A mapping from the name of a region to the names of the buffers that backward recomputes there."""
_PLACE = "plimsoll_place"
_KERNEL = "plimsoll_kernel"
_IS_ON_THE_WAY = "plimsoll_is_on_the_way"


class PlannedPartitioner(Partitioner):
    """A partitioner that splits graphs into forward and backward as a plan says.

    It serves the graphs of one unit (a module that torch.compile compiles), or of several units with the same decisions.
    """

    def __init__(
        self,
        dropped: Dropped,
        known: Dropped | None = None,
        *,
        packed: Sequence[str] = (),
        changed: Sequence[str] = (),
        is_in_order: bool = True,
    ) -> None:
        """``dropped`` maps a region to the values that backward recomputes, and ``known`` maps it to all values of the plan
        there.
        """
        self._known = known or {}
        self._dropped = dropped
        self._is_in_order = is_in_order
        self._packed = tuple(packed)
        self.changed = tuple(changed)
        named = sorted((name, sorted(values)) for name, values in dropped.items())
        self._text = json.dumps([is_in_order, named, self._packed, self.changed])
        self.found: set[tuple[str, str]] = set()
        """The decisions whose buffer was found in some graph, each as a pair of the names of region and value."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this object as one text, so that equal decisions give equal bytes in all processes.

        The reason: torch's caches of compiled graphs use these bytes as a key. Sets would change their order with the hash
        seed, and pickle writes two equal strings differently depending on whether they are one object or two.
        """
        return _from_text, (self._text,)

    @property
    def options(self) -> dict[str, Any]:
        """Options for torch.compile: this partitioner and, if the plan says so, the options that run backward in graph order
        without reuse of buffers. A pass that the user has set in the same place stays.

        Inductor keeps a freed buffer for a later buffer of the same size, up to its own estimate of the peak, which leaves out
        tensors that the caller holds. Neither option changes a number.
        """
        ordered = {**in_order(), "allow_buffer_reuse": False} if self._is_in_order else {}
        return {"custom_partitioner_fn": self, **ordered}

    def uuid(self) -> str:
        """Return a digest of the decisions and of this code. While both are unchanged, torch's caches of compiled graphs are
        valid.
        """
        code = b"".join(
            Path(file or "").read_bytes() for file in (capture.__file__, joint.__file__, nodes.__file__, __file__)
        )
        return hashlib.sha256(self._text.encode() + code).hexdigest()

    def mark(self, graph: fx.Graph, **options: Any) -> None:
        found = JointGraph(graph, options["num_fwd_outputs"], tuple(self._dropped))
        read = found.read_by_backward()
        region_of = {node: kernel.region for kernel in found.kernels for node in kernel.writes}
        # Each forward node gets a mark: between marked nodes, torch's min cut would save whatever it considers cheap.
        for node in found.nodes:
            if node.op == "call_function" and not found.is_backward(node):
                node.meta["recompute"] = (
                    CheckpointPolicy.MUST_SAVE if nodes.obstacle(node) else CheckpointPolicy.MUST_RECOMPUTE
                )
        named = {
            node: (region_of[node], _local(found.names[node], region_of[node])) for node in read if node in found.names
        }
        again: set[fx.Node] = set()
        decided: list[tuple[str, str]] = []
        for node, (region, local) in named.items():
            readers = {found.kernels[at].region for at in read[node]}
            # a buffer that only other regions read is held for them, so its own region does not decide about it
            if region in readers:
                decided.append((region, local))
            if local in self._dropped.get(region, ()):
                self.found.add((region, local))
                if readers == {region}:  # else another region holds it
                    again.add(node)
        held = [node for node in read if node.op == "call_function" and node not in again]
        for node in (*held, *_boundaries(found, again)):
            # torch looks for the mark on the op, not on the op's item that is saved
            node.meta["recompute"] = nodes.op_of(node).meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in found.nodes:
            if (
                node.target is operator.getitem
                and nodes.op_of(node).meta.get("recompute") is CheckpointPolicy.MUST_SAVE
            ):
                # An op is rerun for all of its items or for none. Which items are saved depends on what backward needs.
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in found.nodes:
            # Before torch 2.10 every recomputed node must name its part of the graph; here the whole graph is one part.
            node.meta["ac_graph_id"] = 0
        self._refuse_other_graph(decided)
        inputs = {node: ("", name) for node, name in nodes.input_names(found.nodes).items() if node in read}
        places = {("", name): at for at, name in enumerate(self._packed)}
        for node, decision in (named | inputs).items():
            if decision in places:
                node.meta[_PLACE] = places[decision]
                # a tensor stored on the context would bypass the saved-tensor hooks
                node.meta.pop("saved_tensor_with_no_vc_check", None)
        _note_kernels(found)
        _hide_drawless(graph)

    def finish(self, forward: fx.GraphModule, backward: fx.GraphModule, **options: Any) -> None:
        if self._packed:
            self._put_packed_first(forward.graph, backward.graph, options["num_fwd_outputs"])
        _show_drawless(forward.graph)
        _show_drawless(backward.graph)
        if self._is_in_order:
            _copy_for_each_kernel(backward.graph)
        forward.recompile()
        backward.recompile()

    def _put_packed_first(self, forward: fx.Graph, backward: fx.Graph, outputs: int) -> None:
        """Reorder forward's saved tensors, and backward's inputs in the same way. The values that the plan compresses or
        offloads come first.

        Raises:
            PlanMismatch: the graph does not save one of these values.
        """
        output = forward.output_node()
        made: tuple[Any, ...] = tuple(output.args[0])  # type: ignore[arg-type]
        saved = [node for node in made[outputs:] if isinstance(node.meta.get("val"), torch.Tensor)]
        found = sorted((node for node in saved if _PLACE in node.meta), key=lambda node: node.meta[_PLACE])
        if [node.meta[_PLACE] for node in found] != list(range(len(self._packed))):
            here = {node.meta[_PLACE] for node in found}
            missing = next(name for at, name in enumerate(self._packed) if at not in here)
            raise PlanMismatch(
                f"The compiled graph does not save {missing!r}, but the plan compresses or offloads it.",
                why="since planning, the version of torch or of the model's library or the options of torch.compile have "
                "changed, or this batch causes a graph break",
                next="plan again here",
            )
        ordered = [*found, *(node for node in saved if _PLACE not in node.meta)]
        output.args = ((*made[:outputs], *ordered, *made[outputs + len(saved) :]),)
        taken = {node.name: node for node in backward.nodes if node.op == "placeholder"}
        before = taken[saved[0].name].prev
        for node in reversed(ordered):
            before.append(taken[node.name])

    def _refuse_other_graph(self, here: Collection[tuple[str, str]]) -> None:
        """Raise an error if a graph is not the planned graph: it saves a value that the plan does not know, and nothing that
        the plan drops.

        ``here`` are the values that the graph saves, each as a pair of region and name.

        Raises:
            PlanMismatch: this is not the graph that was planned.
        """
        unknown = [(region, name) for region, name in here if name not in self._known.get(region, (name,))]
        if unknown and not self.found.intersection(here):
            raise PlanMismatch(
                f"The compiled graph saves {'.'.join(filter(None, unknown[0]))!r}, which the plan does not know.",
                why="it also saves none of the tensors that the plan drops: the version of torch or of the model's library or "
                "the options of torch.compile have changed since planning",
                next="plan again here",
            )


class _Drawless:
    """Takes the place of an op that could draw random numbers but does not in this call (attention with a dropout of 0), while
    torch partitions the graph.

    Torch saves and restores the random state around every recomputed op that could draw (seen in 2.9 to 2.15). If an op is
    called in that way, it returns contiguous outputs, backward copies what it reads of them, and CUDA graphs cannot be
    captured.
    """

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__ = "drawless"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _hide_drawless(graph: fx.Graph) -> None:
    """Replace, in a graph, the ops that torch tags as random but that draw nothing in this call. Equal ops get the same
    replacement.
    """
    made: dict[Any, _Drawless] = {}
    for node in graph.nodes:
        is_tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if is_tagged and not nodes.draws(node.target, node.args, node.kwargs):
            node.target = made.setdefault(node.target, _Drawless(node.target))


def _show_drawless(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.target, _Drawless):
            node.target = node.target.op


def _copy_for_each_kernel(backward: fx.Graph) -> None:
    """Give each kernel of backward its own copies of intermediate values that it can compute from memory.

    If two kernels read such a value, inductor may put the value into memory: on a CPU if an exponential, logarithm or similar
    op computes it, and always for the random numbers that a mask is drawn from, at four bytes each. With copies, each kernel
    draws the mask itself.
    """
    kernel_of = {node: node.meta.get(_KERNEL) for node in backward.nodes}
    for node in reversed(backward.nodes):
        if node.op != "call_function" or not node.meta.get(_IS_ON_THE_WAY):
            continue
        readers: defaultdict[int | None, list[fx.Node]] = defaultdict(list)
        for user in node.users:
            readers[kernel_of[user]].append(user)
        kernel_of[node], *others = readers
        for kernel in others:
            with backward.inserting_before(min(readers[kernel])):
                copy = backward.node_copy(node)
            kernel_of[copy] = kernel
            for user in readers[kernel]:
                user.replace_input_with(node, copy)


def _note_kernels(graph: JointGraph) -> None:
    """Write on each node of a graph what `_copy_for_each_kernel` reads later.

    This is the number of the kernel that runs the node, and whether the node's value is never put into memory.
    """
    for at, kernel in enumerate(graph.kernels):
        for node in kernel.nodes:
            node.meta[_KERNEL] = at
    for node in graph.nodes:
        is_made_apart = graph.is_buffer(graph.base(node)) and node not in graph.masks
        node.meta[_IS_ON_THE_WAY] = not (graph.is_backward(node) or is_made_apart)


def _boundaries(graph: JointGraph, again: set[fx.Node]) -> set[fx.Node]:
    """Return the values of other regions that backward needs in order to recompute the values ``again``.

    They are saved, so that recomputation never continues into another region.
    """
    forward = [kernel for kernel in graph.kernels if not kernel.is_backward]
    maker = {node: again for kernel in forward for again in kernel.again for node in again.writes}
    held = graph.read_by_backward().keys() - again
    needed, waiting, seen = set(), list(again), set(again)
    while waiting:
        kernel = maker[waiting.pop()]
        for node in kernel.reads:
            if node not in maker or node in held or node in seen:
                continue
            seen.add(node)
            if maker[node].region != kernel.region:
                needed.add(node)
            elif not maker[node].obstacle:
                waiting.append(node)
    return needed


def _local(name: str, region: str) -> str:
    """Return a buffer's name without the name of its region in front."""
    return name.removeprefix(region + ".") if region else name


def _from_text(text: str) -> PlannedPartitioner:
    is_in_order, dropped, packed, changed = json.loads(text)
    names = {name: frozenset(values) for name, values in dropped}
    return PlannedPartitioner(names, packed=packed, changed=changed, is_in_order=is_in_order)


_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)
"""The base class of a scheduler pass. Before torch 2.13, one class serves all kinds of passes. Torch stores only the uuid of a
pass.
"""


def in_order() -> dict[str, Any]:
    """Return the options that make inductor run `GraphOrder` in backward. The result is empty if the user has set a
    process-wide pass in that place.
    """
    return {} if config._pre_fusion_custom_pass is not None else {"_pre_fusion_custom_pass": GraphOrder()}


def with_seeds_saved() -> dict[str, Any]:
    """Return the options that make inductor run `SeedsSaved`. The result is empty if the user has set a process-wide pass in
    that place.
    """
    return {} if config.joint_custom_post_pass is not None else {"joint_custom_post_pass": SeedsSaved()}


class SeedsSaved(custom_graph_pass.CustomGraphPass):
    """A pass over the graph that makes a checkpointed region save the seeds of its random numbers. It then draws the same
    numbers as without the checkpoint.

    From torch 2.14 on, a checkpoint marks the op that draws seeds to be rerun in backward. Then forward also saves the random
    state, and the generator advances once more. So dropout's masks differ from those without the checkpoint, and the two
    gradients cannot be compared. Without the mark, as before 2.14, the seeds are saved: 8 bytes each.
    """

    def uuid(self) -> str:
        """Return a digest of this code, which torch's caches of compiled graphs use as a key."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if nodes.op_name(node) in nodes.SEEDS:
                node.meta.pop("recompute", None)


class GraphOrder(_Pass):
    """A pass that makes inductor's code run backward in the order of its graph. It adds dependencies between kernels before
    inductor fuses them.

    torch places a recomputed op right before its reader. Inductor's scheduler then fuses kernels that read the same input, such
    as a mask or the angles of rotary embeddings. Recomputed kernels of two blocks become one, and the second block's results
    are computed a whole block early and wait in memory. So every kernel gets a fake dependency on the last op before it that is
    not fused (a matrix product, attention). Fusing across that op would create a cycle, which the scheduler refuses. A kernel
    may still run later, with its reader. A result that no other kernel reads, such as the sum for a bias's gradient, would be
    fused with a later kernel and hold its inputs until then. So the next op that is not fused waits for this result.

    inductor deep-copies its configuration; this object is stateless, so its copy is the object itself.

    Private, seen in torch 2.13 to 2.15: ``_pre_fusion_custom_pass`` and ``CustomSchedulerPass``, ``add_fake_dep``, ``WeakDep``,
    ``compute_ancestors``, ``OutputNode``.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphOrder:
        return self

    def uuid(self) -> str:
        """Return a digest of this code, which torch's caches of compiled graphs use as a key."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.dependencies import WeakDep
        from torch._inductor.scheduler import OutputNode
        from torch._inductor.virtualized import V

        if not V.graph.is_backward:
            return nodes
        last, ended = list[str](), list[str]()
        for node in nodes:
            is_called = node.is_extern() and bool(node.get_buffer_names())
            for name in last + ended if is_called else last:
                node.add_fake_dep(WeakDep(name, mutating_buf=name, is_fake=True))
            if is_called:
                last, ended = [next(iter(node.get_buffer_names()))], []
            elif all(isinstance(user.node, OutputNode) for made in node.get_outputs() for user in made.users):
                ended += node.get_buffer_names()
        V.graph.scheduler.compute_ancestors()
        return nodes
