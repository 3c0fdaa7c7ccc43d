"""Read a joint graph of torch.compile as kernels. Fused ops form one kernel, and only values between kernels take memory.

torch.compile gives the forward and the backward of a compiled function to a partitioner as one graph of ATen ops. Inductor then
fuses chains of elementwise ops, reductions and gathers, so most nodes never get memory of their own. Here a *kernel* is one op
that inductor calls directly (a matrix product, attention), or a group of ops that it is expected to fuse. A *buffer* is a node
that a kernel leaves in memory: an output, an input of a directly called op, or an input of another kernel. Views do not take
memory, so the node that they view is used in their place. Kernels are in the order of the graph.

A fused op belongs to the first kernel that needs it. Forward ops that only backward needs belong to backward. If backward reads
a forward node that is not in memory, the kernel that reads the node recomputes it from the buffers that the node came from.

Private to torch, seen in 2.9 to 2.15: the metadata of nodes (``val``, ``nn_module_stack``, ``fwd_nn_module_stack``).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from plimsoll.tracing.compiled.nodes import (
    IS_BEFORE,
    SEEDS,
    ancestors,
    is_epilogue,
    is_fused,
    is_random,
    is_tensor,
    is_view,
    node_bytes,
    obstacle,
    op_name,
    op_of,
)
from plimsoll.tracing.recorder.opkey import value_stem

OUTSIDE = "outside"
"""The value of ``region`` in kernels that are outside of all regions (planned modules)."""
_SMALL = 8
"""The factor that decides whether a reduction is saved: its input must be at least 8 times as large as its output.

Otherwise the reduction is recomputed within a kernel of backward.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Data about a group of ops that run as one kernel. ``reads`` and ``writes`` are nodes of buffers (nodes with memory of
    their own) or of the graph's inputs.

    ``nodes`` are its ops, ``region`` is the region that it belongs to, and ``obstacle`` says why it must not run again ("" if
    it may).
    """

    name: str
    module: str
    region: str
    is_backward: bool
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    obstacle: str
    is_fused: bool
    apart: tuple[Kernel, ...] = ()
    """If this kernel writes several buffers: kernels that each recompute only one of the buffers. Otherwise empty."""

    @property
    def again(self) -> tuple[Kernel, ...]:
        """The kernels that backward may run to recompute the buffers of this kernel.

        They are the kernels that each make one buffer, or this kernel itself.
        """
        return self.apart or (self,)

    @property
    def moved_bytes(self) -> int:
        """The number of bytes that the kernel reads and writes."""
        return sum(map(node_bytes, (*self.reads, *self.writes)))


class JointGraph:
    """Reads a joint graph as kernels in running order, and finds the forward nodes that backward reads.

    ``forward_outputs`` is the number of outputs that belong to forward. ``regions`` are paths of modules below the compiled
    module. Each kernel belongs to one of these regions, or to ``outside``. A graph of one block has the single region ``""``.
    """

    def __init__(self, graph: fx.Graph, forward_outputs: int, regions: Sequence[str]) -> None:
        self._regions = sorted(regions, key=len, reverse=True)
        self.nodes = list(graph.nodes)
        self._at = {node: position for position, node in enumerate(self.nodes)}
        outputs = self.nodes[-1].args[0]
        several = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        flat = [n if isinstance(n, fx.Node) else None for n in several]
        self.forward_outputs = [self.base(n) for n in flat[:forward_outputs] if n is not None]
        given = [node for node in self.nodes if node.op == "placeholder"]
        self.tangents = [node for node in given if "tangents" in str(node.target)]
        pairs = zip(given, flat[forward_outputs:], strict=False)
        self.gradient_of = {node: self.base(n) for node, n in pairs if n is not None}
        """A mapping from an input of the graph to the node of the gradient that backward returns for it."""
        self.gradients = [self.base(n) for n in flat[forward_outputs:] if n is not None]
        written = [node for node in self.nodes if is_epilogue(node) or IS_BEFORE in node.meta]
        self._in_forward = ancestors(n for n in (*flat[:forward_outputs], *written) if n is not None)
        self._region_of: dict[fx.Node, str] = {}
        self._buffers: set[fx.Node] = set()
        self._drawn: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.masks: set[fx.Node] = set()
        """Nodes that forward makes from random numbers only and that backward reads, such as the masks of dropout."""
        self._stage()
        self._find_buffers()
        self.kernels = self._kernels()
        self.names = self._names()

    # What a node is ------------------------------------------------------------------------------------------------

    def is_backward(self, node: fx.Node) -> bool:
        """Return True if a node belongs to backward: no output of forward needs the node. For an item of an op's output, the op
        counts.
        """
        return op_of(node) not in self._in_forward

    @functools.cache  # noqa: B019 - a graph is read once, then freed
    def base(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory a node uses. It is the node itself, unless the node is a view."""
        while node.op == "call_function":
            if node.target is operator.getitem:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                if not is_view(source):
                    return node
                node = source
            elif is_view(node) and node.all_input_nodes:
                node = node.all_input_nodes[0]
            else:
                return node
        return node

    def is_buffer(self, node: fx.Node) -> bool:
        """Return True if a node has memory of its own: kernels write it, or it is an input."""
        return node.op in ("placeholder", "get_attr") or node in self._buffers

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that a node reads. In place of a view, return the node whose memory the view uses.

        If the node is a ``getitem``, the op whose output it takes is returned.
        """
        return [self.base(each) for each in node.all_input_nodes if is_tensor(each)]

    def _runs(self, node: fx.Node) -> bool:
        """Return True if a node is an op that runs.

        It is not a view, an input, arithmetic on sizes, or an item of another op's output.
        """
        return (
            node.op == "call_function" and node.target is not operator.getitem and not is_view(node) and is_tensor(node)
        )

    def module_of(self, node: fx.Node) -> str:
        """Return the path of the module whose forward made a node, relative to the compiled module."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        return _module_path([*stack.values()][-1][0]) if stack else ""

    def region_of(self, node: fx.Node) -> str:
        """Return the path of the region that a node belongs to. A node without a module belongs to the region of its latest
        input.
        """
        return self._region_of.get(node, OUTSIDE)

    def _find_region(self, node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        # One op draws the seeds of all regions. From torch 2.14 on it carries the first region's module.
        if stack and op_name(node) not in SEEDS:
            path = _module_path([*stack.values()][-1][0])
            for region in self._regions:
                if not region or path == region or path.startswith(region + "."):
                    return region
            return OUTSIDE
        if "" in self._regions:
            return ""
        made = [each for each in node.all_input_nodes if each.op == "call_function"]
        return self.region_of(max(made, key=self._at.__getitem__)) if made else OUTSIDE

    # Which nodes are one kernel ------------------------------------------------------------------------------------

    def _stage(self) -> None:
        """Assign a stage (a number) to each op. Fused ops of one stage that read each other form one kernel.

        A new stage begins after each op that inductor calls directly. An op that only a later stage reads is moved to that
        stage. A mask needs only its random numbers, so no stage waits for it.
        """
        stage: dict[fx.Node, int] = {}
        users = self._readers()
        self._find_masks(users)
        for node in self.nodes:
            self._region_of[node] = self._find_region(node)
            if node.op != "call_function":
                stage[node] = 0
                continue
            before = 0
            for each in node.all_input_nodes:
                splits = self._runs(each) and not self._is_one(each, node) and each not in self.masks
                before = max(before, stage[each] + splits)
            stage[node] = before
        for node in reversed(self.nodes):
            may_wait = self._runs(node) and is_fused(node) and users[node] and node not in self._outputs
            if may_wait and all(self._is_one(node, user) for user in users[node]):
                stage[node] = max(stage[node], min(stage[user] for user in users[node]))
        parent: dict[fx.Node, fx.Node] = {node: node for node in self.nodes if self._runs(node)}

        def root(node: fx.Node) -> fx.Node:
            while parent[node] is not node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        for node in parent:
            for each in self.inputs(node):
                if each in parent and self._is_one(each, node) and stage[each] == stage[node]:
                    parent[root(each)] = root(node)
        self._root = {node: root(node) for node in parent}

    @functools.cached_property
    def _outputs(self) -> set[fx.Node]:
        return {*self.forward_outputs, *self.gradients}

    def _find_masks(self, users: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
        """Find the nodes that are made from random numbers only, with their seeds.

        Among them, find the nodes that backward reads: the masks of dropout.
        """
        for node in self.nodes:
            made = self.inputs(node) if self._runs(node) and is_fused(node) else []
            if is_random(node) or (made and all(each in self._drawn for each in made)):
                seeds = (seed for each in made for seed in self._drawn.get(each, ()))
                self._drawn[node] = (node,) if op_name(node) in SEEDS else tuple(dict.fromkeys(seeds))
        of_forward = {node for node in self._drawn if not (self.is_backward(node) or is_random(node))}
        self.masks = {node for node in of_forward if any(self.is_backward(user) for user in users[node])}

    def _is_one(self, first: fx.Node, second: fx.Node) -> bool:
        """Return True if inductor may put an op (``first``) and an op that reads it (``second``) into one kernel.

        Inductor draws a mask in the kernel that applies it. Here the mask is a kernel of its own. Either the mask is saved, and
        the nodes that depend on it can be recomputed, or the mask is drawn again from its seeds.
        """
        if first in self.masks or not (is_fused(first) and (is_fused(second) or not self._runs(second))):
            return False
        return self.is_backward(first) is self.is_backward(second) and self.region_of(first) == self.region_of(second)

    def _readers(self) -> defaultdict[fx.Node, list[fx.Node]]:
        """Return a mapping from each node to the ops that read it, directly or through views."""
        found: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            if self._runs(node):
                for each in dict.fromkeys(self.inputs(node)):
                    found[each].append(node)
                    if each.target is operator.getitem:
                        found[each.all_input_nodes[0]].append(node)
        return found

    # Which nodes have memory ---------------------------------------------------------------------------------------

    def _find_buffers(self) -> None:
        readers = self._readers()
        self._readers_of = readers
        for node in self.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem and self.base(node) is node:
                self._buffers.add(node)
            elif self._runs(node) and not self._is_tuple(node):
                own = [user for user in readers[node] if self.is_backward(user) is self.is_backward(node)]
                if (
                    not is_fused(node)
                    or node in self._outputs
                    or any(not is_fused(u) or self._root[u] is not self._root[node] for u in own)
                ) and (self._in_memory(node)):
                    self._buffers.add(node)
        for node in self.nodes:  # what backward reads of forward and cannot recompute on the way
            if self._runs(node) and self.is_backward(node):
                for each in self.inputs(node):
                    if not self.is_backward(each):
                        self.sources(each)
        self.sources.cache_clear()

    def _in_memory(self, node: fx.Node) -> bool:
        """Return True if the result of an op is put into memory when other kernels read it. Constants are not, because they are
        made where they are read.
        """
        is_constant = not node.all_input_nodes and op_name(node) not in SEEDS
        return not is_constant or any(not is_fused(user) for user in self._readers_of[node])

    @staticmethod
    def _is_tuple(node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), (tuple, list))

    @functools.cache  # noqa: B019 - a graph is read once, then freed
    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the buffers that a kernel reads if it recomputes this node. The result for a buffer is the buffer itself.

        A node that cannot be recomputed becomes a buffer itself.
        """
        if self.is_buffer(node):
            return (node,)
        made = self.inputs(node)
        read_bytes = max((node_bytes(each) for each in made), default=0)
        is_drawn = node in self._drawn or any(is_random(each) for each in made)
        if is_drawn or obstacle(node) or node_bytes(node) * _SMALL <= read_bytes:
            self._buffers.add(node)
            return (node,)
        return tuple(dict.fromkeys(source for each in made for source in self.sources(each)))

    # Kernels -------------------------------------------------------------------------------------------------------

    def _kernels(self) -> tuple[Kernel, ...]:
        groups: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, root in self._root.items():
            groups[root].append(node)
        found = []
        for nodes in groups.values():
            writes = [node for node in nodes if node in self._buffers]
            for node in nodes:
                if self._is_tuple(node):
                    writes += [user for user in node.users if user in self._buffers]
            if writes:
                kernel = self._kernel(nodes, writes)
                found.append(dataclasses.replace(kernel, apart=tuple(self._apart(kernel))))
        return tuple(self._in_order(found))

    def _apart(self, kernel: Kernel) -> Iterable[Kernel]:
        """For each buffer of a fused forward kernel, yield a kernel that makes only this buffer and does not write to inputs.

        Buffers that one op makes together stay together. In backward, a normalization reads the saved sum before it, and not
        the terms of that sum.
        """
        made: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in kernel.writes:
            made[op_of(node)].append(node)
        if kernel.is_backward or not kernel.is_fused or (len(made) == 1 and not kernel.obstacle):
            return
        own = set(kernel.nodes)
        for op in sorted(made, key=self._at.__getitem__):
            nodes, waiting = {op}, [op]
            while waiting:
                for each in self.inputs(waiting.pop()):
                    if each in own and each not in self._buffers and each not in nodes:
                        nodes.add(each)
                        waiting.append(each)
            yield self._kernel(sorted(nodes, key=self._at.__getitem__), made[op])

    def _kernel(self, nodes: list[fx.Node], writes: list[fx.Node]) -> Kernel:
        own = set(nodes)
        reads: dict[fx.Node, None] = {}
        for node in nodes:
            for each in self.inputs(node):
                if op_of(each) not in own:
                    reads |= dict.fromkeys(self.sources(each))
        last = nodes[-1]
        if self.is_backward(last):  # with a mask also its seeds, to draw it again
            reads |= dict.fromkeys(seed for mask in [*reads] for seed in self._drawn.get(mask, ()))
        name = "+".join(dict.fromkeys(op_name(node) for node in (nodes if len(nodes) < 4 else nodes[-3:])))
        return Kernel(
            name=name,
            module=self.module_of(last),
            region=self.region_of(last),
            is_backward=self.is_backward(last),
            nodes=tuple(nodes),
            reads=tuple(reads),
            writes=tuple(writes),
            obstacle=next((found for node in nodes if (found := obstacle(node))), ""),
            is_fused=is_fused(last),
        )

    def _in_order(self, kernels: list[Kernel]) -> Iterable[Kernel]:
        """Yield the kernels in the order of the graph, forward before backward. A kernel comes after the kernels that it reads
        from.
        """
        maker = {write: index for index, kernel in enumerate(kernels) for write in kernel.writes}
        waits = [
            {maker[read] for read in kernel.reads if read in maker and maker[read] != index}
            for index, kernel in enumerate(kernels)
        ]
        frees: defaultdict[int, list[int]] = defaultdict(list)
        for index, needed in enumerate(waits):
            for each in needed:
                frees[each].append(index)
        key = [(kernel.is_backward, max(self._at[node] for node in kernel.nodes)) for kernel in kernels]
        ready = [(key[index], index) for index, needed in enumerate(waits) if not needed]
        heapq.heapify(ready)
        while ready:
            _, index = heapq.heappop(ready)
            yield kernels[index]
            for each in frees[index]:
                waits[each].discard(index)
                if not waits[each]:
                    heapq.heappush(ready, (key[each], each))

    def _names(self) -> dict[fx.Node, str]:
        """Return a name for each buffer that forward makes. It consists of module, op, and a number among equal names."""
        seen: Counter[str] = Counter()
        names = {}
        for kernel in self.kernels:
            if kernel.is_backward:
                continue
            for node in kernel.writes:
                made = op_of(node)
                name = f"{self.module_of(made)}:{value_stem(op_name(made))}"
                seen[name] += 1
                names[node] = name if seen[name] == 1 else f"{name}#{seen[name]}"
        return names

    def read_by_backward(self) -> dict[fx.Node, list[int]]:
        """Return the forward buffers and inputs that backward reads.

        The result maps each of them to the positions of the kernels that read it.
        """
        found: defaultdict[fx.Node, list[int]] = defaultdict(list)
        for position, kernel in enumerate(self.kernels):
            if kernel.is_backward:
                for node in kernel.reads:
                    if not self.is_backward(node) or node.op == "placeholder":
                        found[node].append(position)
        return found


def _module_path(text: str) -> str:
    """Return a module path such as ``model.layers.0`` for a text such as ``L['self'].model._modules['layers']['0']``."""
    text = re.sub(r"^L\['[^']*'\]|^G\['[^']*'\]", "", text)
    text = re.sub(r"\._modules\b|\._orig_mod\b", "", text)
    text = re.sub(r"\['([^']*)'\]|\[(\d+)\]", lambda match: "." + (match[1] or match[2]), text)
    return text.strip(".")
