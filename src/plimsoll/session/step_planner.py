"""From a training task to its plans: the step is traced and costed, other forms of its values are tried, plans are solved.

Here one process plans for itself. Where several ranks plan together, `tightest_rank.SharedPlanner` does the same steps in turn
with the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import Extremes, codecs_of_strategy, find_extremes
from plimsoll.session.device_costs import measure_engine, measured_costs
from plimsoll.session.forms import Sensed, sense_forms
from plimsoll.session.options import PlanOptions
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep
from plimsoll.session.trial import Gradients, TrialRun, confirmed, run_trial
from plimsoll.tracing.trace import trace as trace_step


def trace_and_cost(
    task: TrainingTask, options: PlanOptions | None = None, progress: Progress = silent
) -> tuple[Trace, Costs]:
    """One step traced and costed, for as many plans as are wanted.

    Raises:
        InvalidModel, InvalidBatch, InvalidLoss, InvalidRegions, TracingFailed: as named.
    """
    options = options or PlanOptions()
    device = None if options.device_profile is None else find_device(options.device_profile)
    traced = trace_step(
        task.model,
        task.batch,
        loss=task.loss,
        optimizer=task.optimizer,
        regions=options.regions,
        device_name=None if device is None else device.name,
        progress=part_of(progress, 0.0, 0.9),
    )
    progress("costing", 0.9)
    if traced.is_fake:
        return traced, roofline_costs(traced, device or find_device("CPU"))
    return traced, measured_costs(traced, measure_engine(traced))


class StepPlanner:
    """Makes plans of one step under a budget (``None``: no limit)."""

    def __init__(self, trace: Trace, costs: Costs, options: PlanOptions, budget_bytes: int | None) -> None:
        self.trace = options.opened(trace)
        self.costs = costs
        self.options = options
        self.budget_bytes = self.own_budget_bytes = budget_bytes
        self.gradients: Gradients | None = None
        self._sensed: Sensed | None = None

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
        solved = self.solve(self.budget_bytes, strategy)
        if self.trace.is_fake or not solved.status.is_usable or (self.budget_bytes is None and self.gradients is None):
            return solved
        return confirmed(
            solved,
            functools.partial(self.run, step()),
            functools.partial(self._solve_again, strategy),
            max_error=self.options.most_error(strategy),
            progress=progress,
        )

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
            BudgetBelowFloor: nothing fits, and ``raise_below_floor`` says that this is an error.
        """
        planner = self._planner
        limits = self.options.limits(error_scale)
        if codecs_of_strategy(strategy):
            planner = planner.heedless_of_error()
        elif strategy == "auto" and limits != planner.limits:
            planner = planner.relimited(limits)
        made = solve(
            planner,
            budget_bytes=budget_bytes,
            strategy=strategy,
            excess_bytes=excess_bytes,
            raise_below_floor=raise_below_floor,
        )
        notes = made.notes
        if self.options.wants_forms and not planner.index.forms.regions:
            notes = (*notes, "Nothing is compressed or offloaded although it was allowed: everything fits as it is.")
        return msgspec.structs.replace(self.options.written_into(made), notes=notes)

    def _solve_again(self, strategy: str, excess_bytes: int, error_scale: float) -> Plan:
        return self.solve(self.budget_bytes, strategy, excess_bytes=excess_bytes, error_scale=error_scale)

    def own(self, plan: Plan) -> Plan:
        """The plan as this process would run it: with the peak and the timeline of its own step."""
        return plan

    def run(self, step: TrainingStep, plan: Plan) -> TrialRun:
        """Run a plan and measure it."""
        return run_trial(step, plan, self.gradients)

    def excess_bytes(self, own_excess_bytes: int) -> int:
        """What has to be taken off the budget for a step that takes so much more than its plan says."""
        return own_excess_bytes

    @functools.cached_property
    def _index(self) -> StepIndex:
        forms = None if self._sensed is None else self._sensed.forms
        return StepIndex(self.trace, self.costs, forms, may_recompute=self.options.may_recompute)

    @functools.cached_property
    def _planner(self) -> Planner:
        if self._sensed is None:
            return Planner(self._index, overrides=self.options.overrides_without_forms)
        return Planner(self._index, overrides=self.options.overrides, limits=self.options.limits())

    def _sense(self, step: TrainingStep) -> Sensed:
        return sense_forms(step, self.trace, self.costs, self.extremes.lowest, self.options)
