"""Which ops talk to other ranks, which choose tokens, and what that means for running them again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.artifacts.decision import Decision
from plimsoll.tracing.recorder.collectives import (
    IS_ROUTING,
    is_collective,
    is_repeatable_collective,
    is_routing,
    is_wait,
)
from plimsoll.tracing.recorder.recorder import OpRecorder
from steps import Net

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def test_collectives_are_told_from_other_ops_and_only_functions_of_their_arguments_can_be_repeated():
    assert is_collective(functional.all_reduce.default)
    assert is_collective(torch.ops.c10d.allreduce_.default)
    assert not is_collective(aten.add.Tensor)
    assert is_wait(functional.wait_tensor.default)
    assert not is_wait(functional.all_reduce.default)
    assert is_repeatable_collective(functional.all_gather_into_tensor.default)
    assert not is_repeatable_collective(torch.ops.c10d.allreduce_.default)


@pytest.mark.parametrize("op", [aten.topk.default, aten.sort.default, aten.nonzero.default, aten.bincount.default])
def test_ops_that_choose_are_known(op: torch._ops.OpOverload):
    assert is_routing(op)


def test_a_mask_that_rows_are_taken_by_is_made_once():
    x = torch.randn(8, 4)
    with OpRecorder() as recorder:
        mask = x[:, 0] > 0
        _ = x[mask]
        _ = torch.where(mask[:, None], x, 0.0)
    made = {op.name: op.obstacle for op in recorder.ops}
    assert made["gt"] == IS_ROUTING
    assert made["where"] == ""


def _choosing() -> Net:
    def choose(net: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = net.up(x).sigmoid()
        weights, rows = hidden.mean(-1).topk(4, dim=0)
        weights /= weights.sum()  # in place, as routers do
        return x.index_add(0, rows, net.down(hidden[rows]) * weights[:, None])

    return Net(choose, up=nn.Linear(16, 32), down=nn.Linear(32, 16))


def test_what_was_chosen_in_forward_is_kept_by_every_plan():
    torch.manual_seed(0)
    model = nn.Sequential(*(_choosing() for _ in range(2)))
    plan = plimsoll.plan(model, torch.randn(8, 16), strategy="full", loss=torch.sum)
    kept = {d.value: d.reason for region in plan.regions for d in region.decisions if d.decision is Decision.KEEP}
    assert any(IS_ROUTING in reason for name, reason in kept.items() if name.startswith("topk"))
