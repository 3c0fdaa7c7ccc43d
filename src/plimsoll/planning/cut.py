"""Finds the cheapest set of values to keep in one region (module call) at a given price of memory, as a minimum s-t cut.

The cost is the price of the bytes held from forward to backward, plus the seconds of ops that run again. A slot is one tensor
that autograd saved. A mode is a way to hold a value: unchanged, or in another form (compressed, offloaded).

Legend (design section 1). ``x_v`` = value v is available in backward; ``y_o`` = op o runs again. A node on the source side
is true. Edges:

==  ===============================  ==========================================================
1   source → x_v, slot cost(v)       backward reads v: infinite, or the cheapest form that only v's slots can use
2   y_o → x_u, infinite              op o reads u
3   x_v → y_producer(v), cost(v)     v is available without running its producer: it is held in its cheapest mode
4   y_o → sink, seconds(o)           op o runs again (infinite if it must not)
5   x_u → sink, cost(u)              u is an input: it is copied or held (0 for parameters)
==  ===============================  ==========================================================

``cost(v)`` is the minimum of λ·bytes + seconds + μ·error² over the modes of v: unchanged (its bytes, 0 seconds), or one of its
forms. λ is the price of memory and μ the price of error. A private form serves the slots of v, but no op that reads v: then
edge 1 pays for it, and x_v stays false. An edge counts if it leaves the source side. All terms are submodular, so the cut is
the optimum for this price. A price does not see that the replay itself needs memory (``choices`` takes care of that). Only
capacities differ between prices. Therefore many prices are solved as one flow through copies of the graph side by side: the
solver's overhead per call is larger than the time for one small graph.

Source: project selection (Picard 1976), as used for rematerialisation by Checkmate's and torch's min-cut partitioners. Here
storing is priced per byte, so that a sweep gives the whole frontier. scipy's ``maximum_flow`` takes 32-bit capacities:
seconds are scaled so that all finite capacities together stay below 2^29, and ``lower_value`` allows for the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from plimsoll.planning.choice import Choice, Packed
from plimsoll.planning.step import RegionView

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_FINITE_TOTAL = 2**29
_INFINITE = 2**30
"""The capacity of an edge that a minimum cut must not cross. It is larger than all finite capacities together, and fits the 32
bits of scipy's flow."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Data: one form that a value may take instead of being held unchanged, and what the form costs.

    A form is a codec's payload, or a transfer over a link (to host memory or disk). ``held_bytes`` stay on the device,
    ``seconds`` is the least time for packing the value and bringing it back, ``squared_error`` the squared gradient error, and
    ``link_bytes`` the bytes sent. A form that ``is_private`` serves only the saved tensors of the value itself: no other value
    can be recomputed from it.
    """

    form: str
    held_bytes: float
    seconds: float
    squared_error: float
    link_bytes: float = 0.0
    is_private: bool = False


@dataclass(frozen=True, slots=True)
class Prices:
    """Data: what one region's decisions cost, apart from the price of a byte. A minimum cut weighs these costs.

    ``op_seconds`` has, for each op of the region, the seconds to run it again. ``held_bytes`` maps each value that can be
    stored to the bytes that holding it adds: the values that are decided about, and the inputs that are copied. ``modes`` maps
    values to their additional forms (compressed or offloaded). ``error_price`` is in seconds per squared relative error.
    """

    held_bytes: dict[int, float]
    op_seconds: tuple[float, ...]
    modes: dict[int, tuple[Mode, ...]] = field(default_factory=dict)
    error_price: float = 0.0

    def seconds(self, mode: Mode) -> float:
        """Return the seconds that a form (a codec or a link) costs, with the price of its gradient error added."""
        return mode.seconds + self.error_price * mode.squared_error


@dataclass(frozen=True, slots=True)
class Cut:
    """Data: the cheapest choice at one price of memory: values kept, values packed (compressed or offloaded), inputs copied,
    and ops that run again.

    ``seconds`` is the sum of the seconds of these ops and of packing, and of the price of the error. ``lower_value`` is a
    lower bound of ``price · bytes + seconds`` over all choices.
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
        """The choice (what the region does with its values) that keeps and packs the values of this cut."""
        return Choice(self.kept, self.packed)


SOURCE, SINK = 0, 1


class Network:
    """The graph whose minimum cut says what a region should keep: edge ``e`` goes from ``tails[e]`` to ``heads[e]``.

    The graph is the same for all prices; only the ``capacities`` of its edges differ.
    """

    def __init__(self, view: RegionView) -> None:
        self.view = view
        graph = view.graph
        self.first_op = 2 + len(graph.values)
        self.nodes = self.first_op + len(graph.ops)
        self.read = sorted({graph.slots[slot].value for slot in graph.backward_order} & set(view.decided))
        held_anyway = view.free | view.forced
        self.held = [value.id for value in graph.values if value.id not in held_anyway]
        """The ids of the values that may be held until backward. Each has an edge in the graph; the ids are in the order of
        these edges.
        """
        edges = [(SOURCE, self.value_node(value)) for value in self.read]
        for value in self.held:
            producer = graph.values[value].producer
            is_leaf = producer < 0 or value in view.movable
            edges.append((self.value_node(value), SINK if is_leaf else self.first_op + producer))
        edges += [(self.first_op + op.id, SINK) for op in graph.ops]
        for op in graph.ops:
            reads = (read for read in dict.fromkeys(op.reads) if read not in held_anyway)
            edges += [(self.first_op + op.id, self.value_node(read)) for read in reads]
        ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
        self.tails, self.heads = ends[:, 0], ends[:, 1]

    def value_node(self, value: int) -> int:
        """Return the number of the graph's node ``x_v``, which says whether value v is available in backward."""
        return 2 + value

    def capacities(self, offers: Offers, prices_seconds_per_byte: Floats) -> Floats:
        """Return a table of the edges' capacities in seconds: one row for each price of memory, one column for each edge.

        An edge that a cut must not cross has the capacity ``inf``. ``offers`` must be made for this graph's region.
        """
        graph = self.view.graph
        found = np.full((len(prices_seconds_per_byte), len(self.tails)), np.inf)
        reads, holds = len(self.read), len(self.held)
        found[:, :reads] = offers.private(prices_seconds_per_byte)[0][:, self.read]
        found[:, reads : reads + holds] = offers.shared(prices_seconds_per_byte)[0][:, self.held]
        ops = found[:, reads + holds : reads + holds + len(graph.ops)]
        is_replayable = [not op.obstacle for op in graph.ops]
        ops[:, is_replayable] = np.array(offers.prices.op_seconds)[is_replayable]
        return found

    @cached_property
    def _places(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Three arrays that place one copy of the graph in the flow's matrix.

        They have the row, the column and the edge of each entry.

        Each edge has an entry, and so has its reverse (with the number -1). Two more entries connect the copy's source and sink
        with the source and sink that all copies share.
        """
        count = len(self.tails)
        ends = (SOURCE, SINK)
        rows = np.concatenate([self.tails, self.heads, ends])
        columns = np.concatenate([self.heads, self.tails, (self.nodes, self.nodes)])
        edges = np.concatenate([np.arange(count), np.full(count, -1), (-1, -1)])
        order = np.lexsort((columns, rows))
        return rows[order], columns[order], edges[order]

    def minimum_cuts(self, capacities: npt.NDArray[np.int64]) -> tuple[Mask, npt.NDArray[np.int64]]:
        """Find the minimum cut for each row of capacities.

        Returns:
            A table that says, for each row of capacities, which nodes are on the source side of the cut; and an array with
            the value of each cut.
        """
        from scipy.sparse import csr_array  # here, so that checks of options do not wait for scipy
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        rows, columns, edges = self._places
        copies, width = len(capacities), len(rows)
        source, sink = copies * self.nodes, copies * self.nodes + 1
        at = np.arange(copies)
        data = np.where(edges >= 0, capacities[:, edges], 0)
        heads = columns + at[:, None] * self.nodes
        is_outer = columns == self.nodes
        from_source, to_sink = is_outer & (rows == SOURCE), is_outer & (rows == SINK)
        heads[:, from_source], heads[:, to_sink] = source, sink
        data[:, to_sink] = _INFINITE
        starts = np.searchsorted(rows, np.arange(self.nodes))
        starts = (starts + at[:, None] * width).ravel()
        ends = copies * width + copies * np.arange(3)
        matrix = csr_array(
            (
                np.concatenate([data.ravel(), np.full(copies, _INFINITE), np.zeros(copies)]).astype(np.int32),
                np.concatenate([heads.ravel(), at * self.nodes + SOURCE, at * self.nodes + SINK]).astype(np.int32),
                np.concatenate([starts, ends]).astype(np.int32),
            ),
            shape=(sink + 1, sink + 1),
        )
        flow = maximum_flow(matrix, source, sink).flow
        assert np.array_equal(flow.indices, matrix.indices), "the flow has an entry per edge and reverse edge"
        has_room = matrix.data > flow.data
        left = csr_array(
            (
                np.ones(int(has_room.sum()), dtype=np.int8),
                matrix.indices[has_room],
                np.concatenate([[0], np.cumsum(has_room)])[matrix.indptr],
            ),
            shape=matrix.shape,
        )
        reached = np.zeros(sink + 1, dtype=np.bool_)
        reached[breadth_first_order(left, source, return_predecessors=False)] = True
        values = flow.data[copies * width : copies * width + copies].astype(np.int64)
        return reached[:source].reshape(copies, self.nodes), values


class Offers:
    """The ways to hold the values of one region, in tables of bytes and seconds with a row for each value.

    Each column is a way. The first way holds the value unchanged; it costs infinity if the value cannot be stored. The other
    ways are the value's forms (compressed, offloaded). Forms that serve only the saved tensors of the value itself have
    separate tables.
    """

    def __init__(self, view: RegionView, prices: Prices) -> None:
        self.prices = prices
        values = len(view.graph.values)
        self._tables = []
        for is_private in (False, True):
            found = {v: [m for m in modes if m.is_private == is_private] for v, modes in prices.modes.items()}
            ways = 1 + max(map(len, found.values()), default=0)
            held_bytes, seconds = np.zeros((values, ways)), np.full((values, ways), np.inf)
            if not is_private:
                stored = list(prices.held_bytes)
                held_bytes[stored, 0], seconds[stored, 0] = list(prices.held_bytes.values()), 0.0
            for value, modes in found.items():
                for at, mode in enumerate(modes, 1):
                    held_bytes[value, at], seconds[value, at] = mode.held_bytes, prices.seconds(mode)
            self._tables.append((held_bytes, seconds, found))

    def shared(self, prices_seconds_per_byte: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Return the cheapest way to hold each value for all its readers, at each price of a byte.

        The result is two tables, with a row for each price and a column for each value: the cost of this way, and the number of
        this way.
        """
        return self._least(0, prices_seconds_per_byte)

    def private(self, prices_seconds_per_byte: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Return two tables like ``shared``, but with the cheapest way to hold each value only for its own saved tensors.

        The cost is infinite if the value does not have a form of this kind.
        """
        return self._least(1, prices_seconds_per_byte)

    def _least(self, table: int, prices_seconds_per_byte: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
        held_bytes, seconds, _ = self._tables[table]
        costs = prices_seconds_per_byte[:, None, None] * held_bytes + seconds
        ways = costs.argmin(axis=2)
        return np.take_along_axis(costs, ways[:, :, None], axis=2)[:, :, 0], ways

    def mode(self, value: int, way: int, *, is_private: bool) -> Mode | None:
        """Return the form (codec or link) of a value that has the number ``way``; ``None`` for 0, the unchanged value."""
        return self._tables[is_private][2][value][way - 1] if way else None


def solve_cuts(network: Network, requests: Sequence[tuple[Offers, Floats]]) -> list[list[Cut]]:
    """Return the cheapest choices (what to keep, to pack and to recompute) of one region at many prices of a byte.

    Args:
        network: the region's network.
        requests: offers, and the prices at which to weigh them: the seconds that one byte held from forward to backward costs.

    Returns:
        A list with one entry for each request: a list with one cut for each of its prices.
    """
    if not any(len(prices) for _, prices in requests):
        return [[] for _ in requests]
    capacities = np.concatenate([network.capacities(offers, prices) for offers, prices in requests])
    is_finite = np.isfinite(capacities)
    totals = np.where(is_finite, capacities, 0.0).sum(axis=1)
    units = np.where(totals > 0, totals / _FINITE_TOTAL, 1.0)
    scaled = np.full(capacities.shape, _INFINITE, dtype=np.int64)
    scaled[is_finite] = np.rint((capacities / units[:, None])[is_finite]).astype(np.int64)
    reached, values = network.minimum_cuts(scaled)
    # Rounding changes a capacity by at most half a unit, so one unit per edge covers the error of a cut.
    lower = np.maximum(values - is_finite.sum(axis=1), 0) * units
    found, first = [], 0
    for offers, prices in requests:
        stop = first + len(prices)
        found.append(_read_off(network, offers, prices, reached[first:stop], lower[first:stop]))
        first = stop
    return found


def _read_off(network: Network, offers: Offers, prices: Floats, reached: Mask, lower: Floats) -> list[Cut]:
    """Translate solved minimum cuts into choices (what to keep or recompute) of one region with their costs, one for each price
    of a byte.

    ``reached`` says which nodes of the graph are on the source side of each cut.
    """
    view, graph = network.view, network.view.graph
    weights = offers.prices
    available = reached[:, 2 : network.first_op]
    runs = reached[:, network.first_op :]
    shared, private = offers.shared(prices)[1], offers.private(prices)[1]
    read = set(network.read)
    cuts = []
    for at in range(len(prices)):
        ops = frozenset(np.flatnonzero(runs[at]).tolist())
        there = set(np.flatnonzero(available[at]).tolist())
        held = {v for v in view.decided if v in there and graph.values[v].producer not in ops}
        held |= set(view.movable) - read
        copied = frozenset(there & view.copied)
        mode_of = {v: offers.mode(v, shared[at, v], is_private=False) for v in held}
        mode_of |= {v: offers.mode(v, private[at, v], is_private=True) for v in read - there}
        modes = {v: mode for v, mode in mode_of.items() if mode is not None}
        kept = frozenset(held - modes.keys())
        cuts.append(
            Cut(
                kept=kept,
                packed=frozenset((v, mode.form) for v, mode in modes.items()),
                copied=copied,
                ops=ops,
                held_bytes=sum(weights.held_bytes[v] for v in kept | copied)
                + sum(m.held_bytes for m in modes.values()),
                seconds=sum(weights.op_seconds[op] for op in ops) + sum(weights.seconds(m) for m in modes.values()),
                lower_value=float(lower[at]),
            )
        )
    return cuts
