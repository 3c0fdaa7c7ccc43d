"""A trace explains the peak of the step that it was made of."""

from __future__ import annotations

import pytest
import torch

from plimsoll.tracing.trace import trace
from tracing import zoo
from tracing.peaks import measured_peak_bytes, predicted_bytes


@pytest.mark.parametrize("name", sorted(zoo.ALL))
def test_unmanaged_peak_is_predicted_within_one_percent(name: str):
    model, batch = zoo.ALL[name]()
    predicted = max(predicted_bytes(trace(model, batch, repeats=1)))
    assert predicted == pytest.approx(measured_peak_bytes(model, batch), rel=0.01)


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
    zoo.loss_of(model(**batch)).backward()
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
