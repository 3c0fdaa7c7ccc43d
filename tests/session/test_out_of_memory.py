"""A step that runs out of memory loses nothing: it is run again under a tighter plan, or refused with all as it was."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from benchmarks.out_of_memory import cases, told
from torch import nn
from torch.optim import optimizer as torch_optimizer

import plimsoll
from long_cases import some
from metering import Device
from plimsoll.errors import BudgetBelowFloor, InvalidModel
from plimsoll.session import retry, step_snapshot
from plimsoll.session.rendezvous.world import Participants, World
from plimsoll.units import MIB
from steps import Stack, mean_square
from unchanged import snapshot

ROWS, WIDTH = 1024, 32
STEPS, SCARCE = 4, 2
"""As many steps; from the one with this number on the device has a limit."""
LIMIT = 5 * MIB
"""Above the lowest peak of the model, below half of what it takes without a plan."""


class Training:
    """Blocks with dropout, trained with AdamW."""

    def __init__(self, blocks: int = 6) -> None:
        torch.manual_seed(0)
        self.model = Stack(blocks, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def managed(self, verb: str) -> Any:
        if verb == "attach":
            return plimsoll.attach(self.model, "1GiB", optimizer=self.optimizer)
        batch = torch.randn(ROWS, WIDTH)
        return plimsoll.apply(
            self.model, plimsoll.plan(self.model, batch, "1GiB", loss=mean_square, optimizer=self.optimizer)
        )

    def step(self, batch: torch.Tensor) -> float:
        loss = mean_square(self.model(batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def run(self, verb: str = "", limit: int | None = None) -> tuple[list[Any], Device]:
        """Losses and weights of some steps, without a verb without Plimsoll."""
        handle = self.managed(verb) if verb else None
        made: list[Any] = []
        with Device().standing_in() as device:
            for number in range(STEPS):
                torch.manual_seed(number)
                batch = torch.randn(ROWS, WIDTH)
                if number == SCARCE and limit is not None:
                    device.limit_bytes = limit
                made.append(self.step(batch) if handle is None else handle.step(self.step, batch))
        if handle is not None:
            handle.remove()
        return [*made, *(parameter.detach() for parameter in self.model.parameters())], device


@pytest.mark.long
@pytest.mark.parametrize(("seed", "case"), [*enumerate(cases(2)), (5, cases(6)[-1])], ids=str)
@pytest.mark.filterwarnings("ignore:plimsoll. a training step took")
def test_a_step_that_fails_at_a_random_moment_has_the_bits_of_one_under_the_tighter_plan(seed: int, case: Any):
    ((part, moment),) = case.moments(1, seed)
    row, is_right = told(case, part, moment)
    assert is_right, row


@pytest.mark.parametrize("verb", some(["attach", "apply"], 1))
def test_training_goes_on_on_a_device_that_has_lost_half_of_its_memory(verb: str, caplog: pytest.LogCaptureFixture):
    plain, _ = Training().run()
    found, device = Training().run(verb, LIMIT)
    assert device.failures > 0
    assert "everything was put back, the step is run again with" in caplog.text
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize("verb", some(["attach", "apply"], 1))
def test_where_no_plan_fits_the_floor_is_named_and_everything_is_as_before_the_step(verb: str):
    training = Training()
    with training.managed(verb) as handle:
        for _ in range(3):
            handle.step(training.step, torch.randn(ROWS, WIDTH))
        batch = torch.randn(ROWS, WIDTH)
        before = {
            name: value for name, value in snapshot(training.model, training.optimizer).items() if " own" not in name
        }
        with Device(MIB).standing_in(), pytest.raises(BudgetBelowFloor, match=r"the lowest peak .* MiB"):
            handle.step(training.step, batch)
        after = snapshot(training.model, training.optimizer)
        for name, value in before.items():
            if name.endswith(("value", "buffer", "random state")) or name.startswith("optimizer "):
                assert torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name], (
                    name
                )


def test_state_that_did_not_exist_before_is_gone_and_a_batch_is_whole_again():
    training = Training()
    seen: list[tuple[int, list[str]]] = []

    def step(batch: dict[str, torch.Tensor]) -> None:
        seen.append((len(training.optimizer.state), list(batch)))
        mean_square(training.model(batch.pop("x"))).backward()
        training.optimizer.step()
        if len(seen) == 1:
            raise torch.OutOfMemoryError("after all is done")

    with training.managed("attach") as handle:
        handle.step(step, {"x": torch.randn(ROWS, WIDTH)})
    assert seen == [(0, ["x"]), (0, ["x"])]


def test_attributes_of_modules_are_put_back_to_any_depth():
    training = Training()
    module = next(iter(training.model.modules()))
    module.seen = {"tokens": [0], "mean": {"of": torch.zeros(3)}}
    module.sums, module.draws = np.zeros(2), np.random.default_rng(0)
    tries: list[tuple[Any, ...]] = []

    def step() -> None:
        found = (
            module.seen["tokens"][0],
            module.seen["mean"]["of"].sum().item(),
            module.sums.sum(),
            module.draws.random(),
        )
        tries.append(found)
        module.seen["tokens"][0] += 7
        module.seen["mean"]["of"] += 1
        module.sums += 1
        mean_square(training.model(torch.randn(ROWS, WIDTH))).backward()
        if len(tries) == 1:
            raise torch.OutOfMemoryError

    with training.managed("attach") as handle:
        handle.step(step)
    assert len(tries) == 2
    assert tries[0] == tries[1]


def test_attributes_and_gradients_that_the_step_gives_other_memory_are_put_back():
    training = Training()
    module, weight = next(iter(training.model.modules())), next(training.model.parameters())
    module.seen = {"mean": torch.zeros(3), "last": torch.zeros(0)}
    weight.grad = gradient = torch.ones_like(weight)
    tries: list[tuple[Any, ...]] = []

    def step() -> None:
        tries.append((module.seen["mean"].tolist(), module.seen["last"].tolist(), gradient.shape, gradient.sum()))
        module.seen["mean"].data = torch.ones(5)
        module.seen["last"].resize_(4).fill_(1)
        gradient.data = torch.zeros(2)
        if len(tries) == 1:
            raise torch.OutOfMemoryError

    with training.managed("attach") as handle:
        handle.step(step)
    assert len(tries) == 2
    assert tries[0] == tries[1]


def test_a_learning_rate_that_the_step_changes_before_it_fails_is_put_back():
    training = Training(2)
    rates, batch = [], torch.randn(64, WIDTH)

    def step() -> None:
        training.optimizer.param_groups[0]["lr"] *= 0.5
        rates.append(training.optimizer.param_groups[0]["lr"])
        loss = mean_square(training.model(batch))
        loss.backward()
        if len(rates) == 3:
            raise torch.OutOfMemoryError("in backward")
        training.optimizer.step()
        training.optimizer.zero_grad()

    with plimsoll.attach(training.model, "1GiB", optimizer=training.optimizer) as handle:
        for _ in range(3):
            handle.step(step)
    assert rates == [5e-3, 2.5e-3, 1.25e-3, 1.25e-3]


def test_a_learned_loss_and_frozen_parameters_are_as_before_the_step_that_failed():
    def trained(*, fails: bool) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        model, loss = Stack(2, WIDTH), nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
        calls = []

        def step(batch: torch.Tensor) -> None:
            calls.append(None)
            mean_square(loss(model(batch))).backward()
            if fails and len(calls) == 3:
                model.blocks[0].requires_grad_(False)
                raise torch.OutOfMemoryError("after backward")
            optimizer.step()
            optimizer.zero_grad()

        with plimsoll.attach(model, "1GiB", optimizer=optimizer) as handle:
            for number in range(4):
                torch.manual_seed(number)
                handle.step(step, torch.randn(64, WIDTH))
        assert len(calls) == 4 + fails
        return model, loss

    for one, other in zip(trained(fails=False), trained(fails=True), strict=True):
        assert all(map(torch.equal, one.parameters(), other.parameters()))
        assert all(each.requires_grad for each in other.parameters())


@pytest.mark.long
def test_gradients_that_were_there_are_there_again():
    training = Training()
    with training.managed("attach") as handle:
        mean_square(training.model(torch.randn(ROWS, WIDTH))).backward()
        batch, gradients = torch.randn(ROWS, WIDTH), [p.grad for p in training.model.parameters()]
        before, tries = [gradient.clone() for gradient in gradients], []

        def step() -> None:
            tries.append([torch.equal(p.grad, was) for p, was in zip(training.model.parameters(), before, strict=True)])
            mean_square(training.model(batch)).backward()
            if len(tries) == 1:
                training.model.zero_grad()
                raise torch.OutOfMemoryError

        handle.step(step)
    assert len(tries) == 2
    assert all(map(all, tries))
    assert all(p.grad is gradient for p, gradient in zip(training.model.parameters(), gradients, strict=True))


def write_a_parameter(training: Training, batch: torch.Tensor) -> None:
    with torch.no_grad():
        training.model.blocks[0].up.weight.mul_(2)


def write_the_batch(training: Training, batch: torch.Tensor) -> None:
    batch.add_(1)


@pytest.mark.parametrize(("write", "named"), [(write_a_parameter, "a parameter"), (write_the_batch, "a tensor")])
def test_what_cannot_be_put_back_is_said_and_the_error_is_the_users(write: Any, named: str):
    training = Training()

    def step(batch: torch.Tensor) -> None:
        write(training, batch)
        raise torch.OutOfMemoryError("of the user's")

    with training.managed("attach") as handle, pytest.raises(torch.OutOfMemoryError, match="of the user's") as raised:
        handle.step(step, torch.randn(ROWS, WIDTH))
    assert named in raised.value.__notes__[0]


@pytest.mark.long
def test_nothing_is_copied_without_step_and_other_errors_pass(monkeypatch: pytest.MonkeyPatch):
    training, copied = Training(), []
    monkeypatch.setattr(step_snapshot, "kept_copy", lambda tensor: copied.append(tensor) or tensor.clone())
    with training.managed("attach") as handle:
        for _ in range(3):
            training.step(torch.randn(ROWS, WIDTH))
        assert not copied

        def step() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            handle.step(step)
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_a_step_of_ranks_that_were_left_out_is_refused_in_words():
    world = World(rank=0, ranks=(0, 1), store=None)  # type: ignore[arg-type]
    with (
        mock.patch.object(retry, "find_participants", return_value=Participants(world)),
        Training().managed("attach") as handle,
        pytest.raises(InvalidModel, match="is trained by 2 ranks"),
    ):
        handle.step(lambda: None)


TRIES: list[int] = []
"""A global, because what a closure holds is restored after a step that failed."""


def test_what_the_loop_holds_still_counts_after_a_step_ran_out_of_memory():
    training = Training()
    handle = training.managed("attach")
    for _ in range(5):
        training.step(torch.randn(ROWS, WIDTH))
    held = torch.zeros(MIB // 4)  # a copy of the weights, say
    for _ in range(2):
        training.step(torch.randn(ROWS, WIDTH))
    assert handle._known.room.account.held_by_loop == held.nbytes
    errors = [torch.OutOfMemoryError]

    def once() -> None:
        if errors:
            raise errors.pop()
        training.step(torch.randn(ROWS, WIDTH))

    for _ in range(4):
        handle.step(once)
    assert handle._known.room.account.held_by_loop >= held.nbytes


def test_a_step_that_fails_while_it_is_traced_is_managed_when_it_is_run_again():
    training = Training()
    TRIES.clear()

    def fail(*_: object) -> None:
        TRIES.append(1)
        if len(TRIES) == 1:
            raise torch.OutOfMemoryError

    with training.managed("attach") as handle:
        hook = training.model.blocks[0].register_forward_hook(fail)
        handle.step(training.step, torch.randn(ROWS, WIDTH))
        hook.remove()
        assert len(TRIES) > 1
        assert handle.plan is not None
