"""torch.compile under FSDP2 and DDP on real ranks: one plan, kept budgets, and the gradients of the same compiled model."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

import plimsoll
from launching import on_ranks
from plimsoll.artifacts.progress import silent
from plimsoll.session.compiled import CompiledPlanner
from plimsoll.session.options import PlanOptions
from steps import Stack, mean_square

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"),
]

told = on_ranks(2, "ranks.compiled_scenarios:on_a_pair")
WITHIN = 0.2
"""Gloo's threads decide when a gathered buffer of so small a model ends, and a kernel more or less in place shows."""


@pytest.mark.parametrize("how", ["planned", "attached", "autocast"])
def test_a_plan_keeps_the_budget_and_the_bits_of_the_compiled_model_on_every_rank(told, how):
    assert len({rank[how]["plan"] for rank in told}) == 1
    for rank in told:
        assert rank[how]["is_bit_equal"]
        assert rank[how]["drops"]
        assert rank[how]["measured"] <= rank[how]["budget"]
        assert rank[how]["predicted"] == pytest.approx(rank[how]["measured"], rel=WITHIN)


def test_attach_plans_for_micro_batches_where_the_first_one_leaves_its_gradients_unreduced(told):
    for rank in told:
        assert "accumulating" in rank["attached"]["signature"]
        assert not rank["attached"]["warnings"]


def test_ddp_around_or_inside_of_one_compilation_is_refused_with_the_way_that_works(told):
    for refusal in (each for rank in told for each in rank["refused"]):
        assert refusal.kind == "InvalidModel"
        assert "layer.compile()" in refusal.next


def test_a_rank_that_runs_out_of_memory_in_a_trial_does_not_go_on_alone(monkeypatch):
    def run(*_):
        raise torch.OutOfMemoryError("planted")

    plan = plimsoll.plan(Stack(2, 8), torch.randn(4, 8), strategy="none", loss=mean_square)
    alone, shared = (CompiledPlanner.__new__(CompiledPlanner) for _ in range(2))
    for planner, ranks in ((alone, 1), (shared, 2)):
        monkeypatch.setattr(planner, "run", run, raising=False)
        monkeypatch.setattr(planner, "solve", lambda *_: plan, raising=False)
        planner.options, planner.ranks = PlanOptions(), SimpleNamespace(budget_bytes=1)
        planner._agreement = SimpleNamespace(size=ranks)
    assert alone._in_own_order("auto", None, silent) is None
    with pytest.raises(torch.OutOfMemoryError):  # which ends what the other ranks wait for
        shared._in_own_order("auto", None, silent)
