"""Divides a program of jax into regions, and finds in each what its derivative reads.

A ``lax.scan`` is a region: one body, run N times, whose saved values are stacked. Everything between scans is divided
where a single active value crosses, as it does between the blocks of a network; blocks that repeat are regions of their own.

``Reading`` looks at a region together with its reverse derivative. What the derivative alone computes from the region's
values (``1 - tanh²``, a mask) is no value of its own: what it is made of counts as read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from plimsoll.integrations.jax_program import (
    MARK,
    ArrayProgram,
    Node,
    active_inputs_of_scan,
    active_values,
    body_of,
    joined,
    part_of,
)

_VIEWS = "broadcast_in_dim reshape squeeze expand_dims iota stop_gradient name copy rev slice transpose split"
_SHAPES = frozenset(_VIEWS.split())
"""Operations that XLA makes part of whoever reads them: what they make is never worth holding."""
_AT_MOST = 16
"""Regions among operations that do not repeat."""


@dataclass(frozen=True, eq=False)
class Region:
    """Operations ``first`` to ``stop`` of a program, as ``part``; a scan's part is its body, run ``repeats`` times.

    ``inputs`` and ``outputs`` are values of the whole program: those of the part, or of the scan.
    """

    name: str
    first: int
    stop: int
    part: ArrayProgram
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    active: tuple[bool, ...]
    repeats: int = 1

    @property
    def is_scan(self) -> bool:
        """Whether it is the body of a loop."""
        return self.repeats > 1

    @cached_property
    def kind(self) -> str:
        """Equal for regions that are alike."""
        return f"{self.repeats} {self.active} {' '.join(_signature(self.part.nodes, self.part))}"

    @cached_property
    def reading(self) -> Reading:
        """The region together with its reverse derivative."""
        return Reading(self.part, self.active)


def find_regions(program: ArrayProgram, active: Sequence[bool]) -> tuple[Region, ...]:
    """The regions of a program, in order; together they have all of its operations.

    Args:
        program: a whole function.
        active: which of its inputs gradients are wanted of.
    """
    moving = active_values(program, active)
    found: list[Region] = []
    begin = 0
    for at, node in enumerate(program.nodes):
        if node.name == "scan" and node.params["length"] > 1 and moving.intersection(node.writes):
            found += _blocks(program, moving, begin, at, len(found))
            found.append(_loop(program, moving, at, len(found)))
            begin = at + 1
    return (*found, *_blocks(program, moving, begin, len(program.nodes), len(found)))


def _loop(program: ArrayProgram, moving: frozenset[int], at: int, index: int) -> Region:
    node = program.nodes[at]
    flags = active_inputs_of_scan(node, [isinstance(read, int) and read in moving for read in node.reads])
    inputs = tuple(read if isinstance(read, int) else -1 for read in node.reads)
    name = f"{index}.{_scope_of([node]) or 'scan'}"
    return Region(name, at, at + 1, body_of(node), inputs, node.writes, flags, node.params["length"])


def _blocks(program: ArrayProgram, moving: frozenset[int], first: int, stop: int, index: int) -> Iterator[Region]:
    places = _places(program, moving, first, stop) if stop > first else []
    for number, (start, end) in enumerate(itertools.pairwise(places)):
        part, inputs, outputs = part_of(program, start, end)
        name = f"{index + number}.{_scope_of(program.nodes[start:end]) or 'block'}"
        yield Region(name, start, end, part, inputs, outputs, tuple(value in moving for value in inputs))


def _scope_of(nodes: Sequence[Node]) -> str:
    """The names of ``named_scope`` that all operations share that have any."""
    scopes = [node.scope.split("/") for node in nodes if node.scope]
    shared = []
    for parts in zip(*scopes, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def _places(program: ArrayProgram, moving: frozenset[int], first: int, stop: int) -> list[int]:
    """Where operations ``first`` to ``stop`` are divided, both ends included."""
    narrow = _narrow_places(program, moving, first, stop)
    segments = list(itertools.pairwise(narrow))
    texts = [" ".join(_signature(program.nodes[a:b], program)) for a, b in segments]
    start, period, count = _repeated(texts)
    if count > 1:
        blocks = [narrow[start + period * number] for number in range(count + 1)]
        return sorted({first, *blocks, stop})
    total = sum(_made_bytes(program, a, b) for a, b in segments)
    places, held = [first], 0
    for a, b in segments:
        held += _made_bytes(program, a, b)
        if held * _AT_MOST >= total and b < stop:
            places.append(b)
            held = 0
    return [*places, stop]


def _narrow_places(program: ArrayProgram, moving: frozenset[int], first: int, stop: int) -> list[int]:
    """The places that one active value crosses at most."""
    last_read: dict[int, int] = {}
    for at, node in enumerate(program.nodes):
        last_read.update((value, at) for value in node.values)
    last_read.update((output, len(program.nodes)) for output in program.outputs if isinstance(output, int))
    crossing: set[int] = set()
    found = [first]
    for at in range(first, stop):
        node = program.nodes[at]
        crossing |= {value for value in (*node.values, *node.writes) if value in moving and value not in program.inputs}
        crossing = {value for value in crossing if last_read.get(value, -1) > at}
        if len(crossing) <= 1 and at + 1 < stop:
            found.append(at + 1)
    return [*found, stop]


def _repeated(texts: Sequence[str]) -> tuple[int, int, int]:
    """Start, period and count of the repetition that covers most of a sequence; the shortest period of those."""
    best = (0, 1, 1)
    for period in range(1, len(texts) // 2 + 1):
        run = 0
        for at in range(period, len(texts)):
            run = run + 1 if texts[at] == texts[at - period] else 0
            count = run // period + 1
            if count > 1 and count * period > best[1] * best[2]:
                best = (at + 1 - count * period, period, count)
    return best


def _signature(nodes: Sequence[Node], program: ArrayProgram) -> list[str]:
    return [f"{node.name}{[program.avals[value].str_short() for value in node.writes]}" for node in nodes]


def _made_bytes(program: ArrayProgram, first: int, stop: int) -> int:
    return sum(program.bytes(value) for node in program.nodes[first:stop] for value in node.writes)


class Reading:
    """A part and its reverse derivative: which values of the part the derivative reads, from when to when.

    Ticks count the operations of the derivative, from 0.
    """

    def __init__(self, part: ArrayProgram, active: Sequence[bool]) -> None:
        self.part = part
        self.is_moving = bool(active_values(part, active).intersection(v for v in part.outputs if isinstance(v, int)))
        joint, inputs = joined(part, active) if self.is_moving else (part, len(part.inputs))
        self.joint = joint
        self.original: dict[int, int] = dict(zip(joint.inputs[:inputs], part.inputs, strict=True))
        """The part's number of a value of the joint program, for inputs and all that is marked."""
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
        """What jax itself holds for the derivative, arguments of the part aside."""
        read = {value for node in self.backward for value in node.values if value not in self._own}
        own = {self.original.get(value, -1 - value): value for value in read}
        return sum(self.joint.bytes(value) for number, value in own.items() if number not in self.part.inputs)

    def reads(self, candidates: frozenset[int]) -> dict[int, tuple[int, int]]:
        """First and last tick at which each candidate, or input of the part, is read by the derivative."""
        known: dict[int, frozenset[int]] = {}
        found: dict[int, tuple[int, int]] = {}
        for tick, node in enumerate(self.backward):
            for value in node.values:
                if value not in self._own:
                    for source in self._sources(value, candidates, known):
                        found[source] = (found.get(source, (tick, tick))[0], tick)
        return found

    def _sources(self, value: int, candidates: frozenset[int], known: dict[int, frozenset[int]]) -> frozenset[int]:
        """The candidates and inputs that a value of the joint program is made of."""
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
        """First tick and the one after the last, of values that the derivative makes and keeps to itself."""
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
    """Whether an operation only says how an array is to be looked at."""
    return node.name in _SHAPES


_OWN_LOOPS = (
    "dot_general conv_general_dilated reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin sort "
    "top_k cumsum cummax cumprod cumlogsumexp gather scatter scatter_add dynamic_slice dynamic_update_slice scan while cond "
    "fft custom_vjp_call custom_jvp_call cholesky triangular_solve reduce_window reduce_window_max select_and_scatter_add "
    "reduce_window_sum select_and_gather_add random_bits threefry2x32 concatenate pad rng_bit_generator jit checkpoint"
)
HEAVY = frozenset(_OWN_LOOPS.split())
"""Operations that XLA does not put into the loop of whoever reads them, or that take time of their own."""


def is_fused(node: Node) -> bool:
    """Whether XLA computes it in the loop of whoever reads it."""
    return node.name not in HEAVY


def flops_of(node: Node, program: ArrayProgram) -> int:
    """Arithmetic of one operation; an exponential or the like counts as eight."""
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
    if node.name in ("exp", "tanh", "log", "logistic", "erf", "sin", "cos", "pow", "exp2", "log1p", "expm1", "erf_inv"):
        return 8 * out
    reads = sum(int(math.prod(getattr(program.avals[value], "shape", ()))) for value in node.values)
    return max(out, reads) if node.name in HEAVY else out
