"""Named strategies in the plan's vocabulary."""

from __future__ import annotations

import pytest

from planning.builders import transformer
from plimsoll.artifacts.costs import Costs, CostSource
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import InvalidStrategy
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import strategy_choices
from plimsoll.tracing.trace import trace
from tracing import zoo

NAMES = ("none", "full", "input-only", "every:2", "sqrt", "selective:attention", "selective:core", "selective:mlp",
         "selective:norm", "selective:mm,sdpa")  # fmt: skip
STEP = transformer(4).finish()
PLANNER = Planner(StepIndex(*STEP))


def plan_of(strategy: str) -> Plan:
    return solve(PLANNER, budget_bytes=None, strategy=strategy)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_makes_a_usable_plan_above_its_bound(name: str) -> None:
    plan = plan_of(name)
    assert plan.status.is_usable
    assert plan.strategy == name
    assert plan.lower_bound_seconds <= plan.predicted_seconds
    assert len(plan.regions) == 4


def test_none_keeps_everything() -> None:
    plan = plan_of("none")
    assert all(region.is_untouched for region in plan.regions)
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes


def test_full_keeps_only_region_inputs() -> None:
    for region in plan_of("full").regions:
        assert {d.value for d in region.decisions if d.decision is Decision.KEEP} == {"input:0"}
    assert plan_of("full").regions == plan_of("input-only").regions


def test_every_two_drops_every_second_boundary() -> None:
    assert [r.is_boundary_dropped for r in plan_of("every:2").regions] == [False, True, False, True]
    assert plan_of("sqrt").regions == plan_of("every:2").regions


def test_selective_modules_recompute_what_those_modules_made() -> None:
    for region in plan_of("selective:mlp").regions:
        assert region.dropped == {d.value for d in region.decisions if d.value.startswith("mlp")}


def test_selective_core_recomputes_what_stands_between_the_two_products_of_attention() -> None:
    model, batch = zoo.gpt2()
    model.set_attn_implementation("eager")
    step = trace(model, batch, device_name="H100-SXM")
    index = StepIndex(step, Costs(device="none", source=CostSource.ROOFLINE, ops={}))
    for view, choice in zip(index.views, strategy_choices(index, "selective:core"), strict=True):
        dropped = {view.graph.values[value].name for value in view.everything - choice.kept}
        assert dropped == {"attn::_softmax#0", "attn::native_dropout#0.0", "attn::native_dropout#0.1"}


def test_selective_core_leaves_fused_attention_alone() -> None:
    assert all(region.is_untouched for region in plan_of("selective:core").regions)


def test_selective_ops_keep_the_outputs_of_those_ops() -> None:
    for region in plan_of("selective:mm,sdpa").regions:
        kept = {d.value for d in region.decisions if d.decision is Decision.KEEP and "::" in d.value}
        assert kept
        assert all("mm" in value or "sdpa" in value for value in kept)


@pytest.mark.parametrize(
    ("name", "closest"),
    [("selctive:attention", "selective:attention"), ("every", "every:2"), ("ful", "full"), ("selective:gellu", "gelu")],
)
def test_unknown_strategies_name_the_closest_ones(name: str, closest: str) -> None:
    with pytest.raises(InvalidStrategy) as raised:
        strategy_choices(StepIndex(*STEP), name)
    assert closest in raised.value.next
