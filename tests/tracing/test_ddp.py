"""Planning a model under ``DistributedDataParallel`` runs its steps on aliases of the parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plimsoll
from steps import mean_square
from tracing.zoo import Stack


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Marked(nn.Parameter):
    """A class of parameters of the user's own."""


class Scaled(Stack):
    """Reads what its code has noted on a parameter, as models under mup do."""

    def __init__(self) -> None:
        super().__init__(width=32)
        self.scale = Marked(torch.ones(1))
        self.scale.width = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.scale, Marked)
        return super().forward(x) * self.scale * self.scale.width


@pytest.mark.usefixtures("one_rank")
def test_forward_reads_the_class_and_the_attributes_of_parameters():
    model = DistributedDataParallel(Scaled())
    with plimsoll.attach(model, "1GiB"):
        for _ in range(3):
            mean_square(model(torch.randn(4, 32))).backward()
