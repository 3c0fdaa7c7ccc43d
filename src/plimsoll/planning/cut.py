"""Finds the cheapest set of values to keep in one region at one price of memory: a minimum s-t cut.

Legend (design section 1). ``x_v`` = value v is available in backward; ``y_o`` = op o runs again. A node on the source side
is true. Edges:

==  ===============================  ==========================================================
1   source → x_v, slot cost(v)       v is read by backward: infinite, or its cheapest form that serves its slots alone
2   y_o → x_u, infinite              op o reads u
3   x_v → y_producer(v), cost(v)     v is available without being made again: it is held in its cheapest mode
4   y_o → sink, seconds(o)           op o runs again (infinite if it may not)
5   x_u → sink, cost(u)              u has no producer: an input that is copied or held (0 for parameters)
==  ===============================  ==========================================================

``cost(v)`` is the least of λ·bytes + seconds + μ·error² over the modes of v: as it is (its bytes, no seconds), or one of
its forms; μ is the price of error. A form that is private serves the slots of v, but
no op that reads v: it is edge 1 that pays for it, and x_v stays false. An edge counts when it leaves the source side. All
terms are submodular, so the cut is the optimum for this price; what a price cannot see is that the replay itself needs
memory (``choices`` looks after that).

Source: project selection (Picard 1976) as used for rematerialisation by Checkmate's and torch's min-cut partitioners; here
storing is priced per byte, so that a sweep gives the whole frontier. scipy's ``maximum_flow`` takes 32-bit capacities:
seconds are scaled so that all finite capacities together stay below 2^29, and ``lower_value`` allows for the rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from plimsoll.planning.choice import Choice, Packed
from plimsoll.planning.step import RegionView

_FINITE_TOTAL = 2**29
_INFINITE = 2**30
"""Larger than all finite capacities together, so no minimum cut crosses such an edge, and below the 32 bits of scipy's flow."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One form of a value: bytes that stay, seconds that packing and bringing back take at least, squared error, bytes sent.

    Only the value's own slots can be made of a form that ``is_private``.
    """

    form: str
    held_bytes: float
    seconds: float
    squared_error: float
    link_bytes: float = 0.0
    is_private: bool = False


@dataclass(frozen=True, slots=True)
class Prices:
    """What the cut weighs: bytes that holding a value adds, and seconds that running an op again adds.

    ``held_bytes`` has every decided value and every copied input of the region; values that are absent cannot be stored.
    ``modes`` are the forms that a value may take besides, ``error_price`` is in seconds per squared relative error.
    """

    held_bytes: dict[int, float]
    op_seconds: tuple[float, ...]
    modes: dict[int, tuple[Mode, ...]] = field(default_factory=dict)
    error_price: float = 0.0

    def seconds(self, mode: Mode) -> float:
        """Seconds of a mode, and what its error is worth."""
        return mode.seconds + self.error_price * mode.squared_error

    def cheapest(self, value: int, price_seconds_per_byte: float) -> tuple[float, Mode | None]:
        """The least cost of holding a value for whoever reads it, and in which form (``None``: as it is)."""
        best: tuple[float, Mode | None] = (price_seconds_per_byte * self.held_bytes[value], None)
        shared = (mode for mode in self.modes.get(value, ()) if not mode.is_private)
        return min([best, *self._costs(shared, price_seconds_per_byte)], key=lambda cost: cost[0])

    def cheapest_private(self, value: int, price_seconds_per_byte: float) -> tuple[float, Mode | None]:
        """The least cost of holding a value for its own slots alone, and in which form; infinite if there is none."""
        private = (mode for mode in self.modes.get(value, ()) if mode.is_private)
        best: tuple[float, Mode | None] = (np.inf, None)
        return min([best, *self._costs(private, price_seconds_per_byte)], key=lambda cost: cost[0])

    def _costs(self, modes: Iterable[Mode], price_seconds_per_byte: float) -> Iterator[tuple[float, Mode]]:
        for mode in modes:
            yield price_seconds_per_byte * mode.held_bytes + self.seconds(mode), mode


@dataclass(frozen=True, slots=True)
class Cut:
    """The values kept, the inputs copied and the ops run again at one price.

    ``seconds`` are those of ops and of packing, and the price of the error. ``lower_value`` is a number that no other choice
    undercuts in ``price · bytes + seconds``.
    """

    kept: frozenset[int]
    packed: Packed
    copied: frozenset[int]
    ops: frozenset[int]
    held_bytes: float
    seconds: float
    lower_value: float

    @property
    def choice(self) -> Choice:
        return Choice(self.kept, self.packed)


@dataclass(frozen=True, slots=True)
class Edges:
    """The graph of the cut; ``capacities`` in seconds, ``inf`` where a cut may not pass."""

    nodes: int
    tails: tuple[int, ...]
    heads: tuple[int, ...]
    capacities: tuple[float, ...]


SOURCE, SINK = 0, 1


def value_node(value: int) -> int:
    """The node of ``x_v``."""
    return 2 + value


def op_node(view: RegionView, op: int) -> int:
    """The node of ``y_o``."""
    return 2 + len(view.graph.values) + op


def read_values(view: RegionView) -> set[int]:
    """The decided values that backward reads."""
    return {view.graph.slots[slot].value for slot in view.graph.backward_order} & set(view.decided)


def build_edges(view: RegionView, prices: Prices, price_seconds_per_byte: float) -> Edges:
    """The edges 1 to 5 of the module's legend."""
    graph = view.graph
    tails: list[int] = []
    heads: list[int] = []
    capacities: list[float] = []

    def add(tail: int, head: int, capacity: float) -> None:
        tails.append(tail)
        heads.append(head)
        capacities.append(capacity)

    for value in read_values(view):
        add(SOURCE, value_node(value), prices.cheapest_private(value, price_seconds_per_byte)[0])
    held_anyway = view.free | view.forced
    for value_ in graph.values:
        if value_.id in held_anyway:
            continue
        can_be_held = value_.id in prices.held_bytes
        capacity = prices.cheapest(value_.id, price_seconds_per_byte)[0] if can_be_held else np.inf
        must_be_held = value_.producer < 0 or value_.id in view.movable
        add(value_node(value_.id), SINK if must_be_held else op_node(view, value_.producer), capacity)
    for op in graph.ops:
        add(op_node(view, op.id), SINK, np.inf if op.obstacle else prices.op_seconds[op.id])
        for read in op.reads:
            if read not in held_anyway:
                add(op_node(view, op.id), value_node(read), np.inf)
    nodes = 2 + len(graph.values) + len(graph.ops)
    return Edges(nodes, tuple(tails), tuple(heads), tuple(capacities))


def solve_cut(view: RegionView, prices: Prices, price_seconds_per_byte: float) -> Cut:
    """The cheapest choice of one region at one price.

    Args:
        view: the region.
        prices: bytes and seconds.
        price_seconds_per_byte: what one byte held from forward to backward costs.
    """
    edges = build_edges(view, prices, price_seconds_per_byte)
    capacities = np.array(edges.capacities)
    is_finite = np.isfinite(capacities)
    total = float(capacities[is_finite].sum())
    unit = total / _FINITE_TOTAL if total > 0 else 1.0
    scaled = np.full(len(capacities), _INFINITE, dtype=np.int64)
    scaled[is_finite] = np.rint(capacities[is_finite] / unit).astype(np.int64)
    reached, flow_value = _minimum_cut(edges, scaled)
    # Rounding changes a capacity by half a unit at most, so one unit per edge is more than a cut can be off by.
    lower_value = max(flow_value - int(is_finite.sum()), 0) * unit
    return _read_off(view, prices, price_seconds_per_byte, reached, lower_value)


def _minimum_cut(edges: Edges, capacities: npt.NDArray[np.int64]) -> tuple[set[int], int]:
    """The nodes on the source side of the smallest cut, and its value."""
    tails, heads = np.array(edges.tails), np.array(edges.heads)
    # Every edge with its reverse, so that the flow comes back in the same places.
    keys = np.concatenate([tails * edges.nodes + heads, heads * edges.nodes + tails])
    places, place_of = np.unique(keys, return_inverse=True)
    data = np.zeros(len(places), dtype=np.int64)
    # Parallel edges add up here; infinite ones are capped again, or the sum would leave 32 bits.
    np.add.at(data, place_of[: len(tails)], capacities)
    data = np.minimum(data, _INFINITE).astype(np.int32)
    rows, columns = np.divmod(places, edges.nodes)
    starts = np.searchsorted(rows, np.arange(edges.nodes + 1)).astype(np.int32)
    matrix = csr_array((data, columns.astype(np.int32), starts), shape=(edges.nodes, edges.nodes))
    flow = maximum_flow(matrix, SOURCE, SINK)
    assert np.array_equal(flow.flow.indices, matrix.indices), "the flow has an entry per edge and reverse edge"
    has_room = data > flow.flow.data
    after: dict[int, list[int]] = {}
    for tail, head in zip(rows[has_room].tolist(), columns[has_room].tolist(), strict=True):
        after.setdefault(tail, []).append(head)
    reached, pending = {SOURCE}, [SOURCE]
    while pending:
        fresh = [head for head in after.get(pending.pop(), ()) if head not in reached]
        reached.update(fresh)
        pending += fresh
    return reached, int(flow.flow_value)


def _read_off(
    view: RegionView, prices: Prices, price_seconds_per_byte: float, reached: set[int], lower_value: float
) -> Cut:
    """The choice that the source side of a cut stands for."""
    graph = view.graph
    ops = frozenset(op.id for op in graph.ops if op_node(view, op.id) in reached)
    available = {value.id for value in graph.values if value_node(value.id) in reached}
    read = read_values(view)
    held = {v for v in view.decided if v in available and graph.values[v].producer not in ops}
    held |= set(view.movable) - read
    copied = frozenset(available & view.copied)
    mode_of = {v: prices.cheapest(v, price_seconds_per_byte)[1] for v in held}
    mode_of |= {v: prices.cheapest_private(v, price_seconds_per_byte)[1] for v in read - available}
    modes = {v: mode for v, mode in mode_of.items() if mode is not None}
    kept = frozenset(held - modes.keys())
    return Cut(
        kept=kept,
        packed=frozenset((v, mode.form) for v, mode in modes.items()),
        copied=copied,
        ops=ops,
        held_bytes=sum(prices.held_bytes[v] for v in kept | copied) + sum(m.held_bytes for m in modes.values()),
        seconds=sum(prices.op_seconds[op] for op in ops) + sum(prices.seconds(mode) for mode in modes.values()),
        lower_value=lower_value,
    )
