"""A hook on a group that sends nothing: what it would send is what the mechanism itself says that it sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plimsoll.artifacts.traffic import Transfer
from plimsoll.distributed.comm_cost.metering import compression_hook
from plimsoll.distributed.comm_cost.timed_step import CountingGroup, KeptBucket, pass_through
from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.slots import GradientPart, make_slots


def bucket_of(model: nn.Module) -> Any:
    """What a hook is given, of a model's own gradients."""
    parameters = list(model.parameters())
    buffer = torch.cat([parameter.grad.flatten() for parameter in parameters])
    parts = buffer.split([parameter.numel() for parameter in parameters])
    return SimpleNamespace(
        parameters=lambda: parameters,
        buffer=lambda: buffer,
        gradients=lambda: [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)],
    )


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
    model(torch.randn(8, 64)).square().mean().backward()
    return model


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("method", ["powersgd:4", "topk:1%", "randomk:5%", "sign", "int8"])
def test_what_passes_is_what_the_mechanism_says_that_it_sends(model: nn.Module, method: str, ranks: int):
    group = CountingGroup(ranks)
    hook = compression_hook(model, method, group, seed=0)
    (found,) = pass_through(hook, [KeptBucket(bucket_of(model))], group)
    counted = sum(Transfer(kind).wire_bytes(payload, ranks) for kind, payload in found.transfers)
    settings = CompressionSettings(method=parse_method(method))
    parts = [GradientPart(name=name, shape=tuple(p.shape), dtype=p.dtype) for name, p in model.named_parameters()]
    said = sum(slot.sent_bytes(settings) for slot in make_slots(parts, settings, ranks=ranks, form="mean"))
    flags_bytes = 64
    assert said <= counted <= said + flags_bytes


def test_uncompressed_gradients_are_all_reduced_once_and_stay_the_mean_of_equal_ones(model: nn.Module):
    group, bucket = CountingGroup(4), KeptBucket(bucket_of(model))
    before = bucket.buffer().clone()
    (found,) = pass_through(compression_hook(model, "none", group, seed=0), [bucket], group)
    assert found.transfers == (("all_reduce", bucket.gradient_bytes),)
    assert len(found.local_seconds) == 2
    assert torch.equal(bucket.buffer(), before)


def test_a_bucket_can_be_filled_again_after_a_hook_wrote_to_it(model: nn.Module):
    bucket = KeptBucket(bucket_of(model))
    before = [gradient.clone() for gradient in bucket.gradients()]
    bucket.buffer().zero_()
    bucket.fill()
    assert all(map(torch.equal, bucket.gradients(), before))


def test_local_work_is_timed_between_transfers_and_not_during_them():
    ticks = iter(range(100))
    group = CountingGroup(2, now=lambda: float(next(ticks)))
    group.start()  # 0
    dist.all_reduce(torch.ones(3), group=group)  # noted at 1, resumed at 2
    dist.all_gather_into_tensor(torch.empty(6), torch.ones(3), group=group)  # noted at 3, resumed at 4
    found = group.stop()  # 5
    assert found.local_seconds == (1.0, 1.0, 1.0)
    assert found.transfers == (("all_reduce", 12), ("all_gather", 12))


def test_collectives_come_back_as_if_all_ranks_had_the_same():
    group = CountingGroup(3)
    group.start()
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    highest = torch.ones(2)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    gathered = torch.empty(3, 2)
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]), group=group)
    exchanged = torch.empty(3)
    dist.all_to_all_single(exchanged, torch.full((3,), 5.0), group=group)
    assert total.tolist() == [3.0, 3.0]
    assert highest.tolist() == [1.0, 1.0]
    assert gathered.tolist() == [[1.0, 2.0]] * 3
    assert exchanged.tolist() == [5.0] * 3
