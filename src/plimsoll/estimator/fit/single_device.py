"""A shape in, the best plan for it on one device out: simulated where everything fits, solved where it does not."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.fit import FitPoint
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.estimator.fit.point import Shape
from plimsoll.estimator.fit.search import Outlook
from plimsoll.estimator.fit.step_family import Report, StepFamily, Training
from plimsoll.planning.costing.step_seconds import optimizer_seconds
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.solve import solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_full, choose_none


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """How many micro-batches make a step: ``count``, or as many as ``global_batch`` examples need."""

    count: int = 1
    global_batch: int | None = None

    def of(self, batch: int) -> int:
        """Micro-batches per step."""
        return self.count if self.global_batch is None else self.global_batch // batch


@dataclass(slots=True)
class SingleDevice:
    """Evaluates points on one device (see ``fitting.search.Evaluate``).

    ``plans`` and ``unmanaged`` (the simulated steps without a plan) belong to this accumulation and budget; families of traces
    may be shared with another one.
    """

    training: Training
    accumulation: Accumulation
    budget_bytes: int
    report: Report
    solves: int = 0
    plans: dict[Shape, Plan] = field(default_factory=dict)
    _families: dict[bool, StepFamily] = field(default_factory=dict)
    unmanaged: dict[Shape, Simulation] = field(default_factory=dict)

    def outlook(self, shape: Shape) -> Outlook:
        """The step without a plan."""
        simulation = self._simulate(shape)
        optimizer = optimizer_seconds(simulation.index.trace, simulation.index.costs)
        count = self.accumulation.of(shape.batch)
        seconds = count * (simulation.seconds - optimizer) + optimizer
        return Outlook(simulation.peak_bytes, count * shape.items / seconds if seconds else 0.0)

    def evaluate(self, shape: Shape) -> FitPoint:
        """The best plan at a shape; one that does not fit comes back with the floor."""
        unmanaged = self._simulate(shape)
        trace, costs = unmanaged.index.trace, unmanaged.index.costs
        saved_bytes = sum(_decided_bytes(unmanaged.index).values())
        point = FitPoint(
            micro_batch=shape.batch,
            sequence=shape.sequence,
            accumulation=self.accumulation.of(shape.batch),
            status=Status.OPTIMAL,
            unmanaged_peak_bytes=unmanaged.peak_bytes,
            predicted_peak_bytes=unmanaged.peak_bytes,
            unmanaged_seconds=unmanaged.seconds - optimizer_seconds(trace, costs),
            micro_seconds=unmanaged.seconds - optimizer_seconds(trace, costs),
            optimizer_seconds=optimizer_seconds(trace, costs),
            saved_bytes=saved_bytes,
            rebuilt_bytes=0,
            is_traced=shape in self._family(shape).traces,
        )
        return point if unmanaged.peak_bytes <= self.budget_bytes else self._solved(shape, point)

    def settle(self, shape: Shape) -> FitPoint:
        """The point at a shape from the step traced there, whatever is predicted of it; its plan is in ``plans``."""
        family = self._family(shape)
        if shape not in family.traces:
            family.at(shape, must_trace=True)
            self.unmanaged.pop(shape, None)
        point = self.evaluate(shape)
        if shape not in self.plans:
            trace, costs = family.at(shape)
            self.plans[shape] = solve(trace, costs, budget_bytes=None, strategy="none")
        return point

    def resolve(self, shape: Shape, excess_bytes: int) -> Plan:
        """The plan at a settled shape with so many bytes taken off the budget.

        Raises:
            BudgetBelowFloor: nothing fits any more.
        """
        trace, costs = self._family(shape).at(shape)
        self.solves += 1
        return solve(trace, costs, budget_bytes=self.budget_bytes, excess_bytes=excess_bytes)

    @property
    def traces(self) -> int:
        """How many steps were traced so far."""
        return sum(len(family.traces) for family in self._families.values())

    def inexact_bytes(self, shape: Shape) -> int:
        """Bytes of storages at a predicted shape whose sizes are estimates."""
        return self._family(shape).family.inexact_bytes(shape)

    def strays(self) -> dict[Shape, str]:
        """Traced shapes whose step has another structure than the others, with what is different."""
        return {shape: why for family in self._families.values() for shape, why in family.family.strays.items()}

    def traced(self, shape: Shape) -> tuple[Trace, Costs]:
        """The step at a shape, traced there."""
        return self._family(shape).at(shape, must_trace=True)

    def optimizer_seconds(self, shape: Shape) -> float:
        """Predicted seconds of the optimizer's step."""
        index = self._simulate(shape).index
        return optimizer_seconds(index.trace, index.costs)

    def _solved(self, shape: Shape, point: FitPoint) -> FitPoint:
        index = self._simulate(shape).index
        self.report(f"solving {shape}")
        self.solves += 1
        plan = solve(index.trace, index.costs, budget_bytes=self.budget_bytes, raise_below_floor=False)
        if point.is_traced:
            self.plans[shape] = plan
        return described(point, plan)

    def _simulate(self, shape: Shape) -> Simulation:
        if shape not in self.unmanaged:
            index = self._too_large(shape) or StepIndex(*self._family(shape).at(shape))
            self.unmanaged[shape] = run_choices(index, choose_none(index, ""))
        return self.unmanaged[shape]

    def _too_large(self, shape: Shape) -> StepIndex | None:
        """A foreseen step that exceeds the budget although it recomputes all: the device might not even hold its trace."""
        foreseen = None if self.training.is_elsewhere else self._family(shape).foreseen(shape)
        if foreseen is None:
            return None
        index = StepIndex(*foreseen)
        return index if run_choices(index, choose_full(index, "")).peak_bytes > self.budget_bytes else None

    def _family(self, shape: Shape) -> StepFamily:
        accumulates = self.accumulation.of(shape.batch) > 1
        if accumulates not in self._families:
            self._families[accumulates] = StepFamily(self.training, accumulates, self.report)
        return self._families[accumulates]


def described(point: FitPoint, plan: Plan) -> FitPoint:
    """A point with what a plan makes of it."""
    decisions = [decision for region in plan.regions for decision in region.decisions]
    return msgspec.structs.replace(
        point,
        status=plan.status,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        micro_seconds=plan.predicted_seconds - point.optimizer_seconds,
        rebuilt_bytes=sum(each.bytes for each in decisions if each.decision is Decision.RECOMPUTE),
    )


def _decided_bytes(index: StepIndex) -> dict[int, int]:
    """Bytes of every storage that a plan may decide about."""
    storages = (view.graph.values[value].storage for view in index.views for value in view.decided)
    return {storage: index.trace.storages[storage].bytes for storage in storages}
