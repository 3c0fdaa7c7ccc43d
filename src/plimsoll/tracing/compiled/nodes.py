"""Classify nodes of a joint graph: called ops, fused ops, random ops, views, and ops that may not run twice.

Private to torch, seen in 2.9 to 2.15: the metadata of nodes (``val``, ``desc``, ``partitioner_tag``), the descriptors of a
graph's inputs and outputs, names of inductor's random ops.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

IS_BEFORE = "plimsoll_is_before"
"""The key, in a node's metadata, that marks a copy of an input. The copy holds the input's contents before the step changes it.
"""
_KNOWN = ("aten", "prims", "inductor")
"""Namespaces of ops whose schemas and tags can be relied on.

An op of a user may draw numbers or count its calls without declaring it.
"""
_FUSED = re.compile(
    "_to_copy|_unsafe_(masked_)?index|arange|bernoulli|cat|clone|constant_pad_nd|convert_element_type|copy_?|embedding|empty_like|"
    "fill|flip|full(_like)?|gather|index|inductor_(lookup_seed|random)|iota|lift_fresh_copy|new_(full|zeros)|ones_like|repeat|"
    "scalar_tensor|(select|slice)_scatter|zeros_like"
)
"""A pattern for names of ops that inductor fuses although they do not have a tag that says so.

Pointwise ops have such a tag.
"""
_REDUCTION = re.compile(
    "a?max|a?min|aminmax|arg(max|min)|all|any|count_nonzero|linalg__powsum|linalg_vector_norm|logsumexp|mean|norm|prod|"
    "(nan)?sum|(std|var)(_mean)?"
)
"""A pattern for names of ops that inductor fuses as reductions. torch tags them from 2.11 on, but 2.9 did not."""
_VIEWS = frozenset({"_unsafe_view", "alias", "view", "reshape", "detach", "lift_fresh"})
SEEDS = ("inductor_seeds", "inductor_seed")
"""Names of the ops that draw seeds. Inductor draws seeds once per call of a graph."""
_RANDOM = ("inductor_random", "inductor_randint", "inductor_lookup_seed", *SEEDS)
"""Names of inductor's random ops. They compute each number from a seed and the number's position, so running them again gives
the same numbers.
"""


def op_name(node: fx.Node) -> str:
    """Return the name of a node's op without its overload, such as ``mm`` for ``aten.mm.default``."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]


def op_of(node: fx.Node) -> fx.Node:
    """Return the node of the op that makes a buffer. For one of several outputs, it is the op that makes all of them."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def node_bytes(node: fx.Node) -> int:
    """Return the size in bytes of a node's output, or 0 if the output is not a tensor.

    Symbolic sizes count with their hints.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(int(hinted(size)) for size in value.shape) * value.element_size()


def input_names(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Return a mapping from each tensor input of a graph to a name such as ``input#3``. ``nodes`` are the nodes of the graph.

    Symbolic sizes are inputs too, but they are not counted. So the names are the same at all sizes.
    """
    tensors = (node for node in nodes if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor))
    return {node: f"input#{at}" for at, node in enumerate(tensors, 1)}


def inputs_key(nodes: Iterable[fx.Node]) -> str:
    """Return a short hash of the inputs of a graph: their dtypes and numbers of dimensions, in order.

    It is equal at all sizes, and differs for other inputs or another order.
    """
    kinds = " ".join(f"{node.meta['val'].dtype} {node.meta['val'].dim()}" for node in input_names(nodes))
    return hashlib.sha256(kinds.encode()).hexdigest()[:8]


def is_tensor(node: fx.Node) -> bool:
    """Return True if a node makes tensors. Sizes, arithmetic on sizes, and checks without output do not."""
    return not isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, type(None)))


def hinted(size: Any) -> Any:
    """Return the example value (hint) that torch has for a symbolic size or number. For a concrete number, return the number
    itself.
    """
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def obstacle(node: fx.Node) -> str:
    """Return the reason why an op must not run again in backward, or ``""`` if it may."""
    target = node.target
    if op_name(node) in SEEDS or draws(target, node.args, node.kwargs):
        return "draws random numbers"
    if IS_BEFORE in node.meta:
        return "reads memory that the step overwrites"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "is a higher-order op that runs its own graph"
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace in ("_c10d_functional", "c10d_functional"):
            return "is a collective"
        if target._schema.is_mutable:
            return "writes to its inputs"
        if target.namespace not in _KNOWN:
            return "is a custom op, which may have effects that torch does not know"
    return ""


def is_random(node: fx.Node) -> bool:
    """Return True if a node draws random numbers, or seeds for them."""
    return op_name(node) in _RANDOM or draws(node.target, node.args, node.kwargs)


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of an op draws random numbers.

    Attention draws only with the option dropout, which is off by default.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    assert isinstance(op, torch._ops.OpOverload), "what has tags is an overload"
    names = (argument.name for argument in op._schema.arguments)
    chance: Any = {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p")
    return not (chance == 0.0 or ("attention" in op._schema.name and chance is None))


def is_fused(node: fx.Node) -> bool:
    """Return True if inductor fuses an op with its neighbours."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or bool(_FUSED.fullmatch(op_name(node)) or _REDUCTION.fullmatch(op_name(node)))


def is_view(node: fx.Node) -> bool:
    """Return True if a node uses the memory of another node."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    infos = [argument.alias_info for argument in target._schema.arguments]
    shows = any(info is not None and not info.is_write for info in infos)
    return shows or op_name(node) in _VIEWS


def is_epilogue(node: fx.Node) -> bool:
    """Return True if a node copies a result of forward into an input of the graph, because the original code changes this input
    in place.
    """
    return node.target is torch.ops.aten.copy_.default and node.meta.get("partitioner_tag") != "must_be_in_backward"


def changed_inputs(graph: fx.Graph) -> Iterable[fx.Node]:
    """Return the inputs that forward changes, within the graph or after it.

    Without copies, gradients and recomputed ops of backward would read the changed inputs.
    """
    inputs = {node.meta.get("desc"): node for node in graph.nodes if node.op == "placeholder"}
    outputs = (getattr(each, "mutated_input", None) for each in graph.output_node().meta.get("desc") or ())
    within = (node.args[0] for node in graph.nodes if is_epilogue(node))
    return dict.fromkeys([*(inputs[each] for each in outputs if each is not None and each in inputs), *within])


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return these nodes, and all nodes that they are made from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
