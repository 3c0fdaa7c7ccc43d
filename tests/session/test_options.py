"""What users ask of a plan, as they write it: read, or refused with the three parts of every error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import plimsoll
from long_cases import some
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.errors import BudgetBelowFloor, InvalidBudget, InvalidCodec, InvalidStrategy, PlimsollError, TracingFailed
from plimsoll.session.options import PlanOptions
from steps import Stack, Step, mean_square, stack
from unchanged import unchanged

ROWS = 2048
"""Enough that every saved tensor is worth another form."""


@pytest.fixture(scope="module")
def step() -> Step:
    torch.manual_seed(0)
    return Stack(2), torch.randn(ROWS, 32), mean_square


@pytest.fixture(scope="module")
def whole(step: Step) -> plimsoll.Plan:
    """The step with everything kept: what its peak and its floor are."""
    model, batch, loss = step
    return plimsoll.plan(model, batch, loss=loss, strategy="none")


@pytest.fixture(scope="module")
def budget(whole: plimsoll.Plan) -> int:
    return between(whole)


def between(whole: plimsoll.Plan) -> int:
    """A budget between the floor and the unmanaged peak."""
    return (whole.floor_bytes + 2 * whole.baseline_peak_bytes) // 3


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, (("recompute",), 0.0)),
        ({"allow": "recompute, compress", "max_error": "1%"}, (("recompute", "compress"), 0.01)),
        ({"allow": ["offload", "compress"], "max_error": 0.05}, (("compress", "offload"), 0.05)),
        ({"allow": ("compress",), "max_error": "0.5"}, (("compress",), 0.5)),
    ],
)
def test_wishes_are_read_in_the_forms_that_people_write(asked: dict[str, Any], found: tuple[tuple[str, ...], float]):
    options = PlanOptions.read(**asked)
    assert (options.allow, options.max_error) == found


@pytest.mark.parametrize(
    ("asked", "error", "part"),
    [
        ({"allow": "recompute,shrink"}, InvalidStrategy, "shrink"),
        ({"allow": ()}, InvalidStrategy, "empty"),
        ({"allow": "compress", "max_error": "much"}, InvalidStrategy, "1%"),
        ({"allow": "compress", "max_error": 1.5}, InvalidStrategy, "below 1"),
        ({"allow": "compress", "max_error": -0.1}, InvalidStrategy, "from 0"),
        ({"allow": "compress", "max_error": float("nan")}, InvalidStrategy, "nan"),
        ({"max_error": 0.01}, InvalidStrategy, "compression is not allowed"),
        ({"strategies": ["full", "every:0"]}, InvalidStrategy, "every:2"),
        ({"strategies": ["hybrid:two"]}, InvalidStrategy, "hybrid:10,6"),
        ({"strategies": ["selective: ,"]}, InvalidStrategy, "does not name anything to keep"),
        ({"strategies": ["int5"]}, InvalidStrategy, "int4"),
        ({"allow": "offload", "host_budget": "4G"}, InvalidBudget, "4GiB"),
        ({"overrides": ["silu"]}, InvalidStrategy, "pattern=keep"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], error: type[PlimsollError], part: str):
    with pytest.raises(error) as caught:
        PlanOptions.read(**asked)
    assert part in str(caught.value)
    assert caught.value.why
    assert caught.value.next


@pytest.mark.parametrize(
    "call",
    [
        lambda model, batch: plimsoll.plan(model, batch, strategy="nonsense"),
        lambda model, batch: plimsoll.compare(model, batch, ["full", "nonsense"]),
        lambda model, batch: plimsoll.explain(model, batch, "nonsense"),
    ],
)
def test_a_strategy_that_is_none_is_refused_before_the_model_runs(call: Callable[[torch.nn.Module, torch.Tensor], Any]):
    model = torch.nn.Linear(2, 1)
    model.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    with pytest.raises(InvalidStrategy, match="'nonsense' is not a strategy"):
        call(model, torch.ones(1, 2))


def test_compare_takes_the_usual_strategies_and_auto_where_there_is_a_budget(step: Step, budget: int):
    model, batch, loss = step
    usual = [row.strategy for row in plimsoll.compare(model, batch, loss=loss, steps=1).rows]
    assert {"none", "full"} < set(usual)
    found = plimsoll.compare(model, batch, loss=loss, budget=budget, steps=1)
    assert [row.strategy for row in found.rows] == [*usual, "auto"]


@pytest.mark.parametrize(
    ("asked", "error", "part"),
    [
        ({"overrides": ["*::tanh*=keep"]}, InvalidStrategy, "does not match any saved value"),
        ({"overrides": ["*gelu*=compress:int8"]}, InvalidStrategy, "not allowed"),
        ({"overrides": ["*gelu*=compress:int9"], "allow": "compress", "max_error": 0.1}, InvalidCodec, "int8"),
        ({"allow": "compress", "device_profile": "H100-SXM"}, TracingFailed, "fake trace"),
    ],
)
def test_what_a_model_cannot_do_is_refused_and_nothing_is_changed(
    asked: dict[str, Any], error: type[PlimsollError], part: str, step: Step, budget: int
):
    model, batch, loss = step
    asked = {"budget": budget, **asked} if "device_profile" not in asked else asked
    with unchanged(model), pytest.raises(error) as caught:
        plimsoll.plan(model, batch, loss=loss, **asked)
    assert part in str(caught.value)


def test_where_everything_fits_nothing_is_held_in_another_form(step: Step, whole: plimsoll.Plan):
    model, batch, loss = step
    budget = 2 * whole.baseline_peak_bytes
    plan = plimsoll.plan(model, batch, budget, loss=loss, allow="recompute,compress,offload", max_error=0.1)
    assert all(region.is_untouched for region in plan.regions)
    assert plan.allow == ("recompute", "compress", "offload")
    assert any("everything fits without it" in note for note in plan.notes)


@pytest.mark.parametrize("strategy", some(["int8", "int4", "fp8", "offload", "hybrid:1,2"], 2))
def test_named_strategies_hold_values_in_their_form(strategy: str, step: Step):
    model, batch, loss = step
    plan = plimsoll.plan(model, batch, loss=loss, strategy=strategy)
    forms = {d.form for region in plan.regions for d in region.decisions if d.is_packed}
    wanted = {"offload": "disk", "hybrid:1,2": "int8"}.get(strategy, strategy)
    assert wanted in forms
    receipt = plimsoll.verify(model, batch, plan, loss=loss, steps=1)
    assert receipt.verdict is (ReceiptVerdict.VERIFIED if strategy == "offload" else ReceiptVerdict.WITHIN_ERROR), str(
        receipt
    )


def test_overrides_are_respected_and_the_rest_is_planned_around_them(step: Step, budget: int):
    model, batch, loss = step
    plan = plimsoll.plan(
        model,
        batch,
        budget,
        loss=loss,
        allow="recompute,compress",
        max_error=0.05,
        overrides=["blocks.*::gelu=compress:bf16", "blocks.1.norm::*=keep"],
    )
    decisions = {f"{region.name}.{d.value}": d for region in plan.regions for d in region.decisions}
    assert {d.form for name, d in decisions.items() if "gelu" in name} == {"bf16"}
    assert {d.decision for name, d in decisions.items() if name.startswith("blocks.1.norm")} == {Decision.KEEP}
    assert plimsoll.verify(model, batch, plan, loss=loss, steps=1).verdict.is_pass


def test_without_recomputation_nothing_is_recomputed(step: Step, budget: int):
    model, batch, loss = step
    plan = plimsoll.plan(model, batch, budget, loss=loss, allow="compress,offload", max_error=0.05)
    assert all(not region.dropped for region in plan.regions)
    assert any(region.packed for region in plan.regions)
    assert plimsoll.verify(model, batch, plan, loss=loss, steps=1).verdict.is_pass


@pytest.mark.long
def test_a_host_budget_is_kept_to():
    model, batch, loss = stack(ROWS)
    budget = between(plimsoll.plan(model, batch, loss=loss, strategy="none"))
    free = plimsoll.plan(model, batch, budget, loss=loss, allow="offload")
    assert free.offloaded_bytes > 0
    tight = plimsoll.plan(
        model, batch, budget, loss=loss, allow="recompute,offload", host_budget=free.offloaded_bytes // 2
    )
    assert tight.offloaded_bytes <= free.offloaded_bytes // 2
    with pytest.raises(BudgetBelowFloor):
        plimsoll.plan(model, batch, budget, loss=loss, allow="offload", host_budget="1B")
