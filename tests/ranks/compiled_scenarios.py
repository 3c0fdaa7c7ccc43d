"""What ranks do in ``test_compiled_on_ranks.py``: blocks compiled before FSDP2 and DDP, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plimsoll
from launching import refused
from plimsoll.artifacts.plan import Plan
from plimsoll.session.training_step import TrainingStep
from ranks.sharding_scenarios import are_equal, gradients
from steps import Stack, mean_square

WIDTH = 64


def _blocks(model: Stack) -> Stack:
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


def _sharded(model: Stack) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _stack() -> Stack:
    torch.manual_seed(0)
    return Stack(3, WIDTH)


def on_a_pair() -> dict[str, Any]:
    """All that two ranks do, in one launch."""
    return {
        "planned": planned(_sharded(_blocks(_stack())), _rows()),
        "attached": attached(DistributedDataParallel(_blocks(_stack())), _rows()),
        "autocast": in_autocast(),
        "refused": [
            refused(lambda: plimsoll.attach(_compiled_in_place(), "1GiB")),
            refused(lambda: plimsoll.attach(torch.compile(DistributedDataParallel(_stack())), "1GiB")),
        ],
    }


def planned(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    """A plan for four fifths of what the step takes, its gradients, and its peak."""
    expected = _trained(model, batch)
    step = TrainingStep(model, (batch,), {}, loss=mean_square)
    plan = plimsoll.plan(model, batch, int(0.8 * _same(step.measure_peak().peak_bytes)), loss=mean_square)
    model.zero_grad(set_to_none=True)
    with plimsoll.apply(model, plan):
        found = _trained(model, batch)
        peak_bytes = step.measure_peak().peak_bytes
    return _told(plan, peak_bytes, is_bit_equal=are_equal(expected, found))


def in_autocast() -> dict[str, Any]:
    """As ``planned``, under DDP in 16 bits; with casts where eager ops have them, so that no order of kernels moves a bit."""
    model = _stack()
    for block in model.blocks:
        block.compile(dynamic=False, options={"emulate_precision_casts": True})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return planned(DistributedDataParallel(model), _rows())


def attached(model: DistributedDataParallel, batch: torch.Tensor) -> dict[str, Any]:
    """A budget on a loop of two micro-batches, of which only the second one reduces gradients."""
    expected = _accumulated(model, batch)
    step = TrainingStep(model, (batch,), {}, loss=mean_square).accumulating()
    budget_bytes = int(0.85 * _same(step.measure_peak().peak_bytes))
    model.zero_grad(set_to_none=True)
    with plimsoll.attach(model, budget_bytes) as handle, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = [_accumulated(model, batch) for _ in range(2)]
        peak_bytes = step.measure_peak().peak_bytes
    assert handle.plan is not None
    is_bit_equal = all(are_equal(expected, each) for each in found)
    ours = [str(each.message) for each in warned if "plimsoll" in str(each.message)]
    return _told(handle.plan, peak_bytes, is_bit_equal=is_bit_equal) | {
        "warnings": ours,
        "signature": handle.plan.signature,
    }


def _told(plan: Plan, peak_bytes: int, *, is_bit_equal: bool) -> dict[str, Any]:
    return {
        "is_bit_equal": is_bit_equal,
        "budget": plan.budget_bytes,
        "predicted": plan.predicted_peak_bytes,
        "measured": peak_bytes,
        "drops": any(region.dropped for region in plan.regions),
        "plan": str([(each.name, each.call, sorted(each.dropped)) for each in plan.regions]),
    }


def _same(peak_bytes: int) -> int:
    """The first rank's, on all."""
    told = [peak_bytes]
    dist.broadcast_object_list(told)
    return told[0]


def _compiled_in_place() -> nn.Module:
    model = DistributedDataParallel(_stack())
    model.compile()
    return model


def _rows() -> torch.Tensor:
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def _trained(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    model.zero_grad(set_to_none=True)
    mean_square(model(batch)).backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found


def _accumulated(model: DistributedDataParallel, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    model.zero_grad(set_to_none=True)
    with model.no_sync():
        mean_square(model(batch)).backward()
    mean_square(model(batch)).backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found
