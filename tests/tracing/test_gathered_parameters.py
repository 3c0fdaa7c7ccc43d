"""Parameters that FSDP2 gathers are filled and emptied: a trace numbers their lives, and regions do not mix them up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from plimsoll.errors import InvalidModel, TracingFailed
from plimsoll.tracing.trace import trace


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient")


class Failing(nn.Sequential):
    fails = False

    def forward(self, x):
        x = self[0](x)
        return self[2](self[1](FailsInBackward.apply(x) if self.fails else x))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("waits", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_gradients_that_wait_are_reduced_after_a_trace_as_without_one(waits, fails):
    def gradients(*, traces: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
        model = Failing(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        first, second = torch.randn(2, 4, 8)
        getattr(model, waits)(False)
        model(first).sum().backward()
        if traces:
            model.fails = fails
            with pytest.raises(TracingFailed) if fails else contextlib.nullcontext():
                trace(model, torch.ones(4, 8), loss=torch.sum)
            model.fails = False
        getattr(model, waits)(True)
        model(second).sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(traces=True), gradients(traces=False)))


@pytest.mark.usefixtures("two_ranks")
def test_what_can_be_rebuilt_is_the_same_with_and_without_sharding():
    def obstacles(*, shards: bool) -> list[list[str]]:
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
        if shards:
            for block in model:
                fully_shard(block)
            fully_shard(model)
        found = trace(model, torch.ones(4, 8), loss=torch.sum)
        return [[op.obstacle for op in region.graph.ops] for region in found.regions]

    assert obstacles(shards=True) == obstacles(shards=False) == [["", "", ""]] * 3


@pytest.mark.usefixtures("two_ranks")
def test_a_model_that_is_split_over_ranks_is_not_traced_without_its_device_and_stays_whole():
    sharded = fully_shard(nn.Sequential(nn.Linear(8, 8)))
    split = parallelize_module(nn.Sequential(nn.Linear(8, 8)), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    for model in (sharded, split):
        with pytest.raises(InvalidModel, match="split over ranks"):
            trace(model, torch.ones(4, 8), loss=torch.sum, device_name="H100-SXM")
        assert not trace(model, torch.ones(4, 8), loss=torch.sum).is_fake
