"""A plan made without the device, then held against it: what is off is said, and the plan is solved again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import plimsoll
import zoo
from long_cases import some
from plimsoll.analysis.verify.revising import Reviser, needs_confirmation
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.costs import CostSource
from plimsoll.artifacts.decision import Engine, Status
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import silent
from plimsoll.artifacts.receipt import Claim, Confirmation, Receipt, ReceiptVerdict
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.trace import Category
from plimsoll.errors import PlanMismatch
from plimsoll.planning.choice import Choice
from plimsoll.planning.strategies import choose_full, choose_none
from plimsoll.session.agreement import Agreement
from plimsoll.session.task import TrainingTask
from plimsoll.ui.cli.app import app
from plimsoll.ui.terminal import render_artifact
from plimsoll.units import KIB, MIB
from samples import make_receipt
from searchless import plan_without_search
from steps import Stack, Step, gpt2, llama, mean_square, stack, vit
from unchanged import unchanged


def bert() -> Step:
    return *zoo.sample("bert"), None


def elsewhere(step: Step, choose: Callable[..., tuple[Choice, ...]] = choose_full, **how: Any) -> Plan:
    """A plan made as if the CPU were not here, without any search."""
    return plan_without_search(step, choose, **{"device_profile": "laptop-CPU"} | how)


@pytest.mark.parametrize("make", some([llama, gpt2, vit, bert], 2))
def test_a_plan_made_with_fake_tensors_applies_on_the_real_cpu_unchanged(make: Callable[[], Step]):
    step = make()
    model, batch, loss = step
    made = elsewhere(step)
    planned_bytes = sum(d.bytes for region in made.regions for d in region.decisions if d.value in region.dropped)
    with plimsoll.apply(model, made) as handle:
        for _ in range(2):
            output = model(**batch)
            (output.loss if loss is None else loss(output)).backward()
        outcomes = handle.outcomes()
    assert planned_bytes > 0
    assert {outcome.engine for outcome in outcomes} == {Engine.RECIPE}
    assert sum(outcome.dropped_bytes for outcome in outcomes) == planned_bytes


@pytest.fixture(scope="module")
def wrong() -> tuple[Plan, Receipt]:
    """A plan whose seconds are a thousand times too small and whose peak is above its budget, and its receipt."""
    torch.manual_seed(0)
    step = Stack(2), torch.randn(512, 32), mean_square
    model, batch, loss = step
    unmanaged, lowest = elsewhere(step, choose_none), elsewhere(step)
    budget_bytes = (unmanaged.predicted_peak_bytes + lowest.predicted_peak_bytes) // 2
    made = msgspec.structs.replace(
        unmanaged,
        strategy="auto",
        budget_bytes=budget_bytes,
        predicted_peak_bytes=budget_bytes,
        predicted_seconds=unmanaged.predicted_seconds / 1000,
    )
    with unchanged(model):
        receipt = plimsoll.verify(model, batch, made, loss=loss, steps=1)
    return made, receipt


def test_wrong_seconds_and_a_wrong_peak_are_named_with_what_was_measured(wrong):
    made, receipt = wrong
    found = receipt.confirmation
    assert receipt.verdict is ReceiptVerdict.OVER_BUDGET
    assert receipt.exit_code == 1
    assert found is not None
    assert found.is_time_off
    assert found.is_over_budget
    assert found.given.predicted_seconds == made.predicted_seconds
    assert found.given.measured_seconds == receipt.measured_seconds
    assert found.given.predicted_peak_bytes == made.predicted_peak_bytes
    assert found.given.measured_peak_bytes > made.budget_bytes


def test_the_plan_is_solved_again_with_measured_costs_and_verified(wrong):
    made, receipt = wrong
    found, revised = receipt.confirmation, receipt.revised_plan
    assert revised is not None
    assert revised.cost_source is CostSource.MEASURED
    assert revised.budget_bytes == made.budget_bytes
    assert found.revised is not None
    assert found.revised.measured_peak_bytes <= made.budget_bytes
    assert abs(found.revised.seconds_error) < abs(found.given.seconds_error)
    assert found.revised_verdict == ReceiptVerdict.VERIFIED
    assert receipt.is_bit_equal


def test_a_receipt_with_a_revised_plan_comes_back_from_json_and_shows_both_plans(wrong):
    receipt = wrong[1]
    assert from_json(to_json(receipt)) == receipt
    text = str(receipt)
    for part in (
        "planned for",
        "above the budget",
        "given plan",
        "revised plan",
        "10% of the time",
        "forward and backward predicted",
    ):
        assert part in text
    render_artifact(receipt)


def test_where_nothing_fits_on_the_device_the_receipt_says_so_and_has_no_new_plan():
    step = stack()
    model, batch, loss = step
    made = msgspec.structs.replace(elsewhere(step), strategy="full", budget_bytes=64 * KIB)
    task = TrainingTask(model=model, batch=batch, loss=loss)
    reviser = Reviser(task, task.step(), Agreement(None, "verify"), silent, lambda revised: make_receipt())
    receipt = reviser.confirm(made, make_receipt())
    assert receipt.confirmation is not None
    assert "64.0 KiB" in receipt.confirmation.obstacle
    assert receipt.revised_plan is None
    counted = msgspec.structs.replace(made, classes={Category.OPTIMIZER_STATE.value: 10 * KIB})
    receipt = reviser.confirm(counted, make_receipt())
    assert receipt.confirmation is not None
    assert "optimizer=" in receipt.confirmation.obstacle
    assert receipt.revised_plan is None


def test_a_plan_made_on_the_device_needs_no_confirmation(wrong):
    made, receipt = wrong
    assert needs_confirmation(made)
    assert not needs_confirmation(receipt.revised_plan)


@pytest.mark.parametrize("verb", [plimsoll.verify, plimsoll.probe, plimsoll.diagnose])
def test_a_plan_for_a_gpus_kernels_is_refused_on_a_cpu(verb: Callable[..., object]):
    model, batch, loss = stack()
    made = elsewhere((model, batch, loss), device_profile="H100-SXM")
    with pytest.raises(PlanMismatch, match="H100-SXM") as caught:
        verb(model, batch, made, loss=loss)
    assert "save other tensors" in caught.value.why


@pytest.mark.parametrize(
    ("peak_bytes", "seconds", "budget_bytes", "is_confirmed"),
    [
        (100 * MIB, 1.0, 100 * MIB, True),
        (104 * MIB, 1.09, None, True),
        (106 * MIB, 1.0, None, False),
        (100 * MIB, 1.12, None, False),
        (100 * MIB, 1.0, 100 * MIB - 1, False),
    ],
)
def test_a_plan_is_confirmed_within_the_stated_tolerances(peak_bytes, seconds, budget_bytes, is_confirmed):
    claim = Claim(
        predicted_peak_bytes=100 * MIB, predicted_seconds=1.0, measured_peak_bytes=peak_bytes, measured_seconds=seconds
    )
    found = Confirmation(cost_device="H100-SXM", budget_bytes=budget_bytes, given=claim)
    assert found.is_confirmed is is_confirmed
    text = str(make_receipt(confirmation=found))
    assert ("confirmed:" in text) is is_confirmed
    assert "revised plan" not in text


def test_the_revised_plan_is_saved_to_a_new_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    run = CliRunner()
    made = elsewhere(stack())
    made.save("plan.json")
    arguments = ["verify", "steps:stack", "--plan", "plan.json", "--optimizer", "none", "--steps", "1"]
    made.save("other.json")
    for name, words in (("plan.json", "would be overwritten"), ("other.json", "already exists")):
        refused = run.invoke(app, [*arguments, "--revised-plan", name])
        assert refused.exit_code == 2
        assert words in refused.output
    saved = run.invoke(app, [*arguments, "--revised-plan", "new.json"])
    assert saved.exit_code == 0, saved.output
    assert "revised plan saved to new.json" in saved.output
    revised = plimsoll.load("new.json")
    assert revised.cost_source is CostSource.MEASURED
    assert revised.status in (Status.OPTIMAL, Status.FEASIBLE)
    again = run.invoke(app, ["verify", "steps:stack", "--plan", "new.json", "--revised-plan", "newer.json"])
    assert again.exit_code == 2
    assert "no effect" in again.output


def test_a_receipt_of_an_older_schema_is_read():
    fields = json.loads(to_json(make_receipt())) | {"schema_version": 2}
    del fields["confirmation"], fields["revised_plan"]
    found = from_json(json.dumps(fields))
    assert isinstance(found, Receipt)
    assert found.confirmation is None
