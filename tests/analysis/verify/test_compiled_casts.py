"""What verify says where a compiled plan computes in 16 bits: kernels round elsewhere, and a wrong gradient is still found."""

from __future__ import annotations

import shutil
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan, RegionPlan
from plimsoll.artifacts.receipt import Receipt, ReceiptVerdict
from plimsoll.engine.compiled.partitioner import PlannedPartitioner

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"),
]


class Gated(nn.Module):
    """Its default partition makes tanh and sigmoid again in backward, in 32 bits; a plan may save them, in 16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        self.gate = nn.Sequential(nn.Linear(32, 32), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.body(self.norm(x)) * self.gate(x)
        return y


class Wrong(PlannedPartitioner):
    """Makes the gradient of one product a hundredth too large."""

    def uuid(self) -> str:
        return uuid4().hex  # not from torch's caches: None is a key like another

    def finish(self, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, **options: Any) -> None:
        product = next(node for node in backward.graph.nodes if node.target is torch.ops.aten.mm.default)
        with backward.graph.inserting_after(product):
            scaled = backward.graph.call_function(torch.ops.aten.mul.Tensor, (product, 1.01))
        scaled.meta.update(product.meta)
        product.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        super().finish(forward, backward, **options)


def _verified(**options: bool) -> Receipt:
    """The receipt of a plan that makes one cast weight again and saves the rest, as autocast to bfloat16 has it."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(Gated(), Gated()), torch.randn(512, 32)
    for block in model:
        block.compile(dynamic=False, options=dict(options))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        full = plimsoll.plan(model, batch, strategy="full", loss=torch.sum)
        return plimsoll.verify(model, batch, _keeping(full), loss=torch.sum, steps=1)


def _keeping(plan: Plan) -> Plan:
    regions = tuple(msgspec.structs.replace(region, decisions=_decided(region)) for region in plan.regions)
    return msgspec.structs.replace(plan, regions=regions, predicted_peak_bytes=2 * plan.baseline_peak_bytes)


def _decided(region: RegionPlan) -> tuple[Any, ...]:
    return tuple(
        each if each.value == "body.0:convert_element_type#3" else msgspec.structs.replace(each, decision=Decision.KEEP)
        for each in region.decisions
    )


def test_a_plan_may_round_elsewhere_and_differs_by_nothing_else() -> None:
    receipt = _verified()
    assert receipt.verdict is ReceiptVerdict.WITHIN_ROUNDING
    assert receipt.gradient_error is not None
    assert torch.finfo(torch.float32).eps ** 0.5 < receipt.gradient_error <= receipt.rounding_tolerance < 0.01
    assert "equal bit for bit: they differ only because kernels round at other places" in receipt.notes[-1]


def test_a_wrong_gradient_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll.engine.compiled.units.PlannedPartitioner", Wrong)
    receipt = _verified()
    assert receipt.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert not any("kernels round" in note for note in receipt.notes)


def test_where_the_user_has_casts_kept_a_plan_changes_no_bit() -> None:
    assert _verified(emulate_precision_casts=True).verdict is ReceiptVerdict.VERIFIED
