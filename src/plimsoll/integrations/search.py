"""Finds the fastest plan whose compiled step is within a budget. Each plan is measured before it is returned.

A compiler or allocator changes memory use after the plan was made. So this module measures the memory of a plan, corrects the
budget by the difference, and makes the plan again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import Plan, RegionPlan
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import BudgetBelowFloor, InvalidOption, PlanMismatch
from plimsoll.planning.solve import Planner, lowest_known, solve
from plimsoll.planning.step import StepIndex
from plimsoll.units import format_bytes, format_bytes_up, parse_budget

_TRIALS = 4
"""How many plans one search measures at most. Most searches need two."""
_CLOSE = 0.03
"""A share of the budget. The search stops if a plan leaves less than this share unused."""
_GAIN = 0.003
"""A share of the step's time. The search also stops if a new plan would save less than this share, because times of operations
are not known more exactly.
"""


def check_plan(plan: object, framework: str, subject: str) -> None:
    """Raise an error unless ``plan`` is a plan for this framework.

    ``subject`` says in words what the framework's plans are for.

    Raises:
        InvalidOption: ``plan`` is not a `Plan`. The error names the type that was passed.
        PlanMismatch: the plan was made for another framework.
    """
    if not isinstance(plan, Plan):
        raise InvalidOption(
            f"plan= has the type {type(plan).__name__}, which is not a Plan.",
            why="a plan object is needed here, not the path of a file",
            next="pass the plan that plan(...) returned, or load a saved plan with plimsoll.artifacts.store.load_plan",
        )
    if plan.framework != framework:
        raise PlanMismatch(
            f"This plan was made for {plan.framework}, not for {subject}.",
            why="it names tensors, arrays or layers of that framework, and another one does not have them",
            next=f"follow it with {plan.framework}, or plan this step",
        )


@dataclass(frozen=True)
class TracedStep:
    """Data: the step of a function and its gradient, with the costs of its operations.

    ``store_seconds_per_byte`` is the time that it takes to hold one byte from forward to backward.
    """

    trace: Trace
    costs: Costs
    store_seconds_per_byte: float


@dataclass(frozen=True, kw_only=True)
class PlanMeter:
    """Data: how the memory of plans is measured.

    ``measure`` returns the bytes of a step under the plans of its regions (modules that the plan decides about), and ``name``
    names what counts these bytes. ``unmanaged_bytes`` are the bytes that the framework itself holds from forward to backward.
    ``kept_bytes`` is the result of ``measure`` if everything is kept, or ``None`` if it is not known.
    """

    framework: str
    name: str
    measure: Callable[[Sequence[RegionPlan]], int]
    unmanaged_bytes: int
    kept_bytes: int | None = None


class PlanSearch:
    """The search for plans of one function. It remembers all its measurements, so several budgets can use them."""

    def __init__(self, step: TracedStep, meter: PlanMeter) -> None:
        self.step, self.meter = step, meter
        self.planner = Planner(StepIndex(step.trace, step.costs))
        self.measured: dict[tuple[object, ...], int] = {}
        self._seen: list[tuple[int, int]] = []
        """For each measured plan: the peak that the planner's model predicted, and the measured peak, in bytes."""
        if meter.kept_bytes is not None:
            self._seen.append((self.planner.loosest.peak_bytes, meter.kept_bytes))
        self._at: dict[int, Plan] = {}
        """The fastest plan for each peak (in bytes) that a plan was solved for."""

    def run(self, budget: int | str | None) -> Plan:
        """Return the fastest plan that was measured to be within the budget. A budget of ``None`` sets no limit.

        Raises:
            BudgetBelowFloor: no measured plan is within the budget.
        """
        started, budget_bytes = time.monotonic(), None if budget is None else parse_budget(budget)
        room, fitting = self._room(budget_bytes), None
        for _ in range(_TRIALS):
            found = self._choose(room)
            if _key(found) in self.measured or not self._is_worth(found, fitting):
                break
            taken = self._measure(found)
            if budget_bytes is None or taken <= budget_bytes:
                if fitting is None or found.predicted_seconds < fitting.predicted_seconds:
                    fitting = self._told(found, taken, budget_bytes)
                if budget_bytes is None or taken >= (1 - _CLOSE) * budget_bytes:
                    break
            self._seen.append((found.predicted_peak_bytes, taken))
            room = self._room(budget_bytes)
        if fitting is None:
            assert budget_bytes is not None, "without a budget every plan fits"
            fitting = self._floor(budget_bytes)
        seconds = self.planner.build_seconds + time.monotonic() - started
        return msgspec.structs.replace(fitting, solve_seconds=seconds)

    def _room(self, budget_bytes: int | None) -> int | None:
        """Return the peak, as the planner predicts it, to plan for, such that the measured peak meets the budget. ``None``
        means no limit.

        It is interpolated between the nearest measurements below and above the budget, if there are both.
        """
        if budget_bytes is None or not self._seen:
            return budget_bytes
        below = max((each for each in self._seen if each[1] <= budget_bytes), default=None)
        above = min((each for each in self._seen if each[1] > budget_bytes), default=None)
        if below is not None and above is not None and below[0] < above[0]:
            # Aim at the middle of the range that ends the search, because the next measurement may be a little above or below.
            share = ((1 - _CLOSE / 2) * budget_bytes - below[1]) / (above[1] - below[1])
            return int(below[0] + share * (above[0] - below[0]))
        said, taken = self._seen[-1]
        # Measurements may vary by themselves: if several plans in a row are over the budget, aim lower each time.
        missed = sum(each[1] > budget_bytes for each in self._seen)
        return int((1 - _CLOSE * max(missed - 1, 0)) * budget_bytes) - (taken - said)

    def _is_worth(self, found: Plan, fitting: Plan | None) -> bool:
        """Return whether the plan saves enough time, compared with the best plan that fits so far, to be worth a
        measurement.
        """
        return fitting is None or fitting.predicted_seconds - found.predicted_seconds > _GAIN * fitting.baseline_seconds

    def _choose(self, room_bytes: int | None) -> Plan:
        """Return the plan that is fastest by the planner's model, with a peak of at most ``room_bytes``.

        Holding fewer bytes may also take less time, so plans for smaller peaks are made as well.
        """
        planner = self.planner
        room = planner.loosest.peak_bytes if room_bytes is None else room_bytes
        peaks = {point.peak_bytes for point in planner.frontier() if point.peak_bytes <= room}
        for peak in {*peaks, room} - self._at.keys():
            self._at[peak] = self._timed(solve(planner, budget_bytes=peak, raise_below_floor=False))
        usable = [each for peak, each in self._at.items() if peak <= room and each.status.is_usable]
        if not usable:
            return self._timed(lowest_known(planner))
        return min(usable, key=lambda each: (each.predicted_seconds, each.predicted_peak_bytes))

    def _timed(self, found: Plan) -> Plan:
        """Return the plan with corrected seconds: the time for holding bytes is added to the step with the plan and to the step
        without it.
        """
        decisions = (each for region in found.regions for each in region.decisions)
        held = sum(each.bytes for each in decisions if each.decision is Decision.KEEP)
        price = self.step.store_seconds_per_byte
        return msgspec.structs.replace(
            found,
            predicted_seconds=found.predicted_seconds + price * held,
            baseline_seconds=found.baseline_seconds + price * self.meter.unmanaged_bytes,
        )

    def _measure(self, found: Plan) -> int:
        if _key(found) not in self.measured:
            self.measured[_key(found)] = self.meter.measure(found.regions)
        return self.measured[_key(found)]

    def _floor(self, budget_bytes: int) -> Plan:
        """Return the plan with the lowest measured peak. If that exceeds the budget, raise an error."""
        lowest = self._timed(lowest_known(self.planner))
        taken = self._measure(lowest)
        smallest = min(self.measured.values())
        if taken > budget_bytes:
            raise BudgetBelowFloor(
                f"budget {format_bytes(budget_bytes)} is below the smallest peak that {self.meter.name} reached, "
                f"{format_bytes(smallest)}.",
                why=f"{len(self.measured)} plans were measured, including the plan with the lowest predicted peak",
                next=f"set the budget to {format_bytes_up(smallest)}, or halve the batch, or put more layers into one loop",
            )
        return self._told(lowest, taken, budget_bytes)

    def _told(self, found: Plan, taken: int, budget_bytes: int | None) -> Plan:
        """Return the plan with its measured peak, ``taken`` bytes, in place of the predicted one."""
        excess = taken - found.predicted_peak_bytes
        # The solver's bound does not include the time that holding takes.
        gap = max(found.predicted_seconds - found.lower_bound_seconds, 0.0)
        overhead = found.predicted_seconds - found.baseline_seconds
        said = f"the prediction was {format_bytes(found.predicted_peak_bytes)}"
        return msgspec.structs.replace(
            found,
            framework=self.meter.framework,
            status=Status.FEASIBLE,
            gap_of_overhead=gap / overhead if overhead > 0 else 0.0,
            gap_of_step=gap / found.baseline_seconds if found.baseline_seconds > 0 else 0.0,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=taken,
            floor_bytes=min(taken, max(found.floor_bytes + excess, 0)),
            baseline_peak_bytes=max(self.meter.unmanaged_bytes, taken),
            notes=(*found.notes, f"measured: {self.meter.name} reports {format_bytes(taken)}, {said}"),
        )


def _key(plan: Plan) -> tuple[object, ...]:
    return tuple(region.effect for region in plan.regions)
