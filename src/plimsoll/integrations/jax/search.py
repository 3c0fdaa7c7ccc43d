"""Looks for the fastest plan of a jax function whose compiled gradient is within a budget."""

from __future__ import annotations

import functools

import msgspec

from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import BudgetBelowFloor
from plimsoll.integrations.jax.call import JaxCall
from plimsoll.integrations.jax.trace import TracedStep
from plimsoll.planning.solve import Planner, lowest_known, solve
from plimsoll.units import format_bytes, format_bytes_up

FRAMEWORK = "jax"
_TRIALS = 4
"""Compilations at most; most plans take two."""
_CLOSE = 0.03
"""A plan that leaves less than this share of the budget unused is not tried again."""


class PlanSearch:
    """The plans of one function that were asked for, and what XLA reported of them."""

    def __init__(self, call: JaxCall, step: TracedStep, planner: Planner) -> None:
        self.call, self.step, self.planner = call, step, planner
        self.measured: dict[tuple[object, ...], int] = {}
        self._at: dict[int, Plan] = {}
        """The fastest plan by the model at each peak that was asked."""

    def run(self, budget_bytes: int | None) -> Plan:
        excess_bytes, fitting = 0, None
        for _ in range(_TRIALS):
            found = self._choose(budget_bytes, excess_bytes)
            key = tuple(region.effect for region in found.regions)
            if key in self.measured:
                break
            taken = self._measure(found)
            if budget_bytes is None or taken <= budget_bytes:
                if fitting is None or found.predicted_seconds < fitting.predicted_seconds:
                    fitting = self._told(found, taken, budget_bytes)
                if budget_bytes is None or taken >= (1 - _CLOSE) * budget_bytes or self._is_fastest(found):
                    break
            excess_bytes = taken - found.predicted_peak_bytes
        if fitting is None:
            assert budget_bytes is not None, "without a budget every plan fits"
            fitting = self._floor(budget_bytes)
        return fitting

    def _choose(self, budget_bytes: int | None, excess_bytes: int) -> Plan:
        """The fastest plan by the model: holding less may take less time, so smaller peaks are asked for as well."""
        planner = self.planner
        room = planner.loosest.peak_bytes if budget_bytes is None else budget_bytes - excess_bytes
        peaks = {point.peak_bytes for point in planner.frontier() if point.peak_bytes <= room}
        for peak in {*peaks, room} - self._at.keys():
            self._at[peak] = self._timed(solve(planner, budget_bytes=peak, raise_below_floor=False))
        usable = [each for peak, each in self._at.items() if peak <= room and each.status.is_usable]
        if not usable:
            return self._timed(lowest_known(planner))
        return min(usable, key=lambda each: (each.predicted_seconds, each.predicted_peak_bytes))

    def _is_fastest(self, found: Plan) -> bool:
        return found.predicted_seconds <= self._choose(None, 0).predicted_seconds

    def _timed(self, found: Plan) -> Plan:
        """With what holding takes in time, for the plan and for the function as it is."""
        decisions = (each for region in found.regions for each in region.decisions)
        held = sum(each.bytes for each in decisions if each.decision is Decision.KEEP)
        unmanaged = sum(region.repeats * region.reading.residual_bytes for region in self.call.regions)
        price = self.step.store_seconds_per_byte
        return msgspec.structs.replace(
            found,
            predicted_seconds=found.predicted_seconds + price * held,
            baseline_seconds=found.baseline_seconds + price * unmanaged,
        )

    def _measure(self, found: Plan) -> int:
        key = tuple(region.effect for region in found.regions)
        self.measured[key] = taken = self.call.measure(functools.partial(self.call.evaluate, found.regions))
        return taken

    def _floor(self, budget_bytes: int) -> Plan:
        """The plan that takes least, if it is within the budget."""
        lowest = self._timed(lowest_known(self.planner))
        taken = self._measure(lowest)
        smallest = min(self.measured.values())
        if taken > budget_bytes:
            raise BudgetBelowFloor(
                f"budget {format_bytes(budget_bytes)} is below the smallest peak that XLA reached, {format_bytes(smallest)}.",
                why=f"{len(self.measured)} plans were compiled, the one that holds least among them",
                next=f"budget {format_bytes_up(smallest)}, or halve the batch, or put more layers into one lax.scan",
            )
        return self._told(lowest, taken, budget_bytes)

    def _told(self, found: Plan, taken: int, budget_bytes: int | None) -> Plan:
        """A plan with what XLA reported of it."""
        excess = taken - found.predicted_peak_bytes
        # The solver's bound knows nothing of what holding takes.
        gap = max(found.predicted_seconds - found.lower_bound_seconds, 0.0)
        overhead = found.predicted_seconds - found.baseline_seconds
        unmanaged = sum(region.repeats * region.reading.residual_bytes for region in self.call.regions)
        note = f"compiled: XLA reports {format_bytes(taken)}, the model said {format_bytes(found.predicted_peak_bytes)}"
        return msgspec.structs.replace(
            found,
            framework=FRAMEWORK,
            status=Status.FEASIBLE,
            gap_of_overhead=gap / overhead if overhead > 0 else 0.0,
            gap_of_step=gap / found.baseline_seconds if found.baseline_seconds > 0 else 0.0,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=taken,
            floor_bytes=min(taken, max(found.floor_bytes + excess, 0)),
            baseline_peak_bytes=max(unmanaged, taken),
            notes=(*found.notes, note),
        )
