"""Masks that a region saves are a plan's to drop: the trace itself does not hold them."""

from __future__ import annotations

from plimsoll.tracing.trace import trace
from tracing import zoo


def test_life_of_a_dropout_mask_leaves_out_the_slot_that_saves_it():
    model, batch = zoo.gpt2()
    step = trace(model, batch, device_name="H100-SXM")
    for region in step.regions:
        graph = region.graph
        masks = [
            graph.values[slot.value]
            for slot in graph.slots
            if slot.is_managed and graph.values[slot.value].name.endswith("native_dropout#0.1")
        ]
        assert masks, "with the kernels of a GPU dropout saves a mask of bytes"
        assert all(step.storages[mask.storage].dies <= region.forward[1] for mask in masks)
