"""A budget at work on a model that torch.compile compiles, where no batch is at hand: the first training call makes the plan.

The call's own arguments are the batch. Later calls choose among a few plans, each compiled once, by their shapes (see
``shapes``). What lies outside of the model is not seen in the first call: the user's loss, where the model returns none.
Steps that are unlike those before are measured, and what they take more than predicted is counted from then on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.agreement import Agreement
from plimsoll.session.calibration import as_batch, optimizer_in_view, planned_state_bytes, stand_in_loss
from plimsoll.session.compiled import CompiledPlanner, compiled_planner
from plimsoll.session.joint_traces import JointTraces, facts_of
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.plans_at_work import AttachedBudget
from plimsoll.session.retry import Retry, floor_of
from plimsoll.session.shapes import ShapePlans, told
from plimsoll.session.step_watch import MeteredSituations, Situation, StepWatch, planned_situation, warn_of_overrun
from plimsoll.session.task import TrainingTask, detached
from plimsoll.session.training_step import gradients_as_if
from plimsoll.tracing.compiled.units import PlannedCall, Unit, install
from plimsoll.tracing.ddp import inner_module, is_without_reduction

P = ParamSpec("P")
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class CompiledAttachment(AttachedBudget):
    """A budget at work on a model with compiled parts."""

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
        self._shaped: ShapePlans | None = None
        self._traces = JointTraces(agreement, model)
        self._retry = Retry(model, self)
        whole = next((unit for unit in units if not unit.path), None)
        self._outside = None if whole is None else _Outside(whole)
        self._steps = StepWatch(self._outside or model, self._before_call, self._after_step)

    @property
    def is_calibrating(self) -> bool:
        """Whether the plan is still to come."""
        return self._work.plan is None

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `plimsoll.engine.apply.Handle.step`."""
        return self._retry.run(function, *args, **kwargs)

    def remove(self) -> None:
        """Undo everything; harmless when called twice."""
        self._steps.end_step()
        self._steps.remove()
        if self._outside is not None:
            self._outside.take_out()
        self._work.remove()

    def tighten(self, *, is_own: bool) -> bool:
        """The step has run out of memory: put a plan to work that takes less, here or where that was. Whether there is one."""
        self._steps.forget()
        self._calls = 0  # ranks stopped in different calls
        self._traces.begin_anew()
        tighter = self._shaped.tighten() if is_own and self._shaped is not None else None
        if tighter is not None:
            self._run(tighter)
        return any(self.agreement.all_of("tighter", tighter is not None, bool))

    def floor(self, *, is_optimizer: bool, is_own: bool) -> BudgetBelowFloor | None:
        """What to say where nothing takes less; ``None`` before there is a plan, and where only other ranks lack memory."""
        known = self._shaped.current_planner() if is_own and self._shaped is not None else None
        return None if known is None else floor_of(*known, is_optimizer=is_optimizer)

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Before a training call: plan for it, or choose among the plans that are there."""
        self._calls += 1
        if self._shaped is None:
            try:
                self._begin(args, kwargs, situation)
            except BaseException:
                if not self._retry.is_running:
                    self.remove()
                raise
        else:
            self._shaped.wait_for(max(1, situation.in_flight))
            task = functools.partial(self._task, args, kwargs)
            self._run(self._traces.plan_for(self._calls, situation.shapes, self._shaped, task))
        self._steps.meter_if_new(args, kwargs, situation, self._metered)

    def _task(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingTask:
        """The step of this very call, whose loss is not known."""
        inner = inner_module(self.model)
        return TrainingTask(
            model=self.model,
            batch=detached(as_batch(inner, args, kwargs)),
            loss=stand_in_loss,
            optimizer=self._optimizer or optimizer_in_view(inner),
            units=self._units,
        )

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Plan for the call that comes, and put the plan to work."""
        # Where gradients are left to a later reduction, more micro-batches come, which begin with them.
        accumulates = situation.accumulates or is_without_reduction(self.model)
        with self._tracing(), self.agreement as agreement:
            task = self._task(args, kwargs)
            agreement.same("the first batch", facts_of(task))
            with gradients_as_if(task.model, are_there=True) if accumulates else contextlib.nullcontext():
                with task.compiled():
                    planner = compiled_planner(agreement, task, self._options, self._budget)
                    plan = planner.plan("auto", task.step)
                agreement.same_plan(plan)
        self._metered = MeteredSituations([planned_situation(plan.signature, plan.in_flight)])
        with self.agreement:
            self._run(plan)
        self._climb(planner, plan, situation, accumulates=accumulates)
        _LOG.info(told(plan, 0))

    def _climb(self, planner: CompiledPlanner, plan: Plan, situation: Situation, *, accumulates: bool) -> None:
        """From now on this rank has a ladder of its own, and needs others only for traces that run collectives."""
        company = self._traces.among(planner.trace)
        how = {"accumulates": accumulates, "may_refuse": self.agreement.size == 1}
        self._shaped = ShapePlans(self._options, self._optimizer, self._tracing, company, **how)
        with self._traces.together():
            self._shaped.begin(situation.shapes, planner.alone(), plan, (planner.unseen_bytes, 0))

    def _run(self, plan: Plan) -> None:
        """Put a plan to work; what is around the compilation of the model stays around it."""
        with contextlib.nullcontext() if self._outside is None else self._outside.away():
            if self._work.run(plan):
                self._metered.expect()

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Trace steps like this call, without a plan at work and without a measurement that runs."""
        self._steps.stop()
        outside = contextlib.nullcontext() if self._outside is None else self._outside.away()
        with self._steps.looking_away(), outside, self._work.paused():
            yield

    def _after_step(self) -> None:
        """A step is over. Where it was measured, it has to have kept to the budget."""
        plan = self.plan
        if plan is None or plan.budget_bytes is None:
            return
        peak_bytes = self._steps.taken_bytes(planned_state_bytes(plan))
        cause = self._metered.ended() if peak_bytes else ""
        if peak_bytes and self._shaped is not None:
            self._shaped.note_peak(peak_bytes)
        if peak_bytes > plan.budget_bytes:
            warn_of_overrun(peak_bytes, plan.budget_bytes, cause, "the next step is planned with that taken off")


class _Outside(nn.Module):
    """Stands around a model that is compiled as a whole and is called in its place: hooks on the model itself would be compiled
    with it.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.inside = unit.module
        self._unit = unit
        self._compiled: Any = None
        self._put_back: Callable[[], None] = lambda: None
        self._put_in()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model has been compiled to."""
        return self._compiled(*args, **kwargs)

    def _called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.training = module.training
        return self(*args, **kwargs)

    def _put_in(self) -> None:
        unit = self._unit
        known = unit.module._compiled_call_impl
        self._compiled = unit.wrapper.forward if known is None and unit.wrapper is not None else known
        self._put_back = install(unit, PlannedCall(self._called, unit.module))

    def take_out(self) -> None:
        """Undo it; harmless when called twice."""
        self._put_back()
        self._put_back = lambda: None

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Not there inside of the block."""
        self.take_out()
        try:
            yield
        finally:
            self._put_in()
