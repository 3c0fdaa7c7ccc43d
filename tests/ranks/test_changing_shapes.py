"""Batches that change their shapes on several ranks under `attach`: each rank chooses plans of its own for its own batches."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest
import torch

from launching import Told, on_ranks
from plimsoll.session.agreement import Agreement
from plimsoll.session.joint_traces import JointTraces
from plimsoll.session.task import TrainingTask
from ranks.changing_shapes import CASES

pytestmark = pytest.mark.long

told = on_ranks(2, "ranks.changing_shapes:on_two_ranks")
SETTLED = 10
"""After so many calls at most no rank needs to know more."""


def _said_beside_overruns(rank: dict[str, Any]) -> list[str]:
    """Return what a rank said, without the overruns that it did have.

    gloo's threads release the buffers of collectives when they are done with them, so a busy machine
    can hold a step a few KiB over its budget. Such a step has to be said. The plan is right.
    """
    is_over = rank["peak"] > rank["budget"]
    return [said for said in rank["said"] if not (is_over and "a training step took" in said)]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_keeps_to_its_budget_with_the_unmanaged_gradients_and_a_plan_for_each_batch(told: Told, name: str):
    for rank in (each[name] for each in told):
        assert rank["is_equal"]
        # The tolerance is for buffers of collectives, see `_said_beside_overruns`.
        assert rank["peak"] <= rank["budget"] * (1.0 if name.startswith("ddp") else 1.05)
        assert rank["peak"] <= rank["budget"] or rank["said"]
        steady = list(zip(rank["rows"], rank["signatures"], strict=True))[SETTLED:]
        assert all(signature.startswith(f"f32[{count}x") for count, signature in steady)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_have_settled_exchange_nothing(told: Told, name: str):
    for rank in (each[name] for each in told):
        assert not any(rank["exchanges"][16 if name in ("gradients wait", "later") else SETTLED :])
        # A gathered buffer that gloo's threads hold a moment longer is one more number that a further trace has to confirm.
        assert rank["traces"] <= 4 + (name == "tensor parallel")
        assert name == "later" or _said_beside_overruns(rank) == []


@pytest.mark.parametrize("name", ["ddp, other counts", "ddp, room"])
def test_where_traces_run_no_collectives_nothing_is_exchanged_after_calibration(told: Told, name: str):
    for rank in (each[name] for each in told):
        assert all(rank["exchanges"][:2])
        assert not any(rank["exchanges"][2:])


@pytest.mark.parametrize("name", ["ddp, other counts", "one rank varies", "gradients wait"])
def test_short_batches_keep_everything_and_long_ones_do_not(told: Told, name: str):
    late = [dropped for rank in told for dropped in rank[name]["dropped"][SETTLED:]]
    assert min(late) == 0 < max(late)


def test_a_rank_that_meets_a_new_shape_alone_takes_the_lowest_peak_and_says_so(told: Told):
    first, second = (rank["later"] for rank in told)
    assert (first["exchanges"][7], second["exchanges"][7]) == (0, 1)
    assert _said_beside_overruns(first) == []
    assert [
        "the memory that a batch of f32[384x16] needs is unknown" in said for said in _said_beside_overruns(second)
    ] == [True]
    assert second["dropped"][7] > second["dropped"][6]


def test_new_shapes_that_all_ranks_meet_later_are_traced_by_all(told: Told):
    for rank in (each["later"] for each in told):
        assert 1 <= rank["traces"] == sum(count > 1 for count in rank["exchanges"][2:])


def test_each_rank_plans_for_its_own_budget(told: Told):
    tight, roomy = (rank["sharded, other budgets"] for rank in told)
    assert tight["budget"] < roomy["budget"]
    assert max(tight["predicted"]) <= tight["budget"]
    assert max(tight["dropped"][SETTLED:]) > max(roomy["dropped"][SETTLED:])


def test_a_rank_follows_its_own_room(told: Told):
    first, second = (rank["ddp, room"] for rank in told)
    assert len(set(first["predicted"][2:])) == 1
    assert max(second["predicted"][6:9]) <= second["budget"] * 8 // 10
    assert second["predicted"][6] < min(second["predicted"][5], second["predicted"][-1])


def test_room_is_refused_where_ranks_have_to_have_one_plan(told: Told):
    assert [rank["without room"]["kind"] for rank in told] == ["InvalidOption"] * 2
    assert "2 ranks that share one plan" in told[0]["without room"]["found"]


class _Others:
    """What a rank of two hears: ``says`` is what the other one needs in each call, ``None`` where it does not come."""

    size = 2

    def __init__(self, says: list[bool | None]) -> None:
        self._says = says
        self.asked: list[int] = []

    def gathered(self, what: str, mine: Any, kind: type) -> list[Any] | None:
        self.asked.append(call := int(what.split()[-1]))
        said = self._says[call]
        return None if said is None else [mine, type(mine)(is_needed=said, facts=mine.facts)]


_NO: list[bool | None] = [False] * 20


@pytest.mark.parametrize(
    ("needs", "others", "asked", "traced"),
    [
        ([False] * 20, _NO, range(4), []),  # nobody ever needs one
        ([True, False, True] + [False] * 17, _NO, range(7), [0, 2]),
        ([False] * 20, [False, True, *_NO[2:]], range(6), [1]),  # the other one needs one
        ([False] * 10 + [True] * 10, [*[False] * 10, *[None] * 10], [0, 1, 2, 3, 10, 11, 12], []),  # in vain, alone
        ([False] * 10 + [True] + [False] * 9, _NO, [0, 1, 2, 3, 10, 11, 12, 13, 14], [10]),  # both come, and ask again
        ([True] * 20, [None] * 20, [0, 1, 2], []),  # the other one makes other calls
    ],
)
def test_ranks_ask_until_they_have_settled_and_wait_in_vain_a_few_times(
    needs: list[bool], others: list[bool | None], asked: Any, traced: list[int]
):
    company, plans = _Others(others), mock.Mock()
    model = torch.nn.Linear(1, 1)
    task = TrainingTask(model=model, batch=torch.ones(1, 1))
    traces = JointTraces(cast(Agreement, company), model)
    with mock.patch.object(traces, "together"):
        for call, is_needed in enumerate(needs):
            plans.lacks.return_value, before = is_needed, plans.trace.call_count
            traces.plan_for(call, (), plans, lambda: task)
            assert (plans.trace.call_count > before) is (call in traced)
    assert company.asked == list(asked)
