"""Decides whether parameters are stepped while backward runs, and does so while a plan is applied.

The planner inserts the step of each parameter into the backward of the trace, where its gradient is complete (see
``tracing.backward_steps``). All other decisions are made for that step as for any step. The step without this decision stays
if its plan for the budget is as fast: single calls of the optimizer take more time than one call for all parameters.

The loop shows only while it runs whether it allows this (see ``engine.optimizer_state.in_backward``). ``attach`` watches the
first measured step before it plans this way. Under ``apply``, the first step runs as usual and is watched.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from plimsoll.artifacts.backward_steps import BackwardSteps
from plimsoll.engine.optimizer_state.by_parameter import check_steps_by_parameter, seconds_of_a_call
from plimsoll.engine.optimizer_state.in_backward import StepsInBackward
from plimsoll.errors import BudgetBelowFloor, InvalidOption, PlimsollError
from plimsoll.session.options import STEP_IN_BACKWARD
from plimsoll.session.state_offload import checked_optimizer, named_parameters, refuse_other_optimizer
from plimsoll.session.step_planner import StepPlanner, fastest_planner
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.backward_steps import gradient_bytes, in_backward, steppable_parameters, temporary_bytes
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fsdp2 import has_flat_parameters
from plimsoll.units import format_bytes_up

_WORTH_NAMING = 0.05
"""A refusal names the decision if it lowers the smallest peak by more than this share."""


def with_backward_steps(whole: StepPlanner, task: TrainingTask) -> StepPlanner:
    """Return the planner of the step whose parameters are stepped in backward, if its plan for the budget is faster. Otherwise
    return ``whole``, the planner of the step with the optimizer at the end. If neither fits, return the planner with the lower
    peak.

    Raises:
        InvalidOption: the optimizer is unknown, or its step cannot run for single parameters.
    """
    optimizer = checked_optimizer(task, STEP_IN_BACKWARD)
    if whole.budget_bytes is None or whole.fits_unmanaged():
        return whole
    check_steps_in_backward(task.model, optimizer)
    steps = all_steps(whole, task)
    if steps is None:
        return whole
    other = whole.with_backward_steps(task, steps)
    return fastest_planner(whole, 1, lambda _: other, floor_bytes_at=lambda _: other.floor_bytes)


def check_steps_in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that the parameters of a model may be stepped one by one as soon as their gradients are complete.

    Raises:
        InvalidOption: a wrapper reduces gradients over ranks later, or the optimizer cannot step single parameters.
    """
    if isinstance(model, DistributedDataParallel) or has_flat_parameters(model):
        raise InvalidOption(
            f"allow= has {STEP_IN_BACKWARD!r}, but {type(model).__name__} reduces the gradients.",
            why="a gradient is reduced over ranks after it is complete, and its parameter would be stepped before",
            next=f"leave {STEP_IN_BACKWARD!r} out of allow=, or train the model without this wrapper in one process",
        )
    check_steps_by_parameter(optimizer, STEP_IN_BACKWARD)


def all_steps(planner: StepPlanner, task: TrainingTask) -> BackwardSteps | None:
    """Return the decision to step all possible parameters in backward; ``None`` if that would not free any gradient."""
    optimizer = checked_optimizer(task, STEP_IN_BACKWARD)
    found = steppable_parameters(planner.trace, named_parameters(optimizer, inner_module(task.model)))
    freed_bytes = sum(found.values())
    if not freed_bytes:
        return None
    stepped = in_backward(planner.trace, optimizer, inner_module(task.model), found)
    return BackwardSteps(
        optimizer=type(optimizer).__name__,
        parameters=tuple(found),
        temporary_bytes=tuple(temporary_bytes(stepped)),
        gradient_bytes=gradient_bytes(planner.trace),
        freed_bytes=freed_bytes,
        seconds=0.0 if planner.trace.is_fake else len(found) * seconds_of_a_call(optimizer),
    )


def name_backward_steps(refusal: BudgetBelowFloor, whole: StepPlanner, task: TrainingTask) -> None:
    """Add to the error for a budget that is too small how far stepping in backward would lower the lowest peak, if it is more
    than 5%.
    """
    options = whole.options
    if task.optimizer is None or options.may_step_in_backward or options.may_offload_state or options.may_tile:
        return
    try:
        check_steps_in_backward(task.model, task.optimizer)
        steps = all_steps(whole, task)
    except PlimsollError:
        return
    if steps is None:
        return
    lowest_bytes = whole.with_backward_steps(task, steps).floor_bytes
    if lowest_bytes < (1 - _WORTH_NAMING) * whole.floor_bytes:
        allowed = ", ".join(map(repr, (*options.allow, STEP_IN_BACKWARD)))
        refusal.next += (
            f", or allow=({allowed}): if the optimizer steps in backward the smallest peak is about "
            f"{format_bytes_up(lowest_bytes)}"
        )


class LoopWatch:
    """Watches the steps of a loop for anything that needs all gradients at once, and steps parameters in backward later.

    Raises:
        InvalidOption: other code has replaced the optimizer's step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = inner_module(model)
        self._steps = StepsInBackward(self._model, optimizer, _trained(optimizer, self._model))
        self.steps: BackwardSteps | None = None
        """The parameters that are stepped in backward now; ``None`` while the loop is watched."""

    @property
    def reason(self) -> str:
        """What the loop does that forbids stepping in backward; empty if nothing was seen."""
        return self._steps.reason

    @property
    def has_watched(self) -> bool:
        """True if enough was watched to decide, and the next backward has not begun."""
        return self._steps.has_watched

    def start(self, optimizer: Optimizer, steps: BackwardSteps) -> None:
        """Step the parameters that the plan names in backward, from the next backward on."""
        self.remove()
        self._steps, self.steps = _steps_of(self._model, optimizer, steps), steps
        self._steps.start()

    def remove(self) -> None:
        """Stop watching and stepping. Calling it twice does no harm."""
        self._steps.remove()
        self.steps = None


class BackwardStepsAtWork:
    """Steps the parameters that a plan names in backward, until `remove`. The first step runs as usual and is watched. If the
    loop needs all gradients at once, later steps run as usual too, and one warning says why.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, steps: BackwardSteps) -> None:
        """Begin to watch the loop.

        Raises:
            PlanMismatch: the optimizer is unknown, of another class, or does not hold the parameters of the plan.
            InvalidOption: its step cannot run for single parameters, or other code has replaced it.
        """
        wrapped, model = model, inner_module(model)
        action = f"steps parameters of {steps.optimizer} in backward"
        found = refuse_other_optimizer(model, optimizer, steps.optimizer, steps.parameters, action)
        check_steps_in_backward(wrapped, found)
        self._steps = _steps_of(model, found, steps)
        self._steps.on_ready = self._decide
        self._has_decided = False

    @property
    def has_decided(self) -> bool:
        """True if parameters are stepped in backward, or if the loop does not allow it."""
        return self._steps.is_stepping or self._has_decided

    def _decide(self) -> None:
        if not self._steps.reason:
            self._steps.start()
        elif not self._has_decided:
            self._has_decided = True
            warnings.warn(
                "plimsoll: this plan steps parameters in backward, but the loop does not allow that: "
                f"{self._steps.reason}. optimizer.step() steps them instead, and the step needs more memory than the plan "
                "predicts; plan without 'step-in-backward' in allow=",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Stop stepping in backward. Calling it twice does no harm."""
        self._steps.remove()


def _trained(optimizer: Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each for name, each in named_parameters(optimizer, model).items() if each.requires_grad}


def _steps_of(model: nn.Module, optimizer: Optimizer, steps: BackwardSteps) -> StepsInBackward:
    named = _trained(optimizer, model)
    return StepsInBackward(model, optimizer, {name: named[name] for name in steps.parameters if name in named})
