"""One tensor in, one tensor out: torch's collectives on whole tensors, under the names that this torch has for them."""

from __future__ import annotations

import torch
import torch.distributed as dist

_NAMES = vars(dist)
# torch 2.13 renamed both and warns of the old names; 2.9 has only these.
_all_gather = _NAMES["all_gather_single" if "all_gather_single" in _NAMES else "all_gather_into_tensor"]
_reduce_scatter = _NAMES["reduce_scatter_single" if "reduce_scatter_single" in _NAMES else "reduce_scatter_tensor"]


def gather_rows(payload: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``(1, bytes)`` of every rank as ``(ranks, bytes)``."""
    gathered = payload.new_empty(group.size(), payload.shape[1])
    _all_gather(gathered, payload, group=group)
    return gathered


def exchange_rows(payloads: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row i of ``(ranks, bytes)`` goes to rank i; the rows that came from every rank."""
    received = torch.empty_like(payloads)
    dist.all_to_all_single(received, payloads, group=group)
    return received


def reduce_rows(
    output: torch.Tensor,
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Row i of the sum over ranks of ``(ranks, elements)`` into the output of rank i."""
    _reduce_scatter(output, rows.view(-1), op=op, group=group)
