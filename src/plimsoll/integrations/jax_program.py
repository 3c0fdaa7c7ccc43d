"""Reads a jaxpr as a flat list of operations, and evaluates it again with names on chosen values.

What ``jit`` wraps is taken apart; loops and branches, and functions with derivatives of their own, stay one operation each.
Values are numbered in the order in which they are made, so two traces of one function at other sizes number them alike.

A name alone does not make a value saveable: the derivative of ``exp`` reads the operation's own result, before the name.
Such an operation gets a derivative that reads the named result (``_bound_with_names``).

Source: "Writing custom Jaxpr interpreters in JAX", jax's documentation. Only ``jax`` and ``jax.extend.core`` are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

_PRODUCTS_AND_SHAPES = (
    "dot_general conv_general_dilated add sub mul div neg reshape transpose broadcast_in_dim convert_element_type slice "
    "gather concatenate squeeze split expand_dims dynamic_slice select_n integer_pow square stop_gradient name reduce_sum "
    "copy pad rev iota eq ne lt le gt ge and or not"
)
_READ_INPUTS_ALONE = frozenset(_PRODUCTS_AND_SHAPES.split())
"""Operations whose derivatives do not read what they return."""
_OPAQUE = ("custom_vjp_call", "scan", "while", "cond", "checkpoint", "remat2", "shard_map")
"""Operations with a program inside that jax differentiates by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class FixedArray:
    """A number that the program holds."""

    value: Any


Operand = int | FixedArray
"""A value by its number, or a constant."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation: ``reads`` and ``writes`` are values, ``scope`` the names of ``named_scope`` around it.

    ``context`` is jax's: what the operation is to be run on.
    """

    primitive: Any
    params: Mapping[str, Any]
    reads: tuple[Operand, ...]
    writes: tuple[int, ...]
    scope: str
    context: Any

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.primitive.name)

    @property
    def values(self) -> tuple[int, ...]:
        """The values that it reads, without constants."""
        return tuple(read for read in self.reads if isinstance(read, int))

    def bind(self, inputs: Sequence[Any]) -> list[Any]:
        """Run it."""
        params = self.primitive.get_bind_params(self.params)
        with jax.named_scope(self.scope), self.context.manager:
            out = self.primitive.bind(*inputs, **params)
        return list(out) if self.primitive.multiple_results else [out]


@dataclass(frozen=True, slots=True, eq=False)
class ArrayProgram:
    """A flat list of operations; ``avals`` has shape and dtype of every value."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    avals: Mapping[int, Any]

    def bytes(self, value: int) -> int:
        """Bytes of a value."""
        return aval_bytes(self.avals[value])


@dataclass(slots=True)
class _Reader:
    nodes: list[Node] = field(default_factory=list)
    avals: dict[int, Any] = field(default_factory=dict)

    def new(self, aval: Any) -> int:
        self.avals[len(self.avals)] = aval
        return len(self.avals) - 1

    def read(self, closed: Any, inputs: Sequence[Operand], scope: str) -> list[Operand]:
        """Append the operations of a jaxpr, and return its results."""
        jaxpr = closed.jaxpr
        known: dict[Any, Operand] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {var: FixedArray(value) for var, value in zip(jaxpr.constvars, closed.consts, strict=True)}

        def operand(atom: Any) -> Operand:
            return FixedArray(atom.val) if isinstance(atom, jex.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            reads = [operand(atom) for atom in eqn.invars]
            inner_scope = "/".join(part for part in (scope, str(eqn.source_info.name_stack)) if part)
            if eqn.primitive.name == "jit" and _is_unsharded(eqn.params):
                results = self.read(eqn.params["jaxpr"], reads, inner_scope)
                known |= zip(eqn.outvars, results, strict=True)
                continue
            writes = tuple(self.new(var.aval) for var in eqn.outvars)
            self.nodes.append(Node(eqn.primitive, eqn.params, tuple(reads), writes, inner_scope, eqn.ctx))
            known |= zip(eqn.outvars, writes, strict=True)
        return [operand(atom) for atom in jaxpr.outvars]


def read_program(closed: Any) -> ArrayProgram:
    """A closed jaxpr as a flat program."""
    reader = _Reader()
    inputs = tuple(reader.new(var.aval) for var in closed.jaxpr.invars)
    outputs = reader.read(closed, inputs, "")
    return ArrayProgram(tuple(reader.nodes), inputs, tuple(outputs), reader.avals)


def trace_program(function: Callable[..., Any], *args: Any) -> tuple[ArrayProgram, Any]:
    """A function of arrays as a flat program, and the tree of what it returns."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return read_program(closed), jax.tree.structure(shapes)


def body_of(scan: Node) -> ArrayProgram:
    """One iteration of a ``lax.scan``: constants, carry and slices in, carry and slices out."""
    return read_program(scan.params["jaxpr"])


Bind = Callable[["Node", Sequence[Any]], list[Any]]
"""How an operation is run on its inputs."""


def evaluate(program: ArrayProgram, inputs: Sequence[Any], bind: Bind) -> list[Any]:
    """Run a program."""
    held: dict[int, Any] = dict(zip(program.inputs, inputs, strict=True))
    run_nodes(program.nodes, held, bind)
    return [take(held, output) for output in program.outputs]


def run_nodes(nodes: Sequence[Node], held: dict[int, Any], bind: Bind) -> None:
    """Run operations one after the other on the values held so far."""
    for node in nodes:
        held.update(zip(node.writes, bind(node, [take(held, read) for read in node.reads]), strict=True))


def naming(names: Mapping[int, str]) -> Bind:
    """Runs operations and gives the values in ``names`` these names, in what derivatives read as well."""

    def bind(node: Node, inputs: Sequence[Any]) -> list[Any]:
        own = {at: names[value] for at, value in enumerate(node.writes) if value in names}
        return _bound_with_names(node, inputs, own) if own else node.bind(inputs)

    return bind


def _marking(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Runs an operation and marks its results with their numbers, for those who read the joint program."""
    return [checkpoint_name(r, f"{MARK}{v}") for v, r in zip(node.writes, node.bind(inputs), strict=True)]


MARK = "plimsoll:"
"""How the names begin that ``joined`` gives: the number of the value follows."""


def take(held: Mapping[int, Any], operand: Operand) -> Any:
    """The array that an operand stands for."""
    return operand.value if isinstance(operand, FixedArray) else held[operand]


def _bound_with_names(node: Node, inputs: Sequence[Any], names: Mapping[int, str]) -> list[Any]:
    """Run an operation and name its results, in what its derivative reads as well."""

    def bound(*active: Any) -> tuple[Any, ...]:
        merged = list(inputs)
        for at, value in zip(floats, active, strict=True):
            merged[at] = value
        return tuple(_named(result, names.get(at)) for at, result in enumerate(node.bind(merged)))

    floats = [at for at, value in enumerate(inputs) if is_float(value)]
    active = [inputs[at] for at in floats]
    if not floats or node.name in _READ_INPUTS_ALONE or node.name in _OPAQUE:
        return list(bound(*active))

    def derivative(primals: Any, tangents: Any) -> Any:
        def both(*values: Any) -> Any:
            merged = list(inputs)

            def plain(*given: Any) -> tuple[Any, ...]:
                for at, value in zip(floats, given, strict=True):
                    merged[at] = value
                return tuple(node.bind(merged))

            return jax.jvp(plain, values[: len(floats)], values[len(floats) :])

        program, tree = trace_program(both, *primals, *tangents)
        marks = {value: names[at] for at, value in enumerate(program.outputs[: len(node.writes)]) if at in names}

        def bind(each: Node, given: Sequence[Any]) -> list[Any]:
            return [_named(r, marks.get(v)) for v, r in zip(each.writes, each.bind(given), strict=True)]

        flat = evaluate(program, [*primals, *tangents], bind)
        results, changes = jax.tree.unflatten(tree, flat)
        return results, changes

    function = jax.custom_jvp(bound)
    function.defjvp(derivative)
    return list(function(*active))


def _named(value: Any, name: str | None) -> Any:
    return value if name is None else checkpoint_name(value, name)


def _is_unsharded(params: Mapping[str, Any]) -> bool:
    """Whether nothing says where a jitted function's arrays have to lie."""
    kinds = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return all(type(kind).__name__ == "UnspecifiedValue" for kind in kinds)


def is_float(value: Any) -> bool:
    """Whether an array, or the aval of one, has a derivative."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, float)
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))


def aval_bytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype; keys of random numbers count by their data."""
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return int(np.prod(shape, dtype=np.int64)) * int(getattr(dtype, "itemsize", 4) or 4)


def active_values(program: ArrayProgram, active: Sequence[bool]) -> frozenset[int]:
    """The values that depend on active inputs through floats."""
    found = {value for value, is_active in zip(program.inputs, active, strict=True) if is_active}
    for node in program.nodes:
        if node.name != "stop_gradient" and found.intersection(node.values):
            found.update(value for value in node.writes if is_float(program.avals[value]))
    return frozenset(found)


def active_inputs_of_scan(scan: Node, active: Sequence[bool]) -> tuple[bool, ...]:
    """Which inputs of a scan's body are active, given which of the scan are: a carry may become so in the loop."""
    body, flags = body_of(scan), list(active)
    first, carries = scan.params["num_consts"], scan.params["num_carry"]
    while True:
        values = active_values(body, flags)
        after = [flags[first + at] or body.outputs[at] in values for at in range(carries)]
        if after == flags[first : first + carries]:
            return tuple(flags)
        flags[first : first + carries] = after


def joined(program: ArrayProgram, active: Sequence[bool]) -> tuple[ArrayProgram, int]:
    """A program and its reverse derivative as one: inputs, then cotangents of the active float results in.

    Every value of the original is marked with its number.

    Returns:
        The program, and how many of its inputs are the original's.
    """
    moving = active_values(program, active)
    wanted = [at for at, value in enumerate(program.outputs) if value in moving]
    places = [at for at, is_active in enumerate(active) if is_active]

    def both(inputs: list[Any], cotangents: list[Any]) -> Any:
        def forward(*given: Any) -> list[Any]:
            merged = list(inputs)
            for at, value in zip(places, given, strict=True):
                merged[at] = value
            results = evaluate(program, merged, _marking)
            return [results[at] for at in wanted]

        results, pull = jax.vjp(forward, *(inputs[at] for at in places))
        return results, pull(list(cotangents))

    shapes = [shape_of(program.avals[value]) for value in program.inputs]
    cotangents = [shape_of(program.avals[value]) for at in wanted if isinstance(value := program.outputs[at], int)]
    found, _ = trace_program(both, shapes, cotangents)
    return found, len(shapes)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What ``make_jaxpr`` takes for an array of this kind."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def part_of(program: ArrayProgram, first: int, stop: int) -> tuple[ArrayProgram, tuple[int, ...], tuple[int, ...]]:
    """Some operations of a program as one of their own: what they read from outside comes in, what others read goes out.

    Its values are numbered anew, inputs first, so that parts that are alike are equal.

    Returns:
        The part, and the whole program's numbers of its inputs and of its outputs.
    """
    nodes = program.nodes[first:stop]
    made = {value for node in nodes for value in node.writes}
    inputs = tuple(dict.fromkeys(value for node in nodes for value in node.values if value not in made))
    later = {value for node in program.nodes[stop:] for value in node.values}
    later |= {output for output in program.outputs if isinstance(output, int)}
    outputs = tuple(value for node in nodes for value in node.writes if value in later)
    number = {value: at for at, value in enumerate((*inputs, *(v for node in nodes for v in node.writes)))}
    renumbered = tuple(
        dataclasses.replace(
            node,
            reads=tuple(number[read] if isinstance(read, int) else read for read in node.reads),
            writes=tuple(number[value] for value in node.writes),
        )
        for node in nodes
    )
    avals = {at: program.avals[value] for value, at in number.items()}
    part = ArrayProgram(renumbered, tuple(range(len(inputs))), tuple(number[value] for value in outputs), avals)
    return part, inputs, outputs
