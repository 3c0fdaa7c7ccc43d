"""A trace explains the peak of the step that it was made of."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import nn

from metering import loss_of
from plimsoll.artifacts.trace import Trace
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.trace import trace
from tracing import zoo


def predicted_bytes(trace: Trace) -> list[int]:
    """Bytes alive during every op above what was there before the step, with every slot kept."""
    ends = {storage.id: storage.dies for storage in trace.storages}
    for region in trace.regions:
        for slot in region.graph.slots:
            if slot.is_managed:
                storage = region.graph.values[slot.value].storage
                ends[storage] = max(ends[storage], slot.released)
    changes = [0] * (len(trace.ops) + 1)
    for storage in trace.storages:
        if storage.born >= 0:
            changes[storage.born] += storage.bytes
            changes[ends[storage.id]] -= storage.bytes
    alive = list(accumulate(changes))[:-1]
    return [bytes_ + trace.workspaces.get(op.cost_key, 0) for bytes_, op in zip(alive, trace.ops, strict=True)]


def measured_peak_bytes(
    model: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer | None = None
) -> int:
    """The peak of a step above what was there before it; a first step has warmed everything up."""
    for is_warm in (False, True):
        model.zero_grad(set_to_none=True)
        with PeakMeter() as meter:
            output = model(**batch)
            loss = loss_of(output)
            loss.backward()
            del output, loss
            if optimizer is not None:
                optimizer.step()
        if is_warm:
            peak_bytes = meter.peak_bytes
    model.zero_grad(set_to_none=True)
    return peak_bytes


@pytest.mark.parametrize("name", sorted(zoo.ALL))
def test_unmanaged_peak_is_predicted_within_one_percent(name: str):
    model, batch = zoo.ALL[name]()
    predicted = max(predicted_bytes(trace(model, batch, repeats=1)))
    assert predicted == pytest.approx(measured_peak_bytes(model, batch), rel=0.01)


def test_a_tensor_that_an_op_with_out_enlarges_counts_as_large_as_it_becomes():
    class Repeating(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(64, 64)

        def forward(self, x):
            y = self.up(x)
            rows = torch.empty(0)
            with torch.no_grad():
                torch.cat([y.detach()] * 32, out=rows)
            return y * rows.mean()

    model, batch = nn.Sequential(Repeating(), Repeating()), torch.randn(256, 64)
    predicted = max(predicted_bytes(trace(model, batch, loss=torch.sum, repeats=1)))
    model(batch).sum().backward()
    with PeakMeter() as meter:
        model.zero_grad()
        model(batch).sum().backward()
    assert predicted == pytest.approx(meter.peak_bytes + sum(p.nbytes for p in model.parameters()), rel=0.02)


def test_peak_under_autocast_counts_the_cached_weight_casts():
    model, batch = zoo.llama()
    with torch.autocast("cpu", torch.bfloat16):
        predicted = max(predicted_bytes(trace(model, batch, repeats=1)))
    original = model.forward

    def forward(**kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return original(**kwargs)

    model.forward = forward
    assert predicted == pytest.approx(measured_peak_bytes(model, batch), rel=0.01)


def test_peak_with_accumulated_gradients_adds_the_new_gradient_beside_the_old_one():
    model, batch = zoo.llama()
    loss_of(model(**batch)).backward()
    step = trace(model, batch, repeats=1)
    fresh = max(predicted_bytes(step))
    model.zero_grad(set_to_none=True)
    assert "accumulating" in step.signature
    assert fresh < max(predicted_bytes(trace(model, batch, repeats=1)))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor])
def test_peak_with_an_optimizer_is_that_of_a_step_in_which_its_state_exists(make: type[torch.optim.Optimizer]):
    model = zoo.Stack(width=64)
    batch = {"x": torch.randn(2, 64)}
    optimizer = make(model.parameters(), lr=0.01)
    predicted = max(predicted_bytes(trace(model, batch, optimizer=optimizer, repeats=1)))
    assert predicted == pytest.approx(measured_peak_bytes(model, batch, optimizer), rel=0.02)
