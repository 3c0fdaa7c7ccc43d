"""What a step that is run again and again measures: its own memory, whatever was left behind before it."""

from __future__ import annotations

import gc

import torch

from plimsoll.session.training_step import TrainingStep
from steps import mean_square, stack


def test_garbage_that_was_there_before_a_step_is_not_taken_off_its_peak():
    model, batch, _ = stack()
    step = TrainingStep(model, (batch,), {}, loss=mean_square)
    expected = step.measure_peak().peak_bytes
    cycle: list[object] = [torch.zeros(2**20)]
    cycle.append(cycle)
    handle = model.register_forward_pre_hook(lambda *_: (gc.collect(), None)[1])
    gc.disable()
    try:
        del cycle
        assert step.measure_peak().peak_bytes == expected
    finally:
        gc.enable()
        handle.remove()
