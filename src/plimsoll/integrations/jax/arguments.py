"""Converts a function's arguments to a list of arrays, and back.

Arguments that are not arrays stay unchanged. A function may change an object of flax.nnx that is an argument: a dropout counts
its calls, a normalisation updates its averages. This module finds which variables a function changed, and writes them back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from plimsoll.errors import InvalidOption
from plimsoll.integrations.jax.program import is_float


@dataclass(frozen=True)
class _Leaf:
    """Data: one leaf of the tree of a function's arguments.

    ``at`` is its index among the arrays. If the leaf is not an array, ``at`` is -1 and ``fixed`` is the leaf.
    """

    at: int
    fixed: Any = None


@dataclass(frozen=True)
class _Variable:
    """Data: one variable of an object of flax.nnx."""

    path: Any
    tree: Any
    leaves: tuple[_Leaf, ...]


@dataclass(frozen=True)
class _Object:
    """Data: an object of flax.nnx among the arguments. ``number`` is its index, and ``graph`` its definition in nnx's terms."""

    number: int
    graph: Any
    variables: tuple[_Variable, ...]


class Arguments:
    """The arguments of a JAX function, as a list of arrays and the structure around them.

    ``arrays`` are the arrays in them, and ``active`` says for each array whether to differentiate it.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], argnums: int | Sequence[int]) -> None:
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        wanted = {number + len(args) if isinstance(number, int) and number < 0 else number for number in numbers}
        self.arrays: list[Any] = []
        self.active: list[bool] = []
        self._objects: list[Any] = []
        parts = [self._read(arg, is_wanted=number in wanted) for number, arg in enumerate(args)]
        self._parts, self._named = parts, self._read(dict(kwargs), is_wanted=False)

    def rebuilt(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any], list[Any]]:
        """Return the function's arguments with other arrays in place of the original ones: positional, named, and the objects
        of flax.nnx among them.
        """
        objects: list[Any] = []
        parts = [_built(each, arrays, objects) for each in (*self._parts, self._named)]
        return parts[:-1], parts[-1], objects

    def changed(self, arrays: Sequence[Any], objects: Sequence[Any]) -> dict[int, Any]:
        """Return the new values of variables that a function has changed in objects of flax.nnx, by the index of the array that
        each replaces.

        Raises:
            InvalidOption: the function added, removed or restructured variables of an object.
        """
        found: dict[int, Any] = {}
        for each, after in zip(self._held(), objects, strict=True):
            now = {path: jax.tree.flatten(variable) for path, variable in _variables(after)[1]}
            if [(v.path, v.tree) for v in each.variables] != [(path, tree) for path, (_, tree) in now.items()]:
                raise InvalidOption(
                    f"The function adds, removes or restructures variables of a {type(after).__name__}.",
                    why="a planned function must have the same variables, with the same structure, before and after a call",
                    next="return new values from the function, or create the variables before planning",
                )
            for variable in each.variables:
                pairs = zip(variable.leaves, now[variable.path][0], strict=True)
                found |= {leaf.at: value for leaf, value in pairs if leaf.at >= 0 and value is not arrays[leaf.at]}
        return found

    def write(self, values: Mapping[int, Any]) -> None:
        """Write new values into the variables of the objects that the user passed. ``values`` maps the index of an array to its
        new value.
        """
        for each in self._held():
            own = [v for v in each.variables if any(leaf.at in values for leaf in v.leaves)]
            if own:
                from flax import nnx

                arrays = [values.get(at, array) for at, array in enumerate(self.arrays)]
                state = nnx.from_flat_state([(v.path, _filled(v, arrays)) for v in own])
                nnx.update(self._objects[each.number], state)

    def _held(self) -> Iterator[_Object]:
        parts = (*self._parts, self._named)
        return (node for nodes, _ in parts for node in nodes if isinstance(node, _Object))

    def _read(self, arg: Any, *, is_wanted: bool) -> tuple[list[_Leaf | _Object], Any]:
        nodes, tree = jax.tree.flatten(arg, is_leaf=_is_object)
        return [
            self._read_object(node, is_wanted=is_wanted)
            if _is_object(node)
            else self._read_leaf(node, is_wanted=is_wanted)
            for node in nodes
        ], tree

    def _read_object(self, node: Any, *, is_wanted: bool) -> _Object:
        from flax import nnx

        graph, variables = _variables(node)
        found = []
        for path, variable in variables:
            leaves, tree = jax.tree.flatten(variable)
            # By default nnx.grad differentiates only nnx.Param.
            is_parameter = is_wanted and isinstance(variable, nnx.Param)
            found.append(_Variable(path, tree, tuple(self._read_leaf(leaf, is_wanted=is_parameter) for leaf in leaves)))
        self._objects.append(node)
        return _Object(len(self._objects) - 1, graph, tuple(found))

    def _read_leaf(self, leaf: Any, *, is_wanted: bool) -> _Leaf:
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return _Leaf(-1, leaf)
        self.arrays.append(leaf)
        self.active.append(is_wanted and is_float(leaf))
        return _Leaf(len(self.arrays) - 1)


def _is_object(node: Any) -> bool:
    # If flax.nnx is not imported, such objects do not exist.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Pytree)


def _variables(node: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    from flax import nnx

    graph, state = nnx.split(node)
    return graph, list(nnx.to_flat_state(state))


def _filled(variable: _Variable, arrays: Sequence[Any]) -> Any:
    leaves = [arrays[leaf.at] if leaf.at >= 0 else leaf.fixed for leaf in variable.leaves]
    return jax.tree.unflatten(variable.tree, leaves)


def _built(part: tuple[list[_Leaf | _Object], Any], arrays: Sequence[Any], objects: list[Any]) -> Any:
    nodes, tree = part
    found = []
    for node in nodes:
        if isinstance(node, _Leaf):
            found.append(arrays[node.at] if node.at >= 0 else node.fixed)
            continue
        from flax import nnx

        state = nnx.from_flat_state([(each.path, _filled(each, arrays)) for each in node.variables])
        objects.append(nnx.merge(node.graph, state))
        found.append(objects[-1])
    return jax.tree.unflatten(tree, found)
