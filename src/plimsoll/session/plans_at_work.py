"""Applies one plan after another to a model, on all ranks together. Contains what eager and compiled attachments share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import COLLECTIVES, Plan
from plimsoll.engine.apply import Handle, RemovedAtEnd
from plimsoll.engine.larger_calls import Listener
from plimsoll.errors import BudgetBelowFloor, InvalidBatch, PlanMismatch
from plimsoll.session.agreement import Agreement
from plimsoll.session.batch_shapes import Shapes
from plimsoll.session.joint_traces import JointTraces
from plimsoll.session.manage import manage_together
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.retry import Retry, floor_of
from plimsoll.session.shapes import ShapePlans
from plimsoll.session.situations import MeteredSituations, Situation
from plimsoll.session.step_planner import StepPlanner
from plimsoll.session.step_watch import StepWatch
from plimsoll.session.task import TrainingTask, task_of_call

P = ParamSpec("P")
T = TypeVar("T")


class PlansAtWork:
    """The plan that manages a model; it can be replaced by another one. ``plan`` is ``None`` before the first."""

    def __init__(self, agreement: Agreement, model: nn.Module, verify_every: int) -> None:
        self.plan: Plan | None = None
        self._agreement = agreement
        self._model = model
        self._verify_every = verify_every
        self._handle: Handle | None = None
        self._earlier_faults: tuple[Fault, ...] = ()
        self.on_larger_calls: Listener | None = None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults that ``verify_every`` has found so far, under every plan."""
        return (*self._earlier_faults, *(() if self._handle is None else self._handle.faults))

    def run(self, plan: Plan) -> bool:
        """Apply a plan, on all ranks together. Return True if its decisions differ from the previous plan's."""
        before, self.plan = self.plan, plan
        if self._handle is not None and before is not None:
            if before.regions is plan.regions or before.effect == plan.effect:
                return False
            try:
                self._handle.switch(plan)
            except PlanMismatch:  # the plan needs another link
                self.remove()
        if self._handle is None:
            self._handle = manage_together(self._agreement, self._model, plan, verify_every=self._verify_every)
            if self.on_larger_calls is not None:
                self._handle.on_larger_calls(self.on_larger_calls)
        self._handle.begin_step()
        return True

    @contextlib.contextmanager
    def trying(self, plan: Plan) -> Iterator[None]:
        """Apply another plan inside the block. Records that its regions make are kept."""
        before = self.plan
        self.run(plan)
        try:
            yield
        finally:
            if before is not None:
                self.run(before)

    def has_moved(self) -> bool:
        """True if regions have other paths than when the plan was applied, for instance because a list of layers was
        replaced.
        """
        return self._handle is not None and self._handle.has_moved()

    def remove(self) -> None:
        """Undo everything. Calling it twice does no harm."""
        if self._handle is not None:
            self._earlier_faults = self.faults
            self._handle.remove()
            self._handle = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model unmanaged inside the block."""
        with contextlib.nullcontext() if self._handle is None else self._handle.paused():
            yield


class AttachedBudget(RemovedAtEnd):
    """Keeps a model under a budget when its batches are not known in advance. The subclasses plan for eager and compiled
    models.
    """

    _steps: StepWatch

    def __init__(
        self,
        model: nn.Module,
        budget: Budget,
        options: PlanOptions,
        agreement: Agreement,
        *,
        optimizer: torch.optim.Optimizer | None,
        verify_every: int,
    ) -> None:
        self.model, self.agreement = model, agreement
        self.repeats_collectives = COLLECTIVES in options.allow
        self._budget, self._options, self._optimizer = budget, options, optimizer
        self._work = PlansAtWork(agreement, model, verify_every)
        self._metered = MeteredSituations()
        self._calls = self._excess_bytes = 0
        self._planner: StepPlanner | None = None
        self._shaped: ShapePlans | None = None
        """The plans that each call chooses from; None until the plan for the first step is made."""
        self._traces = JointTraces(agreement, model)
        self._retry = Retry(model, self)

    @property
    def plan(self) -> Plan | None:
        """The current plan; ``None`` until the first training step has begun. Once that step is over, it is the plan for the
        budget.
        """
        return self._work.plan

    @property
    def is_trying(self) -> bool:
        """True while the model runs in order to make a plan. Such runs are not training steps."""
        return self._steps.is_looking_away

    @property
    def peak_bytes(self) -> int:
        """The highest measured peak of a step under a plan for the budget; 0 until a step was measured."""
        return self._steps.peak_bytes

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults that ``verify_every`` has found so far, under every plan."""
        return self._work.faults

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one training step. If it runs out of memory, put everything back, plan tighter and run it again.

        See `plimsoll.engine.apply.Handle.step`.
        """
        return self._retry.run(function, *args, **kwargs)

    def tighten(self, *, is_own: bool) -> bool:
        """After a step ran out of memory: switch to a plan with a lower peak on the ranks that ran out. Return True if one has
        such a plan.
        """
        self._forget_step()
        tighter = self._shaped.tighten() if is_own and self._shaped is not None else None
        if tighter is not None:
            self._run(tighter)
        return any(self.agreement.all_of("tighter", tighter is not None, bool))

    def floor(self, *, is_optimizer: bool, is_own: bool) -> BudgetBelowFloor | None:
        """Return the error to raise if no plan has a lower peak.

        Return ``None`` before there is a plan, and if only other ranks ran out of memory.
        """
        planner, excess_bytes = self._planner, self._excess_bytes
        if self._shaped is not None:
            planner, excess_bytes = self._shaped.current_planner() or (planner, excess_bytes) if is_own else (None, 0)
        return None if planner is None else floor_of(planner, excess_bytes, is_optimizer=is_optimizer)

    def _forget_step(self) -> None:
        """Forget the step that failed; it starts again."""
        self._steps.forget()
        self._calls = 0  # the ranks stopped in different calls
        self._traces.begin_anew()

    def _task(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingTask:
        return task_of_call(self.model, args, kwargs)

    def _climb(
        self, planner: StepPlanner, plan: Plan, shapes: Shapes, measured: tuple[int, int], *, accumulates: bool
    ) -> None:
        """Give this rank its own ladder. From now on it contacts other ranks only for traces that run collectives."""
        company = self._traces.among(planner.trace)
        how = {"accumulates": accumulates, "may_refuse": self.agreement.size == 1}
        self._shaped = ShapePlans(self._options, self._optimizer, self._tracing, company, **how)
        with self._traces.together():
            self._shaped.begin(shapes, planner, plan, measured)

    def _choose(
        self, plans: ShapePlans, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation, in_flight: int
    ) -> None:
        """Apply the cheapest plan that keeps a batch of this shape within the budget."""
        plans.wait_for(in_flight)
        task = functools.partial(self._task, args, kwargs)
        self._run(self._traces.plan_for(self._calls, situation.shapes, plans, task))
        self._expect(plans)

    def _run(self, plan: Plan) -> None:
        """Apply a plan. If its decisions are new, measure whether it keeps to the budget."""
        if self._work.run(plan):
            self._metered.expect()

    def _expect(self, plans: ShapePlans) -> None:
        """Set the meter's expectation to the prediction for the coming forward."""
        levels = self._steps.levels
        levels.expected_forward_bytes, levels.expected_peak_bytes = plans.expected()

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Trace steps of this call inside the block, without a plan applied and without a running measurement.

        Errors of the model itself are raised as they would be without a budget, because loops may catch them.
        """
        self._steps.drop()
        try:
            with self._steps.looking_away(), self._work.paused():
                yield
        except InvalidBatch as error:
            own = error.__cause__
            if own is None:
                raise
            own.add_note(f"plimsoll: {type(self.model).__name__} raised this while attach traced its training call")
            raise own from None
