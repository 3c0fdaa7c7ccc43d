"""Every training step keeps to its budget, or one message names it, where no shape of a batch shows what a step takes."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import plimsoll
from long_cases import some
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.situations import MeteredSituations, Situation
from plimsoll.tracing.meters import allocated
from plimsoll.units import MIB
from steps import Biased, PaddingFree, Stack, mean_square

ROWS, WIDTH, STEPS, CHANGE = 1024, 64, 9, 4
CPU = torch.device("cpu")


class Pruning(Stack):
    """Drops tokens between two of its blocks."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x[mask] if number == 1 else x)
        return x


class Sampling(Stack):
    """Runs its blocks on several samples of each row."""

    samples = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.repeat(self.samples, 1))


class Loop:
    """A training of ``STEPS`` steps, which changes at step ``CHANGE``."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.make = make

    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        self.loss(model, number).backward()
        self.update(optimizer)

    def loss(self, model: Any, number: int) -> torch.Tensor:
        return mean_square(model(*self.batch(number)))

    def batch(self, number: int) -> tuple[Any, ...]:
        return (torch.randn(ROWS, WIDTH),)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


class FewerHoles(Loop):
    """The mask of a batch of one shape has fewer gaps from the change on."""

    def batch(self, number: int) -> tuple[Any, ...]:
        return torch.randn(ROWS, WIDTH), torch.arange(ROWS) < (ROWS // 3 if number < CHANGE else ROWS)


class MoreSamples(Loop):
    def loss(self, model: Any, number: int) -> torch.Tensor:
        model.samples = 1 if number < CHANGE else 3
        return super().loss(model, number)


class HeavierLoss(Loop):
    def loss(self, model: Any, number: int) -> torch.Tensor:
        output = model(*self.batch(number))
        scales = range(1, 12 if number >= CHANGE else 2)
        return sum((output * scale).log_softmax(-1).square().mean() for scale in scales)


class RetainsGraph(Loop):
    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        self.loss(model, number).backward(retain_graph=number >= CHANGE)
        self.update(optimizer)


class GradientPenalty(Loop):
    def loss(self, model: Any, number: int) -> torch.Tensor:
        loss = super().loss(model, number)
        if number < CHANGE:
            return loss
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in gradients)


class LearnsToLearn(Loop):
    """MAML: the second forward runs at fast weights, while the graph of the first gradients waits."""

    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        for _ in range(2):
            weights = dict(model.named_parameters())
            loss = mean_square(torch.func.functional_call(model, weights, self.batch(number)))
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            fast = {
                name: each - 0.1 * gradient for (name, each), gradient in zip(weights.items(), gradients, strict=True)
            }
            mean_square(torch.func.functional_call(model, fast, self.batch(number))).backward()
        self.update(optimizer)


class NoisyCopies(Loop):
    """The model runs at noisy copies of its weights, which exist until backward has ended."""

    def loss(self, model: Any, number: int) -> torch.Tensor:
        if not self.is_noisy(number):
            return super().loss(model, number)
        weights = {name: each + 0.01 * torch.randn_like(each) for name, each in model.named_parameters()}
        return mean_square(torch.func.functional_call(model, weights, self.batch(number)))

    def is_noisy(self, number: int) -> bool:
        return number >= CHANGE


class NoisyInTurns(NoisyCopies):
    def is_noisy(self, number: int) -> bool:
        return number >= CHANGE and number % 2 == 0


class OtherFirstBlock(NoisyCopies):
    """Only the weights of one block are exchanged, for views of larger copies."""

    def loss(self, model: Any, number: int) -> torch.Tensor:
        if not self.is_noisy(number):
            return Loop.loss(self, model, number)
        block = model.blocks[0].named_parameters(prefix="blocks.0")
        weights = {name: each.detach().repeat(8, *[1] * (each.dim() - 1))[: len(each)] for name, each in block}
        return mean_square(torch.func.functional_call(model, weights, self.batch(number)))


class NoisyFromTheStart(NoisyCopies):
    def is_noisy(self, number: int) -> bool:
        return True


class MoreQuantized(Loop):
    """Runs at quantized weights, whose graph holds further tensors: of one block first, of all blocks in the next step."""

    def loss(self, model: Any, number: int) -> torch.Tensor:
        if number < CHANGE:
            return super().loss(model, number)
        prefix = "blocks.0" if number == CHANGE else ""
        weights = {
            name: (each.tanh() * 8).round() / 8 + each.tanh() - each.tanh().detach()
            for name, each in model.named_parameters()
            if name.startswith(prefix)
        }
        return mean_square(torch.func.functional_call(model, weights, self.batch(number)))


class FailsOnce(Loop):
    """Somebody holds the loss of a step that failed, as a debugger or a notebook does."""

    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss = self.loss(model, number)
        if number == CHANGE:
            self.held = loss
            return
        loss.backward()
        self.update(optimizer)


class RaisesInForward(Loop):
    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number != CHANGE:
            super().step(model, optimizer, number)
            return
        with mock.patch.object(model.blocks[2].down, "forward", side_effect=ValueError):
            try:
                model(*self.batch(number))
            except ValueError as error:
                self.error = error


class Averages(Loop):
    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        super().step(model, optimizer, number)
        if number == CHANGE:
            self.average = AveragedModel(model)


class Perturbs(Loop):
    """Sharpness-aware steps: a second pass at perturbed weights, with the perturbations in a list."""

    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number >= CHANGE:
            self.loss(model, number).backward()
            with torch.no_grad():
                moves = [(each, each.grad * 0.01) for each in model.parameters()]
                for parameter, move in moves:
                    parameter.add_(move)
            optimizer.zero_grad()
        super().step(model, optimizer, number)


class ChangesOptimizer(Loop):
    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == CHANGE:
            self.later = torch.optim.AdamW(model.parameters(), amsgrad=True)
        super().step(model, optimizer if number < CHANGE else self.later, number)


class Reorders(Loop):
    """The same blocks run in another order from the change on."""

    order = (3, 2, 1, 0)

    def loss(self, model: Any, number: int) -> torch.Tensor:
        if number == CHANGE:
            self.reorder(model)
        return super().loss(model, number)

    def reorder(self, model: Any) -> None:
        model.order = self.order


class ReordersLate(Reorders):
    order = (0, 3, 2, 1)


class NewList(Reorders):
    def reorder(self, model: Any) -> None:
        model.blocks = nn.ModuleList(model.blocks[at] for at in self.order)


class Rows(Loop):
    """From the change on, a batch is the first rows of a larger tensor that nobody else holds."""

    def batch(self, number: int) -> tuple[Any, ...]:
        return (torch.randn(ROWS * (1 if number < CHANGE else 4), WIDTH)[:ROWS],)


class Columns(Rows):
    def batch(self, number: int) -> tuple[Any, ...]:
        step = 1 if number < CHANGE else 4
        return (torch.randn(ROWS, WIDTH * step)[:, ::step],)


class SomeRows(Rows):
    """Every third batch, the second one too, is a view of a larger tensor."""

    def batch(self, number: int) -> tuple[Any, ...]:
        return (torch.randn(ROWS * (4 if number % 3 == 1 else 1), WIDTH)[:ROWS],)


def enlarged(parameters: Any) -> list[torch.Tensor]:
    return [each.grad.repeat(64, *[1] * (each.dim() - 1)) for each in parameters]


class Updates(Loop):
    """The loop's own optimizer holds large updates after backward."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = getattr(self, "steps", -1) + 1
        if self.steps >= CHANGE:
            parameters = optimizer.param_groups[0]["params"]
            updates = enlarged(parameters)
            with torch.no_grad():
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.sub_(update[: len(parameter)], alpha=1e-3)
            del updates
            optimizer.zero_grad()
        else:
            super().update(optimizer)


class UpdatesAfterItsStep(Updates):
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = getattr(self, "steps", -1) + 1
        optimizer.step()
        if self.steps >= CHANGE:
            enlarged(optimizer.param_groups[0]["params"])
        optimizer.zero_grad()


class SecondModel(Loop):
    """In the same step and after this model, another model is trained by an optimizer of its own."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.other = Stack(6, WIDTH)
        self.others = torch.optim.SGD(self.other.parameters(), lr=0.01)

    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        super().step(model, optimizer, number)
        if number >= CHANGE:
            mean_square(self.other(*self.batch(number))).backward()
            self.update_other()
            self.other.zero_grad()

    def update_other(self) -> None:
        self.others.step()


class BackwardOfAnother(SecondModel):
    """The loop only needs the gradients of the other model."""

    def update_other(self) -> None:
        pass


class Mines(Loop):
    """The loop compares all rows with each other, without gradients, between forward and backward."""

    def loss(self, model: Any, number: int) -> torch.Tensor:
        output = model(*self.batch(number))
        if number < CHANGE:
            return mean_square(output)
        with torch.no_grad():
            weights = (output @ output.T).softmax(-1).amax(1, keepdim=True)
        return mean_square(output * weights)


class MinesRarely(Mines):
    """Does so in every fourth step only."""

    def loss(self, model: Any, number: int) -> torch.Tensor:
        return Loop.loss(self, model, number) if number % 4 else super().loss(model, number)


class Replaces(Loop):
    """The blocks are exchanged for copies of them."""

    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == CHANGE:
            for at, block in enumerate(model.blocks):
                model.blocks[at] = copy.deepcopy(block)
            del block
            optimizer.param_groups[0]["params"] = list(model.parameters())
        super().step(model, optimizer, number)


class OtherLoss(Loop):
    """A loss of fewer autograd nodes that takes more memory."""

    def loss(self, model: Any, number: int) -> torch.Tensor:
        output = model(*self.batch(number))
        if number < CHANGE:
            return mean_square(output).exp().log().exp().log().exp().log()
        return torch.cdist(output[: ROWS // 2], output[: ROWS // 2]).mean()


class Run:
    """The weights that a loop ends with, the peak of every step, and the step before whose call each warning came."""

    def __init__(self, loop: Loop, verb: str = "", share: float = 0.5) -> None:
        torch.manual_seed(0)
        self.said: list[tuple[int, str]] = []
        with LiveStorages() as live, contextlib.ExitStack() as stack:
            model = loop.make()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            if verb:
                first = loop.batch(0)
                free = plimsoll.plan(model, first, loss=mean_square, strategy="none")
                self.budget = int(free.floor_bytes + share * (free.baseline_peak_bytes - free.floor_bytes))
            if verb == "attach":
                stack.enter_context(plimsoll.attach(model, self.budget, verify_every=0))
            elif verb == "apply":
                plan = plimsoll.plan(model, first, self.budget, loss=mean_square)
                stack.enter_context(plimsoll.apply(model, plan))
            first = None
            live.watch(model)
            self.peaks = []
            for number in range(STEPS + 1):
                torch.manual_seed(number)
                begun = len(live.peaks)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if number < STEPS:
                        loop.step(model, optimizer, number)
                    else:
                        stack.close()
                self.said += [(number, str(each.message)) for each in caught if "plimsoll" in str(each.message)]
                self.peaks.append(max(live.peaks[begun:], default=0))
            self.weights = [parameter.detach().clone() for parameter in model.parameters()]

    @property
    def over(self) -> list[int]:
        return [number for number, peak in enumerate(self.peaks) if peak > self.budget]


class Ordered(Stack):
    """Runs its blocks in any order."""

    order = range(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in self.order:
            x = self.blocks[at](x)
        return x


INSIDE: dict[str, tuple[type[Loop], type[Stack]]] = {
    "padding": (FewerHoles, PaddingFree),
    "tokens": (FewerHoles, Pruning),
    "samples": (MoreSamples, Sampling),
    "loss": (HeavierLoss, Stack),
    "retained": (RetainsGraph, Stack),
    "penalty": (GradientPenalty, Stack),
    "failed": (FailsOnce, Stack),
    "raised": (RaisesInForward, Stack),
    "reordered": (Reorders, Ordered),
    "reordered late": (ReordersLate, Ordered),
    "a new list": (NewList, Ordered),
}

REORDERED = ("reordered", "reordered late", "a new list")
SHARES = {"loss": 0.5, **dict.fromkeys(REORDERED, 0.2)}
"""Budgets, from the lowest peak to the unmanaged one, at which a step after the change is over whatever the plan."""


def loop_of(kind: str) -> Loop:
    loop, model = INSIDE[kind]
    return loop(lambda: model(4, WIDTH))


@pytest.mark.long
@pytest.mark.parametrize("kind", INSIDE)
def test_a_step_that_grows_without_a_larger_batch_is_named_under_an_applied_plan(kind: str):
    expected, found = Run(loop_of(kind)), Run(loop_of(kind), "apply", share=SHARES.get(kind, 0.5))
    assert all(map(torch.equal, expected.weights, found.weights))
    assert min(found.over) >= CHANGE
    named = [number for number, text in found.said if "more than the budget" in text]
    assert min(found.over) <= min(named) <= min(found.over) + 2
    assert len(named) <= 2  # a first estimate, and a measurement that is higher


@pytest.mark.parametrize("kind", some(["padding", "tokens", "samples", "loss", "retained", *REORDERED], 2))
def test_a_step_that_grows_without_a_larger_batch_is_named_and_planned_for_under_attach(kind: str):
    expected, found = (
        Run(loop_of(kind)),
        Run(loop_of(kind), "attach", share=SHARES.get(kind, 1.0)),
    )
    assert all(map(torch.equal, expected.weights, found.weights))
    over = [number for number in found.over if number]  # the first one is traced
    assert over
    assert min(over) >= CHANGE
    assert max(over) <= CHANGE + 2 or any("below the smallest reachable peak" in text for _, text in found.said)
    assert any("more than the budget" in text for _, text in found.said)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["padding", "samples"])
def test_activations_that_grow_inside_a_batch_are_no_reason_to_name_a_floor_that_is_too_high(kind: str):
    run = Run(loop_of(kind), "attach", share=1.6)
    assert run.over == [CHANGE]
    assert not any("below the smallest reachable peak" in text for _, text in run.said)


@pytest.mark.long
@pytest.mark.parametrize("loop", [Rows, Columns, SomeRows])
def test_what_a_view_of_a_larger_batch_holds_is_subtracted_before_the_step_runs(loop: type[Loop]):
    expected, found = Run(loop(lambda: Stack(4, WIDTH))), Run(loop(lambda: Stack(4, WIDTH)), "attach", share=0.7)
    assert all(map(torch.equal, expected.weights, found.weights))
    assert found.over == []
    assert not found.said


@pytest.mark.long
@pytest.mark.parametrize("loop", [NoisyCopies, NoisyInTurns, OtherFirstBlock, MoreQuantized])
def test_copies_of_weights_that_a_call_runs_at_are_subtracted_before_the_step_runs(loop: type[Loop]):
    expected, found = Run(loop(lambda: Stack(4, WIDTH))), Run(loop(lambda: Stack(4, WIDTH)), "attach", share=0.7)
    assert all(map(torch.equal, expected.weights, found.weights))
    assert found.over == []
    assert not found.said


@pytest.mark.long
def test_copies_of_weights_in_the_first_call_are_planned_with():
    loop = NoisyFromTheStart(lambda: Stack(4, WIDTH))
    expected, found = Run(loop), Run(loop, "attach", share=1.3)
    assert all(map(torch.equal, expected.weights, found.weights))
    assert [number for number in found.over if number] == []


@pytest.mark.long
@pytest.mark.parametrize("loop", [Rows, Columns, SomeRows])
def test_a_view_of_a_larger_batch_is_named_under_an_applied_plan(loop: type[Loop]):
    found = Run(loop(lambda: Stack(4, WIDTH)), "apply", share=0.3)
    assert found.over
    named = [number for number, text in found.said if "more than the budget" in text]
    assert min(named) <= min(found.over) + 1
    assert len(named) == 1


@pytest.mark.long
@pytest.mark.parametrize("verb", ["apply", "attach"])
@pytest.mark.parametrize("loop", [Updates, UpdatesAfterItsStep, BackwardOfAnother])
def test_what_a_loop_takes_after_backward_is_named_once(loop: type[Loop], verb: str):
    expected, found = Run(loop(lambda: Stack(4, WIDTH))), Run(loop(lambda: Stack(4, WIDTH)), verb, share=0.1)
    assert all(map(torch.equal, expected.weights, found.weights))
    assert min(found.over) == CHANGE
    assert ["after its last backward" in text for _, text in found.said] == [True]


@pytest.mark.long
@pytest.mark.parametrize("verb", ["apply", "attach"])
def test_another_model_that_is_trained_in_turns_is_no_part_of_the_step(verb: str):
    found = Run(SecondModel(lambda: Stack(4, WIDTH)), verb, share=0.1)
    assert min(found.over) == CHANGE
    assert not found.said


@pytest.mark.long
@pytest.mark.parametrize("verb", ["apply", "attach"])
@pytest.mark.parametrize("loop", [Mines, MinesRarely, OtherLoss])
def test_what_a_loop_takes_between_forward_and_backward_is_named(loop: type[Loop], verb: str):
    expected, found = Run(loop(lambda: Stack(4, WIDTH))), Run(loop(lambda: Stack(4, WIDTH)), verb, share=0.5)
    assert all(map(torch.equal, expected.weights, found.weights))
    assert min(found.over) == CHANGE
    assert any("more than the budget" in text for _, text in found.said)
    if verb == "attach":
        assert STEPS - 1 not in found.over or any("below the smallest reachable peak" in text for _, text in found.said)


@pytest.mark.long
def test_blocks_that_are_replaced_by_others_are_planned_for():
    found = Run(Replaces(lambda: Stack(4, WIDTH)), "attach", share=0.2)
    assert found.over
    assert max(found.over) <= CHANGE + 2
    assert any("were replaced" in text for _, text in found.said)


@pytest.mark.parametrize("period", [2, 3, 4, 5, 7, 8, 10, 16, 50])
def test_samples_meet_every_position_of_a_loop_that_repeats(period: int):
    situations, situation = MeteredSituations(), Situation((("f32", (2, 2)),))
    metered = []
    for step in range(40 * period + 16):
        if situations.begin(situation):
            metered.append(step)
            situations.ended(1, 1)
        situations.ran(1)
    assert {step % period for step in metered} == set(range(period))
    assert len(metered) <= 20 + 40 * period / 14


@pytest.mark.long
@pytest.mark.parametrize("loop", [Averages, Perturbs, ChangesOptimizer])
def test_what_a_loop_begins_to_hold_is_taken_off_before_the_next_step_runs(loop: type[Loop]):
    expected, found = Run(loop(lambda: Stack(4, WIDTH))), Run(loop(lambda: Stack(4, WIDTH)), "attach")
    assert all(map(torch.equal, expected.weights, found.weights))
    assert found.over in ([], [0])
    assert not found.said


@pytest.mark.long
@pytest.mark.parametrize("share", [4.0, 5.5])
def test_no_overrun_is_named_that_did_not_happen(share: float):
    """The graph of the first gradients exists before the second forward, and goes in its backward."""
    loop = LearnsToLearn(lambda: Stack(3, WIDTH))
    expected, found = Run(loop), Run(loop, "attach", share)
    assert all(map(torch.equal, expected.weights, found.weights))
    assert not found.over
    assert not found.said


@pytest.mark.long
def test_a_loop_that_learns_to_learn_is_not_refused_above_its_unmanaged_peak():
    loop = LearnsToLearn(lambda: Stack(3, WIDTH))
    unmanaged = max(Run(loop).peaks)
    with pytest.raises(BudgetBelowFloor) as refused:
        Run(loop, "attach", 1.8)
    (named,) = re.findall(r'budget="([\d.]+)MiB"', str(refused.value))
    assert float(named) * MIB < unmanaged


def with_lbfgs(budget: int | None) -> tuple[list[int], list[torch.Tensor]]:
    """The peak of every step, and the weights after the last."""
    torch.manual_seed(0)
    with LiveStorages() as live:
        model = Stack(3, WIDTH)
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, history_size=3)
        handle = None if budget is None else plimsoll.attach(model, budget, optimizer=optimizer)
        for number in range(STEPS):
            batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mean_square(model(batch))
                loss.backward()
                return loss

            live.begin()
            optimizer.step(closure)
        if handle is not None:
            handle.remove()
    return live.peaks, [each.detach().clone() for each in model.parameters()]


@pytest.mark.long
def test_vectors_of_a_running_step_of_lbfgs_are_counted_once():
    """They are planned as the optimizer's state, also while they are local variables of its step."""
    _, expected = with_lbfgs(None)
    with pytest.raises(BudgetBelowFloor) as refused:
        with_lbfgs(MIB)
    [floor] = re.findall(r'budget="([\d.]+)MiB"', str(refused.value))
    budget = int(1.01 * float(floor) * MIB)
    peaks, weights = with_lbfgs(budget)
    assert all(map(torch.equal, expected, weights))
    assert 0.8 * budget < max(peaks) <= budget


class Wide(nn.Sequential):
    """Most of its memory is in its weights."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(4)))


@pytest.mark.long
def test_every_growth_of_a_history_that_begins_in_mid_run_is_named():
    """First Adam, then L-BFGS, as networks for differential equations are trained."""
    torch.manual_seed(0)
    batch, named = torch.randn(512, 64), [0.0]
    with LiveStorages() as live, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = Wide()
        handle = plimsoll.attach(model, 12 * MIB)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = model(batch).square().mean()
            found.backward()
            return found

        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            live.begin()
            loss()
            optimizer.step()
        optimizer = torch.optim.LBFGS(
            model.parameters(), 0.1, max_iter=3, history_size=5, line_search_fn="strong_wolfe"
        )
        for _ in range(10):
            live.begin()
            optimizer.step(loss)
            figures = re.findall(r"a training step took ([\d.]+) MiB", " ".join(str(each.message) for each in said))
            named.append(max(map(float, figures), default=0.0) * MIB)
        handle.remove()
    assert max(live.peaks[:4]) < 12 * MIB < 16 * MIB < max(live.peaks)
    for peak, found in zip(live.peaks[4:-1], named[2:], strict=True):  # a step is named when the next one has begun
        assert peak <= max(12 * MIB, 1.01 * found)


@pytest.mark.long
def test_the_second_call_of_attach_holds_no_copies_of_buffers_over_the_budget():
    def make() -> nn.Module:
        return nn.Sequential(*(Biased(ROWS, WIDTH) for _ in range(4)))

    found = Run(Loop(make), "attach")
    assert found.over in ([], [0])
    assert not found.said


@pytest.mark.long
def test_outputs_that_a_loop_collects_are_no_part_of_its_steps():
    class Collects(Loop):
        def loss(self, model: Any, number: int) -> torch.Tensor:
            output = model(*self.batch(number))
            self.outputs = [*getattr(self, "outputs", []), output.detach()]
            return mean_square(output)

    found = Run(Collects(lambda: Stack(4, WIDTH)), "attach")
    assert not found.said


@pytest.mark.long
def test_a_wrapper_around_a_managed_forward_stays_when_the_model_is_traced_again():
    class Wraps(Loop):
        def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
            if number == CHANGE:
                block = model.blocks[1]
                forward = block.forward
                block.forward = lambda x: forward(forward(x).tanh())
            super().step(model, optimizer, number)

    expected, found = Run(Wraps(lambda: Stack(4, WIDTH))), Run(Wraps(lambda: Stack(4, WIDTH)), "attach", share=0.3)
    assert all(map(torch.equal, expected.weights, found.weights))


def test_what_is_allocated_rises_and_falls_with_a_tensor():
    before = allocated.allocated_bytes(CPU)
    if before is None:
        pytest.skip("this C library does not count what it has given out")
    tensor = torch.empty(8 * MIB, dtype=torch.uint8)
    assert 8 * MIB <= allocated.allocated_bytes(CPU) - before < 9 * MIB
    del tensor
    assert allocated.allocated_bytes(CPU) - before < MIB


def test_a_c_library_that_does_not_see_torchs_memory_is_not_read():
    allocated._heap_reader.cache_clear()
    try:
        with mock.patch.object(allocated.torch, "empty", return_value=None):
            assert allocated.allocated_bytes(CPU) is None
    finally:
        allocated._heap_reader.cache_clear()


@pytest.mark.long
def test_a_model_that_cannot_be_measured_because_another_one_is_says_so():
    """On a CPU only one meter runs. The encoder's step lasts from its forward to its next one."""
    encoder, decoder = Stack(3, WIDTH), Stack(3, WIDTH)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    with (
        warnings.catch_warnings(record=True) as caught,
        plimsoll.attach(encoder, 7 * MIB, optimizer=optimizer),
        plimsoll.attach(decoder, 7 * MIB, optimizer=optimizer),
    ):
        warnings.simplefilter("always")
        for _ in range(5):
            mean_square(decoder(encoder(torch.randn(ROWS, WIDTH)))).backward()
            optimizer.step()
            optimizer.zero_grad()
    (said,) = [str(each.message) for each in caught if "were not measured" in str(each.message)]
    assert "another managed model" in said


def test_an_overrun_by_what_the_loop_holds_names_it():
    """The copies alone exceed the room that the lowest plan leaves."""
    model = Stack(3, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held = []
    with warnings.catch_warnings(record=True) as caught, plimsoll.attach(model, 7 * MIB, optimizer=optimizer):
        warnings.simplefilter("always")
        for number in range(7):
            if number == CHANGE:
                held.append(torch.zeros(6 * MIB // 4))
            mean_square(model(torch.randn(ROWS, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [str(each.message) for each in caught if "a training step took" in str(each.message)]
    assert ["the training loop holds 6.0 MiB more" in each for each in said] == [True] * len(said)
    assert said


@pytest.mark.long
@pytest.mark.parametrize("kind", ["padding", "samples", "loss", "retained"])
def test_an_overrun_in_every_step_that_no_plan_prevents_is_said_and_then_its_lowest_peak(kind: str):
    found = Run(loop_of(kind), "attach", share=0.05)
    assert found.over == list(range(CHANGE, STEPS))
    warned = [(number, text) for number, text in found.said if "more than the budget" in text]
    assert [number for number, _ in warned] == [CHANGE + 1, CHANGE + 2]
    assert ["below the smallest reachable peak" in text for _, text in warned] == [False, True]
