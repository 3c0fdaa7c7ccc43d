"""Divides a program of jax into regions, the parts that a plan manages.

The body of a ``lax.scan`` is a region: it runs N times, and its saved values are stacked. Operations between scans are divided
at places that only one active value (a value that a gradient flows through) crosses, as between the blocks of a network. Blocks
that repeat become separate regions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from plimsoll.integrations.jax.program import ArrayProgram, Node, active_inputs_of_scan, active_values, body_of, part_of
from plimsoll.integrations.jax.reading import Reading

_AT_MOST = 16
"""The largest number of regions (parts that a plan manages) for operations that do not repeat."""


@dataclass(frozen=True, eq=False)
class Region:
    """Data: one region, a part of a program that a plan manages: the operations ``first`` to ``stop``, as the program ``part``.

    For a scan, the part is its body, which runs ``repeats`` times.

    ``inputs`` and ``outputs`` are the inputs and outputs of the part or of the scan, as values of the whole program.
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
        """Whether this region (a part of the function that a plan manages) is the body of a loop (``lax.scan``)."""
        return self.repeats > 1

    @cached_property
    def kind(self) -> str:
        """A text that is equal for two regions (parts of the function that a plan manages) if they have the same operations and
        shapes, so they can share decisions.
        """
        return f"{self.repeats} {self.active} {' '.join(_signature(self.part.nodes, self.part))}"

    @cached_property
    def reading(self) -> Reading:
        """What the reverse derivative of this region (a part of the function that a plan manages) reads: which of the region's
        values, and when first and last.
        """
        return Reading(self.part, self.active)


def find_regions(program: ArrayProgram, active: Sequence[bool]) -> tuple[Region, ...]:
    """Return the regions (parts of the function that a plan manages) of a program, in order. Together they contain all of its
    operations.

    Args:
        program: a whole function.
        active: for each input, whether its gradient is wanted.
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
    """Return the beginning of the ``named_scope`` that is common to these operations. Those without a scope are ignored."""
    scopes = [node.scope.split("/") for node in nodes if node.scope]
    shared = []
    for parts in zip(*scopes, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def _places(program: ArrayProgram, moving: frozenset[int], first: int, stop: int) -> list[int]:
    """Return the positions at which the operations ``first`` to ``stop`` are divided into regions (the parts that a plan
    manages), including both ends.
    """
    narrow = _narrow_places(program, moving, first, stop)
    segments = list(itertools.pairwise(narrow))
    texts = [" ".join(_signature(program.nodes[a:b], program)) for a, b in segments]
    start, period, count = _repeated(texts, [_made_bytes(program, a, b) for a, b in segments])
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
    """Return the positions in a program at which only one value crosses that a gradient flows through, as between the blocks of
    a network.
    """
    last_read: dict[int, int] = {}
    for at, node in enumerate(program.nodes):
        last_read.update((value, at) for value in node.values)
    # Results of the whole function, such as moving averages, do not prevent a division.
    crossing: set[int] = set()
    found = [first]
    for at in range(first, stop):
        node = program.nodes[at]
        crossing |= {value for value in (*node.values, *node.writes) if value in moving and value not in program.inputs}
        crossing = {value for value in crossing if last_read.get(value, -1) > at}
        if len(crossing) <= 1 and at + 1 < stop:
            found.append(at + 1)
    return [*found, stop]


def _repeated(texts: Sequence[str], weights: Sequence[int]) -> tuple[int, int, int]:
    """Return the start, the period and the count of a repetition in a sequence of texts.

    It is the repetition that covers the most weight, with the shortest such period.

    Example:
        >>> _repeated(["a", "a", "b", "c", "b", "c"], [1, 1, 5, 5, 5, 5])
        (2, 2, 2)
    """
    best, most = (0, 1, 1), 0
    for period in range(1, len(texts) // 2 + 1):
        run = 0
        for at in range(period, len(texts)):
            run = run + 1 if texts[at] == texts[at - period] else 0
            count = run // period + 1
            start = at + 1 - count * period
            covered = sum(weights[start : at + 1])
            if count > 1 and covered > most:
                best, most = (start, period, count), covered
    return best


def _signature(nodes: Sequence[Node], program: ArrayProgram) -> list[str]:
    return [f"{node.name}{[program.avals[value].str_short() for value in node.writes]}" for node in nodes]


def _made_bytes(program: ArrayProgram, first: int, stop: int) -> int:
    return sum(program.bytes(value) for node in program.nodes[first:stop] for value in node.writes)
