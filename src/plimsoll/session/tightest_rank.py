"""Several ranks plan one step together: the tightest rank solves for all.

The tightest rank has the least room: its budget minus its unmanaged peak is the smallest. A plan has one budget, the tightest
rank's. The overshoot of another rank over its own budget is translated into the same overshoot over the plan's budget. Ranks
may have batches of different shapes: each simulates the plan on its own step, and if one exceeds its budget, the tightest rank
solves again.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import BudgetBelowFloor
from plimsoll.planning.describe import classes_at_peak, describe_timeline
from plimsoll.planning.replay_schedule import Unreachable
from plimsoll.planning.simulate import choices_of, run_choices
from plimsoll.session.agreement import Agreement
from plimsoll.session.forms import Sensed
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.step_planner import StepPlanner, trace_and_cost
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep
from plimsoll.session.trial import TrialRun, error_scale
from plimsoll.units import budget_text, format_bytes, format_bytes_up


class _Room(msgspec.Struct, frozen=True, kw_only=True):
    """The room of one rank: its budget minus its unmanaged peak."""

    room_bytes: int
    budget_bytes: int | None


class _Taken(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's measurement, with its budget."""

    peak_bytes: int
    recording_bytes: int
    """How much lower the peak is if the plan is recorded before the optimizer has state."""
    budget_bytes: int | None
    error: float | None

    @property
    def over_bytes(self) -> int:
        return self.peak_bytes - (self.budget_bytes or 0)


class SharedPlanner(StepPlanner):
    """Plans together with other ranks: all run the same steps, the tightest one solves, and every rank gets its plan.

    ``budget_bytes`` is the tightest rank's budget. Every method must be called on all ranks.
    """

    def __init__(
        self,
        agreement: Agreement,
        traced: tuple[Trace, Costs],
        options: PlanOptions,
        budget_bytes: int | None,
    ) -> None:
        super().__init__(*traced, options, budget_bytes)
        self._agreement = agreement
        self._own_excess_bytes = 0
        room_bytes = 0 if budget_bytes is None else budget_bytes - self.extremes.unmanaged_peak_bytes
        rooms = agreement.all_of("room", _Room(room_bytes=room_bytes, budget_bytes=budget_bytes), _Room)
        by_rank = dict(zip(agreement.ranks, rooms, strict=True))
        self._budgets = {rank: room.budget_bytes for rank, room in by_rank.items()}
        # without budgets all rooms are 0, so this is the first rank
        self._tightest = min(by_rank, key=lambda rank: by_rank[rank].room_bytes)
        self.budget_bytes = self._budgets[self._tightest]
        budgets = {str(rank): budget for rank, budget in self._budgets.items() if budget is not None}
        self._uneven_budget_bytes = budgets if len(set(budgets.values())) > 1 else {}

    def alone(self) -> StepPlanner:
        """Return a planner of this rank's own step under its own budget. It reuses what is computed already."""
        own = self.beside(self.trace, self.costs)
        own.in_flight = self.in_flight
        known = ("extremes", "_index", "_planner")
        own.__dict__.update({name: self.__dict__[name] for name in known if name in self.__dict__})
        return own

    def fits_unmanaged(self) -> bool:
        """True if every rank's step keeps to its budget without a plan."""
        return self._agreement.every("budgets", holds=super().fits_unmanaged())

    def solve(self, budget_bytes: int | None, strategy: str = "auto", *, excess_bytes: int = 0, **how: Any) -> Plan:
        """Override `StepPlanner.solve`: the tightest rank solves and all ranks get its plan.

        If the plan is for the budget, solve again until every rank's predicted peak is within its own budget.
        """
        is_for_all = strategy == "auto" and budget_bytes is not None and budget_bytes == self.budget_bytes
        for attempt in itertools.count():
            make = functools.partial(self._made, budget_bytes, strategy, excess_bytes=excess_bytes, **how)
            try:
                made = self._agreement.made_by(self._tightest, f"solving {strategy}", make)
            except BudgetBelowFloor as refusal:
                if not is_for_all:
                    raise
                return self._lowest(refusal, attempt)
            over = self._over_bytes(made) if is_for_all and made.status.is_usable else [0]
            if max(over) <= 0:
                return made
            assert budget_bytes is not None
            # Another rank's overshoot may shrink more slowly than this rank's peak, so double the step in each attempt.
            excess_bytes = budget_bytes - made.predicted_peak_bytes + (max(over) << attempt)
        raise AssertionError("the lowest peak ends it")

    def _lowest(self, refusal: BudgetBelowFloor, attempt: int) -> Plan:
        """Return the plan with the lowest peak if every rank is predicted to keep to its budget under it; else raise
        ``refusal``.

        A refusal in the first attempt means that the tightest rank cannot keep to its own budget; then it is raised too.
        """
        made = self._agreement.made_by(
            self._tightest, "solving for the lowest peak", lambda: self._made(self._planner.floor.peak_bytes, "auto")
        )
        if max(self._over_bytes(made)) <= 0 and attempt:
            return msgspec.structs.replace(made, budget_bytes=self.budget_bytes)
        raise refusal

    def _over_bytes(self, plan: Plan) -> list[int]:
        """Return each rank's overshoot under a plan, including what it measured on top of its trace."""
        taken_bytes = self.own(plan).predicted_peak_bytes + self._own_excess_bytes
        budget_bytes = taken_bytes if self.own_budget_bytes is None else self.own_budget_bytes
        return self._agreement.all_of("predicted peaks", taken_bytes - budget_bytes, int)

    def own(self, plan: Plan) -> Plan:
        """Return the plan with the peak, the timeline and the classes of this rank's own step."""
        try:
            own = run_choices(self._index, choices_of(self._index, plan.regions))
        except Unreachable:  # this rank's step is different: regions without a recipe keep everything
            own = run_choices(self._index, choices_of(self._index, ()))
        return msgspec.structs.replace(
            plan,
            predicted_peak_bytes=own.peak_bytes,
            timeline=describe_timeline(own),
            classes=classes_at_peak(own),
        )

    def halfway_bytes(self, plan: Plan, error_scale: float = 1.0) -> int | None:
        """Override `StepPlanner.halfway_bytes`: all ranks return the tightest rank's value."""
        told = self._agreement.all_of("halfway", super().halfway_bytes(plan, error_scale), int | None)  # type: ignore[arg-type]
        return told[self._agreement.ranks.index(self._tightest)]

    def run(self, step: TrainingStep, plan: Plan, *, unseen_bytes: int = 0) -> TrialRun:
        """Run a plan on all ranks. Return the largest error, and the plan's budget plus the largest overshoot as the peak."""
        with self._agreement.stepping():
            own = super().run(step, plan, unseen_bytes=unseen_bytes)
        taken = _Taken(
            peak_bytes=own.peak_bytes,
            recording_bytes=own.peak_bytes - own.fresh_bytes,
            budget_bytes=self.own_budget_bytes,
            error=own.error,
        )
        told = self._agreement.all_of("measured peaks", taken, _Taken)
        rank, tightest = max(zip(self._agreement.ranks, told, strict=True), key=lambda entry: entry[1].over_bytes)
        of = "" if tightest.budget_bytes is None else f" of {format_bytes(tightest.budget_bytes)}"
        return TrialRun(
            (self.budget_bytes or 0) + tightest.over_bytes,
            (self.budget_bytes or 0) + max(each.over_bytes - each.recording_bytes for each in told),
            max((each.error for each in told if each.error is not None), default=None),
            note=f"run once on {self._agreement.size} ranks: the measured peak of the tightest, rank {rank}, was "
            f"{format_bytes(tightest.peak_bytes)}{of}",
        )

    def excess_bytes(self, own_excess_bytes: int) -> int:
        """Return the tightest rank's excess to subtract from its budget. From now on each rank counts its own excess."""
        self._own_excess_bytes = own_excess_bytes
        told = self._agreement.all_of("excess", own_excess_bytes, int)
        return told[self._agreement.ranks.index(self._tightest)]

    def worst_bytes(self, own_bytes: int) -> int:
        """Return the tightest rank's budget plus the largest overshoot of any rank over its own budget."""
        own_budget_bytes = self.own_budget_bytes or 0
        return (self.budget_bytes or 0) + max(self._agreement.all_of("worst", own_bytes - own_budget_bytes, int))

    def refusal(self, lowest: Plan, floor_bytes: int, **why: Any) -> BudgetBelowFloor:
        """Override `StepPlanner.refusal`: all ranks get the tightest rank's error.

        If budgets differ, the error tells every rank to raise its budget by the largest overshoot.
        """
        error = super().refusal(lowest, floor_bytes, **why)
        if self._uneven_budget_bytes:
            more = format_bytes_up(floor_bytes - (self.budget_bytes or 0))
            error = BudgetBelowFloor(
                error.found,
                why=f"of {self._agreement.size} ranks one lacks {more} of its budget; on rank {self._tightest} {error.why}",
                next=f"{budget_text(floor_bytes)} on rank {self._tightest} and {more} more on every other one",
            )
        return self._agreement.refused_by(self._tightest, error)

    def _sense(self, step: TrainingStep) -> Sensed:
        with self._agreement.stepping():
            return super()._sense(step)

    def _made(self, budget_bytes: int | None, strategy: str, **how: Any) -> Plan:
        """Solve on this rank. The plan notes which rank made it, and the budgets of the ranks."""
        plan = super().solve(budget_bytes, strategy, **how)
        note = f"planned by rank {self._tightest}, which has the least room of {self._agreement.size} ranks"
        budgets = self._uneven_budget_bytes
        return msgspec.structs.replace(plan, notes=(*plan.notes, note), budget_bytes_of_ranks=budgets)


def planner_for(
    agreement: Agreement,
    traced: tuple[Trace, Costs],
    options: PlanOptions,
    budget_bytes: int | None,
) -> StepPlanner:
    """Return a planner for one process, or for one of several ranks."""
    if agreement.size == 1:
        return StepPlanner(*traced, options, budget_bytes)
    return SharedPlanner(agreement, traced, options, budget_bytes)


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
    """Trace and time a step and return its planner. Errors are those of `plimsoll.plan`."""
    with agreement.stepping():
        traced = trace_and_cost(
            task, options, progress, optimizer_is_optional=optimizer_is_optional, limit_bytes=limit_bytes
        )
    return planner_for(agreement, traced, options, budget.bytes_on(traced[1]))


def first_planner(
    agreement: Agreement,
    task: TrainingTask,
    options: PlanOptions,
    budget: Budget,
    *,
    optimizer_is_optional: bool,
    taken_bytes: int = 0,
) -> tuple[StepPlanner, float]:
    """Trace a step and try other forms of its values if they are allowed. Return its planner and the scale of errors.

    The scale says how many times larger than expected the measured errors are. The trace is part of a training call, so it
    keeps to the budget minus ``taken_bytes``, which the trace does not see.
    """
    planner = eager_planner(
        agreement,
        task,
        options,
        budget,
        optimizer_is_optional=optimizer_is_optional,
        limit_bytes=None if budget.asked_bytes is None else budget.asked_bytes - taken_bytes,
    )
    planner.try_forms(task.step)
    if planner.gradients is None:
        return planner, 1.0
    return planner, error_scale(planner.solve(planner.budget_bytes), functools.partial(planner.run, task.step()))
