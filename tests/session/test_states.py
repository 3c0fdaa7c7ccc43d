"""Every cell of the table of states and events is walked through by a real training."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import plimsoll
from long_cases import some
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session import states
from plimsoll.session.attachment import Attachment
from plimsoll.session.states import TABLE, State, TrainingEvent
from plimsoll.units import MIB
from steps import Stack, mean_square

ROWS, WIDTH = 512, 64
ROOMY, TIGHT, NONE = 64 * MIB, 5 * MIB, 1024
ONE_PLAN = {"allow": ("recompute", "offload"), "link": "disk"}
"""Options under which all batches share one plan."""


class Growing(Stack):
    """Runs only its first blocks."""

    depth = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x


class Training:
    """A model under ``plimsoll.attach`` and its loop."""

    def __init__(
        self, budget: int = ROOMY, make: Callable[[], nn.Module] = lambda: Stack(4, WIDTH), **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.before_attach()
        self.attachment: Any = plimsoll.attach(self.model, budget, verify_every=0, **options)
        self.attachment.measures_before_refusing = budget != NONE  # that one is refused in the first call

    def before_attach(self) -> None:
        """What a subclass does to the model first."""

    def steps(self, count: int, rows: int = ROWS) -> None:
        for _ in range(count):
            self.step(rows)

    def step(self, rows: int = ROWS) -> None:
        mean_square(self.model(torch.randn(rows, WIDTH))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Frozen(Training):
    """The first block is frozen when the budget is attached."""

    def before_attach(self) -> None:
        self.model.blocks[0].requires_grad_(False)

    def thaw(self) -> None:
        self.model.blocks[0].requires_grad_(True)


class Failing(Training):
    """A function that is run by ``handle.step`` and goes on after errors of the budget."""

    def __init__(self, *then: Callable[[Any], None], make: Callable[[], nn.Module] = lambda: Stack(2, WIDTH)) -> None:
        super().__init__(NONE, make)
        with pytest.raises(BudgetBelowFloor):
            self.attachment.step(lambda: self.go_on(then))

    def go_on(self, then: tuple[Callable[[Any], None], ...]) -> None:
        with pytest.raises(BudgetBelowFloor):
            self.step()
        for each in then:
            each(self)
        self.step()


def runs_out_of_memory(training: Training, *, times: int = 1) -> None:
    """Run a step that runs out of memory in its first attempts."""
    left = times

    def function() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError
        training.step()

    training.attachment.step(function)


def out_of_memory_after_giving_up() -> None:
    seen: list[int] = []

    def once(training: Any) -> None:
        seen.append(1)
        if len(seen) == 1:
            raise torch.OutOfMemoryError

    Failing(once)


def thawed_after_giving_up() -> None:
    class FrozenAndFailing(Frozen, Failing):
        pass

    FrozenAndFailing(lambda training: training.thaw())


def thawed(steps: int) -> None:
    training = Frozen()
    training.steps(steps)
    training.thaw()
    training.steps(3)


def larger_batch() -> None:
    training = Training(**ONE_PLAN)
    training.steps(3)
    training.steps(2, rows=2 * ROWS)


def more_layers() -> None:
    training = Training(TIGHT, lambda: Growing(12, WIDTH))
    training.steps(3)
    training.model.depth = 12
    training.steps(4)


def heavy_step(training: Training) -> None:
    """A step whose loss takes far more memory than the model."""
    output = training.model(torch.randn(ROWS, WIDTH))
    sum((output * scale).log_softmax(-1).square().mean() for scale in range(1, 30)).backward()
    training.optimizer.zero_grad()


def heavier_loss() -> None:
    training = Training(TIGHT, **ONE_PLAN)
    training.steps(3)
    for _ in range(3):
        heavy_step(training)


def two_forwards() -> None:
    training = Training()
    training.steps(3)
    for _ in range(2):
        (
            mean_square(training.model(torch.randn(ROWS, WIDTH)))
            + mean_square(training.model(torch.randn(ROWS, WIDTH)))
        ).backward()
        training.optimizer.zero_grad()


def one_step_fails() -> None:
    """A step fails in backward and is repeated while the exception still holds its graph; later steps do not fail."""
    training = Training()
    training.steps(3)
    output = training.model(torch.randn(ROWS, WIDTH))
    output.register_hook(lambda gradient: gradient.reshape(1))
    try:
        mean_square(output).backward()
    except RuntimeError:
        training.step()
    del output
    training.steps(10)


def late_state() -> None:
    """The optimizer makes its first step when the plan has been made."""
    training = Training()
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    for _ in range(3):
        mean_square(training.model(torch.randn(ROWS, WIDTH))).backward()
    training.steps(3)


def held_copy() -> list[nn.Module]:
    training = Training()
    training.steps(5)
    copies = [copy.deepcopy(block) for block in training.model.blocks for _ in range(4)]
    training.steps(2)
    return copies


def less_room() -> None:
    rooms = iter([ROOMY, ROOMY, TIGHT, TIGHT, TIGHT, TIGHT])
    training = Training(room=lambda: next(rooms, TIGHT))
    training.steps(5)


def refused_after_measuring() -> None:
    """The model's trace fits, and the loss of the loop does not."""
    training = Training(TIGHT)
    heavy_step(training)
    with pytest.raises(BudgetBelowFloor):
        training.model(torch.randn(ROWS, WIDTH))


def refused_by_the_model() -> None:
    training = Training()
    training.steps(3)
    with pytest.raises(RuntimeError):
        training.model(torch.randn(ROWS, WIDTH + 1))
    training.steps(1)


def refused_at_once() -> None:
    training = Training(NONE)
    with pytest.raises(BudgetBelowFloor):
        training.step()


def at_once() -> None:
    runs_out_of_memory(Training())


def in_step(number: int) -> None:
    training = Training(TIGHT)
    training.steps(number)
    runs_out_of_memory(training)


SCENARIOS: dict[tuple[TrainingEvent, State], Callable[[], Any]] = {
    (TrainingEvent.THAWED, State.UNTRACED): lambda: thawed(0),
    (TrainingEvent.THAWED, State.MEASURING): lambda: thawed(1),
    (TrainingEvent.THAWED, State.RUNNING): lambda: thawed(3),
    (TrainingEvent.THAWED, State.GIVEN_UP): thawed_after_giving_up,
    (TrainingEvent.CALL, State.UNTRACED): lambda: Training().steps(1),
    (TrainingEvent.CALL, State.MEASURING): lambda: Training().steps(2),
    (TrainingEvent.CALL, State.RUNNING): lambda: Training().steps(3),
    (TrainingEvent.CALL, State.GIVEN_UP): Failing,
    (TrainingEvent.LARGER_BATCH, State.RUNNING): larger_batch,
    (TrainingEvent.RAN_MORE, State.RUNNING): more_layers,
    (TrainingEvent.EXCEEDED, State.RUNNING): heavier_loss,
    (TrainingEvent.MORE_FORWARDS, State.RUNNING): two_forwards,
    (TrainingEvent.FEWER_FORWARDS, State.RUNNING): one_step_fails,
    (TrainingEvent.NEW_STATE, State.RUNNING): late_state,
    (TrainingEvent.LOOP_HOLDS, State.RUNNING): held_copy,
    (TrainingEvent.ROOM_CHANGED, State.RUNNING): less_room,
    (TrainingEvent.STEP_ENDED, State.RUNNING): lambda: Training().steps(4),
    (TrainingEvent.OUT_OF_MEMORY, State.UNTRACED): at_once,
    (TrainingEvent.OUT_OF_MEMORY, State.MEASURING): lambda: in_step(1),
    (TrainingEvent.OUT_OF_MEMORY, State.RUNNING): lambda: in_step(3),
    (TrainingEvent.OUT_OF_MEMORY, State.GIVEN_UP): out_of_memory_after_giving_up,
    (TrainingEvent.FAILED, State.UNTRACED): refused_at_once,
    (TrainingEvent.FAILED, State.MEASURING): refused_after_measuring,
    (TrainingEvent.FAILED, State.RUNNING): refused_by_the_model,
    (TrainingEvent.FAILED, State.GIVEN_UP): Failing,
}


@pytest.mark.parametrize(
    "cell", some([pytest.param(cell) for cell in SCENARIOS], 3), ids=lambda cell: f"{cell[0].name} while {cell[1]}"
)
def test_a_real_training_goes_through_the_cell(cell: tuple[TrainingEvent, State]):
    walked: list[tuple[TrainingEvent, State, State]] = []
    react = Attachment._react

    def spy(attachment: Attachment, event: TrainingEvent, *arguments: Any, **named: Any) -> Any:
        before = attachment.state
        try:
            return react(attachment, event, *arguments, **named)
        finally:
            walked.append((event, before, attachment.state))

    with mock.patch.object(Attachment, "_react", spy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SCENARIOS[cell]()
    assert cell in {(event, before) for event, before, _ in walked}
    for event, before, after in walked:
        assert after in {*TABLE[event][before].leads_to, before}


def test_the_table_has_a_scenario_for_every_cell_and_a_method_for_every_reaction():
    cells = {(event, state) for event, row in TABLE.items() for state in row}
    assert cells == set(SCENARIOS)
    assert set(TABLE) == set(TrainingEvent)
    for row in TABLE.values():
        for cell in row.values():
            assert inspect.isfunction(getattr(Attachment, cell.method))


def test_the_documentation_shows_the_table():
    rows = [("event", *map(str, State))]
    for event, cells in TABLE.items():
        rows.append((event.name, *(cells[state].method if state in cells else "" for state in State)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        assert f"    {line}\n" in (states.__doc__ or "")
