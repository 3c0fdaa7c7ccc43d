"""Gradient compression of a model under DDP, on one rank: what is counted, and what a saved state has to contain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.distributed import compress_gradients
from plimsoll.errors import CompressionMismatch, InvalidOption


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def test_parameters_that_ddp_ignores_are_not_counted():
    model = two_layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    with compress_gradients(DistributedDataParallel(model), "topk:10%", min_ratio=0) as handle:
        assert "of 2 parameters" in handle.describe()


def test_an_incomplete_state_is_refused_and_changes_nothing():
    model = DistributedDataParallel(two_layers())
    with compress_gradients(model, "topk:10%", min_ratio=0) as handle:
        model(torch.ones(2, 64)).sum().backward()
        state, before = handle.state_dict(), handle.state_dict()
        del state["velocity"]
        state["reductions"] = dict.fromkeys(state["reductions"], 7)
        with pytest.raises(CompressionMismatch, match="lacks velocity"):
            handle.load_state_dict(state)
        assert handle.state_dict()["reductions"] == before["reductions"]


def test_a_state_is_refused_after_the_compression_has_ended():
    handle = compress_gradients(DistributedDataParallel(two_layers()), "topk:10%", min_ratio=0)
    state = handle.state_dict()
    handle.remove()
    with pytest.raises(InvalidOption, match="has ended"):
        handle.load_state_dict(state)
