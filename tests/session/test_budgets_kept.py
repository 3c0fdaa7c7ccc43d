"""Whatever the training loop looks like: weights as without a plan, every step within the budget, or one clear message."""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.floors import CLOSE, Case, measured, told_by
from torch import nn
from torch.optim.swa_utils import AveragedModel

import plimsoll
from long_cases import some
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.risen_rest import RisenRest
from plimsoll.session.step_watch import StepWatch
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.meters.memory import RisingPeak
from plimsoll.tracing.torch_internals import is_profiler_on
from plimsoll.units import KIB, MIB
from steps import Net, Stack, gpt2, mean_square

ROWS, WIDTH = 1024, 32

Loop = Callable[[nn.Module, torch.optim.Optimizer, int], Any]
"""One step of training, by its number."""


def loss_of(model: nn.Module, rows: int = ROWS) -> torch.Tensor:
    return mean_square(model(torch.randn(rows, WIDTH)))


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model).backward()
    update(optimizer)


def zeros_late(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    output = model(torch.randn(ROWS, WIDTH))
    optimizer.zero_grad()
    mean_square(output).backward()
    optimizer.step()


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(3):
        loss_of(model).backward()
    update(optimizer)


def pairs(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rows: tuple[int, int] = (ROWS, ROWS)
) -> None:
    chosen, rejected = (model(torch.randn(count, WIDTH)) for count in rows)
    with torch.no_grad():
        reference = model(torch.randn(1, WIDTH)).mean()
    loss = mean_square(chosen) - mean_square(rejected - reference)
    del chosen, rejected
    loss.backward()
    update(optimizer)


def growing_pairs(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    pairs(model, optimizer, number, (ROWS // 2, ROWS))


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(evaluate)


def distils(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rows: int = ROWS) -> None:
    """A loss outside of the model that takes much, and less than a block does where everything is computed again."""
    output = model(torch.randn(rows, WIDTH))
    near = sum((output * scale).log_softmax(-1).square().mean() for scale in (1.0, 2.0, 3.0))
    near.backward()
    update(optimizer)


def growing_distils(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    distils(model, optimizer, number, ROWS // 2 if number < 2 else ROWS)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    plain(model, optimizer, number)
    AveragedModel(model).update_parameters(model)


class Forgetful(Stack):
    """Lets go of a cache in its first forward. While that step is planned it is held, to be put back for the user's own."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width)
        self.cache = [torch.zeros(MIB)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.clear()
        return super().forward(x)


class Training:
    """A model trained by a loop, with the peaks of its steps and what Plimsoll said."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.make = make
        self.optimizer = optimizer
        self.attachment: Any = None

    def run(self, loop: Loop, budget: int | str | None = None, *, steps: int = 4, **how: Any) -> list[torch.Tensor]:
        with LiveStorages() as live, warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            model = self.make()
            optimizer = self.optimizer(model.parameters())
            if budget is not None:
                self.attachment = stack.enter_context(plimsoll.attach(model, budget, **how))
            live.watch(model)
            for number in range(steps):
                torch.manual_seed(number)
                loop(model, optimizer, number)
        self.peaks = live.peaks
        self.said = [str(entry.message) for entry in caught if "plimsoll" in str(entry.message)]
        return [parameter.detach().clone() for parameter in model.parameters()]


def assert_kept(training: Training, loop: Loop, share: float = 0.7, steps: int = 4, held_bytes: int = 0) -> None:
    """Weights of the unmanaged training, at a share of its peak, without a word; ``held_bytes`` are let go in step one."""
    expected = training.run(loop, steps=steps)
    budget = int(share * max(training.peaks))
    found = training.run(loop, budget, steps=steps)
    assert training.peaks[0] <= budget + held_bytes
    assert max(training.peaks[1:]) <= budget
    assert training.said == []
    assert not training.attachment.is_calibrating
    assert any(region.dropped for region in training.attachment.plan.regions)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    ("loop", "make"),
    some(
        [
            (loop, Stack)
            for loop in (
                plain,
                zeros_late,
                accumulates,
                pairs,
                growing_pairs,
                closure,
                distils,
                growing_distils,
                scaled,
                averaged,
            )
        ]
        + [(plain, Forgetful)],
        3,
    ),
)
def test_any_loop_keeps_to_its_budget(loop: Loop, make: type[Stack]):
    held_bytes = 4 * MIB if make is Forgetful else 0
    assert_kept(Training(lambda: make(3, WIDTH), torch.optim.AdamW), loop, held_bytes=held_bytes)


@pytest.mark.parametrize(
    "options",
    some([{"fused": True}, {"foreach": True}, {"capturable": False, "amsgrad": True}], 1),
    ids=lambda it: next(iter(it)),
)
def test_any_form_of_an_optimizer_is_seen_to_step(options: dict[str, Any]):
    training = Training(lambda: Stack(3, WIDTH), lambda parameters: torch.optim.AdamW(parameters, **options))
    assert_kept(training, plain)


def attention(width: int) -> Net:
    """Takes memory by the square of the sequence's length."""
    way = lambda net, x: x + torch.softmax(net.to_queries(x) @ x.transpose(1, 2), -1) @ x  # noqa: E731
    return Net(way, to_queries=nn.Linear(width, width))


def sequences(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """As many bytes in every step, in longer sequences in the third and the last one."""
    shape = (2, 512) if number in (2, 4) else (16, 64)
    mean_square(model(torch.randn(*shape, WIDTH))).backward()
    update(optimizer)


@pytest.mark.long
def test_longer_sequences_of_the_same_bytes_are_planned_for_before_they_run():
    training = Training(lambda: nn.Sequential(*[attention(WIDTH) for _ in range(4)]), torch.optim.SGD)
    assert_kept(training, sequences, steps=5)
    assert "f32[2x512x32]" in training.attachment.plan.signature


@pytest.mark.long
def test_a_budget_below_the_floor_in_mid_run_leaves_the_old_plan_in_force():
    torch.manual_seed(0)
    model = Stack(3, WIDTH)
    with plimsoll.attach(model, 600_000) as attachment:
        for _ in range(2):
            loss_of(model, 128).backward()
            model.zero_grad()
        plan = attachment.plan
        with pytest.raises(BudgetBelowFloor):
            loss_of(model, 16 * ROWS)
        assert attachment.plan.regions is plan.regions
        loss_of(model, 128).backward()
        assert attachment.plan.regions is plan.regions
        assert [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [Case("vit"), Case("resnet", "plan", "SGD"), Case("gpt2", loop="accumulates"), Case("bert", "plan")],
    ids=str,
)
def test_the_floor_that_a_refusal_names_works_as_a_budget_at_once(case: Case):
    floor = measured(case)
    assert floor.is_kept
    assert floor.excess <= CLOSE


@pytest.mark.long
def test_gradients_that_stay_are_counted_once():
    case = Case("llama", loop="accumulates", rows=4)
    with pytest.raises(BudgetBelowFloor) as refused:
        case.run("1KiB")
    budget = int(1.3 * told_by(refused.value, case.loop))
    peak, said = case.run(budget)
    assert 0.9 * budget < peak <= budget
    assert said == []


def later_pairs(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    (pairs if number >= 3 else plain)(model, optimizer, number)


@pytest.mark.long
def test_more_forwards_before_one_backward_than_planned_are_said_and_planned_for():
    training = Training(lambda: Stack(3, WIDTH), torch.optim.SGD)
    training.run(later_pairs, steps=5)
    budget = int(0.7 * max(training.peaks))
    training.run(later_pairs, budget, steps=6)
    assert max(training.peaks[-4:]) <= budget
    announced, measured = training.said
    assert "2 forwards of the model wait for one backward, and the plan was made for 1" in announced
    assert "a training step took" in measured
    assert "2 forwards of the model wait for one backward" in measured


def one_step_fails(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step is repeated while the exception of its backward still holds its graph."""
    batch = torch.randn(ROWS, WIDTH)
    output = model(batch)
    try:
        if number == 4:
            output.register_hook(lambda gradient: gradient.reshape(1))
        mean_square(output).backward()
    except RuntimeError:
        optimizer.zero_grad()
        mean_square(model(batch)).backward()
    update(optimizer)


def test_plans_for_two_forwards_are_left_again_once_steps_have_one():
    training = Training(lambda: Stack(4, WIDTH), torch.optim.AdamW)
    expected = training.run(one_step_fails, steps=16)
    budget = int(0.85 * max(training.peaks[:4]))
    found = training.run(one_step_fails, budget, steps=16)
    assert all(map(torch.equal, expected, found))
    failing, *later = training.peaks[5:]  # one peak for each forward, and the failing step has two
    assert max(later) <= budget < failing
    assert later[0] < 0.9 * training.peaks[3]
    assert later[-1] == training.peaks[3]
    assert training.attachment.plan.in_flight == 1
    assert not [text for text in training.said if "smallest reachable" in text]
    (overrun,) = (text for text in training.said if "2 forwards of the model wait for one backward\n" in text)
    assert "later steps are planned for as many forwards" in overrun


def query_and_document(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Forwards of two sizes for one backward. A plan counts both as the larger one."""
    pairs(model, optimizer, number, (ROWS // 8, ROWS))


def test_a_forecast_that_is_too_high_is_no_reason_to_name_a_floor():
    training = Training(lambda: Stack(4, WIDTH), torch.optim.AdamW)
    expected = training.run(query_and_document, steps=8)
    budget = int(0.45 * max(training.peaks))
    found = training.run(query_and_document, budget, steps=8)
    assert all(map(torch.equal, expected, found))
    assert max(training.peaks[6:]) <= budget  # two peaks for each step
    assert not [text for text in training.said if "smallest reachable" in text]
    assert training.attachment._known.shaped.is_below_floor


def document_and_query(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    pairs(model, optimizer, number, (ROWS, ROWS // 16))


@pytest.mark.parametrize("loop", [query_and_document, document_and_query])
def test_forwards_of_two_sizes_are_measured_alike_in_both_orders(loop: Loop):
    training = Training(lambda: Stack(4, WIDTH), torch.optim.AdamW)
    training.run(loop, steps=3)
    training.run(loop, 3 * max(training.peaks), steps=6)
    account = training.attachment._known.room.account
    assert account.outside_model < max(training.peaks) // 8
    assert not training.attachment._known.shaped.is_below_floor
    assert not any(region.dropped for region in training.attachment.plan.regions)


def pairs_come_back(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A loss over two outputs, which needs far more than the model, in the first steps and again after a pause."""
    if number in (2, 3, 4, 13, 14, 15):
        alike = model(torch.randn(ROWS, WIDTH)) @ model(torch.randn(ROWS, WIDTH)).T
        (alike.exp() + alike.sin() + alike.cos()).mean().backward()
    else:
        mean_square(model(torch.randn(ROWS, WIDTH))).backward()
    update(optimizer)


def test_what_pairs_of_forwards_were_measured_to_need_is_known_when_they_come_again():
    training = Training(lambda: Stack(4, WIDTH), torch.optim.AdamW)
    expected = training.run(pairs_come_back, steps=16)
    budget = int(0.8 * max(training.peaks))
    found = training.run(pairs_come_back, budget, steps=16)
    assert all(map(torch.equal, expected, found))
    # Two peaks for each step with a pair. The first such step after the pause is mixed: its first forward was planned alone.
    assert max(training.peaks[-4:]) <= budget < training.peaks[-5]


def penalized(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A loss outside of the model that needs far more in every fourth step."""
    output = model(torch.randn(ROWS, WIDTH))
    loss = mean_square(output)
    if number % 4 == 3:
        alike = output @ output.T
        loss = loss + (alike.exp() + alike.sin() + alike.cos()).mean()
    loss.backward()
    update(optimizer)


def test_a_penalty_that_comes_now_and_then_is_named_each_time(caplog: pytest.LogCaptureFixture):
    training = Training(lambda: Stack(3, WIDTH), torch.optim.SGD)
    training.run(penalized, steps=16)
    budget = int(0.6 * max(training.peaks))
    caplog.set_level("WARNING", "plimsoll")
    training.run(penalized, budget, steps=16)
    over = [number for number, peak in enumerate(training.peaks) if peak > budget]
    assert over == [3, 7, 11, 15]
    warned = [text for text in training.said if "a training step took" in text]
    logged = [record.getMessage() for record in caplog.records if " again, " in record.getMessage()]
    assert sum("below the smallest reachable peak" in text for text in warned) <= 1
    assert len(warned) + len(logged) >= 3  # the last step is named when the next one begins


@pytest.mark.parametrize("allow", ["recompute", "recompute,compress"])
def test_a_copy_that_the_loop_keeps_is_found_in_the_first_micro_batch_after_it(allow: str):
    kept: dict[str, Any] = {}

    def keeps_a_copy(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for _ in range(2):
            loss = loss_of(model)
            loss.backward()
            kept["loss"] = loss.detach()  # grows by 4 bytes after the copy: no record
        update(optimizer)
        if number == 3:
            kept["copy"] = [torch.zeros(2**17) for _ in range(2)]

    training = Training(lambda: Stack(4, WIDTH), torch.optim.AdamW)
    training.run(keeps_a_copy, steps=8)
    budget = int(0.75 * max(training.peaks[:4]))
    kept.clear()
    training.run(keeps_a_copy, budget, steps=8, allow=allow)
    assert max(training.peaks[4:]) <= budget


def test_gradients_that_were_kept_to_compare_forms_with_are_let_go():
    training = Training(lambda: Stack(4, WIDTH), torch.optim.AdamW)
    training.run(plain)
    budget = int(0.75 * max(training.peaks))
    training.run(plain, budget, allow="compress", max_error=0.05)
    assert training.attachment.plan is not None
    assert training.attachment._planned_step.planner.gradients is None
    assert max(training.peaks[1:]) <= budget


class Shallow(Stack):
    """Runs some of its blocks, as layers that are dropped by chance do."""

    depth = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[: self.depth]:
            x = block(x)
        return x


def deepens(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """More blocks than before, now and then."""
    assert isinstance(model, Shallow)
    model.depth = 5 if number in (3, 5) or number > 6 else 2
    plain(model, optimizer, number)


@pytest.mark.long
@pytest.mark.parametrize("verb", ["attach", "apply"])
def test_a_forward_that_runs_more_than_those_before_it_is_metered_and_named(verb: str):
    training = Training(lambda: Shallow(5, WIDTH), torch.optim.SGD)
    expected = training.run(deepens, steps=10)
    unmanaged = training.peaks
    budget = int(0.7 * max(unmanaged))
    if verb == "attach":
        found = training.run(deepens, budget, steps=10)
        assert max(training.peaks[6:]) <= budget < max(training.peaks)
        assert all(map(torch.equal, expected, found))
        said = training.said
    else:
        model = Shallow(5, WIDTH)
        plan = plimsoll.plan(model, torch.randn(ROWS, WIDTH), int(0.9 * unmanaged[2]), loss=mean_square)
        with warnings.catch_warnings(record=True) as caught, plimsoll.apply(model, plan):
            warnings.simplefilter("always")
            for number in range(10):
                deepens(model, torch.optim.SGD(model.parameters()), number)
        said = [str(entry.message) for entry in caught][:1]
    assert [
        "ran more operations than in all earlier steps" in text and "more than the budget" in text for text in said
    ] == [True]


def casts_by_turns(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """In lower precision at first: the same shapes take twice as much where it is off."""
    with torch.autocast("cpu", enabled=number not in (2, 4)):
        loss = loss_of(model)
    loss.backward()
    update(optimizer)


@pytest.mark.long
def test_steps_with_and_without_autocast_take_plans_of_their_own():
    training = Training(lambda: Stack(4, WIDTH), torch.optim.SGD)
    expected = training.run(casts_by_turns, steps=6)
    assert training.peaks[4] > 1.2 * training.peaks[5]
    budget = int(0.7 * max(training.peaks))
    found = training.run(casts_by_turns, budget, steps=6)
    assert max(training.peaks[3:]) <= budget
    assert "autocast" in training.attachment.plan.signature
    assert all(map(torch.equal, expected, found))


@pytest.mark.long
def test_weights_that_autocast_has_cast_are_planned_for_as_gone_before_backward():
    """A loop leaves autocast before backward; a plan is made within it."""
    with LiveStorages() as meter:
        model, batch = Stack(8, 128), torch.randn(16, 128)
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        with torch.autocast("cpu"):
            with pytest.raises(BudgetBelowFloor) as refused:
                plimsoll.plan(model, batch, "1KiB", loss=mean_square)
            floor_bytes = told_by(refused.value, "plain")
            plan = plimsoll.plan(model, batch, floor_bytes, loss=mean_square)
        with plimsoll.apply(model, plan):
            meter.watch(model)
            for _ in range(3):
                with torch.autocast("cpu"):
                    loss = mean_square(model(batch))
                loss.backward()
                model.zero_grad()
    # With gradients; casts that stayed would be half as much as the weights.
    assert max(meter.peaks) <= floor_bytes < 2.3 * parameter_bytes


def test_an_applied_plan_says_that_autocast_is_another_than_it_was_made_for():
    model, batch = Stack(3, WIDTH), torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu"):
        plan = plimsoll.plan(model, batch, "100MiB", loss=mean_square)
    plan = plan.__replace__(budget_bytes=plan.predicted_peak_bytes)
    with plimsoll.apply(model, plan):
        loss_of(model).backward()
        model.zero_grad()
        with pytest.warns(UserWarning, match="plan was made for .*, autocast cpu bf16"):
            model(batch)


class Made:
    """What a model returns, in a class of its own."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Wrapping(Stack):
    """Returns an object that holds its loss."""

    def forward(self, x: torch.Tensor) -> Any:
        return Made(mean_square(super().forward(x)))


def wrapped_pairs(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    first, second = (model(torch.randn(ROWS, WIDTH)) for _ in range(2))
    (first.loss + second.loss).backward()
    update(optimizer)


def test_a_model_may_return_objects_of_a_class_of_its_own():
    training = Training(lambda: Wrapping(3, WIDTH), torch.optim.SGD)
    assert_kept(training, wrapped_pairs)
    assert training.attachment.plan.in_flight == 2


def scales_by_samples(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Gradients of single samples before the step."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    loss_at = lambda weights, x: mean_square(torch.func.functional_call(model, weights, (x[None],)))  # noqa: E731
    samples = torch.func.vmap(torch.func.grad(loss_at), (None, 0), randomness="same")(weights, torch.randn(2, WIDTH))
    scale = 1 + max(gradient.abs().max() for gradient in samples.values())
    del samples
    (loss_of(model) / scale).backward()
    update(optimizer)


def steps_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Every parameter is stepped as soon as its gradient is there."""
    if number == 0:
        for parameter in model.parameters():
            own = torch.optim.SGD([parameter], lr=1e-3)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: update(own))
    loss_of(model).backward()


@pytest.mark.parametrize("loop", some([scales_by_samples, steps_in_backward], 1))
def test_transforms_and_optimizers_within_backward_are_no_steps_of_their_own(loop: Loop):
    training = Training(lambda: Stack(3, WIDTH), torch.optim.SGD)
    assert_kept(training, loop, steps=5)
    assert not is_profiler_on()


def test_a_model_whose_forward_is_never_called_is_named_when_it_is_trained():
    model = nn.ModuleDict({"net": Stack(2, WIDTH)})
    optimizer = torch.optim.SGD(model.parameters())
    with plimsoll.attach(model, "1MiB"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            loss_of(model["net"]).backward()
            update(optimizer)
    (said,) = (str(entry.message) for entry in caught)
    assert "nothing is managed" in said
    assert ".net" in said


@pytest.mark.parametrize(
    ("cause", "step"),
    some(
        [
            (
                "its batch is f32[4096x32], and the plan was made for f32[1024x32]",
                lambda model: (model.zero_grad(), loss_of(model, 4 * ROWS).backward()),
            ),
            (
                "2 forwards of the model wait",
                lambda model: (model.zero_grad(), (loss_of(model) + loss_of(model)).backward()),
            ),
            ("gradients of an earlier backward already exist", lambda model: loss_of(model).backward()),
            (
                "of its parameters were frozen before",
                lambda model: (model.requires_grad_(True), loss_of(model).backward(), model.zero_grad()),
            ),
            ("", lambda model: (loss_of(model).backward(), model.zero_grad())),
        ],
        1,
    ),
)
def test_an_applied_plan_says_once_why_a_step_takes_more_than_its_budget(cause: str, step: Callable[[nn.Module], Any]):
    model, batch = Stack(3, WIDTH), torch.randn(ROWS, WIDTH)
    if "frozen" in cause:
        model.blocks[1].requires_grad_(False)
    free = plimsoll.plan(model, batch, loss=mean_square, strategy="none")
    plan = plimsoll.plan(model, batch, (free.floor_bytes + free.baseline_peak_bytes) // 2, loss=mean_square)
    tight = plan.__replace__(budget_bytes=plan.predicted_peak_bytes - 64 * KIB) if cause else plan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with plimsoll.apply(model, tight):
            for _ in range(4):
                step(model)
    said = [str(entry.message) for entry in caught]
    assert [cause in text and "more than the budget" in text for text in said] == [True] * bool(cause)


def test_on_a_gpu_a_peak_that_rises_is_seen_without_resetting_the_counter():
    peak = RisingPeak(torch.device("cuda"))
    with (
        mock.patch("torch.cuda.memory_allocated", return_value=5),
        mock.patch("torch.cuda.max_memory_allocated", side_effect=[9, 9, 9, 12]),
    ):
        assert (peak.begin(), peak.risen_to()) == (5, 0)
        assert (peak.begin(), peak.risen_to()) == (5, 12)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (["backward 20", "own 20", "loop 20"], 0),
        (["backward 20", "own 25", "loop 25"], 25),
        (["backward 20", "own 25", "loop 28"], 28),
        (["backward 20", "other 40", "own 40", "loop 40"], 0),
        (["backward 20", "other 40", "own 45", "loop 45"], 45),
        (["backward 20", "own 25", "other 40", "loop 40"], 25),
        (["backward 20", "other 40", "backward 40", "own 45", "loop 45"], 45),
        (["backward 10", "own 10", "loop 12"], 12),
        (["backward 10", "own 9", "loop 9"], 0),
    ],
)
def test_on_a_gpu_the_training_of_another_model_is_no_part_of_the_rest_of_a_step(events: list[str], expected: int):
    """``own 25``: the counter reads 25 after the step of the model's optimizer."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in (("own", model), ("other", other))}
    counter = [10]
    with (
        mock.patch("torch.cuda.memory_allocated", return_value=5),
        mock.patch("torch.cuda.max_memory_allocated", side_effect=lambda _: counter[0]),
    ):
        rising = RisingPeak(torch.device("cuda"))
        rest = RisenRest(model, rising)
        for _ in range(2):
            counter[0] = 10
            rising.begin()
            rest.begin()
            for event in events:
                name, reading = event.split()
                if name == "own":
                    raised = optimizers[name].register_step_post_hook(lambda *_, at=int(reading): counter.insert(0, at))
                    optimizers[name].step()
                    raised.remove()
                counter[0] = int(reading)
                if name == "other":  # its forward and backward have raised the counter
                    optimizers[name].step()
                if name == "backward":
                    rest.backward_ended()
            assert rest.end() == expected
        rest.remove()


@pytest.mark.parametrize(("is_updated", "expected"), [(True, 0), (False, 40)])
def test_on_a_gpu_a_step_is_not_blamed_for_the_model_that_is_trained_after_it(is_updated: bool, expected: int):
    """If only gradients of the other model are needed, that is part of the step, as on a CPU."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    counter, found = [10], []
    with (
        mock.patch("torch.cuda.memory_allocated", return_value=0),
        mock.patch("torch.cuda.max_memory_allocated", side_effect=lambda _: counter[0]),
    ):
        steps = StepWatch(model, lambda *_: None, lambda: found.append((steps.risen_bytes, steps.rest_bytes)))
        steps.rising = RisingPeak(torch.device("cuda"))
        steps._rest = RisenRest(model, steps.rising)  # as on a GPU
        loss = model(torch.randn(2, 2)).sum()
        counter[0] = 20
        loss.backward()
        optimizer.step()
        counter[0] = 40
        other(torch.randn(2, 2)).sum().backward()
        if is_updated:
            others.step()
        model(torch.randn(2, 2))
        steps.remove()
    assert found == [(20, expected)]


@pytest.mark.long
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_plan_made_before_the_first_step_holds_when_it_is_recorded_again_later(share: float):
    model, batch, loss = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    roomy = plimsoll.plan(model, batch, "1GiB", loss=loss, optimizer=optimizer)
    budget_bytes = roomy.floor_bytes + int(share * (roomy.baseline_peak_bytes - roomy.floor_bytes))
    plan = plimsoll.plan(model, batch, budget_bytes, loss=loss, optimizer=optimizer)
    model(**batch).loss.backward()
    update(optimizer)
    receipt = plimsoll.verify(model, batch, plan, loss=loss, optimizer=optimizer, steps=1)
    assert 0 < receipt.measured_recording_peak_bytes <= budget_bytes


class Generator(nn.Module):
    """Pictures, so to say, from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks = nn.Linear(8, WIDTH), Stack(2, WIDTH)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.blocks(self.start(noise))
        return made


@pytest.mark.long
def test_a_discriminator_keeps_to_its_budget_in_its_own_steps_and_in_the_generators() -> None:
    def generator() -> tuple[Generator, torch.optim.Optimizer]:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            made = Generator()
        return made, torch.optim.SGD(made.parameters(), lr=0.1)

    def train(budget: int | None = None) -> tuple[list[torch.Tensor], Training]:
        (other, others), training = generator(), Training(lambda: Stack(6, WIDTH), torch.optim.SGD)

        def in_turns(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            with torch.no_grad():
                made = other(torch.randn(ROWS, 8))
            (loss_of(model) - mean_square(model(made))).backward()
            del made
            update(optimizer)
            mean_square(model(other(torch.randn(ROWS, 8)))).backward()
            update(others)
            optimizer.zero_grad()

        found = training.run(in_turns, budget)
        return [*found, *(parameter.detach() for parameter in other.parameters())], training

    expected, without = train()
    budget = int(0.7 * max(without.peaks))
    found, training = train(budget)
    assert max(training.peaks) <= budget
    assert training.said == []
    assert any(region.dropped for region in training.attachment.plan.regions)
    assert all(map(torch.equal, expected, found))


class Recurrent(nn.Module):
    """Thousands of small operations in a block, so that its recording takes much memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(64, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.inner(x)[0]
        return made


@pytest.mark.long
def test_what_recording_takes_does_not_count_for_later_steps() -> None:
    def through_rows(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        mean_square(model(torch.randn(32, 48, 64))).backward()
        update(optimizer)

    training = Training(lambda: nn.Sequential(Recurrent(), Recurrent()), torch.optim.RMSprop)
    training.run(through_rows)
    training.run(through_rows, int(1.05 * max(training.peaks)), steps=5)
    assert training.said == []
    assert not any(region.dropped for region in training.attachment.plan.regions)


def learns_to_learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rows: int = ROWS, inner_steps: int = 1
) -> None:
    """MAML, with a step without inner steps now and then, on the whole batch."""
    if number % 4 == 3:
        loss = loss_of(model, rows)
    else:
        fast = dict(model.named_parameters())
        for _ in range(inner_steps):
            inner = mean_square(torch.func.functional_call(model, fast, (torch.randn(rows // 2, WIDTH),)))
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: each - 0.01 * slope for (name, each), slope in zip(fast.items(), slopes, strict=True)}
        loss = mean_square(torch.func.functional_call(model, fast, (torch.randn(rows // 2, WIDTH),)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.long
def test_a_larger_batch_is_not_refused_for_what_other_steps_took() -> None:
    training = Training(lambda: Stack(4, WIDTH), torch.optim.Adam)
    expected = training.run(learns_to_learn, steps=8)
    budget = int(1.05 * max(training.peaks))
    found = training.run(learns_to_learn, budget, steps=8)
    assert max(training.peaks[1:]) <= budget
    assert all(map(torch.equal, expected, found))


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return made


@pytest.mark.long
def test_a_step_that_reads_the_graph_of_an_earlier_call_goes_on_although_it_cannot_be_traced_again() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 96), *(Normed(96) for _ in range(4)), nn.Linear(96, 4))

    training, loop = Training(make, torch.optim.Adam), partial(learns_to_learn, rows=512, inner_steps=2)
    expected = training.run(loop, steps=8)
    found = training.run(loop, int(0.83 * max(training.peaks)), steps=8)
    assert any("could not be traced" in each for each in training.said)
    assert all(map(torch.equal, expected, found))


class Quantizing(nn.Module):
    """A block that saves twice as much once its fake quantization is switched on."""

    is_on = False

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(self.up(x))
        if self.is_on:
            made = (made.sin() * made.exp()).sigmoid()
        return x + self.down(made)


@pytest.mark.long
def test_the_lowest_plan_of_a_changed_step_runs_if_none_fits() -> None:
    def switched_on(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == 4:
            for block in model:
                block.is_on = True
        plain(model, optimizer, number)

    training = Training(lambda: nn.Sequential(*(Quantizing() for _ in range(6))), torch.optim.SGD)
    expected = training.run(switched_on, steps=9)
    unmanaged = training.peaks[-1]
    with pytest.raises(BudgetBelowFloor) as refused:
        training.run(plain, "16KiB")
    (budget,) = re.findall(r'budget="([^"]+)"', refused.value.next)
    del refused
    found = training.run(switched_on, budget, steps=9)
    # The error about the floor was caught, and must not keep the tensors of a trial.
    assert [each for each in gc.get_objects() if isinstance(each, TrainingStep)] == []
    assert any("below the smallest reachable peak" in each for each in training.said)
    # The first changed step keeps what the plan does not know, the second is planned.
    assert max(training.peaks[6:]) < 0.6 * unmanaged
    assert all(map(torch.equal, expected, found))
