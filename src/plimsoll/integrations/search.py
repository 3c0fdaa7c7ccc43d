"""Looks for the fastest plan whose compiled step is within a budget: a plan is measured before it is handed over.

A compiler, or an allocator, decides about memory once more after the plan. So what a plan takes is asked of it, the
difference is taken off the budget, and the plan is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import Plan, RegionPlan
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import BudgetBelowFloor, InvalidOption
from plimsoll.planning.solve import Planner, lowest_known, solve
from plimsoll.planning.step import StepIndex
from plimsoll.units import format_bytes, format_bytes_up

_TRIALS = 4
"""Plans that are measured at most; most searches take two."""
_CLOSE = 0.03
"""A plan that leaves less than this share of the budget unused is not tried again."""
_GAIN = 0.003
"""Nor is one that would save less than this share of the step: what operations take is not known better."""


def check_plan(plan: object) -> None:
    """Refuse what is no plan.

    Raises:
        InvalidOption: with what was passed.
    """
    if not isinstance(plan, Plan):
        raise InvalidOption(
            f"A {type(plan).__name__} is no plan.",
            why="what is followed is the plan itself, not where it lies",
            next="pass what plan(...) returned, or plimsoll.artifacts.store.load_plan of a saved one",
        )


@dataclass(frozen=True)
class TracedStep:
    """A function and its gradient as a step; holding a byte from forward to backward takes time as well."""

    trace: Trace
    costs: Costs
    store_seconds_per_byte: float


@dataclass(frozen=True, kw_only=True)
class PlanMeter:
    """What plans are measured on.

    ``measure`` says what a step under these plans takes in bytes; ``name`` is who says so. ``unmanaged_bytes`` is what
    the framework itself holds from forward to backward, ``kept_bytes`` what ``measure`` says where all is kept, if it is known.
    """

    framework: str
    name: str
    measure: Callable[[Sequence[RegionPlan]], int]
    unmanaged_bytes: int
    kept_bytes: int | None = None


class PlanSearch:
    """The plans of one function that were asked for, and what was measured of them."""

    def __init__(self, step: TracedStep, meter: PlanMeter) -> None:
        self.step, self.meter = step, meter
        self.planner = Planner(StepIndex(step.trace, step.costs))
        self.measured: dict[tuple[object, ...], int] = {}
        self._seen: list[tuple[int, int]] = []
        """What the model said of a plan and what was measured of it, in bytes."""
        if meter.kept_bytes is not None:
            self._seen.append((self.planner.loosest.peak_bytes, meter.kept_bytes))
        self._at: dict[int, Plan] = {}
        """The fastest plan by the model at each peak that was asked."""

    def run(self, budget_bytes: int | None) -> Plan:
        """The fastest plan that was found to be within the budget.

        Raises:
            BudgetBelowFloor: none was.
        """
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
        return fitting

    def _room(self, budget_bytes: int | None) -> int | None:
        """What the model may take for the meter to say the budget: between what was measured below and above it."""
        if budget_bytes is None or not self._seen:
            return budget_bytes
        below = max((each for each in self._seen if each[1] <= budget_bytes), default=None)
        above = min((each for each in self._seen if each[1] > budget_bytes), default=None)
        if below is not None and above is not None and below[0] < above[0]:
            share = ((1 - _CLOSE / 2) * budget_bytes - below[1]) / (above[1] - below[1])
            return int(below[0] + share * (above[0] - below[0]))
        said, taken = self._seen[-1]
        # What was measured may vary by itself: where one plan after the other is over, aim lower each time.
        missed = sum(each[1] > budget_bytes for each in self._seen)
        return int((1 - _CLOSE * max(missed - 1, 0)) * budget_bytes) - (taken - said)

    def _is_worth(self, found: Plan, fitting: Plan | None) -> bool:
        """Whether a plan saves enough beside the one that fits to be measured."""
        return fitting is None or fitting.predicted_seconds - found.predicted_seconds > _GAIN * fitting.baseline_seconds

    def _choose(self, room_bytes: int | None) -> Plan:
        """The fastest plan by the model: holding less may take less time, so smaller peaks are asked for as well."""
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
        """With what holding takes in time, for the plan and for the function as it is."""
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
        """The plan that takes least, if it is within the budget."""
        lowest = self._timed(lowest_known(self.planner))
        taken = self._measure(lowest)
        smallest = min(self.measured.values())
        if taken > budget_bytes:
            raise BudgetBelowFloor(
                f"budget {format_bytes(budget_bytes)} is below the smallest peak that {self.meter.name} reached, "
                f"{format_bytes(smallest)}.",
                why=f"{len(self.measured)} plans were measured, the one that holds least among them",
                next=f"budget {format_bytes_up(smallest)}, or halve the batch, or put more layers into one loop",
            )
        return self._told(lowest, taken, budget_bytes)

    def _told(self, found: Plan, taken: int, budget_bytes: int | None) -> Plan:
        """A plan with what was measured of it."""
        excess = taken - found.predicted_peak_bytes
        # The solver's bound knows nothing of what holding takes.
        gap = max(found.predicted_seconds - found.lower_bound_seconds, 0.0)
        overhead = found.predicted_seconds - found.baseline_seconds
        said = f"the model said {format_bytes(found.predicted_peak_bytes)}"
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
