"""Verification finds every planted fault and names its cause; it raises no alarm on clean models of many kinds."""

from __future__ import annotations

import pytest
import torch._functorch.config

import plimsoll
from contracts.clean_models import CLEAN, Clean
from contracts.harness import kernels_for
from contracts.planted_faults import FAULTS, Planted
from steps import on

pytestmark = pytest.mark.long


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_every_planted_fault_is_found_and_its_cause_named(planted: Planted, device: torch.device):
    model, batch, loss = planted.step(device)
    with torch._functorch.config.patch(activation_memory_budget=planted.budget):
        if planted.raises:
            with pytest.raises(plimsoll.PlimsollError) as caught:
                plimsoll.verify(model, batch, loss=loss, steps=1)
            assert str(planted.cause) in caught.value.why
            return
        receipt = plimsoll.verify(model, batch, loss=loss, context=planted.context, steps=1)
    assert not receipt.verdict.is_pass
    assert receipt.verdict is planted.verdict, str(receipt)
    causes = [fault.cause for fault in receipt.faults]
    assert causes[:1] == ([] if planted.cause is None else [planted.cause]), str(receipt)
    assert receipt.exit_code == 1


@pytest.mark.parametrize("clean", CLEAN, ids=lambda clean: clean.name)
def test_no_alarm_is_raised_on_a_clean_model(clean: Clean, device: torch.device):
    model, batch, loss = on(device, clean.build())
    with kernels_for(clean.architecture), torch._functorch.config.patch(activation_memory_budget=clean.budget):
        plan = None if clean.strategy is None else plimsoll.plan(model, batch, strategy=clean.strategy, loss=loss)
        receipt = plimsoll.verify(model, batch, plan, loss=loss, context=clean.context, steps=1)
    assert receipt.verdict.is_pass, str(receipt)
    assert receipt.faults == ()
    assert receipt.slope is None or not receipt.slope.disagrees
    assert receipt.compared_tensors > 0 or clean.hides_tensors


def test_there_are_twenty_of_each():
    assert len(FAULTS) >= 20
    assert len(CLEAN) >= 20
