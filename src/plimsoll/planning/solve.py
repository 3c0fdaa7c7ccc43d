"""Decides for every saved value of a step whether to KEEP, RECOMPUTE, COMPRESS or OFFLOAD it. Start reading at ``solve``.

A named strategy is followed, ``auto`` is optimised. Both are simulated, bounded and written down in the same way. A choice
says which saved values of one region (a module) are kept, recomputed or stored in another form:

1. ``choices`` lists the choices of each region, with the exact memory and seconds of each choice.
2. ``integer_program`` picks one choice per region, for the least seconds within the budget.
3. ``simulate`` decides whether the plan fits. If it exceeds the budget, the program is solved again for a budget that is
   smaller by the excess.
4. ``bounds`` computes a bound that no plan can beat, ``decisions`` and ``explain`` put the reasons into words.

Budgets on a fixed *ladder* are solved as well: they are spread evenly between the *floor* (the lowest peak of all plans) and
the peak of the step without a plan. The ladder's plans give the frontier of peak against seconds. ``solve`` never returns a
plan that a plan of the ladder beats.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.other_budgets import OtherBudgets
from plimsoll.artifacts.plan import FrontierPoint, Plan
from plimsoll.planning.bounds import LowerBound
from plimsoll.planning.choice import Choice, Limits
from plimsoll.planning.choices import ChoiceSet, generate_choices
from plimsoll.planning.decisions import write_plan
from plimsoll.planning.describe import describe_largest_change, describe_peak
from plimsoll.planning.explain import floor_error, limits_error, notes_about_forms, notes_about_peak, strategy_error
from plimsoll.planning.integer_program import COARSE_GAP, EXACT_GAP, FINE_GAP, SMALL_COLUMNS, ChoiceProblem, Selection
from plimsoll.planning.pins import Override, pin_choices, pin_values
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.spare_bytes import spread_bytes, with_spare_bytes
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_form, choose_full, choose_none, choose_selective, strategy_choices
from plimsoll.planning.what_if import peak_with_chunked_loss
from plimsoll.units import format_bytes

TIME_LIMIT_SECONDS = 60.0
"""The solver's time limit for all programs of one planner together, in seconds. The time starts when the planner is made, and
again when its ladder (plans with falling peaks) is solved.
"""
_FRONTIER_POINTS = 12
_TIGHTENINGS, _LEAPS = 8, 5
"""How often the program is solved again for a lower budget, if the simulated plan exceeds the budget.

The budget is lowered 8 times by the excess (the bytes over it), then 5 times by 2, 4, 8 … times the excess. After that only the
plans for other budgets that were solved already (the ladder) are considered.
"""
_ERROR_ROOM = 4.0
"""Choices are generated for an error limit that is this many times as large as the user's, because the measured error of a plan
may be smaller than the expected error."""
_OPTIMAL_WITHIN = 1e-6
"""A plan counts as optimal if its seconds exceed the lower bound by at most this share of the step's time. This is the solver's
own tolerance."""


def solve(
    planner: Planner,
    *,
    budget_bytes: int | None,
    strategy: str = "auto",
    excess_bytes: int = 0,
    raise_below_floor: bool = True,
) -> Plan:
    """Decide for every saved value of a step whether to KEEP, RECOMPUTE, COMPRESS or OFFLOAD it.

    Args:
        planner: made for the step; it can be used for any number of plans.
        budget_bytes: the peak that must not be exceeded; ``None`` for no limit.
        strategy: ``auto``, or a name from ``strategies``.
        excess_bytes: measured minus predicted peak of an earlier plan; subtracted from the budget.
        raise_below_floor: if True, raise when the budget cannot be met; if False, return a plan with status ``INFEASIBLE``.

    Returns:
        A plan with every field filled in.

    Raises:
        BudgetBelowFloor: nothing fits (see ``raise_below_floor``).
        InvalidStrategy: the strategy does not exist, or it exceeds the planner's limits.
    """
    started = time.monotonic()
    room_bytes = None if budget_bytes is None else budget_bytes - excess_bytes
    if strategy == "auto":
        outcome = _optimise(planner, room_bytes)
    else:
        named = run_choices(planner.index, pin_choices(planner.index, strategy_choices(planner.index, strategy)))
        if raise_below_floor and not planner.allows(named):
            raise limits_error(f"strategy {strategy!r}", named, planner.limits)
        outcome = _follow(planner, named, room_bytes)
    if outcome.status is Status.INFEASIBLE and raise_below_floor and budget_bytes is not None:
        if strategy != "auto":
            floor_bytes = planner.floor.peak_bytes + excess_bytes
            raise strategy_error(strategy, budget_bytes, describe_peak(outcome.simulation), floor_bytes)
        chunked_bytes = peak_with_chunked_loss(planner.floor)
        raise floor_error(
            budget_bytes,
            describe_peak(planner.floor),
            excess_bytes,
            chunked_bytes=chunked_bytes,
            state_bytes=planner.index.trace.state_bytes,
            others=planner.other_budgets(excess_bytes),
        )
    plan = _write(planner, outcome, budget_bytes, strategy, room_bytes, started)
    larger_bytes = spread_bytes(plan) if plan.status.is_usable and strategy == "auto" else 0
    if room_bytes is None or not larger_bytes or plan.predicted_peak_bytes + larger_bytes <= room_bytes:
        return plan
    # Another batch may need more than this one. Leave as much free as the lowest plan allows.
    outcome = _optimise(planner, max(room_bytes - larger_bytes, planner.floor.peak_bytes))
    return _write(planner, outcome, budget_bytes, strategy, room_bytes, started)


def lowest_known(planner: Planner) -> Plan:
    """Return the plan with the lowest peak that the planner knows.

    It is used for the first steps, until a better plan is ready.

    Other plans with the same peak may be faster.
    """
    floor, started = planner.floor, time.monotonic()
    outcome = _Outcome(floor, Status.FEASIBLE, planner.baseline.seconds, is_stopgap=True)
    return _write(planner, outcome, floor.peak_bytes, "auto", floor.peak_bytes, started)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Data: the result of a search for a plan, before it is written down as a plan.

    It has the simulated step, the status of the search, and a proven lower bound of the step time in seconds.
    """

    simulation: Simulation
    status: Status
    lower_bound_seconds: float
    notes: tuple[str, ...] = ()
    is_stopgap: bool = False
    """True if the plan is used only until a better plan is ready; then the frontier is not computed."""


def _optimise(planner: Planner, room_bytes: int | None) -> _Outcome:
    """Find the plan with the least seconds whose peak is at most ``room_bytes``, for the strategy ``auto``.

    ``None`` means no limit. The outcome has the simulated step under this plan.
    """
    if room_bytes is None or room_bytes >= planner.loosest.peak_bytes:
        return _Outcome(planner.loosest, Status.OPTIMAL, planner.loosest.seconds)
    best = planner.best_within(room_bytes)
    if best.simulation is None:
        is_known = planner.is_floor_proven and best.is_finished
        status = Status.INFEASIBLE if is_known else Status.TIMED_OUT
        return _Outcome(planner.floor, status, planner.baseline.seconds)
    notes = () if best.is_finished else ("The solver ran out of time; this is the best plan that it found until then.",)
    lower = planner.lower_bound_seconds(room_bytes, best, boundaries=False)
    return _bounded(planner, best.simulation, lower, notes)


def _follow(planner: Planner, simulation: Simulation, room_bytes: int | None) -> _Outcome:
    """Return the outcome for a named strategy, whose step is already simulated.

    The function checks the step against ``room_bytes`` and the planner's limits, and computes a lower bound of the step time.
    """
    limit_bytes = simulation.peak_bytes if room_bytes is None else room_bytes
    if simulation.peak_bytes > limit_bytes:
        return _Outcome(simulation, Status.INFEASIBLE, planner.baseline.seconds)
    if not planner.allows(simulation):
        note = limits_error("this strategy", simulation, planner.limits)
        return _Outcome(simulation, Status.INFEASIBLE, planner.baseline.seconds, (f"{note.found} {note.why}.",))
    # ``auto`` never drops a boundary, so only here the bound must include plans that drop boundaries.
    boundaries = any(choice.is_boundary_dropped for choice in simulation.choices)
    return _bounded(planner, simulation, planner.lower_bound_seconds(limit_bytes, None, boundaries=boundaries))


def _bounded(planner: Planner, simulation: Simulation, lower: float, notes: tuple[str, ...] = ()) -> _Outcome:
    """Return the outcome for a step that fits. Its status is OPTIMAL if its seconds meet the lower bound.

    The bound is clipped to the step's seconds, because the solver's tolerance may lift the bound above them.
    """
    lower = min(lower, simulation.seconds)
    is_optimal = simulation.seconds - lower <= _OPTIMAL_WITHIN * planner.baseline.seconds
    return _Outcome(simulation, Status.OPTIMAL if is_optimal else Status.FEASIBLE, lower, notes)


def _write(
    planner: Planner, outcome: _Outcome, budget_bytes: int | None, strategy: str, room_bytes: int | None, started: float
) -> Plan:
    """Return the plan for an outcome (simulated step and status), with prices, bounds, and notes.

    ``started`` is the clock's time when planning began; the plan records the seconds since then.
    """
    index, simulation, baseline = planner.index, outcome.simulation, planner.baseline
    window_prices = planner.window_prices(simulation, room_bytes)
    overhead = simulation.seconds - baseline.seconds
    gap = max(simulation.seconds - outcome.lower_bound_seconds, 0.0)
    link = index.forms.link
    # A named strategy does not decline any form.
    declined = notes_about_forms(simulation) if strategy == "auto" else ()
    notes = (*outcome.notes, *declined, *notes_about_peak(simulation, baseline))
    written = write_plan(simulation, baseline, strategy, planner.region_prices(window_prices))
    larger_bytes = spread_bytes(written)
    if larger_bytes and room_bytes is not None:
        free = format_bytes(room_bytes - simulation.peak_bytes)
        notes += (
            f"Blocks that read values of tensors saved more or less than each other. Most batches with other values may need "
            f"up to {format_bytes(larger_bytes)} more than this peak; {free} of the budget are free for that.",
        )
    spare_bytes = 0 if room_bytes is None else room_bytes - simulation.peak_bytes
    return msgspec.structs.replace(
        with_spare_bytes(written, spare_bytes),
        status=outcome.status,
        budget_bytes=budget_bytes,
        floor_bytes=min(planner.floor.peak_bytes, simulation.peak_bytes),
        lower_bound_seconds=outcome.lower_bound_seconds,
        gap_of_overhead=gap / overhead if overhead > 0 else 0.0,
        gap_of_step=gap / baseline.seconds if baseline.seconds > 0 else 0.0,
        price_seconds_per_byte=float(window_prices.sum()),
        frontier=() if outcome.is_stopgap else planner.frontier(),
        notes=(*index.trace.notes, *index.forms.notes, *notes),
        solve_seconds=planner.build_seconds + time.monotonic() - started,
        predicted_error=math.sqrt(simulation.squared_error),
        link=link.name if link is not None and simulation.link_bytes else "",
        offloaded_bytes=simulation.link_bytes,
        in_flight=math.ceil(index.waiting) + 1,
    )


@dataclass(frozen=True, slots=True)
class BestStep:
    """Data: the fastest simulated step that was found within a budget; the step is ``None`` if nothing fits.

    ``lower_seconds`` is the solver's proven bound on the seconds that a plan adds to the step. ``is_finished`` is False if the
    solver ran out of time.
    """

    simulation: Simulation | None
    lower_seconds: float
    is_finished: bool


class Planner:
    """Makes plans for one step under any budget. It holds everything that does not depend on the budget.

    That is: the choices (what to keep or recompute) of each region (module call), the program that picks among them, the floor
    (the plan with the lowest peak), and the ladder (plans at budgets between the floor and the peak without a plan).

    Args:
        index: the step with its costs, its forms, whether it may recompute, and its place in a pipeline.
        overrides: the user's decisions.
        limits: the gradient error that plans may cause, and the bytes that they may offload; by default no error, and no limit
            on offloaded bytes.
        known_choices: choices of regions of other steps with the same costs, such as other stages of a pipeline. Choices that
            this planner generates are added.

    Raises:
        InvalidStrategy: an override matches no value or demands the impossible, or all overrides together exceed the limits.
    """

    def __init__(
        self,
        index: StepIndex,
        *,
        overrides: Sequence[Override] = (),
        limits: Limits | None = None,
        known_choices: dict[Hashable, ChoiceSet] | None = None,
    ) -> None:
        started = time.monotonic()
        self.limits = limits or Limits()
        self.index = pin_values(index, overrides)
        self.baseline = self._run(choose_none(self.index, ""))
        self.loosest = self._run(pin_choices(self.index, self.baseline.choices)) if overrides else self.baseline
        # The well-known strategies are always among the choices, so that ``auto`` is never slower than one of them.
        families = [pin_choices(self.index, choose_full(self.index, ""))]
        families += [choose_selective(self.index, module) for module in ("attention", "mlp", "norm")]
        if self.limits.squared_error:
            families += [choose_form(self.index, codec) for codec in ("int8", "int4")]
        self._extremes = [self.loosest, self._run(families[0])]
        squared_error = self.limits.squared_error * _ERROR_ROOM**2
        self.sets: tuple[ChoiceSet, ...] = generate_choices(self.index, families, squared_error, known_choices)
        self._bounds: dict[bool, LowerBound] = {}
        self.floor: Simulation
        self.is_floor_proven = False
        self._rungs: dict[int, Simulation] = {}
        self._known_rungs: dict[int, Simulation] = {}
        self.is_complete = all(choice_set.is_complete for choice_set in self.sets)
        self.problem = ChoiceProblem(self.index, self.sets, TIME_LIMIT_SECONDS, self.limits)
        # Small programs with complete choices are solved to the end. For large ones this would take minutes.
        is_small = self.is_complete and self.problem.columns <= SMALL_COLUMNS
        self.gap = EXACT_GAP if is_small else FINE_GAP
        self._search(None)
        self.build_seconds = time.monotonic() - started

    def heedless_of_error(self) -> Planner:
        """Return a copy of the planner that allows any gradient error. It is used for named strategies.

        The floor (the plan with the lowest peak) and the ladder (plans at other budgets) are not computed again.
        """
        other = copy.copy(self)
        other.limits, other._bounds = Limits(math.inf, self.limits.link_bytes), {}
        return other

    def relimited(self, limits: Limits) -> Planner:
        """Return a planner for the same step and the same choices, with other limits on gradient error and offloaded bytes.

        Raises:
            InvalidStrategy: the overrides alone exceed the limits.
        """
        started = time.monotonic()
        other = copy.copy(self)
        other.limits, other._bounds = limits, {}
        other.problem = self.problem.relimited(limits, TIME_LIMIT_SECONDS)
        # A plan that is best within wide limits and also keeps the narrow ones is best within the narrow ones.
        other._search(self if limits.are_within(self.limits) else None)
        other.build_seconds = time.monotonic() - started
        return other

    def _search(self, known: Planner | None) -> None:
        """Find and store the floor: the plan with the lowest peak within the limits.

        If ``known`` is another planner of the same step, its results are reused where they hold.
        """
        if not self.allows(self.loosest):
            raise limits_error("all overrides together", self.loosest, self.limits)
        simulations = [s for s in self._extremes if self.allows(s)]
        self._known_rungs = {} if known is None else {**known._known_rungs, **known._rungs}
        self._rungs = {}
        if known is not None and self.allows(known.floor):
            self.is_floor_proven = known.is_floor_proven
            simulations.append(known.floor)
        else:
            found = self.problem.minimise_peak()
            self.is_floor_proven = found.is_finished
            if found.effects is not None:
                simulations.append(self._run(_choices(found)))
                simulations = [s for s in simulations if self.allows(s)]
        self.floor = min(simulations, key=lambda s: (s.peak_bytes, s.seconds))
        self._lowest = simulations

    @property
    def ladder(self) -> list[Simulation]:
        """A list of simulated steps, one for each plan of the ladder, and one for each other plan with a low peak.

        The ladder's plans are the fastest at budgets spread evenly from the floor (lowest reachable peak) to the unmanaged
        (without a plan) peak. They are computed on first use, because the first step under ``attach`` needs only the floor.
        """
        if not self._rungs:
            self.problem.deadline = time.monotonic() + TIME_LIMIT_SECONDS
            self._rungs = self._climb(self._known_rungs)
        return [*self._lowest, *filter(self.allows, self._rungs.values())]

    def allows(self, simulation: Simulation) -> bool:
        """Return True if the plan of a simulated step is within the planner's limits on gradient error and offloaded bytes."""
        return self.limits.allow(simulation.squared_error, simulation.link_bytes)

    def _run(self, choices: Sequence[Choice]) -> Simulation:
        return run_choices(self.index, choices)

    def _climb(self, known: Mapping[int, Simulation]) -> dict[int, Simulation]:
        """Solve the ladder: return a mapping from budgets in bytes to the simulated step of the best plan for each budget.

        The budgets are spread evenly from the floor (lowest reachable peak) to the unmanaged (without a plan) peak. A budget is
        left out if no plan was found for it. ``known`` maps budgets to steps that need not be solved again.
        """
        # They depend only on the step, so a plan for a larger budget can fall back on every plan of a smaller one.
        low, high = self.floor.peak_bytes, self.loosest.peak_bytes
        budgets = [low + (high - low) * point // (_FRONTIER_POINTS - 1) for point in range(_FRONTIER_POINTS - 1)]
        gap = EXACT_GAP if self.gap == EXACT_GAP else COARSE_GAP
        rungs: dict[int, Simulation] = {}
        for budget in dict.fromkeys(budgets) if high > low else ():
            if budget in known and self.allows(known[budget]):
                rungs[budget] = known[budget]
                continue
            selection = self.problem.choose(budget, gap)
            if selection.effects is not None:
                rungs[budget] = self._run(_choices(selection))
        return rungs

    def best_within(self, budget_bytes: int) -> BestStep:
        """Solve for the fastest plan whose simulated peak is within the budget, and return its simulated step.

        If a plan of the ladder (plans for fixed budgets) fits and is faster, its step is returned.
        """
        fitting = [simulation for simulation in self.ladder if simulation.peak_bytes <= budget_bytes]
        lower = 0.0
        is_finished = True
        target = budget_bytes
        for attempt in range(_TIGHTENINGS + _LEAPS):
            selection = self.problem.choose(target, self.gap)
            is_finished = is_finished and selection.is_finished
            if attempt == 0:
                lower = selection.lower_value
            if selection.effects is None:
                break
            simulation = self._run(_choices(selection))
            if simulation.peak_bytes <= budget_bytes:
                if self.allows(simulation):
                    fitting.append(simulation)
                break
            # If the excess does not shrink with the target, the program does not see it. Then lower the target faster.
            target -= (simulation.peak_bytes - budget_bytes) * 2 ** max(attempt + 1 - _TIGHTENINGS, 0)
        best = min(fitting, key=lambda s: (s.seconds, s.peak_bytes)) if fitting else None
        return BestStep(best, lower if np.isfinite(lower) else 0.0, is_finished)

    def lower_bound_seconds(self, budget_bytes: int, found: BestStep | None, *, boundaries: bool) -> float:
        """Return a proven lower bound, in seconds, of the step time of all plans within the budget.

        Args:
            budget_bytes: the budget.
            found: the solver's own result at this budget; its bound is used if the choices are complete.
            boundaries: True if the bound must also hold for plans that drop region inputs.
        """
        if boundaries not in self._bounds:
            self._bounds[boundaries] = LowerBound(self.index, self.sets, self.limits, boundaries=boundaries)
        bound = self._bounds[boundaries].seconds(budget_bytes)
        if self.is_complete and found is not None and not boundaries:
            bound = max(bound, self.index.base_seconds + found.lower_seconds)
        return bound

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """Return a point (peak in bytes, step seconds) for each plan of the ladder that is best in its way, lowest peak first.

        A plan is left out if another plan has a peak and seconds that are both at most as large.
        """
        best: list[Simulation] = []
        for simulation in sorted(self.ladder, key=lambda s: (s.peak_bytes, s.seconds)):
            if not best or simulation.seconds < best[-1].seconds:
                best.append(simulation)
        points = {
            each.peak_bytes: FrontierPoint(peak_bytes=each.peak_bytes, step_seconds=each.seconds) for each in best
        }
        rows = {point.peak_bytes for point in OtherBudgets.of(list(points.values()), self.baseline.seconds).points}
        above = self.baseline
        for each in reversed(best):  # each change is compared with the row above in the table of other budgets
            change = describe_largest_change(above, each)
            points[each.peak_bytes] = msgspec.structs.replace(points[each.peak_bytes], change=change)
            above = each if each.peak_bytes in rows else above
        return tuple(points.values())

    def other_budgets(self, excess_bytes: int = 0, *, least_bytes: int = 0) -> OtherBudgets:
        """Return what other budgets cost, for an error about a budget that is too small.

        Args:
            excess_bytes: measured minus predicted peak.
            least_bytes: no budget below this works.
        """
        return OtherBudgets.of(
            self.frontier(), self.baseline.seconds, excess_bytes=excess_bytes, least_bytes=least_bytes
        )

    def window_prices(self, simulation: Simulation, room_bytes: int | None) -> npt.NDArray[np.float64]:
        """Return an array with, for each window (a stretch of the step), the price of its memory in seconds per byte.

        It is the time that the step would lose if the window had one byte less. All prices are 0 if the plan does not spend
        time to save memory.
        """
        if simulation.seconds > self.baseline.seconds:
            relaxed = self.problem.relax(room_bytes if room_bytes is not None else simulation.peak_bytes)
            if relaxed is not None:
                return relaxed.window_prices
        return np.zeros(len(self.problem.windows.spans))

    def region_prices(self, window_prices: npt.NDArray[np.float64]) -> list[float]:
        """Return a list with, for each region, the seconds per step that one byte held by the region costs.

        The region holds bytes in some windows (stretches of the step), and the result is the sum of their prices. In a
        pipeline, waiting micro-batches hold the byte too, so the prices of the windows while they wait are added.
        """
        windows = self.problem.windows
        is_waited = [start < self.index.last_wait for start, _ in windows.spans]
        waits = self.index.waiting * float(window_prices[is_waited].sum())
        return [waits + float(window_prices[list(held)].sum()) for held in windows.is_held]


def _choices(selection: Selection) -> tuple[Choice, ...]:
    """Return a tuple with the choice that a result of the solver takes for each region."""
    assert selection.effects is not None
    return tuple(effect.choice for effect in selection.effects)
