"""The checklist passes on evidence alone, and failure modes are named from what was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from plimsoll.analysis.advise.checklist import StepEvidence, check_all, find_failures
from plimsoll.analysis.advise.choosing import Made
from plimsoll.analysis.advise.memory import find_bottleneck, measure_layers
from plimsoll.artifacts.advice import CheckOutcome
from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.receipt import RegionOutcome
from plimsoll.artifacts.trace import Phase
from plimsoll.artifacts.verdict import Ruling
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask
from samples import make_mismatch, make_receipt
from steps import stack
from ui.pages.page_samples import make_verdict


@pytest.fixture(scope="module")
def evidence() -> StepEvidence:
    model, batch, loss = stack()
    trace, costs = trace_and_cost(TrainingTask(model=model, batch=batch, loss=loss))
    planner = Planner(index := StepIndex(trace, costs))
    none, full = (Made(name=name, plan=solve(planner, budget_bytes=None, strategy=name)) for name in ("none", "full"))
    return StepEvidence(
        index=index,
        bottleneck=find_bottleneck(trace, none.plan),
        layers=measure_layers(trace, costs, none.plan),
        made=(none, full),
        chosen=full,
        receipt=None,
        verdict=None,
        items=48,
        items_name="examples",
        target="pkg:step",
        again="plimsoll advise pkg:step --budget 1GiB",
    )


def checked(evidence: StepEvidence, **changes: object):
    return {item.name: item for item in check_all(dataclasses.replace(evidence, **changes))}


def modes(evidence: StepEvidence, **changes: object):
    return {mode.name: mode for mode in find_failures(dataclasses.replace(evidence, **changes))}


def test_without_a_receipt_only_what_the_trace_shows_passes(evidence: StepEvidence):
    items = checked(evidence)
    passed = {name for name, item in items.items() if item.outcome is CheckOutcome.PASS}
    assert passed == {"activations-by-layer", "parameters-apart", "granularity-chosen", "attention-backward"}
    for name in set(items) - passed:
        assert items[name].outcome is CheckOutcome.NOT_CHECKED
        assert items[name].next.startswith("plimsoll ")
        assert "pkg:step" in items[name].next


CURVE = tuple(1 / (step + 1) for step in range(100))
PASS, FAIL, NOT_CHECKED = CheckOutcome.PASS, CheckOutcome.FAIL, CheckOutcome.NOT_CHECKED
FOUND, NOT_FOUND = CheckOutcome.FOUND, CheckOutcome.NOT_FOUND
KEPT = RegionOutcome(name="blocks.0", call=0, engine=Engine.KEEP, reason="reads a value")
HIGHER = {"measured_peak_bytes": 2 * make_receipt().predicted_peak_bytes, "budget_bytes": None}


@pytest.mark.parametrize(
    ("changes", "name", "outcome", "words"),
    [
        ({}, "recompute-profiled", PASS, "+3.6%"),
        ({}, "determinism-tested", PASS, ""),
        ({}, "throughput", PASS, "421 examples/s"),  # 48 in 0.114 s
        ({}, "loss-curves", NOT_CHECKED, ""),
        ({"is_deterministic": False}, "determinism-tested", FAIL, "use_deterministic_algorithms"),
        ({"baseline_curve": CURVE[:10], "plan_curve": CURVE[:10]}, "loss-curves", NOT_CHECKED, ""),
        ({"baseline_curve": CURVE, "plan_curve": CURVE}, "loss-curves", PASS, ""),
        ({"baseline_curve": CURVE, "plan_curve": (*CURVE[1:], 9.0)}, "loss-curves", FAIL, "LOSSES_DIFFER"),
        ({"plan_losses": (1.25, 9.0)}, "loss-curves", FAIL, "Do not train"),
    ],
)
def test_a_receipt_is_evidence_for_time_determinism_throughput_and_curves_of_many_steps(
    evidence: StepEvidence, changes: dict[str, Any], name: str, outcome: CheckOutcome, words: str
):
    item = checked(evidence, receipt=make_receipt(**changes))[name]
    assert item.outcome is outcome
    assert words in item.evidence + item.next


@pytest.mark.parametrize(
    ("ruling", "outcome"),
    [
        (Ruling.GOOD, PASS),
        (Ruling.NET_LOSS, FAIL),
        (Ruling.UNDECIDED, NOT_CHECKED),
        (Ruling.BASELINE_DIVERGED, NOT_CHECKED),
    ],
)
def test_only_a_verdict_that_says_something_about_the_plan_passes_or_fails(
    evidence: StepEvidence, ruling: Ruling, outcome: CheckOutcome
):
    item = checked(evidence, verdict=make_verdict(ruling=ruling))["loss-curves"]
    assert item.outcome is outcome
    assert "strategy" in item.evidence


def test_a_fake_trace_counts_but_does_not_measure(evidence: StepEvidence):
    fake = StepIndex(msgspec.structs.replace(evidence.index.trace, is_fake=True), evidence.index.costs)
    assert checked(evidence, index=fake)["activations-by-layer"].outcome is NOT_CHECKED


@pytest.mark.parametrize(
    ("changes", "name", "outcome", "words"),
    [
        (None, "non-determinism", NOT_CHECKED, ""),
        ({}, "non-determinism", NOT_FOUND, ""),
        ({"gradient_mismatches": (make_mismatch(),)}, "non-determinism", FOUND, "GRADIENTS_DIFFER"),
        ({"measured_seconds": 0.114}, "throughput", NOT_FOUND, ""),
        ({"measured_seconds": 0.2}, "throughput", FOUND, "plimsoll diagnose"),
        (HIGHER, "less-saved", FOUND, "120.0 MiB"),
        ({"regions": (KEPT,)}, "less-saved", FOUND, "blocks.0"),
    ],
)
def test_wrong_gradients_lost_throughput_and_less_saved_than_expected_are_found_in_a_receipt(
    evidence: StepEvidence, changes: dict[str, Any] | None, name: str, outcome: CheckOutcome, words: str
):
    mode = modes(evidence, receipt=None if changes is None else make_receipt(**changes))[name]
    assert mode.outcome is outcome
    assert words in mode.evidence + mode.next
    assert ("plimsoll diagnose" in mode.next) is (name == "throughput" and outcome is FOUND)


def test_bubbles_are_never_claimed_to_be_known(evidence: StepEvidence):
    assert modes(evidence, receipt=make_receipt())["pipeline-bubbles"].outcome is CheckOutcome.NOT_CHECKED


def test_what_a_plan_hides_from_a_debugger_is_counted(evidence: StepEvidence):
    mode = modes(evidence)["debugging"]
    dropped = sum(len(region.dropped) for region in evidence.made[1].plan.regions)
    assert mode.outcome is CheckOutcome.FOUND
    assert str(dropped) in mode.evidence
    assert "--intermediate NAME" in mode.next
    alone = dataclasses.replace(evidence, chosen=evidence.made[0])
    assert modes(alone)["debugging"].outcome is CheckOutcome.NOT_FOUND


def test_parts_of_the_peak_add_up_to_it(evidence: StepEvidence):
    assert sum(part.bytes for part in evidence.bottleneck.parts) == evidence.bottleneck.peak_bytes


def test_layers_save_what_the_unmanaged_plan_holds_and_take_their_ops_time(evidence: StepEvidence):
    assert [layer.name for layer in evidence.layers] == [call.name for call in evidence.index.trace.regions]
    forward = sum(
        evidence.index.costs.ops[op.cost_key].seconds
        for op in evidence.index.trace.ops
        if op.region >= 0 and op.phase is Phase.FORWARD
    )
    assert sum(layer.forward_seconds for layer in evidence.layers) == pytest.approx(forward)
    assert all(layer.saved_bytes > 0 for layer in evidence.layers)
