"""The unmanaged step in bytes: predicted from a trace, and measured."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from plimsoll.artifacts.trace import Trace
from plimsoll.tracing.meters.memory import PeakMeter
from tracing.zoo import loss_of


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
