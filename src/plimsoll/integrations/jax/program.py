"""Reads a jaxpr as a flat list of operations.

Functions under ``jit`` are inlined. A loop, a branch, and a function with its own derivative each stay one operation. Values
are numbered in the order of their creation, so that two traces of one function at other sizes have the same numbers.

Source: "Writing custom Jaxpr interpreters in JAX", jax's documentation. Only ``jax`` and ``jax.extend.core`` are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex


@dataclass(frozen=True, slots=True, eq=False)
class FixedArray:
    """Data: a constant of the program."""

    value: Any


Operand = int | FixedArray
"""What an operation reads: the number of a value, or a constant."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Data: one operation. ``reads`` and ``writes`` are values, ``scope`` is the ``named_scope`` around the operation.

    ``context`` is jax's context that the operation must run in.
    """

    primitive: Any
    params: Mapping[str, Any]
    reads: tuple[Operand, ...]
    writes: tuple[int, ...]
    scope: str
    context: Any

    @property
    def name(self) -> str:
        """The name of the operation's primitive."""
        return str(self.primitive.name)

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers of the values that the operation reads, without constants."""
        return tuple(read for read in self.reads if isinstance(read, int))

    def bind(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the operation on these inputs and return its results."""
        params = self.primitive.get_bind_params(self.params)
        with jax.named_scope(self.scope), self.context.manager:
            out = self.primitive.bind(*inputs, **params)
        return list(out) if self.primitive.multiple_results else [out]


@dataclass(frozen=True, slots=True, eq=False)
class ArrayProgram:
    """Data: a flat list of operations with inputs and outputs. ``avals`` maps each value to its shape and dtype."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    avals: Mapping[int, Any]

    def bytes(self, value: int) -> int:
        """Return the bytes of a value."""
        return aval_bytes(self.avals[value])


@dataclass(slots=True)
class _Reader:
    nodes: list[Node] = field(default_factory=list)
    avals: dict[int, Any] = field(default_factory=dict)

    def new(self, aval: Any) -> int:
        self.avals[len(self.avals)] = aval
        return len(self.avals) - 1

    def read(self, closed: Any, inputs: Sequence[Operand], scope: str) -> list[Operand]:
        """Append the operations of a jaxpr to this reader, and return the jaxpr's results."""
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
    """Return a closed jaxpr as a flat program."""
    reader = _Reader()
    inputs = tuple(reader.new(var.aval) for var in closed.jaxpr.invars)
    outputs = reader.read(closed, inputs, "")
    return ArrayProgram(tuple(reader.nodes), inputs, tuple(outputs), reader.avals)


def trace_program(function: Callable[..., Any], *args: Any) -> tuple[ArrayProgram, Any]:
    """Return a function of arrays as a flat program, and the tree structure of the function's result."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return read_program(closed), jax.tree.structure(shapes)


def body_of(scan: Node) -> ArrayProgram:
    """Return one iteration of a ``lax.scan`` as a program.

    Inputs are constants, carry and slices; outputs are carry and slices.
    """
    return read_program(scan.params["jaxpr"])


def take(held: Mapping[int, Any], operand: Operand) -> Any:
    """Return the array that an operation reads: the constant itself, or the value with the operand's number in ``held``."""
    return operand.value if isinstance(operand, FixedArray) else held[operand]


def _is_unsharded(params: Mapping[str, Any]) -> bool:
    """Return whether no sharding is specified for the arrays of a jitted function."""
    kinds = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return all(type(kind).__name__ == "UnspecifiedValue" for kind in kinds)


def is_float(value: Any) -> bool:
    """Return whether an array, or an aval (jax's description of shape and dtype), is floating-point, so that it has a
    derivative.
    """
    dtype = getattr(value, "dtype", None)
    return isinstance(value, float) if dtype is None else bool(jax.dtypes.issubdtype(dtype, np.inexact))


def is_complex(aval: Any) -> bool:
    """Return whether an array of this shape and dtype has complex numbers."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, np.complexfloating))


def aval_bytes(aval: Any) -> int:
    """Return the bytes of an array of this shape and dtype. Random keys count with the bytes of their data."""
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return int(np.prod(shape, dtype=np.int64)) * int(getattr(dtype, "itemsize", 4) or 4)


def active_values(program: ArrayProgram, active: Sequence[bool]) -> frozenset[int]:
    """Return the numbers of the values through which a gradient flows: values that depend on active inputs through
    floating-point values.

    An input is active if its gradient is wanted.
    """
    found = {value for value, is_active in zip(program.inputs, active, strict=True) if is_active}
    for node in program.nodes:
        if node.name != "stop_gradient" and found.intersection(node.values):
            found.update(value for value in node.writes if is_float(program.avals[value]))
    return frozenset(found)


def active_inputs_of_scan(scan: Node, active: Sequence[bool]) -> tuple[bool, ...]:
    """Return, for each input of the body of a ``lax.scan``, whether a gradient flows through it.

    ``active`` says this for the scan's inputs.

    A carry may become active inside the loop.
    """
    body, flags = body_of(scan), list(active)
    first, carries = scan.params["num_consts"], scan.params["num_carry"]
    while True:
        values = active_values(body, flags)
        after = [flags[first + at] or body.outputs[at] in values for at in range(carries)]
        if after == flags[first : first + carries]:
            return tuple(flags)
        flags[first : first + carries] = after


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an aval, as an argument for ``make_jaxpr``."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def part_of(program: ArrayProgram, first: int, stop: int) -> tuple[ArrayProgram, tuple[int, ...], tuple[int, ...]]:
    """Return some consecutive operations of a program as a program of their own, with the numbers that its inputs and outputs
    have in the whole program.

    Its inputs are the values that its operations read from outside, its outputs are the values that others read. Values are
    renumbered, inputs first, so that equal parts are equal.
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
