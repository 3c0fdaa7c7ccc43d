"""Named strategies in the plan's vocabulary."""

from __future__ import annotations

import pytest

import zoo as architectures
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


def deepseek() -> StepIndex:
    """A layer without experts and one with: routed ones, a shared one, and keys and values made of what is compressed."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    step = trace(DeepseekV3ForCausalLM(config), architectures.words(2, 16, 32), device_name="H100-SXM")
    return StepIndex(step, Costs(device="none", source=CostSource.ROOFLINE, ops={}))


@pytest.mark.long
def test_parts_of_experts_and_of_compressed_attention_are_recomputed_by_name() -> None:
    index = deepseek()
    dense, mixture = index.views
    dropped = {
        part: [
            {view.graph.values[value].name for value in view.everything - choice.kept}
            for view, choice in zip(index.views, strategy_choices(index, f"selective:{part}"), strict=True)
        ]
        for part in ("moe-act", "shared", "mla-up", "core")
    }
    assert dropped["moe-act"] == [set(), {"mlp.experts.act_fn::silu#0", "mlp.experts::mul#0"}]
    assert dropped["shared"][0] == set()
    assert dropped["shared"][1] == {
        view.graph.values[value].name
        for view in (mixture,)
        for value in view.droppable
        if view.graph.values[value].name.startswith("mlp.shared_experts")
    }
    assert len(dropped["shared"][1]) == 4
    assert dropped["core"] == [set(), set()]
    for view, names in zip((dense, mixture), dropped["mla-up"], strict=True):
        [attention] = [op for op in view.graph.ops if "scaled_dot_product" in op.name]
        assert names == {view.graph.values[value].name for value in attention.reads}
    every = strategy_choices(index, "selective:mla-up+moe-act+shared")
    assert [len(view.everything - choice.kept) for view, choice in zip(index.views, every, strict=True)] == [
        3,
        3 + 2 + 4,
    ]


def test_a_routers_softmax_is_none_of_attentions() -> None:
    model, batch = architectures.sample("mixtral")
    index = StepIndex(
        trace(model, batch, device_name="H100-SXM"), Costs(device="none", source=CostSource.ROOFLINE, ops={})
    )
    for view, choice in zip(index.views, strategy_choices(index, "selective:core"), strict=True):
        assert any(value.name.startswith("mlp.gate::_softmax") for value in view.graph.values)
        dropped = [view.graph.values[value].name for value in view.everything - choice.kept]
        assert dropped
        assert all(name.startswith("self_attn::") for name in dropped)


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
