"""Makes the plans of a training task: traces the step, finds the cost of each op, tries codecs and links (ways to compress and
to offload values), and solves.

Several ranks plan together: all run the same steps, the tightest rank (the rank with the least memory to spare) solves, and all
ranks get its plan (see ``tightest_rank``). A single process does the same without exchanging messages.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.backward_steps import BackwardSteps
from plimsoll.artifacts.costs import Costs, OpCost
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.forms import Forms
from plimsoll.artifacts.offloaded_state import OffloadedState
from plimsoll.artifacts.plan import Plan, TimelinePoint
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.tile import Tile
from plimsoll.artifacts.trace import Phase, Trace
from plimsoll.engine.tiles import in_tiles
from plimsoll.errors import BudgetBelowFloor, InvalidModel, TracingFailed
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.describe import classes_at_peak, describe_timeline
from plimsoll.planning.explain import after_backward_floor_error, floor_error
from plimsoll.planning.ladder import rungs_of
from plimsoll.planning.replay_schedule import Unreachable
from plimsoll.planning.simulate import choices_of, run_choices
from plimsoll.planning.solve import Planner, lowest_known, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import Extremes, codecs_of_strategy, find_extremes
from plimsoll.planning.what_if import peak_with_chunked_loss
from plimsoll.session.account import predicted_optimizer_bytes
from plimsoll.session.agreement import Agreement
from plimsoll.session.device_costs import measure_engine, measured_costs
from plimsoll.session.forms import Sensed, sense_forms
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.task import TrainingTask
from plimsoll.session.tightest_rank import TightestRank
from plimsoll.session.training_step import TrainingStep
from plimsoll.session.trial import Gradients, Managing, TrialRun, confirmed, error_scale, run_trial
from plimsoll.tracing.backward_steps import CALL_OF_OPTIMIZER, in_backward
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fsdp2 import holds_gradients_back
from plimsoll.tracing.optimizer import TRANSFER_OF_STATE, in_chunks
from plimsoll.tracing.trace import trace as trace_step

CLOSE = 0.15
"""If the lowest reachable peak is predicted within this share below the budget, measure the plan with that peak before relying
on it.
"""

_LOWEST = "lowest"
"""An internal strategy: the plan with the lowest peak that was found first, without a search for the fastest such plan."""


def trace_and_cost(
    task: TrainingTask,
    options: PlanOptions | None = None,
    progress: Progress = silent,
    *,
    optimizer_is_optional: bool = False,
    limit_bytes: int | None = None,
) -> tuple[Trace, Costs]:
    """Trace one step and find the cost of each op. Any number of plans can be made from the result.

    Args:
        task: the step.
        options: what plans may do.
        progress: receives the stage and the share done.
        optimizer_is_optional: leave out the optimizer if it cannot be traced.
        limit_bytes: the most that tracing may allocate. Tracing keeps to it by saving fewer activations, so it may exceed a
            limit that is too small even without them.

    Raises:
        InvalidModel, InvalidBatch, InvalidLoss, InvalidRegions, TracingFailed: as named.
    """
    options = options or PlanOptions()
    traced = trace_task(
        task,
        options,
        part_of(progress, 0.0, 0.9),
        optimizer_is_optional=optimizer_is_optional,
        limit_bytes=limit_bytes,
    )
    progress("costing", 0.9)
    if traced.is_fake:
        costs = roofline_costs(traced, find_device(options.device_profile or "CPU"))
    else:
        costs = measured_costs(traced, measure_engine(traced))
    return traced, _with_waits(traced, costs, options)


def trace_task(
    task: TrainingTask,
    options: PlanOptions,
    progress: Progress = silent,
    *,
    optimizer_is_optional: bool = False,
    limit_bytes: int | None = None,
    repeats: int = 3,
) -> Trace:
    """Trace one step. With ``repeats=0`` its ops are not timed. Errors are those of ``trace_and_cost``."""
    trace = functools.partial(
        trace_step,
        task.model,
        task.batch,
        loss=task.loss,
        regions=options.regions,
        device_name=None if options.device_profile is None else find_device(options.device_profile).name,
        repeats=repeats,
        limit_bytes=limit_bytes,
        progress=progress,
    )
    with in_tiles(inner_module(task.model), options.tiles):
        try:
            traced = trace(optimizer=task.optimizer)
            if task.optimizer is not None:
                traced = _with_optimizer(traced, task.optimizer, task.model, options)
            return traced
        except (InvalidModel, TracingFailed):  # SparseAdam's step cannot be traced; attach measures its state instead
            if task.optimizer is None or not optimizer_is_optional:
                raise
            return trace()


class StepPlanner:
    """Makes plans of one traced step under a budget (``None`` means no limit).

    With several ranks, a method must be called on all of them together, unless its description says otherwise.
    """

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        options: PlanOptions,
        budget_bytes: int | None,
        agreement: Agreement | None = None,
    ) -> None:
        """Create a planner. ``agreement`` connects the ranks that plan together. By default, this process plans alone."""
        self.trace = options.opened(trace)
        self.costs = costs
        self.options = options
        self.own_budget_bytes = budget_bytes
        self._agreement = agreement or Agreement(None, "plan")
        self._index: StepIndex | None = None
        self._solver: Planner | None = None
        unmanaged_bytes = 0 if self._agreement.size == 1 else self.extremes.unmanaged_peak_bytes
        self.ranks = TightestRank(self._agreement, budget_bytes, unmanaged_bytes)
        self.gradients: Gradients | None = None
        self.in_flight = 1
        self.loss_share = 0.0
        """Bytes of the user's loss, divided by the bytes that one micro-batch holds between forward and backward. It is assumed
        to be the same under all plans.
        """
        self.mistake_bytes = 0
        """The measured peak minus the predicted peak of the plan with the lowest peak, in bytes. The measured step is one after
        the step that records the plan.
        """
        self.managing: Managing | None = None
        """A function that returns the context that applies a plan in trials (measured runs of plans) and keeps what the plan
        records. With None, trials discard what they record.
        """
        self.tried_bytes = 0
        """The highest peak of all trials (measured runs of plans) in bytes; 0 if there was none."""
        self.recording_bytes = 0
        """The bytes that the step that recorded the plan with the lowest peak needed in addition to a later step under this
        plan.
        """
        self._ran = TrialRun(0, 0, None)
        """The last trial (a run of a plan to measure its peak), as measured in this process before ranks compared theirs."""
        self._forms: Forms | None = None
        self._unmanaged: Plan | None = None
        """A plan that keeps everything, for the step that plans are compared with. None if this is the traced step itself."""

    @property
    def budget_bytes(self) -> int | None:
        """The budget that plans are solved for: the budget of the tightest rank (the rank with the least room)."""
        return self.ranks.budget_bytes

    def alone(self) -> StepPlanner:
        """Return a planner for this rank's own step under this rank's own budget. It does not contact other ranks."""
        if self._agreement.size == 1:
            return self
        own = self.beside(self.trace, self.costs)
        own.wait_for(self.in_flight)
        own.extremes, own._index, own._solver = self.extremes, self._index, self._solver  # these take long to compute
        own._unmanaged = self._unmanaged
        return own

    def beside(self, trace: Trace, costs: Costs) -> StepPlanner:
        """Return a planner for another step of the same model under the same budget. It does not contact other ranks."""
        made = StepPlanner(trace, costs, self.options, self.own_budget_bytes)
        made.loss_share = self.loss_share
        return made

    def traced(
        self, task: TrainingTask, *, optimizer_is_optional: bool, limit_bytes: int, is_timed: bool
    ) -> tuple[Trace, Costs | None]:
        """Trace another step of the same model. If ``is_timed``, time its ops within ``limit_bytes`` and return costs too."""
        if is_timed:
            return trace_and_cost(
                task, self.options, optimizer_is_optional=optimizer_is_optional, limit_bytes=limit_bytes
            )
        return trace_task(task, self.options, optimizer_is_optional=optimizer_is_optional, repeats=0), None

    @functools.cached_property
    def extremes(self) -> Extremes:
        """Simulations of the step without a plan, and with everything recomputed."""
        return find_extremes(self.trace, self.costs)

    def fits_unmanaged(self) -> bool:
        """Return True if, on each rank, the step without a plan keeps to the rank's own budget."""
        own_bytes = self.own_budget_bytes
        fits = own_bytes is not None and own_bytes >= self.extremes.unmanaged_peak_bytes
        return self._agreement.every("budgets", holds=fits)

    @property
    def floor_bytes(self) -> int:
        """The lowest predicted peak that a plan of this rank's step reaches, in bytes."""
        return self._planner.floor.peak_bytes

    def traced_in_tiles(self, task: TrainingTask, tiles: tuple[Tile, ...]) -> StepPlanner:
        """Trace the step with these tiles (parts of a few rows), without timing its ops, and return a planner of this process
        alone.
        """
        options = dataclasses.replace(self.options, tiles=tiles)
        traced = trace_task(task, options, optimizer_is_optional=True, repeats=0)
        return StepPlanner(traced, self.costs, options, self.own_budget_bytes)

    def with_state(self, task: TrainingTask, state: OffloadedState) -> StepPlanner:
        """Return a planner for the same step with this optimizer state offloaded. The step is not traced again."""
        return self._with_options(task, dataclasses.replace(self.options, state=state))

    def with_backward_steps(self, task: TrainingTask, steps: BackwardSteps) -> StepPlanner:
        """Return a planner for the same step with these parameters stepped in backward. The step is not traced again."""
        return self._with_options(task, dataclasses.replace(self.options, backward_steps=steps))

    def _with_options(self, task: TrainingTask, options: PlanOptions) -> StepPlanner:
        """Return a planner for the same step whose optimizer runs as these options say."""
        assert task.optimizer is not None
        trace = _with_optimizer(self.trace, task.optimizer, task.model, options)
        if trace.is_fake:
            ops = roofline_costs(trace, find_device(options.device_profile or "CPU")).ops
        else:
            ops = measured_costs(trace).ops
        costs = msgspec.structs.replace(self.costs, ops={**ops, **self.costs.ops})
        made = StepPlanner(trace, _with_waits(trace, costs, options), options, self.own_budget_bytes, self._agreement)
        made._forms, made.gradients, made.loss_share = self._forms, self.gradients, self.loss_share
        made._unmanaged = self._unmanaged or self.extremes.lowest
        return made

    def compare_with(self, whole: StepPlanner) -> None:
        """From now on, compare plans with the unmanaged (without a plan) step of another planner: with the step that does not
        run in tiles.
        """
        self._unmanaged = whole.extremes.lowest
        self.costs = _as_if_timed_together(whole.trace, whole.costs, self.costs)
        self._forget_index()

    def try_forms(self, step: Callable[[], TrainingStep], progress: Progress = silent) -> None:
        """Run the step once to measure the forms of its values (codecs and links). Nothing is run if the options do not allow
        forms, or if the budget does not need them.

        If lossy plans are allowed, the unmanaged (without a plan) gradients are kept to compare with.
        """
        if self.options.wants_forms and (not self.fits_unmanaged() or self.options.insists_on_forms):
            progress("trying codecs and links", 0.0)
            with self._agreement.stepping():
                sensed = self._sense(step())
            self._forms = sensed.forms
            self.gradients = sensed.gradients if self.options.wants_lossy else None
        progress("solving", 0.0 if self._forms is None else 0.4)

    def plan(self, strategy: str, step: Callable[[], TrainingStep], progress: Progress = silent) -> Plan:
        """Return the plan for the budget. On a real device the plan is run once, and solved again if it needs more than
        predicted.

        Raises:
            BudgetBelowFloor: no plan fits.
        """
        try:
            solved = self.solve(self.budget_bytes, strategy)
            if (
                self.trace.is_fake
                or not solved.status.is_usable
                or (self.budget_bytes is None and self.gradients is None)
            ):
                return solved
            return self._confirmed(solved, strategy, step(), progress)
        except BudgetBelowFloor as error:
            if self.trace.is_fake or strategy != "auto":
                raise
            progress("running the plan with the lowest peak", 0.9)
            try:
                return self.lowest_that_fits(step())
            except BudgetBelowFloor as measured:
                raise measured from error

    def _confirmed(self, plan: Plan, strategy: str, step: TrainingStep, progress: Progress) -> Plan:
        """Run the plan and return it. If the run exceeds the budget or the allowed error, solve again with the measurement."""
        return confirmed(
            plan,
            functools.partial(self.run, step),
            lambda excess_bytes, error_scale: self.solve(
                self.budget_bytes, strategy, excess_bytes=excess_bytes, error_scale=error_scale
            ),
            max_error=self.options.most_error(strategy),
            progress=progress,
        )

    def confirmed_beside(
        self, plan: Plan, step: TrainingStep, excess_bytes: int, resolve: Callable[[int], Plan], *, seen_bytes: int
    ) -> Plan:
        """Run the plan once and return it. If it needs more than expected, return the plan that ``resolve`` makes for the
        larger excess instead. An excess is the measured peak of steps minus their predicted peak.

        Args:
            plan: the solved plan.
            step: the step to run.
            excess_bytes: how much more than predicted the user's steps are known to need. A trial does not show all of it: the
                user's loss, what a step leaves behind, and the state of other optimizers are missing.
            resolve: solves again for an excess in bytes.
            seen_bytes: the part of the excess that a trial shows too, so that it is not added to the trial's peak.
        """
        run = functools.partial(self.run, step, unseen_bytes=max(0, excess_bytes - seen_bytes))
        return confirmed(plan, run, lambda more, _: resolve(max(excess_bytes, more)), max_error=None, progress=silent)

    def lowest(self, error_scale: float = 1.0) -> Plan:
        """Return a plan with the lowest peak that any plan reaches. Among such plans, it is the fastest that the solver
        found.
        """
        return self.solve(self.lowest_for_now(error_scale).floor_bytes, error_scale=error_scale)

    def lowest_for_now(self, error_scale: float = 1.0) -> Plan:
        """Return a plan with the lowest peak, to use for a step or two.

        The planner does not search for the fastest plan with that peak. For Llama and Mixtral models of 6 to 12 blocks, the
        search took 1.5 to 2.5 s of processor time.
        """
        return self.solve(None, _LOWEST, error_scale=error_scale)

    def rungs(self) -> Iterator[Plan]:
        """Yield the plans of the ladder: those that the solver found between the peak without a plan and the lowest peak, the
        cheapest plan first.
        """
        rungs = map(self.options.written_into, rungs_of(self._planner))
        return rungs if self._unmanaged is None else (_compared_with(rung, self._unmanaged) for rung in rungs)

    def predicted_bytes(self, plan: Plan) -> int | None:
        """Return the predicted peak of this rank's step under a plan that was made for another step. Return None if this step
        cannot follow the plan.
        """
        try:
            return run_choices(self.index, choices_of(self.index, plan.regions)).peak_bytes
        except Unreachable:
            return None

    def is_kept_by(self, plan: Plan, excess_bytes: int) -> bool:
        """Return True if this rank's step keeps to its budget under ``plan``, which was made for another step. ``excess_bytes``
        are added to the predicted peak.
        """
        predicted_bytes = self.predicted_bytes(plan)
        return predicted_bytes is not None and predicted_bytes <= (self.own_budget_bytes or 0) - excess_bytes

    def halfway_bytes(self, plan: Plan, error_scale: float = 1.0) -> int | None:
        """Return a peak in bytes that is halfway between a plan's peak and the lowest peak. Both are peaks of the step of the
        tightest rank.

        If the two are close, return the lowest peak. If the plan has the lowest peak already, return None.
        """
        return self.ranks.of_tightest("halfway", self._own_halfway_bytes(plan, error_scale), int | None)

    def _own_halfway_bytes(self, plan: Plan, error_scale: float) -> int | None:
        taken_bytes, lowest_bytes = self.predicted_bytes(plan), self.lowest_for_now(error_scale).predicted_peak_bytes
        # An OutOfMemoryError says only in its text how much memory is free, and we do not parse texts. So take half of the
        # distance to the lowest peak each time, and all of it if it is small.
        spare_bytes = (plan.predicted_peak_bytes if taken_bytes is None else taken_bytes) - lowest_bytes
        if spare_bytes <= 0:
            return None
        return lowest_bytes if spare_bytes < CLOSE * lowest_bytes else lowest_bytes + spare_bytes // 2

    def lowest_allowed(self, step: Callable[[], TrainingStep], error_scale: float = 1.0) -> Plan:
        """Return a plan with the lowest peak for the first step.

        If the predicted peak is close to the budget, the plan is run and measured first.

        Raises:
            BudgetBelowFloor: the measured peak exceeds the budget.
        """
        assert self.budget_bytes is not None
        lowest = self.lowest_for_now(error_scale)
        if self.ranks.worst_bytes(self.own(lowest).predicted_peak_bytes) <= (1 - CLOSE) * self.budget_bytes:
            return lowest
        return self.lowest_that_fits(step(), error_scale)

    def lowest_that_fits(self, step: TrainingStep, error_scale: float = 1.0) -> Plan:
        """Run the plan with the lowest peak and return it if its measured peak is within the budget, whatever its predicted
        peak is.

        The peak is measured as in a training that begins with this plan, before the optimizer has state.

        Raises:
            BudgetBelowFloor: names the measured peak, which is a budget that works.
        """
        assert self.budget_bytes is not None
        plan = self.lowest(error_scale)
        try:
            run = self.run(step, plan)
        except torch.OutOfMemoryError:
            raise self.refusal(plan, plan.predicted_peak_bytes) from None
        own = self.own(plan)
        self.recording_bytes = self._ran.recording_bytes
        self.mistake_bytes = self._ran.steady_bytes - own.predicted_peak_bytes
        most_error = self.options.most_error("auto")
        is_wrong = run.error is not None and most_error is not None and run.error > most_error
        floor_bytes = max(run.fresh_bytes, self.ranks.worst_bytes(predicted_optimizer_bytes(own)))
        if floor_bytes > self.budget_bytes or is_wrong:
            # The budget that the error names must work. The first recorded step of a process needed 2.8 KiB less than later
            # ones, so measure once more and name the larger peak.
            floor_bytes = max(floor_bytes, self.run(step, plan).fresh_bytes)
            waits = holds_gradients_back(step.model)  # then the trial ran later micro-batches already
            accumulating_bytes = 0 if waits else self.run(step.accumulating(), plan).fresh_bytes
            raise self.refusal(plan, floor_bytes, accumulating_bytes=accumulating_bytes)
        return msgspec.structs.replace(plan, budget_bytes=self.budget_bytes, notes=(*plan.notes, run.told))

    def refusal(
        self, lowest: Plan, floor_bytes: int, *, accumulating_bytes: int = 0, is_optimizer: bool = False
    ) -> BudgetBelowFloor:
        """Return the error for a budget that is below the measured peak of the plan with the lowest peak. All ranks get the
        tightest rank's error.

        Args:
            lowest: the plan.
            floor_bytes: its measured peak.
            accumulating_bytes: the peak with gradients of earlier micro-batches; 0 if not measured.
            is_optimizer: the peak is after backward, mostly in the optimizer's step.
        """
        assert self.budget_bytes is not None
        solver = self._planner if self._agreement.size == 1 else self._solver  # of several ranks only one solves
        excess_bytes = max(0, floor_bytes - lowest.peak.bytes)
        if is_optimizer:
            others = None if solver is None else solver.other_budgets(least_bytes=floor_bytes)
            error = after_backward_floor_error(self.budget_bytes, floor_bytes, others)
        else:
            error = floor_error(
                self.budget_bytes,
                lowest.peak,
                floor_bytes - lowest.peak.bytes,
                chunked_bytes=None if solver is None else peak_with_chunked_loss(solver.floor),
                accumulating_bytes=accumulating_bytes,
                state_bytes=self.trace.state_bytes,
                others=None if solver is None else solver.other_budgets(excess_bytes, least_bytes=floor_bytes),
            )
        return self.ranks.refused(error, floor_bytes)

    def wait_for(self, in_flight: int) -> None:
        """From now on, make plans for steps where ``in_flight`` forwards wait for one backward."""
        if in_flight != self.in_flight:
            self.in_flight = in_flight
            self._forget_index()

    def count_loss(self, plan: Plan, measured_bytes: int) -> None:
        """From now on, make plans that count the memory of the user's loss, which the trace does not contain.

        ``measured_bytes`` is the measured peak of a step under ``plan`` between forward and backward.
        """
        index = self.index
        curve = run_choices(index, choices_of(index, plan.regions)).curve
        loss_bytes = measured_bytes - int(curve[index.handover])
        if loss_bytes > 0 and index.between_bytes > 0:
            self.loss_share = loss_bytes / index.between_bytes
            self._forget_index()

    def _forget_index(self) -> None:
        self._index = self._solver = None

    def solve(
        self,
        budget_bytes: int | None,
        strategy: str = "auto",
        *,
        excess_bytes: int = 0,
        error_scale: float = 1.0,
        raise_below_floor: bool = True,
    ) -> Plan:
        """Return a plan, not yet run, whose peak is at most the budget minus ``excess_bytes``. A budget of ``None`` means no
        limit.

        With several ranks, the tightest rank solves, and all ranks get its plan. If the plan is for the ranks' budget, solve
        again until every rank's predicted peak is within its own budget. ``error_scale`` says how many times larger than
        expected the errors of lossy forms (codecs or offload) are.

        Raises:
            BudgetBelowFloor: no plan fits, or no plan was found in time, unless ``raise_below_floor`` is False.
        """
        how: dict[str, Any] = {"error_scale": error_scale, "raise_below_floor": raise_below_floor}
        if self._agreement.size == 1:
            return self._solve_here(budget_bytes, strategy, excess_bytes=excess_bytes, **how)
        is_for_all = strategy == "auto" and budget_bytes is not None and budget_bytes == self.budget_bytes
        for attempt in itertools.count():
            make = functools.partial(self._solve_here, budget_bytes, strategy, excess_bytes=excess_bytes, **how)
            try:
                made = self.ranks.made(f"solving {strategy}", make)
            except BudgetBelowFloor as refusal:
                if not is_for_all:
                    raise
                return self._lowest_for_all(refusal, attempt)
            over = self._over_bytes(made) if is_for_all and made.status.is_usable else [0]
            if max(over) <= 0:
                return made
            assert budget_bytes is not None
            # Another rank's overshoot may shrink more slowly than the tightest rank's peak. So subtract twice as much in each
            # attempt.
            excess_bytes = budget_bytes - made.predicted_peak_bytes + (max(over) << attempt)
        raise AssertionError("the lowest peak ends it")

    def _lowest_for_all(self, refusal: BudgetBelowFloor, attempt: int) -> Plan:
        """Called if no plan was found for all ranks' budgets. Return the plan with the lowest peak if each rank is predicted to
        keep to its own budget under it. Otherwise raise ``refusal``.

        A refusal in the first attempt means that the tightest rank cannot keep to its own budget, so it is raised as well.
        """
        made = self.ranks.made(
            "solving for the lowest peak", lambda: self._solve_here(self._planner.floor.peak_bytes, "auto")
        )
        if max(self._over_bytes(made)) <= 0 and attempt:
            return msgspec.structs.replace(made, budget_bytes=self.budget_bytes)
        raise refusal

    def _over_bytes(self, plan: Plan) -> list[int]:
        """Return a list with, for each rank, its predicted peak under a plan minus its budget, in bytes. The peak includes the
        bytes that the rank measured in addition to its trace.
        """
        taken_bytes = self.own(plan).predicted_peak_bytes + self.ranks.own_excess_bytes
        budget_bytes = taken_bytes if self.own_budget_bytes is None else self.own_budget_bytes
        return self._agreement.all_of("predicted peaks", taken_bytes - budget_bytes, int)

    def _solve_here(
        self,
        budget_bytes: int | None,
        strategy: str,
        *,
        excess_bytes: int = 0,
        error_scale: float = 1.0,
        raise_below_floor: bool = True,
    ) -> Plan:
        """Solve in this process, without contacting other ranks. The arguments are those of `solve`."""
        planner = self._planner
        limits = self.options.limits(error_scale)
        if codecs_of_strategy(strategy):
            planner = planner.heedless_of_error()
        elif strategy in ("auto", _LOWEST) and limits != planner.limits:
            planner = planner.relimited(limits)
        made = (
            lowest_known(planner)
            if strategy == _LOWEST
            else solve(
                planner,
                budget_bytes=budget_bytes,
                strategy=strategy,
                excess_bytes=excess_bytes,
                raise_below_floor=raise_below_floor,
            )
        )
        if (
            made.status is Status.TIMED_OUT
            and raise_below_floor
            and budget_bytes is not None
            and not self.trace.is_fake
        ):
            raise floor_error(
                budget_bytes, made.peak, excess_bytes, state_bytes=self.trace.state_bytes
            )  # the caller then tries the lowest known peak
        notes = made.notes
        if self.options.wants_forms and not planner.index.forms.regions:
            notes = (*notes, "Nothing is compressed or offloaded although it was allowed: everything fits without it.")
        if self._unmanaged is not None:
            made = _compared_with(made, self._unmanaged)
        return self.ranks.noted(msgspec.structs.replace(self.options.written_into(made), notes=notes))

    def own(self, plan: Plan) -> Plan:
        """Return a copy of the plan with the figures of this rank's own step: predicted peak, timeline, and bytes by class."""
        if self._agreement.size == 1:
            return plan
        try:
            own = run_choices(self.index, choices_of(self.index, plan.regions))
        except Unreachable:  # this rank's step makes other values, and regions without a recipe keep everything
            own = run_choices(self.index, choices_of(self.index, ()))
        return msgspec.structs.replace(
            plan,
            predicted_peak_bytes=own.peak_bytes,
            timeline=describe_timeline(own),
            classes=classes_at_peak(own),
        )

    def run(self, step: TrainingStep, plan: Plan, *, unseen_bytes: int = 0) -> TrialRun:
        """Run a plan and return its measured peaks and error. ``unseen_bytes``, which a trial does not contain, are added to
        the peaks.

        With several ranks, the returned peak is the plan's budget plus the largest overshoot of any rank.
        """
        with self._agreement.stepping():
            trial = run_trial(step, plan, self.gradients, self.managing)
        self._ran = trial
        self.tried_bytes = max(self.tried_bytes, trial.taken_bytes)
        # Add a rank's own bytes before the ranks agree. When each rank added them afterwards, one rank solved again while the
        # others went on.
        return self.ranks.worst_trial(
            dataclasses.replace(
                trial,
                peak_bytes=trial.peak_bytes + unseen_bytes,
                fresh_bytes=trial.fresh_bytes + unseen_bytes,
                beside_bytes=unseen_bytes,
            )
        )

    @property
    def index(self) -> StepIndex:
        """The traced step in the form that the solver reads. It is made on first use."""
        if self._index is None:
            self._index = StepIndex(
                self.trace,
                self.costs,
                self._forms,
                may_recompute=self.options.may_recompute,
                in_flight=self.in_flight,
                loss_share=self.loss_share,
            )
        return self._index

    @property
    def _planner(self) -> Planner:
        if self._solver is None:
            if self._forms is None:
                self._solver = Planner(self.index, overrides=self.options.overrides_without_forms)
            else:
                self._solver = Planner(self.index, overrides=self.options.overrides, limits=self.options.limits())
        return self._solver

    def _sense(self, step: TrainingStep) -> Sensed:
        lowest = self.options.written_into(self.extremes.lowest)
        return sense_forms(step, self.trace, self.costs, lowest, self.options)


def _with_optimizer(trace: Trace, optimizer: torch.optim.Optimizer, model: nn.Module, options: PlanOptions) -> Trace:
    """Return the trace with the optimizer's step as the options say: in chunks with offloaded state, in backward, or as it
    was traced.
    """
    if options.state is not None:
        return in_chunks(trace, optimizer, inner_module(model), options.state.chunks)
    if options.backward_steps is not None:
        return in_backward(trace, optimizer, inner_module(model), options.backward_steps.parameters)
    return trace


def _with_waits(trace: Trace, costs: Costs, options: PlanOptions) -> Costs:
    """Return the costs with the seconds that the optimizer's step waits for the link (to host memory or disk), and those of
    its calls for single parameters.
    """
    waits: dict[str, OpCost] = {}
    if options.state is not None:
        keys = [op.cost_key for op in trace.ops if op.name == TRANSFER_OF_STATE]
        waits = {key: OpCost(seconds=options.state.seconds / len(keys)) for key in keys}
    if options.backward_steps is not None:
        calls = sum(op.cost_key == CALL_OF_OPTIMIZER for op in trace.ops)
        waits[CALL_OF_OPTIMIZER] = OpCost(seconds=options.backward_steps.seconds / max(calls, 1))
    return msgspec.structs.replace(costs, ops={**costs.ops, **waits}) if waits else costs


def _as_if_timed_together(trace: Trace, first: Costs, second: Costs) -> Costs:
    """Return the costs of a second timing of ops, scaled to the speed that the machine had in the first timing.

    Ops that both timings have keep their first seconds. All others are scaled by how much the common ops changed. On a shared
    machine, two timings of the same ops differ by up to 20%, more than tiles cost.
    """
    ticks = [op.cost_key for op in trace.ops if op.cost_key in first.ops and op.cost_key in second.ops]
    before = sum(first.seconds_of(key) for key in ticks)
    after = sum(second.seconds_of(key) for key in ticks)
    scale = before / after if before and after else 1.0
    ops = {
        key: first.ops.get(key) or OpCost(seconds=cost.seconds * scale, spread_seconds=cost.spread_seconds * scale)
        for key, cost in second.ops.items()
    }
    return msgspec.structs.replace(second, ops=ops)


def _compared_with(plan: Plan, other: Plan) -> Plan:
    """Return the plan with the figures of the unmanaged (without a plan) step from another plan, whose step does not run in
    tiles.
    """
    in_optimizer = [each.unmanaged_seconds for each in plan.timeline if each.phase == Phase.OPTIMIZER]
    optimizer_seconds = plan.baseline_seconds - (in_optimizer[0] or 0.0) if in_optimizer else 0.0
    before_optimizer = plan.baseline_seconds - optimizer_seconds
    stretch = (other.baseline_seconds - optimizer_seconds) / before_optimizer if before_optimizer else 1.0

    def moved(point: TimelinePoint) -> TimelinePoint:
        seconds = point.unmanaged_seconds or 0.0
        after = max(0.0, seconds - before_optimizer)
        # the unmanaged step runs other ops, so its bytes do not belong to the ticks of this step
        return msgspec.structs.replace(
            point, unmanaged_seconds=(seconds - after) * stretch + after, unmanaged_bytes=None
        )

    return msgspec.structs.replace(
        plan,
        baseline_peak_bytes=other.baseline_peak_bytes,
        baseline_seconds=other.baseline_seconds,
        baseline_peak=other.baseline_peak,
        activation_bytes=other.activation_bytes,
        timeline=tuple(map(moved, plan.timeline)),
    )


def fastest_planner(
    whole: StepPlanner,
    count: int,
    planner_at: Callable[[int], StepPlanner],
    *,
    floor_bytes_at: Callable[[int], int],
) -> StepPlanner:
    """Return the planner with the fastest plan within the budget: ``whole``, or one of ``count`` other planners of the step.

    The other planners are in order: each has a lower peak than the planner before it, but its step takes longer. They are tried
    from the first one that fits until a plan is not faster. If none fits, the last one is returned, or ``whole`` if its lowest
    peak is lower.
    """
    best, seconds, first = whole, _seconds(whole), 0
    if seconds == math.inf:
        budget_bytes = whole.budget_bytes or 0
        first = bisect.bisect_left(range(count), True, key=lambda at: floor_bytes_at(at) <= budget_bytes)
        if first == count:
            return min((whole, planner_at(count - 1)), key=lambda planner: planner.floor_bytes)
    for at in range(first, count):
        planner = planner_at(at)
        found = _seconds(planner)
        if found >= seconds and seconds < math.inf:
            break
        best, seconds = planner, found
    return best


def _seconds(planner: StepPlanner) -> float:
    """Return the predicted seconds of the step under the plan for the budget; infinity if no plan fits."""
    try:
        plan = planner.solve(planner.budget_bytes)
    except BudgetBelowFloor:
        return math.inf
    return plan.predicted_seconds if plan.status.is_usable else math.inf


def eager_planner(
    agreement: Agreement,
    task: TrainingTask,
    options: PlanOptions,
    budget: Budget,
    progress: Progress = silent,
    *,
    optimizer_is_optional: bool = False,
    limit_bytes: int | None = None,
) -> StepPlanner:
    """Trace and time a step, and return its planner. Errors are those of `plimsoll.plan`."""
    with agreement.stepping():
        traced = trace_and_cost(
            task, options, progress, optimizer_is_optional=optimizer_is_optional, limit_bytes=limit_bytes
        )
    return StepPlanner(*traced, options, budget.bytes_on(traced[1]), agreement)


def first_planner(
    agreement: Agreement,
    task: TrainingTask,
    options: PlanOptions,
    budget: Budget,
    *,
    optimizer_is_optional: bool,
    taken_bytes: int = 0,
    progress: Progress = silent,
) -> tuple[StepPlanner, float]:
    """Trace a step, and measure the forms of its values (codecs and links) if they are allowed. Return a planner for the step,
    and the scale of errors.

    The scale is the measured error as a multiple of the expected error. The trace runs inside a training call. So it keeps to
    the budget minus ``taken_bytes``, which are allocated outside of the traced step.
    """
    planner = eager_planner(
        agreement,
        task,
        options,
        budget,
        progress,
        optimizer_is_optional=optimizer_is_optional,
        limit_bytes=None if budget.asked_bytes is None else budget.asked_bytes - taken_bytes,
    )
    planner.try_forms(task.step)
    if planner.gradients is None:
        return planner, 1.0
    return planner, error_scale(planner.solve(planner.budget_bytes), functools.partial(planner.run, task.step()))
