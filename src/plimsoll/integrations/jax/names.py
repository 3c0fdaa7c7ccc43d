"""Evaluates a program of jax with names on chosen values, so that policies of ``jax.checkpoint`` can save them.

A name alone does not make a value saveable: the derivative of ``exp`` reads the operation's own result, before the name. Such
an operation gets a derivative that reads the named result (``_bound_with_names``).

``joined`` names each value of a program in this way and lets jax differentiate the program, to find what the derivative reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from plimsoll.integrations.jax.program import ArrayProgram, Node, active_values, is_float, shape_of, take, trace_program

_PRODUCTS_AND_SHAPES = (
    "dot_general conv_general_dilated add sub mul div neg reshape transpose broadcast_in_dim convert_element_type slice "
    "gather concatenate squeeze split expand_dims dynamic_slice select_n integer_pow square stop_gradient name reduce_sum "
    "copy pad rev iota eq ne lt le gt ge and or not"
)
_READ_INPUTS_ALONE = frozenset(_PRODUCTS_AND_SHAPES.split())
"""Names of jax operations whose derivatives read only inputs, not the operation's results."""
_OPAQUE = ("custom_vjp_call", "scan", "while", "cond", "checkpoint", "remat2", "shard_map")
"""Names of operations that contain a program of their own. jax differentiates that program itself."""


Bind = Callable[[Node, Sequence[Any]], list[Any]]
"""A function that runs an operation on its inputs and returns its results."""


def evaluate(program: ArrayProgram, inputs: Sequence[Any], bind: Bind) -> list[Any]:
    """Run a program with ``bind``, which runs each operation, and return the program's results."""
    held: dict[int, Any] = dict(zip(program.inputs, inputs, strict=True))
    run_nodes(program.nodes, held, bind)
    return [take(held, output) for output in program.outputs]


def run_nodes(nodes: Sequence[Node], held: dict[int, Any], bind: Bind) -> None:
    """Run operations one after the other. They read values from the mapping ``held``, and their results are added to it."""
    for node in nodes:
        held.update(zip(node.writes, bind(node, [take(held, read) for read in node.reads]), strict=True))


def naming(names: Mapping[int, str]) -> Bind:
    """Return a function that runs an operation and names its results, so that a checkpoint policy can save them. Only results
    that are in ``names`` get a name.
    """

    def bind(node: Node, inputs: Sequence[Any]) -> list[Any]:
        own = {at: names[value] for at, value in enumerate(node.writes) if value in names}
        return _bound_with_names(node, inputs, own) if own else node.bind(inputs)

    return bind


def _marking(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Run an operation and give each result a name with its number. The name is used to find the result in the joint program
    of function and derivative.
    """
    return [checkpoint_name(r, f"{MARK}{v}") for v, r in zip(node.writes, node.bind(inputs), strict=True)]


MARK = "plimsoll:"
"""The prefix of the names that ``joined`` gives. The value's number follows."""


def _bound_with_names(node: Node, inputs: Sequence[Any], names: Mapping[int, str]) -> list[Any]:
    """Run an operation, and name its results so that its derivative reads the named results. Return the results."""

    def bound(*given: Any) -> tuple[Any, ...]:
        return tuple(_named(result, names.get(at)) for at, result in enumerate(node.bind(given)))

    floats = [at for at, value in enumerate(inputs) if is_float(value)]
    if not floats or node.name in _READ_INPUTS_ALONE or node.name in _OPAQUE:
        return list(bound(*inputs))

    def derivative(primals: Any, tangents: Any) -> Any:
        moving = [tangents[at] for at in floats]

        def both(given: list[Any], changes: list[Any]) -> Any:
            def plain(*active: Any) -> tuple[Any, ...]:
                merged = list(given)
                for at, value in zip(floats, active, strict=True):
                    merged[at] = value
                return tuple(node.bind(merged))

            return jax.jvp(plain, [given[at] for at in floats], changes)

        program, tree = trace_program(both, list(primals), moving)
        marks = {value: names[at] for at, value in enumerate(program.outputs[: len(node.writes)]) if at in names}

        def bind(each: Node, given: Sequence[Any]) -> list[Any]:
            return [_named(r, marks.get(v)) for v, r in zip(each.writes, each.bind(given), strict=True)]

        flat = evaluate(program, [*primals, *moving], bind)
        results, changes = jax.tree.unflatten(tree, flat)
        return results, changes

    # Integers are arguments too: the derivative runs after this trace has ended, and could not read its values.
    function = jax.custom_jvp(bound)
    function.defjvp(derivative)
    return list(function(*inputs))


def _named(value: Any, name: str | None) -> Any:
    return value if name is None else checkpoint_name(value, name)


def joined(program: ArrayProgram, active: Sequence[bool]) -> tuple[ArrayProgram, int]:
    """Return a program and its reverse derivative as one program.

    Its inputs are the original's inputs, then the gradients (cotangents) of the float results that depend on active inputs.
    Each value of the original has a name with its number.

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
