"""Which ops talk to other ranks, which choose tokens, and what that means for running them again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import plimsoll
from plimsoll.artifacts.decision import Decision
from plimsoll.tracing.recorder.collectives import (
    IS_ROUTING,
    chooses_alike,
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


def _obstacles() -> dict[str, str]:
    x = torch.randn(8, 4)
    with OpRecorder() as recorder:
        x.topk(2)
        x.sort()
        x.nonzero()
    return {op.name: op.obstacle for op in recorder.ops}


def test_a_sort_may_run_again_on_a_cpu_in_one_process(monkeypatch: pytest.MonkeyPatch):
    assert _obstacles() == {"topk": "", "sort": "", "nonzero": IS_ROUTING}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert set(_obstacles().values()) == {IS_ROUTING}


def test_a_sort_of_stand_ins_does_not_run_again_because_the_plan_may_be_for_another_device():
    with FakeTensorMode():
        x = torch.randn(8, 4)
        assert not chooses_alike(aten.sort.default, (x,))
    assert chooses_alike(aten.sort.default, (torch.randn(8, 4),))
    assert not chooses_alike(aten.sort.default, (torch.randn(8, 4, device="meta"),))


def test_what_was_chosen_in_forward_is_chosen_again_with_the_same_bits():
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(_choosing() for _ in range(2))), torch.randn(8, 16).round()  # equal numbers too
    plan = plimsoll.plan(model, batch, strategy="full", loss=torch.sum)
    decisions = {d.value: d.decision for region in plan.regions for d in region.decisions}
    assert {each for name, each in decisions.items() if name.startswith("topk")} == {Decision.RECOMPUTE}
    model(batch).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    with plimsoll.apply(model, plan):
        for _ in range(2):
            model.zero_grad()
            model(batch).sum().backward()
            assert all(torch.equal(a, b.grad) for a, b in zip(expected, model.parameters(), strict=True))
