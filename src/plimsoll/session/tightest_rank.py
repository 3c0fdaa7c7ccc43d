"""How several ranks plan one step together: the tightest rank plans for all.

That is the rank whose budget lies lowest beside what its step takes without a plan. A plan knows one budget, that rank's. What
another rank takes beyond its own budget is therefore said as so many bytes beyond that one.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.session.agreement import Agreement
from plimsoll.session.forms import Sensed
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import StepPlanner
from plimsoll.session.training_step import TrainingStep
from plimsoll.session.trial import TrialRun
from plimsoll.units import format_bytes


class _Room(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's budget leaves beside its unmanaged step."""

    room_bytes: int
    budget_bytes: int | None


class _Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured, beside its budget."""

    peak_bytes: int
    budget_bytes: int | None
    error: float | None

    @property
    def over_bytes(self) -> int:
        return self.peak_bytes - (self.budget_bytes or 0)


class SharedPlanner(StepPlanner):
    """Plans together with other ranks: all run the same steps, the tightest one solves, and every rank has its plan.

    ``budget_bytes`` is that rank's. Every method is called on all ranks alike.
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
        room_bytes = 0 if budget_bytes is None else budget_bytes - self.extremes.unmanaged_peak_bytes
        rooms = agreement.all_of("room", _Room(room_bytes=room_bytes, budget_bytes=budget_bytes), _Room)
        by_rank = dict(zip(agreement.ranks, rooms, strict=True))
        self._tightest = min(by_rank, key=lambda rank: by_rank[rank].room_bytes)  # the first one, without budgets
        self.budget_bytes = by_rank[self._tightest].budget_bytes
        budgets = {str(rank): room.budget_bytes for rank, room in by_rank.items() if room.budget_bytes is not None}
        self._uneven_budget_bytes = budgets if len(set(budgets.values())) > 1 else {}

    def fits_unmanaged(self) -> bool:
        """Whether every rank's step keeps to its budget without a plan."""
        return self._agreement.every("budgets", holds=super().fits_unmanaged())

    def solve(self, budget_bytes: int | None, strategy: str = "auto", **how: Any) -> Plan:
        """As `StepPlanner.solve`, on the tightest rank; on the others its plan."""
        solve = functools.partial(super().solve, budget_bytes, strategy, **how)
        return self._agreement.made_by(self._tightest, f"solving {strategy}", lambda: self._signed(solve()))

    def run(self, step: TrainingStep, plan: Plan) -> TrialRun:
        """Run a plan on all ranks: the largest error, and a peak as far over the budget as the worst one is."""
        with self._agreement.stepping():
            own = super().run(step, plan)
        taken = _Taken(peak_bytes=own.peak_bytes, budget_bytes=self.own_budget_bytes, error=own.error)
        told = self._agreement.all_of("measured peaks", taken, _Taken)
        rank, tightest = max(zip(self._agreement.ranks, told, strict=True), key=lambda entry: entry[1].over_bytes)
        of = "" if tightest.budget_bytes is None else f" of {format_bytes(tightest.budget_bytes)}"
        return TrialRun(
            (self.budget_bytes or 0) + tightest.over_bytes,
            max((each.error for each in told if each.error is not None), default=None),
            note=f"run once on {self._agreement.size} ranks: the measured peak of the tightest, rank {rank}, was "
            f"{format_bytes(tightest.peak_bytes)}{of}",
        )

    def most_excess_bytes(self, own_excess_bytes: int) -> int:
        """What has to be taken off the tightest rank's budget, so that every rank's excess fits under its own."""
        spare_bytes = self.own_budget_bytes or 0
        most_bytes = max(self._agreement.all_of("excess", own_excess_bytes - spare_bytes, int))
        return (self.budget_bytes or 0) + most_bytes

    def _sense(self, step: TrainingStep) -> Sensed:
        with self._agreement.stepping():
            return super()._sense(step)

    def _signed(self, plan: Plan) -> Plan:
        """The plan with who made it and for whom."""
        note = f"planned by rank {self._tightest}, which has the least room of {self._agreement.size} ranks"
        budgets = self._uneven_budget_bytes
        return msgspec.structs.replace(plan, notes=(*plan.notes, note), budget_bytes_of_ranks=budgets)


def planner_for(
    agreement: Agreement,
    traced: tuple[Trace, Costs],
    options: PlanOptions,
    budget_bytes: int | None,
) -> StepPlanner:
    """The planner of a process on its own, or of one among several ranks."""
    if agreement.size == 1:
        return StepPlanner(*traced, options, budget_bytes)
    return SharedPlanner(agreement, traced, options, budget_bytes)
