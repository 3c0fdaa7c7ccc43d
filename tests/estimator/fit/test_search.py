"""The search against formulas: a step whose best micro-batch is known by trying every one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.fit import FitPoint
from plimsoll.estimator.fit.search import Outlook, Search, Shape, Space
from samples import filled

MOST_BATCH = 256


@dataclass
class Formula:
    """Fixed seconds per step, seconds and bytes per example; a plan rebuilds what does not fit, ever dearer."""

    fixed_seconds: float
    example_seconds: float
    example_bytes: int
    budget_bytes: int
    floor_share: float
    rebuild_factor: float
    solves: int = 0
    asked: list[Shape] = field(default_factory=list)

    def outlook(self, shape: Shape) -> Outlook:
        seconds = self.fixed_seconds + self.example_seconds * shape.items
        return Outlook(self.example_bytes * shape.items, shape.items / seconds)

    def evaluate(self, shape: Shape) -> FitPoint:
        assert shape not in self.asked, "a point is evaluated once"
        self.asked.append(shape)
        peak_bytes = self.example_bytes * shape.items
        rebuilt_bytes = max(0, peak_bytes - self.budget_bytes)
        self.solves += rebuilt_bytes > 0
        does_fit = peak_bytes * self.floor_share <= self.budget_bytes
        overhead = self.rebuild_factor * (rebuilt_bytes / peak_bytes) ** 2
        return filled(
            FitPoint,
            micro_batch=shape.batch,
            sequence=shape.sequence,
            status=Status.OPTIMAL if does_fit else Status.INFEASIBLE,
            unmanaged_peak_bytes=peak_bytes,
            predicted_peak_bytes=min(peak_bytes, self.budget_bytes),
            unmanaged_seconds=self.example_seconds * shape.items,
            micro_seconds=self.example_seconds * shape.items * (1 + overhead),
            optimizer_seconds=self.fixed_seconds,
            rebuilt_bytes=rebuilt_bytes,
        )


def run(formula: Formula, **space) -> Search:
    search = Search(Space(**{"sequences": (1,), "most_batch": MOST_BATCH} | space), formula, formula.budget_bytes)
    search.run()
    return search


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(
    fixed=st.floats(0.01, 30.0),
    budget=st.integers(2, 200),
    floor_share=st.floats(0.1, 0.9),
    rebuild=st.floats(0.01, 0.6),
)
def test_the_best_point_is_within_two_percent_of_trying_every_one(fixed, budget, floor_share, rebuild):
    formula = Formula(fixed, 0.1, 100, budget * 100, floor_share, rebuild)
    every = Formula(fixed, 0.1, 100, budget * 100, floor_share, rebuild)
    points = [every.evaluate(Shape(batch, 1)) for batch in range(1, MOST_BATCH + 1)]
    most = max(point.items_per_second for point in points if point.does_fit)
    search = run(formula)
    best = search.best()
    assert best.items_per_second >= 0.98 * most
    assert formula.solves <= search.most_solves + 1


@pytest.mark.parametrize(("floor_share", "most_batch"), [(0.3, MOST_BATCH), (0.1, 64)])
def test_the_largest_micro_batch_that_needs_no_plan_is_always_among_the_points(floor_share: float, most_batch: int):
    search = run(Formula(5.0, 0.1, 100, 3700, floor_share, 0.5), most_batch=most_batch)
    assert most_batch > 64 or all(point.does_fit for point in search.points())
    assert 37 in [point.micro_batch for point in search.points() if point.is_unmanaged]


def test_a_slow_plan_loses_against_no_plan_and_large_fixed_costs_are_worth_recomputation():
    best = run(Formula(0.01, 0.1, 100, 3700, 0.3, 5.0)).best()
    assert (best.is_unmanaged, best.micro_batch) == (True, 37)
    best = run(Formula(30.0, 0.1, 100, 3700, 0.3, 0.2)).best()
    assert best.micro_batch > 74


def test_only_allowed_micro_batches_are_evaluated():
    allowed = (1, 2, 3, 4, 6, 8, 12, 24)
    formula = Formula(5.0, 0.1, 100, 1000, 0.5, 0.2)
    run(formula, allowed=allowed)
    assert {shape.batch for shape in formula.asked} <= set(allowed)


def test_where_not_even_one_example_fits_there_is_no_best_point():
    search = run(Formula(5.0, 0.1, 100, 50, 0.9, 0.2))
    assert search.best() is None
    assert [point.does_fit for point in search.points()] == [False]


def test_solves_are_shared_among_sequences():
    formula = Formula(5.0, 0.1, 100, 6400, 0.3, 0.2)
    search = run(formula, sequences=(2, 4, 8))
    assert {point.sequence for point in search.points()} == {2, 4, 8}
    assert formula.solves <= search.most_solves + 1


@pytest.mark.parametrize(("most_batch", "ladder"), [(1, (1,)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_the_ladder_doubles_up_to_the_largest_micro_batch(most_batch: int, ladder: tuple[int, ...]):
    assert Space(sequences=(1,), most_batch=most_batch).ladder() == ladder
