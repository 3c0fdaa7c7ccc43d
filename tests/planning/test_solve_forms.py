"""Plans that may hold values in other forms: within their limits, with reasons, and told what they declined."""

from __future__ import annotations

import functools
import math

import msgspec
import pytest

from planning.builders import OUT, StepBuilder, in_regions, simulate, transformer
from planning.form_builders import block_forms, compressed, forms_for, offloaded
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.forms import Forms, LinkCost
from plimsoll.artifacts.plan import Plan, ValueDecision
from plimsoll.errors import BudgetBelowFloor, InvalidStrategy
from plimsoll.planning.choice import Limits
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

TRACE, COSTS = transformer(4, width=1024).finish()
FORMS = block_forms(TRACE, COSTS, bytes_per_second=3000.0)
LIMITS = Limits(0.001**2)


def without(forms: Forms, decision: Decision) -> Forms:
    """The same, less one decision."""
    regions = []
    for region in forms.regions:
        values = tuple(
            msgspec.structs.replace(v, forms=tuple(f for f in v.forms if f.decision is not decision))
            for v in region.values
        )
        regions.append(msgspec.structs.replace(region, values=values))
    return msgspec.structs.replace(forms, regions=tuple(regions))


@functools.cache
def planner(max_error: float = 0.001, host_budget_bytes: int | None = None, *, offers: str = "all") -> Planner:
    forms = {"all": FORMS, "compress": without(FORMS, Decision.OFFLOAD), "offload": without(FORMS, Decision.COMPRESS)}
    limits = Limits(max_error**2, host_budget_bytes)
    return Planner(StepIndex(TRACE, COSTS, forms.get(offers)), limits=limits)


def plan_at(share: float, made: Planner) -> Plan:
    low, high = made.floor.peak_bytes, made.loosest.peak_bytes
    return solve(made, budget_bytes=int(low + share * (high - low)))


def values(plan: Plan, decision: Decision) -> list[ValueDecision]:
    return [d for region in plan.regions for d in region.decisions if d.decision is decision]


@pytest.mark.parametrize("offers", ["all", "compress", "offload", "none"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_plans_keep_to_budget_error_and_host_in_the_simulator(offers: str, share: float) -> None:
    made = planner(0.001, 60_000, offers=offers)
    plan = plan_at(share, made)
    simulation = simulate(TRACE, COSTS, plan.regions, made.index.forms)
    assert plan.status.is_usable
    assert plan.budget_bytes is not None
    assert simulation.peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
    assert simulation.seconds == pytest.approx(plan.predicted_seconds)
    assert math.sqrt(simulation.squared_error) == pytest.approx(plan.predicted_error)
    assert plan.predicted_error <= 0.001 * (1 + 1e-6)
    assert simulation.link_bytes == plan.offloaded_bytes <= 60_000
    assert (plan.link == "host") == (plan.offloaded_bytes > 0)
    assert plan.lower_bound_seconds <= plan.predicted_seconds
    assert plan.gap_of_step < 0.01


def test_what_is_allowed_lowers_the_floor_and_the_seconds() -> None:
    plain, rich = planner(0.0, offers="none"), planner()
    assert rich.floor.peak_bytes <= plain.floor.peak_bytes * 1.002
    for share in (0.1, 0.4, 0.7):
        budget_bytes = int(plain.floor.peak_bytes + share * (plain.loosest.peak_bytes - plain.floor.peak_bytes))
        seconds = [solve(made, budget_bytes=budget_bytes).predicted_seconds for made in (plain, rich)]
        assert seconds[1] < seconds[0]


@pytest.mark.long
def test_more_error_more_host_memory_and_a_faster_link_never_cost_time() -> None:
    budget_bytes = (planner().floor.peak_bytes + planner().loosest.peak_bytes) // 2

    def seconds(made: Planner) -> float:
        return solve(made, budget_bytes=budget_bytes).predicted_seconds

    tolerance = 1.002
    by_error = [seconds(planner(error)) for error in (0.0, 0.0003, 0.003)]
    assert by_error[2] <= by_error[1] * tolerance
    assert by_error[1] <= by_error[0] * tolerance
    by_host = [seconds(planner(0.0, host, offers="offload")) for host in (0, 20_000, None)]
    assert by_host[2] <= by_host[1] * tolerance
    assert by_host[1] <= by_host[0] * tolerance
    slow = without(block_forms(TRACE, COSTS, bytes_per_second=300.0), Decision.COMPRESS)
    assert by_host[2] <= seconds(Planner(StepIndex(TRACE, COSTS, slow))) * tolerance


def test_a_host_budget_of_nothing_sends_nothing() -> None:
    plan = plan_at(0.3, planner(0.001, 0))
    assert plan.status.is_usable
    assert not values(plan, Decision.OFFLOAD)
    assert plan.offloaded_bytes == 0


def test_without_an_error_budget_nothing_lossy_is_chosen() -> None:
    plan = plan_at(0.1, planner(0.0))
    assert plan.is_lossless
    assert plan.predicted_error == 0.0
    assert {d.form for d in values(plan, Decision.COMPRESS)} <= {"zeros", "bits"}


def test_packed_values_have_a_reason_in_terms_of_the_price_and_of_the_error() -> None:
    plan = plan_at(0.1, planner(0.003, offers="compress"))
    packed = values(plan, Decision.COMPRESS)
    assert any(d.is_lossy for d in packed)
    for decision in packed:
        assert decision.reason.startswith(f"{decision.form} costs ")
        assert "/MiB, memory is worth " in decision.reason
        assert ("gradient error" in decision.reason) == decision.is_lossy
        assert 0 <= decision.held_bytes < decision.bytes or not decision.bytes
    assert sum(d.error**2 for d in packed) == pytest.approx(plan.predicted_error**2)


def test_seconds_of_values_and_regions_add_up_to_the_overhead_but_for_waiting() -> None:
    plan = plan_at(0.2, planner(offers="compress"))
    of_regions = sum(region.replay_seconds for region in plan.regions)
    of_values = sum(d.seconds for region in plan.regions for d in region.decisions)
    assert of_regions == pytest.approx(plan.predicted_seconds - plan.baseline_seconds)
    assert of_values == pytest.approx(of_regions)


def test_where_everything_fits_the_plan_says_that_it_declined() -> None:
    plan = solve(planner(), budget_bytes=planner().loosest.peak_bytes)
    assert plan.status is Status.OPTIMAL
    assert all(region.is_untouched for region in plan.regions)
    assert [note for note in plan.notes if "although" in note] == [
        "Nothing is compressed although it was allowed: everything fits without it.",
        "Nothing is offloaded although it was allowed: everything fits without it.",
    ]


def test_a_link_that_only_costs_time_is_declined_with_a_note() -> None:
    slow = block_forms(TRACE, COSTS, bytes_per_second=0.01)
    plan = plan_at(0.5, Planner(StepIndex(TRACE, COSTS, without(slow, Decision.COMPRESS))))
    assert not values(plan, Decision.OFFLOAD)
    assert plan.notes == (
        "Nothing is offloaded although it was allowed: other decisions reach the budget in less time.",
    )


def test_a_named_strategy_declines_nothing() -> None:
    plan = solve(planner(), budget_bytes=None, strategy="full")
    assert not any("although" in note for note in plan.notes)


@pytest.mark.long
def test_other_limits_give_the_plans_of_a_planner_made_for_them() -> None:
    wide = planner(0.003, 60_000)
    for limits in (Limits(0.001**2, 60_000), Limits(0.004**2, None)):
        fresh = planner(math.sqrt(limits.squared_error), limits.link_bytes)
        again = wide.relimited(limits)
        assert again.floor.peak_bytes == pytest.approx(fresh.floor.peak_bytes, rel=5e-3)
        for share in (0.1, 0.5):
            one, other = plan_at(share, again), plan_at(share, fresh)
            assert one.predicted_seconds == pytest.approx(other.predicted_seconds, rel=2e-3)
            assert limits.allow(one.predicted_error**2, one.offloaded_bytes)


def test_the_host_budget_binds_a_named_strategy_too() -> None:
    made = planner(0.001, 10_000)
    with pytest.raises(InvalidStrategy) as raised:
        solve(made, budget_bytes=None, strategy="offload")
    assert "strategy 'offload' would offload" in raised.value.found
    assert "9.8 KiB" in raised.value.why
    plan = solve(made, budget_bytes=None, strategy="offload", raise_below_floor=False)
    assert plan.status is Status.INFEASIBLE
    assert any("host budget" in note for note in plan.notes)


def test_the_floor_counts_what_other_forms_allow_and_names_its_holders() -> None:
    made = planner()
    with pytest.raises(BudgetBelowFloor) as raised:
        solve(made, budget_bytes=int(made.floor.peak_bytes * 0.99))
    assert str(made.floor.peak_bytes) in raised.value.next


def test_compression_alone_plans_where_recomputing_is_not_allowed() -> None:
    made = Planner(StepIndex(TRACE, COSTS, FORMS, may_recompute=False), limits=LIMITS)
    plan = plan_at(0.3, made)
    assert plan.status.is_usable
    assert not values(plan, Decision.RECOMPUTE)
    assert values(plan, Decision.COMPRESS) or values(plan, Decision.OFFLOAD)


def window_step() -> StepBuilder:
    """Three regions that save 100 bytes each; the compute of each takes 2 s forward and 4 s backward."""
    block = lambda step, x: step.op("down", step.op("up", x, size=100, saves=(OUT,)), size=1)  # noqa: E731
    return in_regions(block, block, block, source_bytes=1, loss_bytes=300)


@pytest.mark.parametrize(("bytes_per_second", "waits"), [(50.0, 0.0), (25.0, 2.0 + 0.0), (10.0, 8.0 + 6.0)])
def test_transfers_cost_what_the_neighbours_compute_does_not_hide(bytes_per_second: float, waits: float) -> None:
    trace, costs = window_step().finish()
    link = LinkCost(name="host", out_bytes_per_second=bytes_per_second, in_bytes_per_second=bytes_per_second)
    offers = forms_for(trace, {"::up#0": [offloaded(100)]}, link=link)
    offers = msgspec.structs.replace(offers, regions=offers.regions[:2])
    made = Planner(StepIndex(trace, costs, offers))
    plan = solve(made, budget_bytes=None, strategy="offload")
    assert len(values(plan, Decision.OFFLOAD)) == 2
    assert plan.predicted_seconds - plan.baseline_seconds == pytest.approx(2 * waits)
    assert plan.offloaded_bytes == 200


@pytest.mark.parametrize(
    ("strategy", "forms"),
    [("int8", {"int8", "bits"}), ("int4", {"int4", "bits"}), ("offload", {"host"}), ("hybrid:2,2", {"int8", "bits"})],
)
def test_strategies_hold_values_in_their_form(strategy: str, forms: set[str]) -> None:
    made = planner().heedless_of_error()
    plan = solve(made, budget_bytes=None, strategy=strategy)
    used = [{d.form for d in region.decisions if d.form} for region in plan.regions]
    expected = {"offload": [forms, forms, forms, set()], "hybrid:2,2": [forms, forms, set(), set()]}
    assert used == expected.get(strategy, [forms] * 4)
    assert [region.is_boundary_dropped for region in plan.regions] == [False] * 3 + [strategy == "hybrid:2,2"]
    assert plan.lower_bound_seconds <= plan.predicted_seconds
    expected_error = simulate(TRACE, COSTS, plan.regions, FORMS).squared_error
    assert plan.predicted_error == pytest.approx(math.sqrt(expected_error))


def test_fp8_keeps_what_has_no_such_form() -> None:
    trace, costs = window_step().finish()
    offers = forms_for(trace, {"::up#0": [compressed("fp8", 50, 0.1, noise=0.02)]})
    made = Planner(StepIndex(trace, costs, offers), limits=Limits(1.0))
    plan = solve(made, budget_bytes=None, strategy="fp8")
    assert [d.form for d in values(plan, Decision.COMPRESS)] == ["fp8"] * 3
    assert plan.predicted_error == pytest.approx(math.sqrt(3) * 0.5 * 0.02)


@pytest.mark.parametrize(
    "strategy", ["hybrid", "hybrid:2", "hybrid:a,b", "hybrid:2,0", "hybrid:-1,2", "int8:1", "offload:host"]
)
def test_what_is_no_strategy_is_refused(strategy: str) -> None:
    with pytest.raises(InvalidStrategy):
        solve(planner(), budget_bytes=None, strategy=strategy)


def test_explanations_name_forms_prices_and_errors() -> None:
    plan = plan_at(0.1, planner(0.003))
    text = plan.explain()
    packed = next(d for d in values(plan, Decision.COMPRESS) if d.is_lossy)
    assert packed.reason in text
    assert "COMPRESS" in text
    assert "nan" not in text
    assert "inf " not in text
