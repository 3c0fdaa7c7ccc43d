"""From a training task to its plans: the step is traced and costed, other forms of its values are tried, plans are solved.

Here one process plans for itself. Where several ranks plan together, `tightest_rank.SharedPlanner` does the same steps in turn
with the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import msgspec
import torch

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import BudgetBelowFloor, InvalidModel, TracingFailed
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.explain import floor_error, optimizer_floor_error
from plimsoll.planning.ladder import rungs_of
from plimsoll.planning.replay_schedule import Unreachable
from plimsoll.planning.simulate import choices_of, run_choices
from plimsoll.planning.solve import Planner, lowest_known, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import Extremes, codecs_of_strategy, find_extremes
from plimsoll.planning.what_if import peak_with_chunked_loss
from plimsoll.session.calibration import predicted_optimizer_bytes
from plimsoll.session.device_costs import measure_engine, measured_costs
from plimsoll.session.forms import Sensed, sense_forms
from plimsoll.session.options import PlanOptions
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep
from plimsoll.session.trial import Gradients, Managing, TrialRun, confirmed, run_trial
from plimsoll.tracing.fsdp2 import holds_gradients_back
from plimsoll.tracing.trace import trace as trace_step

CLOSE = 0.15
"""A lowest peak that is predicted to be within this share of the budget, or above it, is measured before it is relied on."""

_LOWEST = "lowest"
"""No strategy of the user's: the plan with the lowest peak, as it was found."""


def trace_and_cost(
    task: TrainingTask,
    options: PlanOptions | None = None,
    progress: Progress = silent,
    *,
    optimizer_is_optional: bool = False,
    limit_bytes: int | None = None,
) -> tuple[Trace, Costs]:
    """One step traced and costed, for as many plans as are wanted; without its optimizer where that is optional and cannot
    be traced. ``limit_bytes`` is the most that this may take, if saved activations are all that exceeds it.

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
        return traced, roofline_costs(traced, find_device(options.device_profile or "CPU"))
    return traced, measured_costs(traced, measure_engine(traced))


def trace_task(
    task: TrainingTask,
    options: PlanOptions,
    progress: Progress = silent,
    *,
    optimizer_is_optional: bool = False,
    limit_bytes: int | None = None,
    repeats: int = 3,
) -> Trace:
    """One step traced; with ``repeats=0`` without the seconds of its ops. Errors are as for ``trace_and_cost``."""
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
    try:
        return trace(optimizer=task.optimizer)
    except (InvalidModel, TracingFailed):
        if task.optimizer is None or not optimizer_is_optional:
            raise
        return trace()


class StepPlanner:
    """Makes plans of one step under a budget (``None``: no limit)."""

    def __init__(self, trace: Trace, costs: Costs, options: PlanOptions, budget_bytes: int | None) -> None:
        self.trace = options.opened(trace)
        self.costs = costs
        self.options = options
        self.budget_bytes = self.own_budget_bytes = budget_bytes
        self.gradients: Gradients | None = None
        self.in_flight = 1
        self.loss_share = 0.0
        """What the user's loss takes, of what is there anyway between forward and backward."""
        self.mistake_bytes = 0
        """What the plan with the lowest peak took more than it predicts in steady steps, when it was tried."""
        self.managing: Managing | None = None
        """What puts plans to work in trials, if it is to keep what they record."""
        self.tried_bytes = 0
        """What that trial took; 0 where there was none."""
        self.recording_bytes = 0
        """What it took more in the step that recorded it."""
        self._ran = TrialRun(0, 0, None)
        """The last trial as this process saw it."""
        self._sensed: Sensed | None = None

    def alone(self) -> StepPlanner:
        """A planner that asks no other rank."""
        return self

    def beside(self, trace: Trace, costs: Costs) -> StepPlanner:
        """A planner of another step of the same model under the same budget, that asks no other rank."""
        made = StepPlanner(trace, costs, self.options, self.own_budget_bytes)
        made.loss_share = self.loss_share
        return made

    def traced(
        self, task: TrainingTask, *, optimizer_is_optional: bool, limit_bytes: int, is_timed: bool
    ) -> tuple[Trace, Costs | None]:
        """Another step of the same model, traced as this one was; with its costs if it is timed, within ``limit_bytes``."""
        if is_timed:
            return trace_and_cost(
                task, self.options, optimizer_is_optional=optimizer_is_optional, limit_bytes=limit_bytes
            )
        return trace_task(task, self.options, optimizer_is_optional=optimizer_is_optional, repeats=0), None

    @functools.cached_property
    def extremes(self) -> Extremes:
        """The step without a plan, and with everything recomputed."""
        return find_extremes(self.trace, self.costs)

    def fits_unmanaged(self) -> bool:
        """Whether the step keeps to its budget without a plan."""
        return self.own_budget_bytes is not None and self.own_budget_bytes >= self.extremes.unmanaged_peak_bytes

    def try_forms(self, step: Callable[[], TrainingStep], progress: Progress = silent) -> None:
        """Run the step once to see in which other forms its values could be held, where that is allowed and needed.

        The unmanaged gradients are kept, where lossy plans have to be compared with them.
        """
        if self.options.wants_forms and (not self.fits_unmanaged() or self.options.insists_on_forms):
            progress("trying codecs and links", 0.0)
            self._sensed = self._sense(step())
            self.gradients = self._sensed.gradients if self.options.wants_lossy else None
        progress("solving", 0.0 if self._sensed is None else 0.4)

    def plan(self, strategy: str, step: Callable[[], TrainingStep], progress: Progress = silent) -> Plan:
        """The plan for the budget; on a real device it is run once, and solved again with what that shows.

        Raises:
            BudgetBelowFloor: nothing fits.
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
        """The plan, run, or one that is solved again with what runs have shown."""
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
        """The plan, run once, or what ``resolve`` makes of more excess, where steps are known to take so much more.

        The trial shows what the step itself takes more, and not the user's loss, what a step leaves behind, or state of
        other optimizers. ``seen_bytes`` of the excess are what the first trial has shown as well.
        """
        run = functools.partial(self.run, step, unseen_bytes=max(0, excess_bytes - seen_bytes))
        return confirmed(plan, run, lambda more, _: resolve(max(excess_bytes, more)), max_error=None, progress=silent)

    def lowest(self, error_scale: float = 1.0) -> Plan:
        """The plan with the lowest peak that there is."""
        return self.solve(self.lowest_for_now(error_scale).floor_bytes, error_scale=error_scale)

    def lowest_for_now(self, error_scale: float = 1.0) -> Plan:
        """As ``lowest``, for a step or two: nobody looks for the fastest plan with that peak."""
        return self.solve(None, _LOWEST, error_scale=error_scale)

    def rungs(self) -> Iterator[Plan]:
        """The plans between the lowest peak and the unmanaged one that were solved on the way, the cheapest first."""
        return map(self.options.written_into, rungs_of(self._planner))

    def predicted_bytes(self, plan: Plan) -> int | None:
        """The peak of this step under a plan that was made for another one; ``None`` where that cannot be followed here."""
        try:
            return run_choices(self._index, choices_of(self._index, plan.regions)).peak_bytes
        except Unreachable:
            return None

    def is_kept_by(self, plan: Plan, excess_bytes: int) -> bool:
        """Whether a plan that was made for another step keeps this one within the budget, with so much on top."""
        predicted_bytes = self.predicted_bytes(plan)
        return predicted_bytes is not None and predicted_bytes <= (self.own_budget_bytes or 0) - excess_bytes

    def halfway_bytes(self, plan: Plan, error_scale: float = 1.0) -> int | None:
        """A peak halfway between that of a plan and the lowest one; that itself where it is close; ``None`` if it is the
        plan's.
        """
        taken_bytes, lowest_bytes = self.predicted_bytes(plan), self.lowest_for_now(error_scale).predicted_peak_bytes
        spare_bytes = (plan.predicted_peak_bytes if taken_bytes is None else taken_bytes) - lowest_bytes
        if spare_bytes <= 0:
            return None
        return lowest_bytes if spare_bytes < CLOSE * lowest_bytes else lowest_bytes + spare_bytes // 2

    def lowest_allowed(self, step: Callable[[], TrainingStep], error_scale: float = 1.0) -> Plan:
        """A plan with the lowest peak for the first step; ``BudgetBelowFloor`` where the budget is below what that takes."""
        assert self.budget_bytes is not None
        lowest = self.lowest_for_now(error_scale)
        if self.worst_bytes(self.own(lowest).predicted_peak_bytes) <= (1 - CLOSE) * self.budget_bytes:
            return lowest
        return self.lowest_that_fits(step(), error_scale)

    def lowest_that_fits(self, step: TrainingStep, error_scale: float = 1.0) -> Plan:
        """The plan with the lowest peak, if it is measured to fit, whatever is predicted, in a training that begins with it.

        Raises:
            BudgetBelowFloor: with the peak that was measured, which is a budget that works.
        """
        assert self.budget_bytes is not None
        plan = self.lowest(error_scale)
        try:
            run = self.run(step, plan)
        except torch.OutOfMemoryError:
            raise self.refusal(plan, plan.predicted_peak_bytes) from None
        own = self.own(plan)
        self.tried_bytes = self._ran.fresh_bytes
        self.recording_bytes = self._ran.recording_bytes
        self.mistake_bytes = self._ran.steady_bytes - own.predicted_peak_bytes
        most_error = self.options.most_error("auto")
        is_wrong = run.error is not None and most_error is not None and run.error > most_error
        floor_bytes = max(run.fresh_bytes, self.worst_bytes(predicted_optimizer_bytes(own)))
        if floor_bytes > self.budget_bytes or is_wrong:
            # The first recorded step of a process was seen to take 2.8 KiB less than later ones: the budget named has to hold.
            floor_bytes = max(floor_bytes, self.run(step, plan).fresh_bytes)
            waits = holds_gradients_back(step.model)  # then the trial has accumulated
            accumulating_bytes = 0 if waits else self.run(step.accumulating(), plan).fresh_bytes
            raise self.refusal(plan, floor_bytes, accumulating_bytes=accumulating_bytes)
        return msgspec.structs.replace(plan, budget_bytes=self.budget_bytes, notes=(*plan.notes, run.told))

    def refusal(
        self, lowest: Plan, floor_bytes: int, *, accumulating_bytes: int = 0, is_optimizer: bool = False
    ) -> BudgetBelowFloor:
        """The error for a budget below what the plan with the lowest peak was measured to take, in the optimizer's step or
        before it; also where gradients of earlier micro-batches are there.
        """
        assert self.budget_bytes is not None
        if is_optimizer:
            return optimizer_floor_error(self.budget_bytes, floor_bytes)
        has_solved = "_planner" in self.__dict__  # among several ranks one of them does
        return floor_error(
            self.budget_bytes,
            lowest.peak,
            floor_bytes - lowest.peak.bytes,
            chunked_bytes=peak_with_chunked_loss(self._planner.floor) if has_solved else None,
            accumulating_bytes=accumulating_bytes,
        )

    def wait_for(self, in_flight: int) -> None:
        """Plan for so many forwards before one backward."""
        if in_flight != self.in_flight:
            self.in_flight = in_flight
            self._forget_index()

    def count_loss(self, plan: Plan, measured_bytes: int) -> None:
        """Plan for what the user's loss takes outside of the model, where a step took so many bytes between forward and
        backward under a plan.
        """
        index = self._index
        curve = run_choices(index, choices_of(index, plan.regions)).curve
        loss_bytes = measured_bytes - int(curve[index.handover])
        if loss_bytes > 0 and index.between_bytes > 0:
            self.loss_share = loss_bytes / index.between_bytes
            self._forget_index()

    def _forget_index(self) -> None:
        self.__dict__.pop("_planner", None)
        self.__dict__.pop("_index", None)

    def solve(
        self,
        budget_bytes: int | None,
        strategy: str = "auto",
        *,
        excess_bytes: int = 0,
        error_scale: float = 1.0,
        raise_below_floor: bool = True,
    ) -> Plan:
        """A plan, not yet run, for a budget (``None``: as much as it takes) less ``excess_bytes``.

        ``error_scale`` says how many times larger than expected errors are.

        Raises:
            BudgetBelowFloor: nothing fits, or nothing was found in time, and ``raise_below_floor`` says that this is an error.
        """
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
            raise floor_error(budget_bytes, made.peak, excess_bytes)  # the lowest peak that is known can be tried
        notes = made.notes
        if self.options.wants_forms and not planner.index.forms.regions:
            notes = (*notes, "Nothing is compressed or offloaded although it was allowed: everything fits as it is.")
        return msgspec.structs.replace(self.options.written_into(made), notes=notes)

    def own(self, plan: Plan) -> Plan:
        """The plan as this process would run it: with the peak and the timeline of its own step."""
        return plan

    def run(self, step: TrainingStep, plan: Plan, *, unseen_bytes: int = 0) -> TrialRun:
        """Run a plan and measure it; ``unseen_bytes`` are known to come on top."""
        trial = run_trial(step, plan, self.gradients, self.managing)
        self._ran = trial
        return dataclasses.replace(
            trial, peak_bytes=trial.peak_bytes + unseen_bytes, fresh_bytes=trial.fresh_bytes + unseen_bytes
        )

    def excess_bytes(self, own_excess_bytes: int) -> int:
        """What has to be taken off the budget for a step that takes so much more than its plan says."""
        return own_excess_bytes

    def worst_bytes(self, own_bytes: int) -> int:
        """The bytes beside this planner's budget that the worst rank has beside its own."""
        return own_bytes

    @functools.cached_property
    def _index(self) -> StepIndex:
        return StepIndex(
            self.trace,
            self.costs,
            None if self._sensed is None else self._sensed.forms,
            may_recompute=self.options.may_recompute,
            in_flight=self.in_flight,
            loss_share=self.loss_share,
        )

    @functools.cached_property
    def _planner(self) -> Planner:
        if self._sensed is None:
            return Planner(self._index, overrides=self.options.overrides_without_forms)
        return Planner(self._index, overrides=self.options.overrides, limits=self.options.limits())

    def _sense(self, step: TrainingStep) -> Sensed:
        return sense_forms(step, self.trace, self.costs, self.extremes.lowest, self.options)
