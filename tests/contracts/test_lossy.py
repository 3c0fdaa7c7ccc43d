"""Compressed training through the public interface: a plan keeps to the error that it is allowed, and to its budget."""

from __future__ import annotations

import pytest
import torch

import plimsoll
import steps
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt, ReceiptVerdict
from plimsoll.engine.offload.open import default_link_name
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.recorder.calling import split_batch

pytestmark = pytest.mark.long

MODELS = {
    "llama": steps.llama,
    "gpt2": steps.gpt2,
    "vit": steps.vit,
    "stack": lambda scale: steps.stack(rows=512 * scale, width=32 * scale),
}


def planned(name: str, share: float, device: torch.device, **settings: object) -> tuple[Plan, Receipt]:
    """A plan for a share of the unmanaged peak, and what verification says about it on a model of its own."""

    def build() -> steps.Step:
        return steps.on(device, MODELS[name](1 if device.type == "cpu" else 8))

    model, batch, loss = build()
    budget = int(share * TrainingStep(model, *split_batch(batch), loss=loss).measure_peak().peak_bytes)
    model, batch, loss = build()
    plan = plimsoll.plan(model, batch, budget, loss=loss, **settings)
    model, batch, loss = build()
    return plan, plimsoll.verify(model, batch, plan, loss=loss, steps=2)


def forms(plan: Plan) -> set[str]:
    return {d.form for region in plan.regions for d in region.decisions if d.decision is Decision.COMPRESS}


def assert_kept(plan: Plan, receipt: Receipt, max_error: float) -> None:
    """The receipt's verdict is the best that the plan can have."""
    assert receipt.verdict is (ReceiptVerdict.VERIFIED if plan.is_lossless else ReceiptVerdict.WITHIN_ERROR), receipt
    assert receipt.gradient_error <= max_error
    assert receipt.measured_peak_bytes <= plan.budget_bytes < receipt.measured_baseline_peak_bytes
    assert receipt.measured_recording_peak_bytes <= plan.budget_bytes
    assert receipt.baseline_losses == receipt.plan_losses
    assert not any("could not" in region.reason for region in receipt.regions)


@pytest.mark.parametrize(
    ("name", "share", "max_error"), [("llama", 0.8, 0.05), ("stack", 0.8, 0.01), ("vit", 0.9, 0.001)]
)
def test_a_plan_that_may_only_compress_keeps_to_its_error_and_its_budget(name, share, max_error, device):
    plan, receipt = planned(name, share, device, allow=("compress",), max_error=max_error)
    assert not plan.is_lossless
    assert_kept(plan, receipt, max_error)
    assert plan.measured_error <= max_error
    # The step is deterministic, so what was measured before the plan was returned is what training will have.
    assert receipt.gradient_error == pytest.approx(plan.measured_error)
    assert 1 / 4 < plan.predicted_error / receipt.gradient_error < 4


def test_compression_without_an_allowed_error_changes_no_bit(device):
    plan, receipt = planned("gpt2", 0.96, device, allow=("compress",), max_error=0)
    assert plan.is_lossless
    assert forms(plan)
    assert_kept(plan, receipt, 0.0)
    assert receipt.is_bit_equal


def test_all_forms_beside_recomputation_keep_to_the_error_and_the_budget(device):
    settings = {"allow": ("recompute", "compress", "offload"), "max_error": "1%"}
    overrides = ("blocks.0*gelu*=offload", "blocks.1*up*=compress:bf16", "blocks.2*norm*=recompute")
    plan, receipt = planned("stack", 0.8, device, overrides=overrides, **settings)
    assert_kept(plan, receipt, 0.01)
    decided = {d.decision for region in plan.regions for d in region.decisions}
    assert decided >= {Decision.RECOMPUTE, Decision.COMPRESS, Decision.OFFLOAD}
    assert "bf16" in forms(plan)
    assert plan.link == default_link_name(device)
