"""A budget attached to a training that knows nothing of it: same bits, peaks within it, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import plimsoll
import zoo
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor, InvalidBudget, InvalidModel, InvalidRegions
from plimsoll.units import MIB, parse_bytes
from steps import Stack, mean_square
from unchanged import unchanged

ROWS = 384
WIDTH = 32
STEPS = 5

BUDGET = 2 * MIB
"""Between the floor and the unmanaged peak of the step."""


class Training:
    """An ordinary loop. ``steps`` returns all that it makes."""

    def __init__(self, model: nn.Module, *, micro: int = 1, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        self.model = model
        self.micro = micro
        self.optimizer = optimizer(model.parameters(), lr=1e-2)

    def steps(self, rows: tuple[int, ...] = (ROWS,) * STEPS) -> list[Any]:
        made: list[Any] = []
        for number, count in enumerate(rows):
            random = torch.Generator().manual_seed(number)
            torch.manual_seed(number)
            for _ in range(self.micro):
                loss = mean_square(self.model(torch.randn(count, WIDTH, generator=random))) / self.micro
                loss.backward()
                made.append(loss.item())
                del loss
            self.optimizer.step()
            made.append([p.grad.clone() for p in self.model.parameters()])
            self.optimizer.zero_grad()
            made.append(self._evaluate())
        made.append([p.detach().clone() for p in self.model.parameters()])
        return made

    def _evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            value = float(self.model(torch.ones(3, WIDTH)).sum())
        self.model.train()
        return value


def twins(**how: Any) -> tuple[Training, Training]:
    torch.manual_seed(0)
    model = Stack(4, WIDTH)
    return Training(copy.deepcopy(model), **how), Training(model, **how)


def assert_same(expected: list[Any], found: list[Any]) -> None:
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, list) and isinstance(other, list):
            assert all(map(torch.equal, one, other))
        elif other is not None:
            assert one == other


def dropped(attachment: Any) -> int:
    return sum(len(region.dropped) for region in attachment.plan.regions)


@pytest.mark.parametrize(("is_known", "micro"), [(True, 2), (False, 1)], ids=["optimizer passed", "optimizer found"])
def test_losses_gradients_and_weights_are_those_of_the_unmanaged_training(is_known: bool, micro: int):
    plain, managed = twins(micro=micro)
    rows = (ROWS, ROWS, ROWS // 2, ROWS, ROWS)
    expected = plain.steps(rows)
    with plimsoll.attach(managed.model, BUDGET, optimizer=managed.optimizer if is_known else None) as attachment:
        found = managed.steps(rows)
        assert not attachment.is_calibrating
        assert dropped(attachment)
    assert_same(expected, found)


@pytest.mark.long
def test_a_budget_that_gradients_of_earlier_micro_batches_leave_room_in_takes_a_plan_for_them():
    """The only refusal names it, after the loop's own micro-batches were measured."""

    def trained(budget: int | str) -> int:
        torch.manual_seed(0)
        model = Stack(6, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with plimsoll.attach(model, budget) as attachment:
            for number in range(6):
                mean_square(model(torch.randn(32, 64))).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            return attachment.peak_bytes

    with pytest.raises(BudgetBelowFloor) as refused:
        trained("1KiB")
    [budget] = re.findall(r'budget="([^"]+)"', refused.value.next)
    assert 0 < trained(budget) <= parse_bytes(budget)
    with pytest.raises(BudgetBelowFloor):  # the named budget is at most 3% above the lowest that works
        trained(round(0.97 * parse_bytes(budget)))


class Fragile(Stack):
    """Refuses a batch with an error of its own."""

    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            raise ValueError("no such batch")
        return super().forward(x)


def test_a_batch_that_the_model_refuses_while_it_is_planned_for_leaves_the_budget_at_work():
    model = Fragile(4, WIDTH)
    with plimsoll.attach(model, BUDGET) as attachment:
        for number in range(5):
            model.is_broken = number == 1
            with contextlib.suppress(ValueError):
                mean_square(model(torch.randn(ROWS, WIDTH))).backward()
            model.zero_grad()
        assert not attachment.is_calibrating
        assert dropped(attachment)
        assert any("forward" in vars(module) for module in model.modules())
        assert 0 < attachment.peak_bytes <= parse_bytes(BUDGET)


@pytest.mark.parametrize("is_frozen_late", [False, True])
def test_parameters_that_are_trained_later_are_planned_for(is_frozen_late: bool):
    model = Stack(4, WIDTH)
    model.blocks[:3].requires_grad_(is_frozen_late)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        for _ in range(3):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with plimsoll.attach(model, BUDGET, optimizer=optimizer) as attachment:
        model.blocks[:3].requires_grad_(False)
        train()
        frozen = attachment.plan
        assert frozen is not None
        model.requires_grad_(True)
        train()
        assert attachment.plan is not None
        assert attachment.plan.baseline_peak_bytes > frozen.baseline_peak_bytes
        assert dropped(attachment)


def test_every_batch_takes_a_plan_of_its_own_that_keeps_it_within_the_budget():
    plain, managed = twins(optimizer=torch.optim.SGD)
    rows = (ROWS // 4, ROWS // 4, ROWS, ROWS, ROWS // 2, ROWS)
    expected = plain.steps(rows)
    plans = {}
    with plimsoll.attach(managed.model, "1.4MiB") as attachment:

        def note(*_: Any) -> None:
            if attachment.plan is not None and not attachment.is_calibrating:
                plans[attachment.plan.signature.split(";")[0]] = attachment.plan

        managed.model.register_forward_pre_hook(note)
        found = managed.steps(rows)
    assert_same(expected, found)
    small, half, large = (plans[f"f32[{count}x{WIDTH}]"] for count in (ROWS // 4, ROWS // 2, ROWS))
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in (small, half, large))
    assert [any(region.dropped for region in plan.regions) for plan in (small, large)] == [False, True]
    assert half.predicted_overhead < large.predicted_overhead


def test_a_budget_as_text_or_auto_that_holds_everything_leaves_the_regions_alone():
    for budget in ("1GiB", "auto"):
        _, managed = twins()
        with plimsoll.attach(managed.model, budget) as attachment:
            managed.steps((8, 8, 8))
            assert attachment.plan.budget_bytes is not None
            assert dropped(attachment) == 0
            assert not [m for m in managed.model.modules() if "forward" in vars(m)]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_model_that_is_let_go_with_its_budget_is_freed(steps):
    def left() -> weakref.ref[nn.Module]:
        _, managed = twins(optimizer=torch.optim.SGD)
        plimsoll.attach(managed.model, BUDGET)
        managed.steps((8,) * steps)
        return weakref.ref(managed.model)

    found = left()
    gc.collect()
    assert found() is None
    plimsoll.attach(twins()[0].model, BUDGET).remove()
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_remove_restores_everything_in_any_phase():
    for steps in range(3):
        _, managed = twins(optimizer=torch.optim.SGD)
        model = managed.model
        hooks = [dict(m._forward_pre_hooks) for m in model.modules()]
        attachment = plimsoll.attach(model, BUDGET)
        managed.steps((8,) * steps)
        attachment.remove()
        attachment.remove()
        assert hooks == [dict(m._forward_pre_hooks) for m in model.modules()]
        assert not [m for m in model.modules() if "forward" in vars(m) or m._forward_hooks]
        assert not torch._C._autograd._profiler_enabled()
        assert not torch_optimizer._global_optimizer_pre_hooks
        with unchanged(model, managed.optimizer):
            pass


def test_remove_between_forward_and_backward_keeps_gradients_right():
    plain, managed = twins()
    batch = torch.randn(8, WIDTH)
    for training, is_attached in ((plain, False), (managed, True)):
        attachment = plimsoll.attach(training.model, BUDGET) if is_attached else None
        torch.manual_seed(3)
        loss = mean_square(training.model(batch))
        if attachment is not None:
            attachment.remove()
        loss.backward()
    grads = [[p.grad for p in t.model.parameters()] for t in (plain, managed)]
    assert all(map(torch.equal, *grads))


def test_a_budget_below_the_floor_is_refused_in_the_first_call_if_nothing_may_change_before():
    _, managed = twins()
    model, batch = managed.model, torch.randn(ROWS, WIDTH)
    with unchanged(model, managed.optimizer):
        plimsoll.attach(model, 200_000).measures_before_refusing = False
        with pytest.raises(BudgetBelowFloor, match="exist at the same time"):
            model(batch)
    model(batch).sum().backward()


@pytest.mark.long
def test_state_that_first_shows_in_a_later_step_is_counted_once():
    torch.manual_seed(0)
    model = Stack(3, 64)
    optimizers = [
        torch.optim.AdamW(block.parameters()) for block in model.blocks
    ]  # several, so plans count no state ahead
    with warnings.catch_warnings(), plimsoll.attach(model, "4MiB") as attachment:
        warnings.simplefilter("error")
        for number in range(8):
            mean_square(model(torch.randn(64, 64))).backward()
            for optimizer in optimizers:
                if number >= 3:
                    optimizer.step()
            model.zero_grad()
        account = attachment._known.room.account
    state_bytes = sum(value.nbytes for each in optimizers for state in each.state.values() for value in state.values())
    assert account.optimizer_state == state_bytes
    assert account.outside_model < state_bytes // 4


def test_a_batch_that_no_plan_fits_is_refused_each_time_it_comes():
    torch.manual_seed(0)
    model = Stack(3, 32)
    with plimsoll.attach(model, 600_000, allow=("recompute", "compress")) as attachment:
        for rows in (64, 64, 64):
            model(torch.randn(rows, 32)).square().mean().backward()
            model.zero_grad()
        plan = attachment.plan
        for _ in range(2):
            with pytest.raises(BudgetBelowFloor):
                model(torch.randn(8000, 32))
            assert attachment.plan.regions is plan.regions


def test_what_a_loss_of_ones_own_takes_is_refused_in_the_second_call_with_a_budget_that_works():
    _, managed = twins(optimizer=torch.optim.SGD)
    model, batch = managed.model, torch.randn(ROWS, WIDTH)

    def step() -> None:
        torch.cdist(model(batch), torch.randn(4 * ROWS, WIDTH)).exp().mean().backward()  # 8 MiB and more
        model.zero_grad()

    plimsoll.attach(model, "4MiB")
    step()
    with pytest.raises(BudgetBelowFloor, match="was measured to need") as refused:
        step()
    assert not [m for m in model.modules() if "forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks]
    assert not torch_optimizer._global_optimizer_post_hooks
    step()
    (budget,) = re.findall(r'budget="(\w+\.?\w*)"', refused.value.next)
    with plimsoll.attach(model, budget), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step()


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({"budget": "24G"}, InvalidBudget),
        ({"budget": None}, InvalidBudget),
        ({"budget": MIB, "optimizer": "adamw"}, InvalidModel),
        ({"budget": MIB, "regions": []}, InvalidRegions),
    ],
)
def test_what_is_wrong_from_the_start_is_refused_at_once(how: dict[str, Any], kind: type):
    model = Stack()
    with unchanged(model), pytest.raises(kind):
        plimsoll.attach(model, **how)


def test_what_shows_in_the_first_call_is_refused_there_and_the_model_let_go():
    model = Stack()
    with unchanged(model):
        plimsoll.attach(model, MIB, regions=["layers.*"])
        with pytest.raises(InvalidRegions):
            model(torch.ones(2, WIDTH))


def test_an_exception_in_the_first_forward_only_delays_the_plan():
    plain, managed = twins(optimizer=torch.optim.SGD)
    expected = plain.steps((ROWS,) * 3)
    calls_of_the_tracer = [None] * 3
    with plimsoll.attach(managed.model, BUDGET) as attachment:
        springs = mock.Mock(side_effect=[*calls_of_the_tracer, RuntimeError("trap")])
        trap = managed.model.blocks[1].register_forward_pre_hook(springs)
        with pytest.raises(RuntimeError, match="trap"):
            managed.steps((ROWS,))
        trap.remove()
        managed.model.zero_grad()
        found = managed.steps((ROWS,) * 3)
        assert not attachment.is_calibrating
    assert_same(expected, found)


def test_forwards_without_backward_do_not_count_as_a_step():
    _, managed = twins(optimizer=torch.optim.SGD)
    with plimsoll.attach(managed.model, BUDGET) as attachment:
        managed.model(torch.randn(ROWS, WIDTH))
        managed.model(torch.randn(ROWS, WIDTH))
        assert attachment.is_calibrating
        managed.steps((ROWS,) * 2)
        assert not attachment.is_calibrating


@pytest.mark.long
@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_profiler_of_the_user_has_precedence(where: str):
    _, managed = twins(optimizer=torch.optim.SGD)
    with plimsoll.attach(managed.model, BUDGET) as attachment, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            if where == "around":
                with torch.profiler.profile() as profiler:
                    managed.steps((ROWS,))
            else:
                output = managed.model(torch.randn(ROWS, WIDTH))
                with torch.profiler.profile() as profiler:
                    mean_square(output).backward()
            is_recorded = any("mm" in event.key for event in profiler.key_averages())
            assert is_recorded == (where == "inside" or step > 0)  # the call that is traced is lost, with a warning
        assert not attachment.is_calibrating
    assert not torch._C._autograd._profiler_enabled()


def test_a_copy_of_an_attached_model_is_a_plain_model():
    _, managed = twins()
    with plimsoll.attach(managed.model, 200_000):
        twin = copy.deepcopy(managed.model)
        twin(torch.randn(ROWS, WIDTH)).sum().backward()
    assert twin.blocks[0].up.weight.grad is not None


def test_a_graph_before_the_model_is_not_run_by_tracing():
    encoder, model = nn.Linear(8, WIDTH), Stack()
    with plimsoll.attach(model, "1GiB"):
        hidden = encoder(torch.randn(4, 8))
        output = model(hidden)
        assert encoder.weight.grad is None
        output.sum().backward()
    assert encoder.weight.grad is not None


def _sharpness_aware(budget: int) -> list[int]:
    """The peaks of a loop that keeps perturbations in a list from one backward to the next, by a meter from outside."""
    with LiveStorages() as live:
        torch.manual_seed(0)
        model = zoo.build("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with plimsoll.attach(model, budget):
            live.watch(model)
            for _ in range(3):
                model(**zoo.words(4, 32)).loss.backward()
                moved = [(each, each.grad * 0.01) for each in model.parameters()]
                optimizer.zero_grad()
                with torch.no_grad():
                    torch._foreach_add_(*map(list, zip(*moved, strict=True)))
                model(**zoo.words(4, 32)).loss.backward()
                with torch.no_grad():
                    torch._foreach_sub_(*map(list, zip(*moved, strict=True)))
                del moved
                optimizer.step()
                optimizer.zero_grad()
    return live.peaks


@pytest.mark.long
def test_the_one_refusal_counts_what_a_loop_carries_in_a_list():
    """At the floor of the first step alone it went on above its budget without a word."""
    with pytest.raises(BudgetBelowFloor) as refusal:
        _sharpness_aware(2**10)
    named_bytes = int(re.findall(r"\((\d+) bytes\)", refusal.value.next)[0])

    peaks = _sharpness_aware(named_bytes)

    assert max(peaks) <= named_bytes


@pytest.mark.parametrize("budget", ["1GiB", "2MiB"])
def test_an_optimizer_that_the_loop_replaces_is_freed(budget: str):
    model = Stack(3, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    with plimsoll.attach(model, budget, optimizer=optimizer) as attachment:
        for number in range(8):
            if number == 5:
                first, optimizer = weakref.ref(optimizer), torch.optim.AdamW(model.parameters())
                gc.collect()
                assert first() is None
            mean_square(model(torch.randn(512, 32))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert attachment.plan is not None
