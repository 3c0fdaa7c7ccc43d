"""Of several plans the right one is taken, and of every other one it is said why it lost."""

from __future__ import annotations

import dataclasses

import pytest

from advice_samples import make_advice
from plimsoll.analysis.advise.candidates import find_knee
from plimsoll.analysis.advise.choosing import Made, Wish, choose, describe, recommend
from plimsoll.artifacts.advice import Bottleneck, CompilerCoverage, Kind
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import FrontierPoint, RegionPlan, ValueDecision
from plimsoll.units import MIB
from samples import make_plan, make_region

BOTTLENECK = Bottleneck(
    part="activations", peak_bytes=100 * MIB, floor_bytes=40 * MIB, moment="", parts=(), summary="activations"
)


def region(decision: Decision, form: str = "", *, is_lossy: bool = False) -> RegionPlan:
    value = ValueDecision(value="attn.out", decision=decision, bytes=MIB, form=form, is_lossy=is_lossy)
    return RegionPlan(name="block", call=0, kind="block", decisions=(value,), retained_bytes=0, replay_seconds=0.0)


def made(name: str, mib: float, overhead: float, **changes: object) -> Made:
    """A plan by its peak and its overhead; recomputes in a layer of its own unless ``regions`` says otherwise."""
    plan = make_plan(
        strategy=name if name in ("none", "full") else "auto",
        predicted_peak_bytes=int(mib * MIB),
        predicted_seconds=0.1 * (1 + overhead),
        **{"regions": (make_region(int(mib)),), **changes},
    )
    return Made(name=name, plan=plan)


NONE = made("none", 100, 0.0, regions=(make_region(0, drops=()),))
FULL = made("full", 50, 0.24)
AUTO = made("auto", 60, 0.03)


def wish(mib: float = 64, *, is_budget: bool = True, max_error: float = 0.0) -> Wish:
    return Wish(
        limit_bytes=int(mib * MIB),
        limit_text=f"{mib:g}MiB",
        is_budget=is_budget,
        max_error=max_error,
        target="llama-tiny",
    )


def outcome(plans: list[Made], what: Wish):
    chosen = choose(plans, what)
    by_name = {candidate.name: candidate for candidate in describe(plans, chosen, what)}
    return by_name, recommend(plans, chosen, BOTTLENECK, what)


def test_the_fastest_plan_within_the_budget_is_taken_and_the_others_say_why_not():
    found, advice = outcome([NONE, FULL, AUTO], wish())
    assert found["auto"].is_chosen
    assert found["none"].reason == "over the budget by 36.0 MiB"
    assert found["full"].reason == "slower by 21.0% of the step"
    assert advice.kind is Kind.MANAGE
    assert advice.command == "plimsoll plan llama-tiny --budget 64MiB -o plan.json"
    assert any("full" in reason and "+24.0%" in reason for reason in advice.reasons)


def test_a_step_that_fits_is_left_alone():
    found, advice = outcome([NONE, FULL], wish(128))
    assert found["none"].is_chosen
    assert advice.kind is Kind.DO_NOTHING
    assert advice.command == ""
    assert "28.0 MiB" in advice.reasons[0]


def test_nothing_that_fits_is_said_with_the_floor():
    low = made("auto", 40, 0.3, status=Status.INFEASIBLE)
    found, advice = outcome([NONE, low], wish(20))
    assert not any(candidate.is_chosen for candidate in found.values())
    assert advice.kind is Kind.DOES_NOT_FIT
    assert "40.0 MiB" in advice.headline


def test_of_plans_as_fast_as_each_other_the_simplest_is_taken():
    packed = made("packed", 60, 0.0295, regions=(region(Decision.COMPRESS, "bits"),))
    sent = made("sent", 60, 0.029, regions=(region(Decision.OFFLOAD, "disk"),))
    found, _ = outcome([NONE, sent, packed, AUTO], wish())
    assert found["auto"].is_chosen
    assert found["packed"].reason == "no faster, and it does more to the values"
    faster = made("sent", 60, 0.01, regions=(region(Decision.OFFLOAD, "disk"),))
    assert outcome([NONE, faster, AUTO], wish())[0]["sent"].is_chosen


@pytest.mark.parametrize(("max_error", "is_chosen"), [(0.0, False), (0.01, False), (0.02, True)])
def test_a_lossy_plan_counts_only_within_the_tolerance(max_error: float, is_chosen: bool):
    lossy = made("int8", 60, 0.0, regions=(region(Decision.COMPRESS, "int8", is_lossy=True),), predicted_error=0.015)
    found, advice = outcome([NONE, AUTO, lossy], wish(max_error=max_error))
    assert found["int8"].is_chosen is is_chosen
    assert ("lossy" in " ".join(advice.reasons)) is is_chosen
    if not is_chosen:
        assert "1.50% is expected" in found["int8"].reason


def test_the_same_plan_under_another_name_says_what_was_refused():
    twin = Made(name="auto (compress)", plan=AUTO.plan, refused="no value takes another form")
    found, _ = outcome([NONE, AUTO, twin], wish())
    assert found["auto (compress)"].reason == "the same plan: no value takes another form"


def test_a_twin_without_a_reason_ends_without_a_colon():
    packed = made("packed", 60, 0.01, regions=(region(Decision.COMPRESS, "bits"),))
    twin = Made(name="packed and sent", plan=packed.plan)
    found, _ = outcome([NONE, packed, twin], wish())
    assert found["packed and sent"].reason == "the same plan"


def test_the_command_plans_under_the_same_limits():
    limited = dataclasses.replace(wish(), options=("--regions 'layers.*'",))
    _, advice = outcome([NONE, AUTO], limited)
    assert advice.command == "plimsoll plan llama-tiny --budget 64MiB --regions 'layers.*' -o plan.json"


def test_the_command_quotes_texts_with_spaces_and_limits_offloading_only_where_the_plan_may_offload():
    spaced = dataclasses.replace(wish(), limit_text="64 MiB", offload_options=("--host-budget '1 GiB'", "--link disk"))
    _, advice = outcome([NONE, AUTO], spaced)
    assert advice.command == "plimsoll plan llama-tiny --budget '64 MiB' -o plan.json"
    sending = made("auto (offload)", 60, 0.03, allow=("recompute", "offload"))
    _, advice = outcome([NONE, sending], spaced)
    assert advice.command.endswith("--allow recompute,offload --host-budget '1 GiB' --link disk -o plan.json")


def test_without_a_budget_the_knee_decides_and_doing_nothing_comes_first():
    lower, worse = made("lower", 45, 0.2), made("worse", 70, 0.3)
    found, advice = outcome([NONE, lower, worse, AUTO], wish(64, is_budget=False))
    assert found["auto"].is_chosen
    assert found["none"].reason == "if the step fits"
    assert found["lower"].reason == "frees 15.0 MiB more for 17.0% of the step"
    assert found["worse"].reason == "slower by 27.0% of the step"
    assert advice.headline.startswith("if the step fits, do nothing")


def test_a_peak_that_no_plan_reaches_sends_people_elsewhere():
    bottleneck = Bottleneck(
        part="state", peak_bytes=100, floor_bytes=97, moment="", parts=(), summary="state", remedies=("shard it",)
    )
    advice = recommend([NONE], NONE, bottleneck, wish(100, is_budget=False))
    assert advice.kind is Kind.LOOK_ELSEWHERE
    assert "3%" in advice.headline
    assert advice.reasons == ("state", "shard it")


@pytest.mark.parametrize(
    ("frontier", "knee_bytes"),
    [
        ({10: 2.0, 20: 1.2, 30: 1.1, 40: 1.0}, 20),
        ({10: 1.005, 20: 1.001, 40: 1.0}, 10),  # what costs nothing is taken before any knee
        ({10: 1.0}, None),
    ],
)
def test_the_knee_is_where_memory_gets_dear(frontier: dict[int, float], knee_bytes: int | None):
    points = [FrontierPoint(peak_bytes=size, step_seconds=seconds) for size, seconds in frontier.items()]
    knee = find_knee(points, 1.0)
    assert (knee and knee.peak_bytes) == knee_bytes


def test_the_chosen_candidate_is_found_and_shares_of_nothing_are_zero():
    chosen = make_advice().chosen
    assert chosen.name == "auto"
    assert make_advice(candidates=()).chosen is None
    empty = CompilerCoverage(is_measured=True)
    assert (empty.op_share, empty.time_share) == (0.0, 0.0)
