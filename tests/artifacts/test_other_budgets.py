"""The table of other budgets: few rows, the whole range, budgets that work."""

from __future__ import annotations

import pickle

import pytest
import torch

import plimsoll
from plimsoll.artifacts.other_budgets import HEADER, TITLE, OtherBudgets
from plimsoll.artifacts.plan import FrontierPoint
from plimsoll.errors import BudgetBelowFloor
from plimsoll.units import KIB, MIB, parse_bytes
from samples import make_plan
from steps import Stack, mean_square


def points(count: int) -> list[FrontierPoint]:
    return [
        FrontierPoint(peak_bytes=(count + place) * MIB, step_seconds=2.0 - place / count, change=f"change {place}")
        for place in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 10, 11, 40])
def test_at_most_ten_rows_reach_from_the_largest_to_the_smallest_budget(count: int):
    found = OtherBudgets.of(points(count), 1.0)
    sizes = [point.peak_bytes for point in found.points]
    assert len(sizes) == min(count, 10)
    assert sizes == sorted(set(sizes), reverse=True)
    assert (sizes[0], sizes[-1]) == ((2 * count - 1) * MIB, count * MIB)


def test_bytes_of_the_real_step_are_added_and_budgets_that_need_the_same_are_one_row():
    found = OtherBudgets.of(points(4), 1.0, excess_bytes=KIB, least_bytes=6 * MIB)
    assert [point.peak_bytes for point in found.points] == [7 * MIB + KIB, 6 * MIB + KIB, 6 * MIB]
    assert found.points[-1].step_seconds == 1.75  # the fastest of those below


def test_bars_are_as_long_as_the_extra_time():
    found = OtherBudgets.of(points(2), 1.5)
    assert found.shares == [0.0, 1.0]
    title, header, first, last = found.lines()
    assert title == TITLE
    assert all(name in header for name in HEADER)
    assert "█" not in first
    assert last.endswith("█" * 16 + "  change 0")


def test_an_empty_frontier_has_no_table():
    assert OtherBudgets.of([], 1.0).lines() == []


def test_a_plan_without_a_budget_shows_the_table_and_a_plan_for_one_keeps_it_for_details():
    without, plan = make_plan(budget_bytes=None), make_plan()
    assert len(without.frontier) > 1
    assert TITLE in str(without)
    assert TITLE not in str(plan)
    assert TITLE in plan.explain()
    assert f"<th>{HEADER[3]}</th>" in without._repr_html_()


@pytest.fixture(scope="module")
def refusal() -> BudgetBelowFloor:
    with pytest.raises(BudgetBelowFloor) as caught:
        plimsoll.plan(Stack(4, 32), torch.randn(384, 32), 100 * KIB, loss=mean_square)
    return caught.value


@pytest.mark.long
def test_a_refusal_shows_what_other_budgets_cost_and_its_smallest_one_works(refusal: BudgetBelowFloor):
    assert refusal.others[0] == TITLE
    assert "\n  ".join(refusal.others) in str(refusal)
    smallest = " ".join(refusal.others[-1].split()[:2])
    plan = plimsoll.plan(Stack(4, 32), torch.randn(384, 32), parse_bytes(smallest), loss=mean_square)
    assert plan.status.is_usable
    assert plan.regions[0].dropped


def test_each_row_names_what_it_recomputes(refusal: BudgetBelowFloor):
    _, header, first, *rest = refusal.others
    assert header.split()[-2:] == ["largest", "change"]
    assert first.endswith("none")
    assert all(" recompute " in row and " more block" in row for row in rest)


def test_a_refusal_keeps_its_table_between_processes(refusal: BudgetBelowFloor):
    assert str(pickle.loads(pickle.dumps(refusal))) == str(refusal)
