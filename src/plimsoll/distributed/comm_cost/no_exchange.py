"""What FSDP2 calls to reduce gradients in, the same call without sending anything out: a step's time without that traffic."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin


class SilentScatter(DefaultAllocMixin, ReduceScatter):
    """Every rank keeps its own part of its own gradients: finite numbers of the right shape, and no more than that."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> dist.Work | None:
        """Give back this rank's row."""
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()].view_as(output_tensor))
        return None
