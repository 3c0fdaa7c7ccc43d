"""The stages of one rank and its budget in, a plan for every stage out: their bytes together stay within it.

The budget is shared by one number, the same for all stages of the rank: how far each may go from its own smallest peak to
what it takes when nothing is given up. The largest number whose peak over the rank's actions fits is searched by halving.

Known weakness: with several stages, one number for all is not the least time; for one stage it is the planner's optimum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll.artifacts.plan import Plan
from plimsoll.distributed.pipelines.stage_steps import StageStep
from plimsoll.errors import BudgetBelowFloor
from plimsoll.estimator.pipeline_schedule.orders import Action
from plimsoll.estimator.pipeline_schedule.rank_memory import RankPeak, rank_peak
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds
from plimsoll.planning.describe import describe_peak
from plimsoll.planning.explain import format_bytes_up, name_holders
from plimsoll.planning.simulate import Simulation
from plimsoll.units import format_bytes

_HALVINGS = 7
"""To within a hundredth of what the stages can give up."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A plan per stage, the peak that they come to on this rank (``beside_bytes`` of the planner included), and seconds."""

    plans: dict[int, Plan]
    peak: RankPeak
    seconds: dict[int, ActionSeconds]


class RankPlanner:
    """Plans of one rank.

    Args:
        steps: its stages.
        actions: what it does in a step, in order.
        beside_bytes: what it holds all the time besides its stages.
    """

    def __init__(self, steps: Mapping[int, StageStep], actions: Sequence[Action], beside_bytes: int) -> None:
        self._steps = dict(steps)
        self._actions = actions
        self._beside_bytes = beside_bytes

    def lowest(self) -> RankPlan:
        """Every stage at its smallest peak."""
        return self._at(0.0)

    def solve(self, budget_bytes: int, excess_bytes: int = 0) -> RankPlan:
        """The plans for a budget.

        Args:
            budget_bytes: for everything on the rank.
            excess_bytes: what was measured beyond predictions; taken off.

        Raises:
            BudgetBelowFloor: names the stage in whose action the smallest peak lies.
        """
        room_bytes = budget_bytes - excess_bytes
        if self._peak(1.0).peak_bytes <= room_bytes:
            return self._at(1.0)
        if self._peak(0.0).peak_bytes > room_bytes:
            raise self._below_floor(budget_bytes, excess_bytes)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._peak(middle).peak_bytes <= room_bytes:
                low = middle
            else:
                high = middle
        return self._at(low)

    def peak_of(self, plans: Mapping[int, Plan]) -> RankPeak:
        """What given plans come to on this rank."""
        return self._peak_of({index: self._steps[index].under(plan) for index, plan in plans.items()})

    def _budget(self, index: int, share: float) -> int:
        low, high = self._steps[index].range_bytes
        return low + int((high - low) * share)

    def _simulations(self, share: float) -> dict[int, Simulation]:
        return {index: step.simulation(self._budget(index, share)) for index, step in self._steps.items()}

    def _peak(self, share: float) -> RankPeak:
        return self._peak_of(self._simulations(share))

    def _peak_of(self, simulations: Mapping[int, Simulation]) -> RankPeak:
        memory = {index: self._steps[index].memory(simulation) for index, simulation in simulations.items()}
        return rank_peak(self._actions, memory, beside_bytes=self._beside_bytes)

    def _at(self, share: float) -> RankPlan:
        plans = {index: step.plan(self._budget(index, share)) for index, step in self._steps.items()}
        simulations = {index: self._steps[index].under(plan) for index, plan in plans.items()}
        seconds = {index: self._steps[index].seconds(simulation) for index, simulation in simulations.items()}
        return RankPlan(plans, self._peak_of(simulations), seconds)

    def _below_floor(self, budget_bytes: int, excess_bytes: int) -> BudgetBelowFloor:
        simulations = self._simulations(0.0)
        peak = self._peak_of(simulations)
        stage = peak.action.stage if peak.action is not None else max(simulations)
        floor_bytes = peak.peak_bytes + excess_bytes
        stages = "stage" if len(simulations) == 1 else "stages"
        named = ", ".join(map(str, sorted(simulations)))
        measured = f", {format_bytes(excess_bytes)} of it measured beyond what was predicted" if excess_bytes else ""
        return BudgetBelowFloor(
            f"budget {format_bytes(budget_bytes)} is below the smallest reachable peak of {stages} {named}, "
            f"{format_bytes(floor_bytes)}.",
            why=f"it lies in {peak.moment}{measured}; in stage {stage} alone "
            f"{name_holders(describe_peak(simulations[stage]))} are alive together",
            next=f"budget {format_bytes_up(floor_bytes)} ({floor_bytes} bytes), or a smaller micro-batch, or fewer "
            f"layers in stage {stage}",
        )
