"""What is read from schedules of torch.distributed.pipelining: stages, and the actions that torch really runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, _ScheduleForwardOnly

import plimsoll.distributed
from plimsoll.distributed.pipelines.pipeline_stages import ScheduleAttachment
from plimsoll.distributed.pipelines.rank_plans import RankPlanner, Standing, _refuse_differing
from plimsoll.distributed.pipelines.schedules import Wrapped, added_seconds, read_schedule
from plimsoll.distributed.pipelines.stage_plans import renamed
from plimsoll.distributed.pipelines.stage_steps import StageStep, trace_stage
from plimsoll.errors import BudgetBelowFloor, InvalidBudget, InvalidModel, InvalidOption, PlanMismatch, RanksDiffer
from plimsoll.estimator.pipeline_schedule.orders import Action, ActionKind, check_orders
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds
from samples import make_plan, make_region
from steps import Block, Stack


@pytest.fixture(autouse=True)
def one_of_two_ranks() -> Iterator[None]:
    """Rank 0 of two, whose group needs no other process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def stage(index: int, count: int = 2, module: nn.Module | None = None) -> PipelineStage:
    return PipelineStage(module or nn.Linear(4, 4), index, count, torch.device("cpu"))


def test_gpipe_and_1f1b_have_one_stage_and_their_loops():
    for kind, expected in ((ScheduleGPipe, "0F0 0F1 0F2 0B0 0B1 0B2"), (Schedule1F1B, "0F0 0F1 0B0 0F2 0B1 0B2")):
        found = read_schedule(kind(stage(0), 3, loss_fn=torch.sum))
        assert list(found.stages) == [0]
        assert " ".join(map(str, found.actions)) == expected
        assert not found.splits_backward(0)


def test_the_first_stage_runs_backward_whole_where_others_split_it():
    found = read_schedule(ScheduleInterleavedZeroBubble([stage(0)], 4, loss_fn=torch.sum))
    check_orders(found.orders, 2)
    assert {action.work for action in found.orders[0]} == {ActionKind.FORWARD, ActionKind.BACKWARD}
    split = {ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT}
    assert {action.work for action in found.orders[1]} == split


@pytest.mark.parametrize("kind", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
def test_the_tables_of_v_schedules_are_one_whole_step(kind: Any):
    found = read_schedule(kind([stage(0, 4), stage(3, 4)], 4, loss_fn=torch.sum))
    check_orders(found.orders, 4)
    assert sorted(found.stages) == [0, 3]
    assert found.splits_backward(3)
    assert not found.splits_backward(0)
    each = ActionSeconds(
        forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0, recompute_seconds=1.0
    )
    added = added_seconds(found.orders, dict.fromkeys(range(4), each), 4)
    assert added.predicted_added_seconds >= 4 * 2


def test_what_is_no_schedule_does_not_train_or_has_no_parameters_is_refused():
    with pytest.raises(InvalidModel, match="Linear is not a pipeline schedule"):
        read_schedule(nn.Linear(1, 1))
    with pytest.raises(InvalidOption, match="does not have a loss"):
        read_schedule(ScheduleGPipe(stage(0), 2))
    with pytest.raises(InvalidModel, match="order of _ScheduleForwardOnly cannot be read"):
        read_schedule(_ScheduleForwardOnly(stage(0), 2, loss_fn=torch.sum))
    schedule = ScheduleGPipe(stage(0, module=nn.ReLU()), 2, loss_fn=torch.sum)
    with pytest.raises(InvalidModel, match="Stage 0 does not have trainable parameters"):
        plimsoll.distributed.attach_schedule(schedule, "1GiB", ranks=[0])


def test_fewer_micro_batches_than_stages_are_torchs_to_refuse():
    with pytest.raises(ValueError, match="microbatches"):
        Schedule1F1B(stage(0), 1, loss_fn=torch.sum)


def test_a_bad_budget_or_managed_stage_leaves_the_schedule_alone():
    schedule = ScheduleGPipe(stage(0), 2, loss_fn=torch.sum)
    with pytest.raises(InvalidBudget):
        plimsoll.distributed.attach_schedule(schedule, "24G", ranks=[0])
    for timeout_seconds in (-1, float("nan"), "5"):
        with pytest.raises(InvalidOption, match="is not a positive number"):
            plimsoll.distributed.attach_schedule(schedule, "1GiB", ranks=[0], timeout_seconds=timeout_seconds)
    with pytest.raises(InvalidModel, match=r"not a torch\.optim\.Optimizer"):
        plimsoll.distributed.attach_schedule(schedule, "1GiB", optimizer=["adam"], ranks=[0])  # type: ignore[list-item]
    assert "step" not in vars(schedule)


def alone(module: nn.Module) -> ScheduleGPipe:
    """A pipeline of one stage, which runs without another rank."""
    only = PipelineStage(module, 0, 1, torch.device("cpu"), group=dist.new_group([0]))
    return ScheduleGPipe(only, 2, loss_fn=nn.functional.mse_loss)


def test_evaluation_between_steps_leaves_their_measurements():
    schedule = alone(Stack(2, 16))
    batch = torch.ones(8, 16)
    with plimsoll.distributed.attach_schedule(schedule, "1GiB", ranks=[0]) as handle:
        for _ in range(3):
            assert handle.is_calibrating
            schedule.step(batch, target=batch)
            with torch.no_grad():
                schedule.eval(batch, target=batch)
        assert not handle.is_calibrating
        assert 0 < handle.measured_peak_bytes <= handle.report.predicted_peak_bytes


@pytest.mark.long
@pytest.mark.parametrize("is_passed", [False, True])
def test_state_that_an_optimizer_makes_after_several_steps_counts_toward_the_budget(is_passed: bool):
    def train(budget: int | str, steps: int, accumulated: int) -> ScheduleAttachment:
        module = Stack(4, 64)
        optimizer = torch.optim.AdamW(module.parameters())
        schedule, batch = alone(module), torch.ones(128, 64)
        handle = plimsoll.distributed.attach_schedule(
            schedule, budget, optimizer=optimizer if is_passed else None, ranks=[0]
        )
        for step in range(1, steps + 1):
            schedule.step(batch, target=batch, return_outputs=False)
            if step % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
        handle.remove()
        return handle

    unmanaged_bytes = train("1GiB", 4, 1).measured_peak_bytes
    budget_bytes = unmanaged_bytes * 9 // 10
    handle = train(budget_bytes, 9, 3)
    state_bytes = 2 * sum(each.nbytes for each in Stack(4, 64).parameters())
    assert handle.report.excess_bytes >= state_bytes
    assert state_bytes < handle.measured_peak_bytes <= budget_bytes
    assert handle.report.predicted_peak_bytes <= budget_bytes


def test_the_batch_of_a_step_is_freed_once_steps_are_not_measured():
    schedule = alone(Stack(2, 16))
    with plimsoll.distributed.attach_schedule(schedule, "1GiB", ranks=[0]) as handle:
        for _ in range(3):
            batch = torch.ones(8, 16)
            schedule.step(batch, target=batch, return_outputs=False)
        assert not handle.is_calibrating
        reference = weakref.ref(batch)
        del batch
        assert reference() is None


def test_steps_that_cannot_be_measured_settle_with_a_warning():
    schedule = alone(Stack(2, 16))
    batch = torch.ones(8, 16)
    with torch.profiler.profile(), plimsoll.distributed.attach_schedule(schedule, "1GiB", ranks=[0]) as handle:
        for _ in range(5):
            schedule.step(batch, target=batch)
            assert handle.is_calibrating
        with pytest.warns(UserWarning, match="after 5 steps the peak .* is not known, because a profiler was running"):
            schedule.step(batch, target=batch)
        assert not handle.is_calibrating


def test_a_first_step_that_is_refused_leaves_no_plan_and_a_report():
    schedule = alone(Stack(2, 16))
    handle = plimsoll.distributed.attach_schedule(schedule, "4KiB", ranks=[0])
    with pytest.raises(BudgetBelowFloor):
        schedule.step(torch.ones(8, 16), target=torch.ones(8, 16))
    assert handle.plans == {}
    assert "not yet" in str(handle.report)
    assert "step" not in vars(schedule)


def test_removing_a_wrapper_restores_the_method_or_steps_aside():
    owner = SimpleNamespace(run=lambda: "own")
    wrapped = Wrapped(owner, "run", lambda original: f"wrapped {original()}")
    assert owner.run() == "wrapped own"
    theirs, owner.run = owner.run, lambda: f"theirs {theirs()}"
    wrapped.remove()
    wrapped.remove()
    assert owner.run() == "theirs own"
    lock = threading.Event()
    again = Wrapped(lock, "is_set", lambda original: not original())
    assert lock.is_set()
    again.remove()
    assert "is_set" not in vars(lock)


@pytest.fixture(scope="module")
def steps() -> dict[int, StageStep]:
    """Two stages of one rank."""
    known: Any = {}
    found = {}
    for index in (0, 2):
        module = nn.Sequential(*(Block(16) for _ in range(2)))
        hidden = torch.ones(32, 16, requires_grad=True)
        traced = trace_stage(index, module, (hidden,), {}, loss=None, regions=None, micro_batches=4)
        found[index] = StageStep(traced, 2, left_bytes=0, merged_bytes=0, known_choices=known)
    return found


def interleaved() -> list[Action]:
    order = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    return [Action(int(text[0]), ActionKind(text[1]), int(text[2])) for text in order.split()]


def test_stages_of_a_rank_share_its_budget_and_stay_within_it(steps: dict[int, StageStep]):
    planner = RankPlanner(steps, interleaved(), 1000)
    low, high = planner.lowest().peak.peak_bytes, planner.solve(1 << 30).peak.peak_bytes
    assert low < high
    seconds = []
    for budget in (low, (low + high) // 2, high):
        made = planner.solve(budget)
        assert made.peak.peak_bytes <= budget
        assert planner.peak_of(made.plans) == made.peak
        seconds.append(sum(found.recompute_seconds for found in made.seconds.values()))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0
    tight = planner.solve(high, excess_bytes=high - low)
    assert tight.peak.peak_bytes <= low


def test_a_budget_below_the_floor_names_the_stage(steps: dict[int, StageStep]):
    planner = RankPlanner(steps, interleaved(), 1000)
    with pytest.raises(BudgetBelowFloor, match="smallest reachable peak of stages 0, 2") as caught:
        planner.solve(5000, excess_bytes=100)
    assert "measured beyond" in caught.value.why
    assert "layers in stage" in caught.value.next


def test_waiting_micro_batches_hold_less_under_a_tighter_plan(steps: dict[int, StageStep]):
    step = steps[0]
    low, high = step.range_bytes
    tight, loose = (step.memory(step.simulation(budget)) for budget in (low, high))
    assert tight.held_bytes < loose.held_bytes
    assert tight.lasting_bytes == loose.lasting_bytes
    # What the second half reads again comes back between the halves, whatever the plan gave up.
    assert tight.between_bytes - tight.held_bytes > loose.between_bytes - loose.held_bytes


def test_regions_are_found_by_the_end_of_their_path():
    plan = make_plan(regions=(make_region(2), make_region(3)))
    names = [region.name for region in plan.regions]
    whole = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleDict({"2": nn.ReLU(), "3": nn.ReLU()})})})
    for module, expected in (
        (whole, [f"model.layers.{n}" for n in (2, 3)]),
        (whole["model"], ["layers.2", "layers.3"]),
    ):
        assert [region.name for region in renamed(plan, module, "stage 1").regions] == expected
    with pytest.raises(PlanMismatch, match=f"{names[0]}' and 1 more, which stage 1 does not have"):
        renamed(plan, nn.Linear(1, 1), "stage 1")


def test_regions_that_cannot_be_told_apart_are_refused():
    two = nn.ModuleDict(
        {part: nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleDict({"2": nn.ReLU()})})}) for part in "ab"}
    )
    with pytest.raises(PlanMismatch, match=r"'model.layers.2' may be 'a.model.layers.2' or 'b.model.layers.2'"):
        renamed(make_plan(regions=(make_region(2),)), two, "stage 1")
    regions = tuple(msgspec.structs.replace(make_region(2), name=f"{part}.layers.2") for part in "ab")
    with pytest.raises(PlanMismatch, match=r"'a.layers.2' or 'b.layers.2' may be 'layers.2'"):
        renamed(make_plan(regions=regions), nn.ModuleDict({"layers": nn.ModuleDict({"2": nn.ReLU()})}), "stage 1")


def test_plans_of_no_stage_are_refused():
    block = nn.Sequential(nn.Linear(4, 4))
    schedule = ScheduleGPipe(stage(0, module=block), 2, loss_fn=torch.sum)
    with pytest.raises(InvalidOption, match="The plans include stage 2, but the pipeline has stages 0 to 1"):
        plimsoll.distributed.apply_stages(schedule, {2: make_plan(regions=())}, ranks=[0])
    with pytest.raises(InvalidOption, match="a list, which does not assign plans to stages"):
        plimsoll.distributed.apply_stages(schedule, [], ranks=[0])  # type: ignore[arg-type]


def test_replicas_of_a_stage_with_different_models_are_refused():
    standing: Callable[..., Standing] = lambda print_: Standing(  # noqa: E731 - two of a kind
        stages=(1,), fingerprints=(print_,), room_bytes=1, does_fit=True, has_stepped=True
    )
    _refuse_differing([standing("a"), standing("a")])
    with pytest.raises(RanksDiffer, match=r"stages \[1\] have different models"):
        _refuse_differing([standing("a"), standing("b")])
