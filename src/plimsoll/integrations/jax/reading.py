"""Finds what the reverse derivative of a part of a jax program reads, and which operations XLA fuses.

A value that only the derivative computes from the part's values (``1 - tanh²``, a mask) does not count. In its place, the
part's values that it is made from count as read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from plimsoll.integrations.jax.names import MARK, joined
from plimsoll.integrations.jax.program import ArrayProgram, Node, active_values, body_of

_VIEWS = "broadcast_in_dim reshape squeeze expand_dims iota stop_gradient name copy rev slice transpose split"
_SHAPES = frozenset(_VIEWS.split())
"""Names of operations that XLA merges into the operations that read their results. Holding these results for the gradient is
never worthwhile.
"""
_TRANSCENDENTAL = frozenset(
    ["exp", "tanh", "log", "logistic", "erf", "erfc", "sin", "cos", "pow", "exp2", "log1p", "expm1", "erf_inv"]
)
"""Functions that a device computes in several steps per element."""


class Reading:
    """Data about a part of a program and its reverse derivative: which values of the part the derivative reads, and when first
    and last.

    Ticks count the operations of the derivative, from 0.
    """

    def __init__(self, part: ArrayProgram, active: Sequence[bool]) -> None:
        self.part = part
        self.is_moving = bool(active_values(part, active).intersection(v for v in part.outputs if isinstance(v, int)))
        joint, inputs = joined(part, active) if self.is_moving else (part, len(part.inputs))
        self.joint = joint
        self.original: dict[int, int] = dict(zip(joint.inputs[:inputs], part.inputs, strict=True))
        """Maps a value of the joint program (the part together with its derivative) to the number of the same value in the
        part.

        Only inputs and values that were marked with a name have an entry.
        """
        self.backward: list[Node] = []
        seeds = set(joint.inputs[inputs:])
        self._made_by: dict[int, Node] = {}
        for node in joint.nodes:
            if seeds.intersection(node.values):
                seeds.update(node.writes)
                self.backward.append(node)
                continue
            self._made_by.update((value, node) for value in node.writes)
            if node.name == "name" and str(node.params["name"]).startswith(MARK):
                value = int(str(node.params["name"]).removeprefix(MARK))
                self.original.update((each, value) for each in (*node.values, *node.writes))
        self._own = seeds

    @cached_property
    def residual_bytes(self) -> int:
        """The bytes that jax itself, without a plan, holds for the derivative of this part of the program. Arguments of the
        part do not count.
        """
        read = {value for node in self.backward for value in node.values if value not in self._own}
        own = {self.original.get(value, -1 - value): value for value in read}
        return sum(self.joint.bytes(value) for number, value in own.items() if number not in self.part.inputs)

    def reads(self, candidates: frozenset[int]) -> dict[int, tuple[int, int]]:
        """Return when the derivative reads each value that a plan may hold, and each input of the part: the first and the last
        tick (a count of the derivative's operations).

        Values that the derivative does not read are left out.
        """
        known: dict[int, frozenset[int]] = {}
        found: dict[int, tuple[int, int]] = {}
        for tick, node in enumerate(self.backward):
            for value in node.values:
                if value not in self._own:
                    for source in self._sources(value, candidates, known):
                        found[source] = (found.get(source, (tick, tick))[0], tick)
        return found

    def _sources(self, value: int, candidates: frozenset[int], known: dict[int, frozenset[int]]) -> frozenset[int]:
        """Return the values that a value of the joint program (the part with its derivative) is made from: inputs, and values
        that a plan may hold.
        """
        if value not in known:
            own = self.original.get(value)
            if own is not None and (own in candidates or own in self.part.inputs):
                known[value] = frozenset({own})
            else:
                node = self._made_by.get(value)
                reads = node.values if node is not None else ()
                known[value] = frozenset().union(*(self._sources(read, candidates, known) for read in reads))
        return known[value]

    @cached_property
    def backward_lives(self) -> dict[int, tuple[int, int]]:
        """Maps each value that only the derivative makes and reads to its lifetime in ticks (counts of the derivative's
        operations): its first tick, and the tick after its last.
        """
        lives: dict[int, tuple[int, int]] = {}
        results = {output for output in self.joint.outputs if isinstance(output, int)}
        readers: dict[int, int] = {}
        for tick, node in enumerate(self.backward):
            for value in node.values:
                if value in lives:
                    lives[value] = (lives[value][0], tick + 1)
                    readers[value] = readers.get(value, 0) + 1
            lives.update((value, (tick, tick + 1)) for value in node.writes)
        makers = {value: node for node in self.backward for value in node.writes}
        return {
            value: life
            for value, life in lives.items()
            if value not in results and not (is_fused(makers[value]) and readers.get(value, 0) <= 1)
        }


def is_shape_only(node: Node) -> bool:
    """Return whether an operation only changes how an array is viewed."""
    return node.name in _SHAPES


_OWN_LOOPS = (
    "dot_general conv_general_dilated reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin sort "
    "top_k cumsum cummax cumprod cumlogsumexp gather scatter scatter-add scatter-mul scatter-min scatter-max dynamic_slice "
    "dynamic_update_slice scan while cond fft custom_vjp_call custom_jvp_call cholesky triangular_solve reduce_window "
    "reduce_window_max select_and_scatter_add reduce_window_sum select_and_gather_add random_bits threefry2x32 concatenate "
    "pad rng_bit_generator jit checkpoint"
)
HEAVY = frozenset(_OWN_LOOPS.split())
"""Operations that XLA does not compute in the loops of the operations that read their results, or that take time of their
own.
"""


def is_fused(node: Node) -> bool:
    """Return whether XLA computes the operation in the loops of the operations that read its result."""
    return node.name not in HEAVY


def flops_of(node: Node, program: ArrayProgram) -> int:
    """Return the arithmetic of one operation. An exponential or a similar function counts as eight."""
    sizes = [
        int(math.prod(program.avals[value].shape)) for value in node.writes if hasattr(program.avals[value], "shape")
    ]
    out = sum(sizes)
    if node.name == "dot_general":
        (contracting, _), _ = node.params["dimension_numbers"]
        shape = program.avals[node.values[0]].shape if node.values else ()
        return 2 * out * int(math.prod(shape[axis] for axis in contracting if axis < len(shape)))
    if node.name == "conv_general_dilated":
        kernel = program.avals[node.values[-1]].shape
        features = kernel[node.params["dimension_numbers"].rhs_spec[0]]
        return 2 * out * int(math.prod(kernel)) // max(int(features), 1)
    if node.name == "scan":
        body = body_of(node)
        return int(node.params["length"]) * sum(flops_of(each, body) for each in body.nodes)
    if node.name in _TRANSCENDENTAL:
        return 8 * out
    reads = sum(int(math.prod(getattr(program.avals[value], "shape", ()))) for value in node.values)
    return max(out, reads) if node.name in HEAVY else out
