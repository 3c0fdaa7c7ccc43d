"""Bytes that stay free for regions that read values, and bytes that such regions may keep in values that no plan knows."""

from __future__ import annotations

import random
import statistics

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plimsoll
from plimsoll.artifacts.plan import Plan, RegionPlan
from plimsoll.planning.spare_bytes import spread_bytes, with_spare_bytes
from steps import mean_square

WIDTH, ROWS, BLOCKS = 32, 256, 8


class Routing(nn.Module):
    """A block that works on the rows whose first value is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.detach()[:, 0] > 0).nonzero().squeeze(1)
        return x.index_add(0, rows, self.down(F.gelu(self.up(x[rows])))).roll(1, dims=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routing() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def planned(strategy: str, budget: int | None = None) -> Plan:
    torch.manual_seed(0)
    return plimsoll.plan(Model(), rows_of(0), budget, loss=mean_square, strategy=strategy)


def test_the_bytes_that_stay_free_are_two_deviations_of_a_steps_bytes():
    plan = planned("none")
    held = [region.retained_bytes for region in plan.regions]
    assert len(set(held)) > BLOCKS // 2
    assert spread_bytes(plan) == pytest.approx(2 * BLOCKS**0.5 * statistics.pstdev(held), abs=1)


def test_blocks_that_drop_what_depends_on_data_need_hardly_any_bytes_free():
    assert spread_bytes(planned("full")) < spread_bytes(planned("none")) / 20


def test_regions_of_one_size_and_regions_that_read_nothing_need_no_bytes_free():
    plan = planned("none")
    alike = tuple(msgspec.structs.replace(region, retained_bytes=100) for region in plan.regions)
    unread = tuple(msgspec.structs.replace(region, value_read="") for region in plan.regions)
    assert spread_bytes(msgspec.structs.replace(plan, regions=alike)) == 0
    assert spread_bytes(msgspec.structs.replace(plan, regions=unread)) == 0


@pytest.mark.long
def test_a_plan_leaves_these_bytes_free_and_says_so():
    none, full = planned("none"), planned("full")
    budget = (none.predicted_peak_bytes + full.predicted_peak_bytes) // 2
    plan = planned("auto", budget)
    assert 0 < spread_bytes(plan) <= budget - plan.predicted_peak_bytes
    assert any("may need up to" in note and "of the budget are free for that" in note for note in plan.notes)


def test_a_budget_near_the_floor_is_kept_although_hardly_a_byte_is_free():
    budget = round(1.01 * planned("none").floor_bytes)
    assert planned("auto", budget).predicted_peak_bytes <= budget


def region(*, bytes_: int, value_read: str = "moe.py:1", input_bytes: int = 100) -> RegionPlan:
    known = planned("none").regions[0].decisions[0]
    decision = msgspec.structs.replace(known, bytes=bytes_)
    return RegionPlan(
        name=f"blocks.{random.random()}",
        call=0,
        kind="",
        decisions=(decision,) if bytes_ else (),
        retained_bytes=bytes_,
        replay_seconds=0.0,
        value_read=value_read,
        input_bytes=input_bytes,
    )


KINDS = ((0, "moe.py:1"), (0, "moe.py:1"), (1000, "moe.py:1"), (0, ""))


@pytest.mark.long
def test_regions_that_read_values_share_what_is_left_of_the_budget():
    short, other, long, unread = (region(bytes_=size, value_read=line) for size, line in KINDS)
    plan = msgspec.structs.replace(planned("none"), regions=(short, other, long, unread))
    spares = [each.spare_bytes for each in with_spare_bytes(plan, 3100).regions]
    assert spares == [1024, 1024, None, 0]
    assert [each.is_left_alone for each in with_spare_bytes(plan, 3100).regions] == [False, False, True, True]


def test_no_byte_may_be_kept_if_the_budget_has_none_left():
    plan = msgspec.structs.replace(planned("none"), regions=(region(bytes_=0),))
    assert [with_spare_bytes(plan, spare).regions[0].spare_bytes for spare in (-5, 0, 1, 3)] == [0, 0, 1, 2]
