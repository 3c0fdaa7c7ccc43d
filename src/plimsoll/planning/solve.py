"""A trace, its costs and a budget in, a plan out: choices, program, simulation, bound and explanation, in that order.

The simulator has the last word: if it finds more than the budget, the program is solved again with the difference taken
off. Budgets on a fixed ladder between floor and unmanaged peak are solved as well; their plans give the frontier, and a
plan that one of them already beats is never returned.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.forms import Forms
from plimsoll.artifacts.plan import FrontierPoint, Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.bounds import LowerBound
from plimsoll.planning.choice import Choice
from plimsoll.planning.choices import ChoiceSet, generate_choices
from plimsoll.planning.choose import COARSE_GAP, EXACT_GAP, FINE_GAP, ChoiceProblem, Selection
from plimsoll.planning.decisions import decide
from plimsoll.planning.describe import classes_at_peak, describe_peak, describe_timeline
from plimsoll.planning.explain import floor_error, limits_error, notes_about_forms, notes_about_peak, strategy_error
from plimsoll.planning.limits import Limits
from plimsoll.planning.moments import peak_with_chunked_loss
from plimsoll.planning.pins import Override, pin_choices, pin_values
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_form, choose_full, choose_none, choose_selective, strategy_choices

TIME_LIMIT_SECONDS = 60.0
"""What the solver may take in all, unless told otherwise."""
_FRONTIER_POINTS = 12
_TIGHTENINGS = 8
_SMALL_PROGRAM_COLUMNS = 400
_ERROR_ROOM = 4.0
"""Choices are made for limits that may turn out so much wider, when a plan is measured to err less than expected."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best simulated step within a budget (``None``: nothing fits), how it was found, and what bounds it."""

    simulation: Simulation | None
    lower_seconds: float
    is_finished: bool


@dataclass(frozen=True, slots=True)
class _Rungs:
    """The floor and the best simulated steps at the budgets of the ladder, as far as they are known."""

    floor: Simulation | None = None
    is_floor_proven: bool = False
    by_budget: Mapping[int, Simulation] = field(default_factory=dict)


class Planner:
    """Everything about one step that does not depend on the budget: choices, program, floor, ladder."""

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        time_limit_seconds: float = TIME_LIMIT_SECONDS,
        *,
        forms: Forms | None = None,
        overrides: Sequence[Override] = (),
        limits: Limits | None = None,
        may_recompute: bool = True,
        in_flight: int = 1,
        known_choices: dict[Hashable, ChoiceSet] | None = None,
    ) -> None:
        started = time.monotonic()
        self.limits = limits or Limits()
        self.index = pin_values(
            StepIndex(trace, costs, forms, may_recompute=may_recompute, in_flight=in_flight), overrides
        )
        self.baseline = self._run(choose_none(self.index, ""))
        self.loosest = self._run(pin_choices(self.index, self.baseline.choices)) if overrides else self.baseline
        families = [pin_choices(self.index, choose_full(self.index, ""))]
        families += [choose_selective(self.index, module) for module in ("attention", "mlp", "norm")]
        if self.limits.squared_error:
            families += [choose_form(self.index, codec) for codec in ("int8", "int4")]
        self._extremes = [self.loosest, self._run(families[0])]
        squared_error = self.limits.squared_error * _ERROR_ROOM**2
        self.sets: tuple[ChoiceSet, ...] = generate_choices(self.index, families, squared_error, known_choices)
        self.is_complete = all(choice_set.is_complete for choice_set in self.sets)
        self.problem = ChoiceProblem(self.index, self.sets, time_limit_seconds, self.limits)
        self.gap = EXACT_GAP if self.problem.columns <= _SMALL_PROGRAM_COLUMNS else FINE_GAP
        self._search(_Rungs())
        self.build_seconds = time.monotonic() - started

    def heedless_of_error(self) -> Planner:
        """The same planner, for named strategies that are followed whatever error they cause; floor and ladder stay."""
        other = copy.copy(self)
        other.limits = Limits(math.inf, self.limits.link_bytes)
        return other

    def relimited(self, limits: Limits, time_limit_seconds: float = TIME_LIMIT_SECONDS) -> Planner:
        """A planner for the same step and the same choices, with other limits.

        Raises:
            InvalidStrategy: the overrides alone exceed them.
        """
        started = time.monotonic()
        other = copy.copy(self)
        other.limits = limits
        other.problem = self.problem.relimited(limits, time_limit_seconds)
        # What was best within wider limits and keeps to narrower ones is best within those.
        other._search(self._rungs if limits.are_within(self.limits) else _Rungs())
        other.build_seconds = time.monotonic() - started
        return other

    def _search(self, known: _Rungs) -> None:
        """Floor and ladder under the limits, but for what is known already."""
        if not self._allows(self.loosest):
            raise limits_error("the overrides together", self.loosest, self.limits)
        simulations = [s for s in self._extremes if self._allows(s)]
        if known.floor is not None and self._allows(known.floor):
            self.is_floor_proven = known.is_floor_proven
            simulations.append(known.floor)
        else:
            found = self.problem.minimise_peak()
            self.is_floor_proven = found.is_finished
            if found.effects is not None:
                simulations.append(self._run(_choices(found)))
                simulations = [s for s in simulations if self._allows(s)]
        self.floor = min(simulations, key=lambda s: (s.peak_bytes, s.seconds))
        self._rungs = _Rungs(self.floor, self.is_floor_proven, self._climb(known.by_budget))
        self.ladder = [*simulations, *(s for s in self._rungs.by_budget.values() if self._allows(s))]

    def _allows(self, simulation: Simulation) -> bool:
        return self.limits.allow(simulation.squared_error, simulation.link_bytes)

    def _run(self, choices: Sequence[Choice]) -> Simulation:
        return run_choices(self.index, choices)

    def _climb(self, known: Mapping[int, Simulation]) -> dict[int, Simulation]:
        """Plans at budgets spread evenly from the floor to the unmanaged peak: the same ones for every budget."""
        low, high = self.floor.peak_bytes, self.loosest.peak_bytes
        budgets = [low + (high - low) * point // (_FRONTIER_POINTS - 1) for point in range(_FRONTIER_POINTS - 1)]
        gap = EXACT_GAP if self.gap == EXACT_GAP else COARSE_GAP
        rungs: dict[int, Simulation] = {}
        for budget in dict.fromkeys(budgets) if high > low else ():
            if budget in known and self._allows(known[budget]):
                rungs[budget] = known[budget]
                continue
            selection = self.problem.choose(budget, gap)
            if selection.effects is not None:
                rungs[budget] = self._run(_choices(selection))
        return rungs

    def best_within(self, budget_bytes: int) -> Found:
        """The least seconds within a budget, by the simulator's count."""
        fitting = [simulation for simulation in self.ladder if simulation.peak_bytes <= budget_bytes]
        lower = 0.0
        is_finished = True
        target = budget_bytes
        for attempt in range(_TIGHTENINGS):
            selection = self.problem.choose(target, self.gap)
            is_finished = is_finished and selection.is_finished
            if attempt == 0:
                lower = selection.lower_value
            if selection.effects is None:
                break
            simulation = self._run(_choices(selection))
            if simulation.peak_bytes <= budget_bytes:
                if self._allows(simulation):
                    fitting.append(simulation)
                break
            target -= simulation.peak_bytes - budget_bytes
        best = min(fitting, key=lambda s: (s.seconds, s.peak_bytes)) if fitting else None
        return Found(best, lower if np.isfinite(lower) else 0.0, is_finished)

    def lower_bound_seconds(self, budget_bytes: int, found: Found | None, *, boundaries: bool) -> float:
        """Seconds that no plan within the budget undercuts.

        Args:
            budget_bytes: the budget.
            found: the solver's own run at this budget, whose bound counts where its choices are complete.
            boundaries: whether plans that drop region inputs are to be bounded too.
        """
        bound = LowerBound(self.index, self.sets, self.limits, boundaries=boundaries).seconds(budget_bytes)
        if self.is_complete and found is not None and not boundaries:
            bound = max(bound, self.index.base_seconds + found.lower_seconds)
        return bound

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The ladder's plans that no other one beats in both peak and seconds."""
        points: list[FrontierPoint] = []
        for simulation in sorted(self.ladder, key=lambda s: (s.peak_bytes, s.seconds)):
            if not points or simulation.seconds < points[-1].step_seconds:
                points.append(FrontierPoint(peak_bytes=simulation.peak_bytes, step_seconds=simulation.seconds))
        return tuple(points)


def solve(
    trace: Trace,
    costs: Costs,
    *,
    budget_bytes: int | None,
    strategy: str = "auto",
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    excess_bytes: int = 0,
    raise_below_floor: bool = True,
    planner: Planner | None = None,
) -> Plan:
    """Decide for every saved value of a step whether to KEEP, RECOMPUTE, COMPRESS or OFFLOAD it.

    Args:
        trace: the step.
        costs: seconds per op.
        budget_bytes: the peak that may not be exceeded; ``None`` for as much as it takes.
        strategy: ``auto``, or a name from ``strategies``.
        time_limit_seconds: what the solver may take in all.
        excess_bytes: measured minus predicted peak of an earlier plan; taken off the budget.
        raise_below_floor: whether a budget that cannot be met is an error, or a plan with the status ``INFEASIBLE``.
        planner: made for this trace and these costs, when several plans of one step are wanted, or when values may take
            other forms; by default a new one.

    Returns:
        A plan with every field filled in.

    Raises:
        BudgetBelowFloor: nothing fits (see ``raise_below_floor``).
        InvalidStrategy: no such strategy, or one that exceeds the planner's limits.
    """
    if strategy != "auto":  # a wrong name is told before any work
        strategy_choices(StepIndex(trace, costs), strategy)
    planner = planner or Planner(trace, costs, time_limit_seconds)
    named = None if strategy == "auto" else pin_choices(planner.index, strategy_choices(planner.index, strategy))
    started = time.monotonic()
    room_bytes = None if budget_bytes is None else budget_bytes - excess_bytes
    if named is not None:
        simulation = run_choices(planner.index, named)
        if not planner.limits.allow(simulation.squared_error, simulation.link_bytes) and raise_below_floor:
            raise limits_error(f"strategy {strategy!r}", simulation, planner.limits)
        outcome = _follow(planner, simulation, room_bytes)
    else:
        outcome = _optimise(planner, room_bytes)
    if outcome.status is Status.INFEASIBLE and raise_below_floor and budget_bytes is not None:
        if named is not None:
            raise strategy_error(
                strategy, budget_bytes, describe_peak(outcome.simulation), planner.floor.peak_bytes + excess_bytes
            )
        chunked_bytes = peak_with_chunked_loss(planner.floor)
        raise floor_error(budget_bytes, describe_peak(planner.floor), excess_bytes, chunked_bytes=chunked_bytes)
    return _write(planner, outcome, budget_bytes, strategy, room_bytes, started)


@dataclass(frozen=True, slots=True)
class _Outcome:
    simulation: Simulation
    status: Status
    lower_bound_seconds: float
    notes: tuple[str, ...] = ()


def _optimise(planner: Planner, room_bytes: int | None) -> _Outcome:
    if room_bytes is None or room_bytes >= planner.loosest.peak_bytes:
        return _Outcome(planner.loosest, Status.OPTIMAL, planner.loosest.seconds)
    found = planner.best_within(room_bytes)
    if found.simulation is None:
        is_known = planner.is_floor_proven and found.is_finished
        status = Status.INFEASIBLE if is_known else Status.TIMED_OUT
        return _Outcome(planner.floor, status, planner.baseline.seconds)
    lower = min(planner.lower_bound_seconds(room_bytes, found, boundaries=False), found.simulation.seconds)
    notes = () if found.is_finished else ("The solver ran out of time; this is the best plan that it had found.",)
    is_optimal = found.simulation.seconds - lower <= 1e-6 * planner.baseline.seconds
    return _Outcome(found.simulation, Status.OPTIMAL if is_optimal else Status.FEASIBLE, lower, notes)


def _follow(planner: Planner, simulation: Simulation, room_bytes: int | None) -> _Outcome:
    """A named strategy: nothing to choose, but the same figures."""
    limit_bytes = simulation.peak_bytes if room_bytes is None else room_bytes
    if simulation.peak_bytes > limit_bytes:
        return _Outcome(simulation, Status.INFEASIBLE, planner.baseline.seconds)
    if not planner.limits.allow(simulation.squared_error, simulation.link_bytes):
        note = limits_error("this strategy", simulation, planner.limits)
        return _Outcome(simulation, Status.INFEASIBLE, planner.baseline.seconds, (f"{note.found} {note.why}.",))
    boundaries = any(choice.is_boundary_dropped for choice in simulation.choices)
    lower = planner.lower_bound_seconds(limit_bytes, None, boundaries=boundaries)
    lower = min(lower, simulation.seconds)
    is_optimal = simulation.seconds - lower <= 1e-6 * planner.baseline.seconds
    return _Outcome(simulation, Status.OPTIMAL if is_optimal else Status.FEASIBLE, lower)


def _write(
    planner: Planner, outcome: _Outcome, budget_bytes: int | None, strategy: str, room_bytes: int | None, started: float
) -> Plan:
    trace, costs = planner.index.trace, planner.index.costs
    simulation, baseline = outcome.simulation, planner.baseline
    window_prices = np.zeros(len(planner.problem.windows.spans))
    if simulation.seconds > baseline.seconds:
        relaxed = planner.problem.relax(room_bytes if room_bytes is not None else simulation.peak_bytes)
        window_prices = window_prices if relaxed is None else relaxed.window_prices
    spans, last_wait = planner.problem.windows.spans, planner.index.last_wait
    waits = planner.index.waiting * float(window_prices[[a < last_wait for a, _ in spans]].sum())
    region_prices = [waits + float(window_prices[list(held)].sum()) for held in planner.problem.windows.is_held]
    overhead = simulation.seconds - baseline.seconds
    gap = max(simulation.seconds - outcome.lower_bound_seconds, 0.0)
    return Plan(
        status=outcome.status,
        strategy=strategy,
        model=trace.model,
        fingerprint=trace.fingerprint,
        signature=trace.signature,
        device=trace.device,
        cost_source=costs.source,
        cost_device=costs.device,
        budget_bytes=budget_bytes,
        floor_bytes=min(planner.floor.peak_bytes, simulation.peak_bytes),
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_seconds=baseline.seconds,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_seconds=simulation.seconds,
        lower_bound_seconds=outcome.lower_bound_seconds,
        gap_of_overhead=gap / overhead if overhead > 0 else 0.0,
        gap_of_step=gap / baseline.seconds if baseline.seconds > 0 else 0.0,
        price_seconds_per_byte=float(window_prices.sum()),
        regions=decide(simulation, region_prices),
        peak=describe_peak(simulation),
        baseline_peak=describe_peak(baseline),
        classes=classes_at_peak(simulation),
        timeline=describe_timeline(simulation),
        frontier=planner.frontier(),
        notes=(*trace.notes, *planner.index.forms.notes, *outcome.notes, *_notes(planner, simulation, strategy)),
        solve_seconds=planner.build_seconds + time.monotonic() - started,
        predicted_error=math.sqrt(simulation.squared_error),
        link=link_of(simulation),
        offloaded_bytes=simulation.link_bytes,
        in_flight=planner.index.waiting + 1,
    )


def _notes(planner: Planner, simulation: Simulation, strategy: str) -> tuple[str, ...]:
    """What ``auto`` declined (a named strategy declines nothing), and why a peak hardly moves."""
    declined = notes_about_forms(simulation) if strategy == "auto" else ()
    return (*declined, *notes_about_peak(simulation, planner.baseline))


def link_of(simulation: Simulation) -> str:
    """The link that a plan uses, if any."""
    link = simulation.index.forms.link
    return link.name if link is not None and simulation.link_bytes else ""


def _choices(selection: Selection) -> tuple[Choice, ...]:
    assert selection.effects is not None
    return tuple(effect.choice for effect in selection.effects)
