"""What a step does differently than planned is said at once: autocast, mode, NaN, a second budget."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch

import plimsoll
from plimsoll.errors import PlanMismatch
from plimsoll.session.step_planner import StepPlanner
from steps import Stack, mean_square

BATCH = torch.randn(256, 32)


@pytest.fixture(scope="module")
def plan() -> plimsoll.Plan:
    return plimsoll.plan(Stack(2, 32), BATCH, "1GiB", loss=mean_square)


def said(plan: plimsoll.Plan, *, batch: torch.Tensor = BATCH, casts: bool = False, trains: bool = True) -> list[str]:
    model = Stack(2, 32).train(trains)
    with warnings.catch_warnings(record=True) as caught, plimsoll.apply(model, plan):
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = mean_square(model(batch))
            loss.backward()
            model.zero_grad()
    return [text for each in caught if (text := str(each.message)).startswith("plimsoll: ")]


def test_a_step_as_planned_is_not_warned_about(plan):
    assert said(plan) == []


def test_another_autocast_than_the_plans_is_said_once(plan):
    [text] = [each for each in said(plan, casts=True) if "its plan was made with" in each]
    assert "runs with autocast cpu bf16, and its plan was made with no autocast" in text


def test_another_mode_than_the_plans_is_said_once(plan):
    [text] = said(plan, trains=False)
    assert "Stack is in evaluation mode, and its plan was made in training mode" in text


def test_nan_in_the_first_batch_is_said(plan):
    batch = BATCH.clone()
    batch[0, 0] = float("nan")
    [text] = said(plan, batch=batch)
    assert f"NaN in 1 of {BATCH.numel()} elements" in text


def test_attach_says_that_a_call_in_evaluation_mode_is_not_managed():
    model = Stack(2, 32).eval()
    with plimsoll.attach(model, "1GiB"), pytest.warns(UserWarning, match="no plan is made for this call"):
        mean_square(model(BATCH)).backward()
    with warnings.catch_warnings(), plimsoll.attach(model, "1GiB"), torch.no_grad():
        warnings.simplefilter("error")
        model(BATCH)


def test_the_search_for_nan_is_not_in_a_trace():
    # Traces of later calls do not have it. If the first had it, every new shape would be traced twice, and timed.
    model = Stack(2, 32)
    planner = mock.patch.object(StepPlanner, "traced", autospec=True, side_effect=StepPlanner.traced)
    with planner as traced, plimsoll.attach(model, "1GiB"):
        for rows in (256, 256, 128):
            mean_square(model(BATCH[:rows])).backward()
    assert [call.kwargs["is_timed"] for call in traced.call_args_list] == [False]


def test_a_plan_is_not_applied_to_a_model_that_attach_manages(plan):
    model = Stack(2, 32)
    with plimsoll.attach(model, "1GiB"), pytest.raises(PlanMismatch, match="attach already manages Stack"):
        plimsoll.apply(model, plan)
    plimsoll.apply(model, plan).remove()
