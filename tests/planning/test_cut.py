"""The minimum cut against networkx, and against every subset."""

from __future__ import annotations

import itertools
import math

import networkx
import pytest

from planning.builders import random_step, transformer
from plimsoll.planning.choices import prices_of
from plimsoll.planning.cut import SINK, SOURCE, Prices, build_edges, solve_cut
from plimsoll.planning.frontier import sweep_prices
from plimsoll.planning.replay_schedule import recipe_ops
from plimsoll.planning.step import RegionView, StepIndex

PRICES = (0.0, 0.003, 0.02, 0.1, 0.7, 5.0)


def value_by_networkx(view: RegionView, prices: Prices, price: float) -> float:
    edges = build_edges(view, prices, price)
    graph = networkx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for tail, head, capacity in zip(edges.tails, edges.heads, edges.capacities, strict=True):
        known = graph.get_edge_data(tail, head, {"capacity": 0.0})["capacity"]
        graph.add_edge(tail, head, capacity=min(known + capacity, 1e12))
    return float(networkx.minimum_cut_value(graph, SOURCE, SINK))


def value_by_enumeration(view: RegionView, prices: Prices, price: float) -> float:
    best = math.inf
    for size in range(len(view.droppable) + 1):
        for kept in map(frozenset, itertools.combinations(view.droppable, size)):
            ops: set[int] = set()
            copied: set[int] = set()
            for value in set(view.droppable) - kept:
                recipe, leaves = recipe_ops(view.graph, value, view.leaves | kept)
                ops.update(recipe)
                copied.update(set(leaves) & view.copied)
            bytes_ = sum(prices.held_bytes[v] for v in kept | copied)
            best = min(best, price * bytes_ + sum(prices.op_seconds[op] for op in ops))
    return best


@pytest.mark.parametrize("price", PRICES)
def test_cut_equals_the_one_of_networkx(price: float) -> None:
    index = StepIndex(*transformer(2, detail=2).finish())
    view, prices = index.views[0], prices_of(index, index.views[0])
    cut = solve_cut(view, prices, price)
    assert price * cut.held_bytes + cut.seconds == pytest.approx(value_by_networkx(view, prices, price), abs=1e-5)


@pytest.mark.parametrize("seed", range(30))
def test_cut_is_the_best_of_all_subsets(seed: int) -> None:
    index = StepIndex(*random_step(seed, ops=6).finish())
    for view in index.views:
        prices = prices_of(index, view)
        for price in PRICES if len(view.droppable) <= 7 else ():
            cut = solve_cut(view, prices, price)
            best = value_by_enumeration(view, prices, price)
            assert price * cut.held_bytes + cut.seconds == pytest.approx(best, abs=1e-5)
            assert cut.lower_value <= best + 1e-12


def test_hull_is_convex_and_starts_at_keeping_everything() -> None:
    index = StepIndex(*transformer(1, detail=3).finish())
    hull = sweep_prices(index.views[0], prices_of(index, index.views[0]))
    assert hull.cuts[0].seconds == 0.0
    points = [(cut.held_bytes, cut.seconds) for cut in hull.cuts]
    slopes = [(s2 - s1) / (b1 - b2) for (b1, s1), (b2, s2) in itertools.pairwise(points) if b1 > b2]
    assert len(slopes) > 3
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(slopes))


def test_lines_bound_every_subset() -> None:
    index = StepIndex(*transformer(1).finish())
    view = index.views[0]
    prices = prices_of(index, view)
    for line in sweep_prices(view, prices).lines[:6]:
        for kept in map(frozenset, itertools.combinations(view.droppable, 2)):
            ops = {op for v in set(view.droppable) - kept for op in recipe_ops(view.graph, v, view.leaves | kept)[0]}
            seconds = sum(prices.op_seconds[op] for op in ops)
            held = sum(prices.held_bytes[v] for v in kept)
            assert seconds >= line.value_seconds - line.price_seconds_per_byte * held - 1e-9
