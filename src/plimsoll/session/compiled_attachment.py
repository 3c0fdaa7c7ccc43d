"""Keeps training of a model compiled by torch.compile under a budget. The first training call makes the plan.

The call's own arguments are the batch. Later calls choose among a few plans by their shapes; each plan is compiled once (see
``shapes``). If values may be compressed or offloaded, all calls follow the first plan, because those forms are measured at one
size only. The first call does not show what happens outside the model, such as the user's loss if the model returns none. Steps
in a new situation are measured, and their excess over the prediction is counted from then on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.errors import PlimsollError
from plimsoll.session.account import planned_state_bytes
from plimsoll.session.agreement import Agreement
from plimsoll.session.compiled import compiled_planner
from plimsoll.session.joint_traces import facts_of
from plimsoll.session.messages import log_planning_overrun, warn_of_overrun
from plimsoll.session.optimizer_watch import optimizer_in_view
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.plans_at_work import AttachedBudget
from plimsoll.session.shapes import can_follow_shapes, told
from plimsoll.session.situations import MeteredSituations, Situation, planned_situation
from plimsoll.session.step_watch import StepWatch
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import gradients_as_if
from plimsoll.tracing.compiled.units import PlannedCall, Unit, as_ours, install_alone
from plimsoll.tracing.ddp import inner_module, is_without_reduction

_LOG = logging.getLogger(__name__)


class CompiledAttachment(AttachedBudget):
    """Keeps a model with compiled parts under a budget."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        budget: Budget,
        options: PlanOptions,
        *,
        optimizer: torch.optim.Optimizer | None,
        agreement: Agreement,
        verify_every: int = 0,
    ) -> None:
        super().__init__(model, budget, options, agreement, optimizer=optimizer, verify_every=verify_every)
        self._units = tuple(units)
        whole = next((unit for unit in units if not unit.path), None)
        self._outside = None if whole is None else _Outside(whole)
        self._steps = StepWatch(self._outside or model, self._before_call, self._after_step)
        self._work.on_larger_calls = self._steps.larger_call

    @property
    def is_calibrating(self) -> bool:
        """True until the plan is made."""
        return self._work.plan is None

    def remove(self) -> None:
        """Undo everything. Calling it twice does no harm."""
        self._steps.end_step()
        self._steps.remove()
        if self._outside is not None:
            self._outside.take_out()
        self._work.remove()

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Before a training call: make its plan, or choose among the existing plans."""
        self._calls += 1
        if self._work.plan is None:
            try:
                self._begin(args, kwargs, situation)
            except PlimsollError:  # errors of the model pass: the next call tries again
                if not self._retry.is_running:
                    self.remove()
                raise
        elif self._shaped is not None:
            self._choose(self._shaped, args, kwargs, situation, max(1, situation.in_flight))
        self._steps.meter_if_new(args, kwargs, situation, self._metered)

    def _task(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingTask:
        optimizer = optimizer_in_view(inner_module(self.model), self._optimizer)
        return dataclasses.replace(super()._task(args, kwargs), optimizer=optimizer, units=self._units)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Plan for the coming call and apply the plan."""
        # Without a reduction, gradients wait, so later micro-batches of the step begin with existing gradients.
        accumulates = situation.accumulates or is_without_reduction(self.model)
        with self._tracing(), self.agreement as agreement:
            task = self._task(args, kwargs)
            agreement.same("the first batch", facts_of(task))
            with gradients_as_if(task.model, are_there=True) if accumulates else contextlib.nullcontext():
                with task.compiled():
                    planner = compiled_planner(
                        agreement, task, self._options, self._budget, limit_bytes=self._budget.asked_bytes
                    )
                    step = functools.partial(task.step, written=planner.trace.written)
                    planner.try_forms(step)
                    plan = planner.plan("auto", step)
                agreement.same_plan(plan)
        self._metered = MeteredSituations([planned_situation(plan.signature, plan.in_flight)])
        with self.agreement:
            self._run(plan)
        self._planner = planner.alone()
        if can_follow_shapes(self._options, agreement.size):
            measured_bytes = (planner.unseen_bytes, 0)
            self._climb(self._planner, plan, situation.shapes, measured_bytes, accumulates=accumulates)
        if plan.budget_bytes is not None and planner.planning_peak_bytes > plan.budget_bytes:
            log_planning_overrun(
                planner.planning_peak_bytes,
                plan.budget_bytes,
                "one step ran without a plan, to read and to measure what torch.compile makes of the model",
                "compiled block by block the model takes less in this call",
            )
        _LOG.info(told(plan, 0))

    def _run(self, plan: Plan) -> None:
        with self._away():
            super()._run(plan)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        with self._away(), super()._tracing():
            yield

    def _away(self) -> contextlib.AbstractContextManager[None]:
        """Remove our wrapper while the model is recompiled."""
        return contextlib.nullcontext() if self._outside is None else self._outside.away()

    def _after_step(self) -> None:
        """After a step: if it was measured and exceeded the budget, warn."""
        plan = self.plan
        if plan is None or plan.budget_bytes is None:
            return
        peak_bytes, cause = self._steps.taken_by(planned_state_bytes(plan), self._metered, plan.budget_bytes)
        if peak_bytes and self._shaped is not None:
            self._shaped.note_peak(peak_bytes)
        if peak_bytes > plan.budget_bytes:
            follows = "the next step is planned with that taken off"
            alone = "attach a smaller budget, or leave allow= out: then such steps are planned for"
            warn_of_overrun(peak_bytes, plan.budget_bytes, cause, alone if self._shaped is None else follows)


class _Outside(nn.Module):
    """Wraps a model that is compiled as a whole and is called in its place. Hooks on the model itself would be compiled with
    it.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.inside = unit.module
        self._unit = unit
        self._compiled: Any = None
        self._put_back: Callable[[], None] = lambda: None
        self._put_in()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model."""
        wrapper = self._unit.wrapper
        if self._compiled is None and wrapper is not None:
            # The user's compiled code calls the module, which would call this wrapper again.
            with self.away():
                return wrapper.forward(*args, **kwargs)
        with as_ours():
            return self._compiled(*args, **kwargs)

    def _called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.training = module.training
        return self(*args, **kwargs)

    def _put_in(self) -> None:
        unit = self._unit
        self._compiled = unit.module._compiled_call_impl
        self._put_back = install_alone(unit, PlannedCall(self._called, unit.module))

    def take_out(self) -> None:
        """Remove the wrapper. Calling it twice does no harm."""
        self._put_back()
        self._put_back = lambda: None

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Remove the wrapper inside the block."""
        self.take_out()
        try:
            yield
        finally:
            self._put_in()
