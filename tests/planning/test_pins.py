"""Overrides: how they are read, whom they meet, and that plans keep to them."""

from __future__ import annotations

import functools

import pytest

from long_cases import some
from planning.builders import OUT, StepBuilder, transformer
from planning.form_builders import block_forms, compressed, forms_for
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import InvalidStrategy
from plimsoll.planning.choice import Limits
from plimsoll.planning.pins import Override, parse_override, pin_values, refuse_unknown_modules
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

TRACE, COSTS = transformer(4, width=1024).finish()
FORMS = block_forms(TRACE, COSTS)
WIDE = Limits(0.05**2)


def pinned_index(*overrides: str) -> StepIndex:
    return pin_values(StepIndex(TRACE, COSTS, FORMS), [parse_override(text) for text in overrides])


def pins(index: StepIndex, region: int) -> dict[str, str]:
    view = index.views[region]
    return {view.graph.values[value].name: str(pin) for value, pin in view.pins.items()}


@functools.cache
def planner(*overrides: str, limits: Limits = WIDE) -> Planner:
    return Planner(
        StepIndex(TRACE, COSTS, FORMS), limits=limits, overrides=[parse_override(text) for text in overrides]
    )


def decisions(plan: Plan, value: str) -> list[tuple[Decision, str]]:
    return [(d.decision, d.form) for region in plan.regions for d in region.decisions if value in d.value]


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("a=keep", Override("a", Decision.KEEP)),
        (" layers.*.mlp::gelu = RECOMPUTE ", Override("layers.*.mlp::gelu", Decision.RECOMPUTE)),
        ("*=compress", Override("*", Decision.COMPRESS)),
        ("*=compress:int8:unrotated", Override("*", Decision.COMPRESS, "int8:unrotated")),
        ("a=b=offload", Override("a=b", Decision.OFFLOAD)),
    ],
)
def test_overrides_are_read(text: str, override: Override) -> None:
    assert parse_override(text) == override


@pytest.mark.parametrize(
    "text", ["", "keep", "=keep", "a=", "a=kept", "a=keep:int8", "a=recompute:x", "a=compress:", "a"]
)
def test_what_is_no_override_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidStrategy) as raised:
        parse_override(text)
    assert repr(text) in raised.value.found
    assert "pattern=keep" in raised.value.why


GELU = "mlp.act::gelu#13"


@pytest.mark.parametrize(
    ("overrides", "pinned"),
    [
        (["layers.[12].mlp.act::*=recompute"], ["", "RECOMPUTE", "RECOMPUTE", ""]),
        (["mlp.act::gelu=keep"], ["KEEP"] * 4),  # without the path in front and the number
        (["*gelu*=recompute", "*gelu*=compress:int8", "layers.2.*gelu*=keep"], ["int8", "int8", "KEEP", "int8"]),
        (["*gelu*=compress"], ["zeros"] * 4),  # the smallest lossless form
    ],
)
def test_a_pattern_meets_the_values_of_every_region_that_it_matches_and_the_last_one_counts(
    overrides: list[str], pinned: list[str]
) -> None:
    index = pinned_index(*overrides)
    assert [pins(index, region) for region in range(4)] == [{GELU: pin} if pin else {} for pin in pinned]


def test_an_override_that_matches_nothing_names_the_closest_values() -> None:
    with pytest.raises(InvalidStrategy) as raised:
        pinned_index("layers.0.mlp.act::gellu=keep")
    assert "does not match any saved value" in raised.value.found
    assert "layers.0.mlp.act::gelu#13" in raised.value.next


MODULES = ["", "layers", *(f"layers.{n}{part}" for n in range(12) for part in ("", ".mlp", ".mlp.act", ".attn"))]
OPS = ["add", "gelu", "_softmax"]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("nolayer.*", "no module has 'nolayer.' in its path"),
        ("layers.12.*", "no module has 'layers.12.' in its path"),
        ("layers.*.mpl.*", "no module is named 'mpl'"),
        ("*nolayer*", "no module has 'nolayer' in its path, and no op in its name"),
        ("*xact::gelu", "no module has 'xact' in its path"),
        ("*gelu*::add", "no module has 'gelu' in its path"),
    ],
)
def test_a_pattern_that_no_module_can_match_is_refused_by_the_modules_names_alone(pattern: str, why: str) -> None:
    with pytest.raises(InvalidStrategy) as raised:
        refuse_unknown_modules([Override(pattern, Decision.KEEP)], MODULES, OPS)
    assert repr(pattern) in raised.value.found
    assert raised.value.why == why


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "layers.*",
        "*mlp*gelu*",
        "layers.1[01].*",
        "*softmax#0",
        "act::nothing*",
        "layers.?.mlp",
        "*input:0",
        "*::a.b",
    ],
)
def test_a_pattern_that_a_value_may_match_passes_without_a_trace(pattern: str) -> None:
    refuse_unknown_modules([Override(pattern, Decision.KEEP)], MODULES, OPS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("layers.0::input:0=recompute", "cannot be recomputed"),
        ("layers.0.*gelu*=compress:fp8", "cannot be held in it"),
        ("layers.3.*gelu*=offload", "cannot be held in it"),
    ],
)
def test_a_demand_that_a_value_cannot_meet_says_why_and_what_it_can(text: str, why: str) -> None:
    with pytest.raises(InvalidStrategy) as raised:
        pinned_index(text)
    assert why in raised.value.why
    assert "choose one of: keep, " in raised.value.next
    assert "compress:int8" in raised.value.next
    assert "=keep'" in raised.value.next


def test_what_several_regions_save_takes_no_other_form() -> None:
    step = StepBuilder()
    x, mask = step.op("source", size=10), step.op("mask", size=10)
    for number in range(2):
        with step.region(f"blocks.{number}", x) as region:
            x = step.op("mul", x, mask, size=10, saves=(mask, OUT))
            region.outputs = (x,)
    step.op("loss", x, size=1)
    trace, costs = step.finish()
    forms = forms_for(trace, {f"input:{n}": [compressed("bits", 1)] for n in range(3)})
    with pytest.raises(InvalidStrategy) as raised:
        pin_values(StepIndex(trace, costs, forms), [parse_override("blocks.0::input:*=compress")])
    assert raised.value.why == "other regions save the same memory"


@pytest.mark.parametrize(
    ("override", "decision"),
    [
        ("*gelu*=keep", (Decision.KEEP, "")),
        ("*gelu*=recompute", (Decision.RECOMPUTE, "")),
        ("*gelu*=compress:int4", (Decision.COMPRESS, "int4")),
    ],
)
@pytest.mark.parametrize("share", [0.1, 0.6, 1.5])
def test_auto_plans_around_overrides_at_every_budget(
    override: str, decision: tuple[Decision, str], share: float
) -> None:
    made = planner(override)
    low, high = made.floor.peak_bytes, made.loosest.peak_bytes
    plan = solve(made, budget_bytes=int(low + share * (high - low)))
    assert plan.status.is_usable
    assert decisions(plan, "gelu") == [decision] * 4
    reasons = {d.reason for region in plan.regions for d in region.decisions if "gelu" in d.value}
    assert reasons == {"set by your override"}
    assert plan.lower_bound_seconds <= plan.predicted_seconds


@pytest.mark.parametrize("strategy", ["none", "full", "int8", "every:2", "hybrid:2,2"])
def test_named_strategies_keep_to_overrides(strategy: str) -> None:
    made = planner("*gelu*=compress:zeros").heedless_of_error()
    plan = solve(made, budget_bytes=None, strategy=strategy)
    assert decisions(plan, "gelu") == [(Decision.COMPRESS, "zeros")] * 4


def test_an_input_that_an_override_decides_about_stays_at_its_boundary() -> None:
    made = planner("layers.1::input:0=compress:zeros")
    plan = solve(made, budget_bytes=None, strategy="every:4")
    assert [region.is_boundary_dropped for region in plan.regions] == [False, False, True, True]
    assert decisions(plan, "input:0")[1] == (Decision.COMPRESS, "zeros")
    linked = [d.reason for d in plan.regions[2].decisions if d.value == "input:0"]
    assert linked == ["not held: the region before recomputes it"]


@pytest.mark.parametrize("share", some([0.0, 0.5], 1))
@pytest.mark.parametrize(("wish", "decision"), [("keep", Decision.KEEP), ("recompute", Decision.RECOMPUTE)])
@pytest.mark.parametrize("region", [0, 1])
def test_an_override_of_one_block_holds_for_that_block_though_others_are_alike(
    region: int, wish: str, decision: Decision, share: float
) -> None:
    made = planner(f"layers.{region}.*gelu*={wish}")
    low, high = made.floor.peak_bytes, made.loosest.peak_bytes
    plan = solve(made, budget_bytes=int(low + share * (high - low)))
    assert decisions(plan, "mlp.act::gelu#13")[region] == (decision, "")


@pytest.mark.parametrize(
    ("override", "limits", "found", "why"),
    [
        # 0.02 · 0.08 in each of four blocks
        ("*gelu*=compress:int4", Limits(0.001**2), "expected gradient error of 0.0032", "0.001"),
        ("layers.[012].*gelu*=offload", Limits(0.0, 4096), "would offload 12.0 KiB", "4.0 KiB"),
    ],
)
def test_overrides_beyond_max_error_or_the_host_budget_are_refused_with_both_amounts(
    override: str, limits: Limits, found: str, why: str
) -> None:
    with pytest.raises(InvalidStrategy) as raised:
        planner(override, limits=limits)
    assert found in raised.value.found
    assert why in raised.value.why


def test_limits_that_become_too_narrow_for_overrides_are_told() -> None:
    made = planner("*gelu*=compress:int4")
    with pytest.raises(InvalidStrategy):
        made.relimited(Limits(0.001**2))


def test_a_strategy_may_not_make_a_mask_of_what_an_override_makes_lossy() -> None:
    step = StepBuilder()
    x = step.op("source", size=10)
    with step.region("block", x) as region:
        a = step.op("scores", x, size=100, saves=(x, OUT))
        mask = step.op("compare", a, size=100, saves=(OUT,))
        region.outputs = (step.op("mul", a, mask, size=10),)
    step.op("loss", a, size=1)
    trace, costs = step.finish()
    forms = forms_for(trace, {"::scores#0": [compressed("int8", 50, noise=0.01)]})
    made = Planner(
        StepIndex(trace, costs, forms), limits=Limits(0.5), overrides=[parse_override("*scores*=compress:int8")]
    )
    free = solve(made, budget_bytes=None)
    assert all(d.decision is not Decision.RECOMPUTE for d in free.regions[0].decisions)
    with pytest.raises(InvalidStrategy) as raised:
        solve(made, budget_bytes=None, strategy="full")
    assert "exact value" in raised.value.found
    plan = solve(made, budget_bytes=None, strategy="full", raise_below_floor=False)
    assert not plan.status.is_usable
    assert any("exact value" in note for note in plan.notes)
