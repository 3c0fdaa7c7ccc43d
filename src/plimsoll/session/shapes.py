"""Plans for batches of every shape. The first few shapes are traced. Steps of all other shapes are derived from these traces.

A plan names values, so it applies at all shapes of a family (steps with the same ops at different shapes, see
``planning.family``). This module holds a ladder (a list of plans with different peaks) for each family, and the bytes that were
measured on top of their predictions. It chooses the cheapest rung (plan of the ladder) whose peak at the batch's shape, plus
these bytes, is within the budget.

The bytes on top (for the user's loss, and bytes that a step leaves behind) grow with the shape. For batches larger than the
measured one they are scaled by the growth of the activations. They are never scaled down.

With several ranks, each has its own ladder and chooses for itself, because replaying a plan runs no collective. Only traces may
run collectives (see ``joint_traces``). Two cases are not supported: COMPRESS and OFFLOAD, whose forms (codecs or offload) are
known at one size only, and recipes (ops that rebuild a value) that repeat collectives, which need the same plan on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import BudgetBelowFloor, PlimsollError
from plimsoll.planning.expressions import Sizes
from plimsoll.planning.family import Family, stray_because
from plimsoll.planning.ladder import Ladder
from plimsoll.planning.peaks import Forecast, ShapedStep
from plimsoll.planning.spare_bytes import with_spare_bytes
from plimsoll.session.account import PlanRoom
from plimsoll.session.agreement import Agreement
from plimsoll.session.batch_shapes import Shapes, covers, shown, standing_in
from plimsoll.session.messages import warn, warn_of_floor
from plimsoll.session.optimizer_watch import optimizer_in_view
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_levels import is_more
from plimsoll.session.step_planner import CLOSE, StepPlanner
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import gradients_as_if

_MOST_TRACES = 6
"""Trace at most this many shapes of one kind if their steps cannot be derived from each other. Later shapes use the plan of a
traced shape that is at least as large in each dimension.
"""
_LONG_SECONDS, _MANY_STEPS = 10.0, 64
"""Further traces end when they have taken more than this many seconds, and more than this many steps' time.

A recursion over trees runs thousands of operations in a step of 0.05 s. Each trace of it took 10 s, and there were 14 of them.
"""
_MOST_KNOWN = 4096
"""Remember plans for at most this many shapes: with random lengths, nearly every step has a new shape."""
_WORTH_SOLVING = 1.5
"""Solve a plan for a shape that needs more than this multiple of the memory of the largest shape solved so far.

For smaller shapes, the best plan that exists already (in the ladder) is within a few percent of a plan solved for the shape,
and solving takes about a second.
"""

_Kind = tuple[tuple[str, int], ...]
"""What calls of one kind have in common: dtype and number of dimensions of each tensor of the call."""


@dataclass(slots=True)
class _Steps:
    """What is known of one kind of call: traces by shape, costs of the traces that were timed, and a ladder (plans to choose
    from) for each family of similar steps.
    """

    traces: dict[Sizes, Trace] = field(default_factory=dict)
    costs: dict[Sizes, Costs] = field(default_factory=dict)
    ladders: list[Ladder[Sizes]] = field(default_factory=list)

    def ladder_for(self, sizes: Sizes) -> Ladder[Sizes] | None:
        """Return the ladder (plans to choose from) for a shape. It belongs to the family (one step at many batch sizes) that
        contains the shape's trace, or else to the largest family that can predict the shape. Return ``None`` if no family
        predicts the shape.
        """
        found = [each for each in self.ladders if sizes in each.step.family.shapes]
        if not found and sizes not in self.traces:
            found = [each for each in self.ladders if each.step.family.knows(sizes)]
        return max(found, key=lambda each: len(each.step.family.shapes), default=None)


class _Written(NamedTuple):
    """Data: the plan for one batch shape, and what it was made from: a rung, its forecast of memory and time, and the bytes
    between its peak and the limit for plans.
    """

    plan: Plan
    rung: Plan
    forecast: Forecast
    spare_bytes: int

    def is_for(self, rung: Plan, forecast: Forecast, spare_bytes: int) -> bool:
        """Return True if this plan was made from this rung for this forecast, so that it can be used again.

        The spare bytes are compared only if some region (managed module) reads values of tensors.
        """
        if self.rung.regions is not rung.regions or self.forecast != forecast:
            return False
        return self.spare_bytes == spare_bytes or not any(region.value_read for region in rung.regions)


class ShapePlans:
    """Chooses a plan for each call of one model by the call's shapes. New shapes are traced if their peaks cannot be
    predicted.
    """

    def __init__(
        self,
        options: PlanOptions,
        passed_optimizer: Callable[[], torch.optim.Optimizer | None],
        tracing: Callable[[], contextlib.AbstractContextManager[None]],
        agreement: Agreement,
        room: PlanRoom,
        waiting_bytes: Callable[[], int],
        *,
        accumulates: bool,
        may_refuse: bool,
        may_measure: bool,
    ) -> None:
        """Create an empty set of plans.

        Args:
            options: what plans may do.
            passed_optimizer: returns the optimizer that the user has passed, while it exists.
            tracing: a context that is entered around every trace.
            agreement: the ranks that trace together.
            room: the bytes that plans may take. Both the owner of this object and this class change its account (bytes that
                predictions lack).
            waiting_bytes: returns the bytes that earlier forwards of the running step hold while a trace runs.
            accumulates: whether gradients existed when the first trace was made.
            may_refuse: whether a batch that fits under no plan is an error. With several ranks it is not, because a rank that
                stops would leave the others waiting.
            may_measure: whether the peak of each step can be measured. On a GPU, only a peak above all earlier ones is known.
        """
        self._options = options
        self._agreement = agreement
        self._tracing = tracing
        self._accumulates = accumulates
        self._passed_optimizer = passed_optimizer
        self._steps: dict[_Kind, _Steps] = {}
        self._planner: StepPlanner | None = None
        """The planner of the step that was traced first."""
        self._plans: list[Plan] = []
        self._rungs: Iterator[Plan] = iter(())
        """More rungs (plans of the ladder), which are solved when they are needed. A model whose batches all have one shape
        never needs them.
        """
        self._in_flight = 1
        self._measured_with: dict[int, tuple[int, float]] = {}
        """What steps were measured to need beyond their predictions, for each number of forwards before one backward: the bytes
        outside of the model, and the growth of activations.
        """
        self._most_solved_bytes = 0
        self._tracing_seconds = 0.0
        """How long the traces of new shapes have taken."""
        self._first: tuple[Shapes, int] | None = None
        self._largest: Shapes | None = None
        self._current: tuple[Shapes, Forecast] | None = None
        """The shapes that a plan was last chosen for, and the forecast (peak and seconds) of that plan there. While several
        forwards wait for one backward, these are the largest shapes so far.
        """
        self._known: dict[Shapes, _Written] = {}
        self._reported: dict[Shapes, int] = {}
        """Shapes that a message was about already, because no plan fits them, or because they cannot be traced. For each, how
        many bytes over the budget the lowest plan was predicted to be.
        """
        self._unfitting: dict[Shapes, tuple[int, BudgetBelowFloor]] = {}
        """Shapes that no plan fits: for each, the bytes that were not enough and the error that was raised."""
        self._may_refuse, self._may_measure = may_refuse, may_measure
        self._has_exceeded = False
        """Whether a step has exceeded the budget, so that forecasts are wrong for some batches."""
        self.is_below_floor = False
        """Whether no plan fits the call that a plan was last chosen for, so that the plan with the lowest peak was chosen."""
        self.has_doubt = False
        """Whether `is_below_floor` may be wrong, because the forecast may be too high. The step should then be measured."""
        self._outside_at_lowest: int | None = None
        """What the last step after `is_below_floor` was measured to need beyond its prediction, in bytes, or None.

        The account holds what plans that keep more were measured to need: after an attention memory had filled, a floor of
        7.5 MiB followed from it, and steps at the lowest peak took 6.6.
        """
        self._inner_growth = 1.0
        """The measured activations of a step, as a multiple of the predicted activations.

        It is more than 1 if sizes inside the model follow the data: a model that drops padding has larger activations for a
        batch of the same shape with less padding.
        """
        self._room, self._waiting_bytes = room, waiting_bytes

    def begin(self, shapes: Shapes, planner: StepPlanner, plan: Plan) -> None:
        """Begin the ladder (the plans to choose from) with the first step, which was traced and measured, and with the plan
        that was made for it.
        """
        assert planner.budget_bytes is not None
        self._room.budget_bytes = planner.budget_bytes
        self._in_flight, self._planner = planner.in_flight, planner
        self._learn(shapes, planner.trace, planner.costs)
        self._rungs = planner.rungs()
        self._offer((plan, next(self._rungs)))  # the first rung keeps everything
        self._first = (shapes, self._activation_bytes(shapes))
        self._most_solved_bytes = self._unmanaged_bytes(shapes)
        ladder = self._known_ladder(shapes)
        if ladder.rungs[0].plan is plan:  # not if another rank made the plan and this step lacks its values
            forecast = ladder.at(_split(shapes)[1])[0]
            # The measurement may contain bytes that do not recur. The plan was accepted for this step, so it fits.
            most_bytes = max(0, self._room.budget_bytes - forecast.before_optimizer_bytes)
            self._room.account = self._room.account.measuring(min(self._room.account.measured_bytes(), most_bytes))
            # Keep the figures of the accepted plan. When they were written anew from the forecast, a compiled plan's predicted
            # peak was 2.7% above what its trial had measured.
            spare_bytes = self._room_bytes(shapes) - forecast.before_optimizer_bytes
            self._known[shapes] = _Written(plan, plan, forecast, spare_bytes)

    def knows(self, shapes: Shapes) -> bool:
        """Return True if the peaks of plans at these shapes can be predicted from the traces so far."""
        return self._ladder_of(shapes) is not None

    def _covering(self, shapes: Shapes) -> list[Shapes]:
        """Return traced shapes whose peaks are an upper bound of the peak of ``shapes``. This is the smallest traced shape that
        is at least as large in each dimension.

        For a batch of lists, return all traced shapes that together bound it. A detector resizes the images in the lists, so a
        smaller batch may need more memory than any single traced shape.
        """
        kind, _ = _split(shapes)
        traced = [_joined(kind, sizes) for sizes in self._steps.get(kind, _Steps()).traces]
        larger = [each for each in traced if covers(each, shapes)]
        found = standing_in(traced, shapes)
        return found if len(found) > len(larger) else sorted(larger, key=self._unmanaged_bytes)[:1]

    def bounds(self, shapes: Shapes) -> bool:
        """Return True if the peaks of plans are known at these shapes, or at larger shapes whose peaks are an upper bound."""
        return self.knows(shapes) or bool(self._covering(shapes))

    def lacks(self, shapes: Shapes) -> bool:
        """Return True if a step of these shapes must be traced: its peaks cannot be predicted, and no traced shape may be used
        in its place.
        """
        if self.knows(shapes):
            return False
        steps = self._steps.get(_split(shapes)[0], _Steps())
        is_enough = len(steps.traces) >= _MOST_TRACES or shapes in self._reported or self._has_traced_long
        return not (is_enough and self._covering(shapes))

    def trace(self, shapes: Shapes, task: TrainingTask) -> None:
        """Trace a step of these shapes, on all ranks that trace together. A rank that knows the shapes traces too, because the
        traces of the others run collectives.
        """
        begun_seconds = time.monotonic()
        try:
            self._trace(shapes, task)
        except PlimsollError as error:
            if self._agreement.size > 1 or not self._covering(shapes):
                raise
            self._reported.setdefault(shapes, 0)
            warn(
                f"a batch of a new shape could not be traced, and runs under the plan of a larger batch: {error.found}"
            )
        self._tracing_seconds += time.monotonic() - begun_seconds

    @property
    def _has_traced_long(self) -> bool:
        # Ranks trace together, and their clocks differ.
        return self._agreement.size == 1 and is_long(self._tracing_seconds, self._plans[0].baseline_seconds)

    def _trace(self, shapes: Shapes, task: TrainingTask) -> None:
        """Trace a step in the same state as the first step. Its ops are timed only if their seconds cannot be derived from a
        similar timed step.
        """
        task = dataclasses.replace(task, optimizer=optimizer_in_view(task.model, self._passed_optimizer()))
        is_known, known = self.knows(shapes), self._steps.get(_split(shapes)[0], _Steps())
        planner = self._planner
        assert planner is not None, "the first step was planned"
        limit_bytes = self._room.bytes() - self._waiting_bytes()
        with self._stepping(task) as is_optional:
            traced = planner.traced(task, optimizer_is_optional=is_optional, limit_bytes=limit_bytes, is_timed=False)
        opened = _split(shapes)[1], self._options.opened(traced[0])
        is_alike = is_known or any(not stray_because((each, known.traces[each]), opened) for each in known.costs)
        # Timing runs the model again, with its collectives. So all ranks time their steps, or none does.
        if not self._agreement.every("alike", holds=is_alike):
            with self._stepping(task) as is_optional:
                traced = planner.traced(task, optimizer_is_optional=is_optional, limit_bytes=limit_bytes, is_timed=True)
        if not is_known:
            self._learn(shapes, *traced)

    @contextlib.contextmanager
    def _stepping(self, task: TrainingTask) -> Iterator[bool]:
        """Prepare the state for a trace inside the ``with`` block, such as whether gradients exist. Yield True if the optimizer
        may be left out of the trace.
        """
        gradients = gradients_as_if(task.model, are_there=self._accumulates)
        with self._tracing(), self._agreement.stepping(), gradients:
            yield task.optimizer is not self._passed_optimizer()

    def _learn(self, shapes: Shapes, trace: Trace, costs: Costs | None = None) -> None:
        kind, sizes = _split(shapes)
        steps = self._steps.setdefault(kind, _Steps())
        steps.traces[sizes] = self._options.opened(trace)
        if costs is not None:
            steps.costs[sizes] = costs
        self._build(steps)

    def wait_for(self, in_flight: int) -> None:
        """From now on, choose plans for steps with ``in_flight`` forwards that wait for one backward."""
        if in_flight != self._in_flight:
            # What was measured while two forwards waited does not hold for steps with one: after one failed step, a floor of
            # 16.6 MiB was named for steps that took 8.
            account = self._room.account
            now = self._measured_with[self._in_flight] = account.outside_model, self._inner_growth
            known = self._measured_with.get(in_flight, now)
            if in_flight > self._in_flight:
                known = max(known[0], now[0]), max(known[1], now[1])  # more forwards do not need less
            outside_bytes, self._inner_growth = known
            self._room.account = dataclasses.replace(account, outside_model=outside_bytes)
            self._in_flight, self._outside_at_lowest = in_flight, None
            self._unfitting.clear()
            for steps in self._steps.values():
                steps.ladders = []
                self._build(steps)

    def choose(self, shapes: Shapes, signature: Callable[[], str]) -> Plan:
        """Return the cheapest plan that keeps a batch of these shapes within the budget. ``signature`` returns the signature of
        the batch's step.

        Raises:
            BudgetBelowFloor: no rung fits, solving for this shape finds no plan either, and such a batch has not run
                before.
        """
        alike = [shapes] if self.knows(shapes) else self._covering(shapes)
        if not alike:
            return self._unknown(shapes, signature)
        known = self._planned_for(max(alike, key=self._unmanaged_bytes))
        self.is_below_floor = self.has_doubt = False
        try:
            known, found = self._fitting_all(alike)
        except BudgetBelowFloor as error:
            found = self._known_ladder(known).lowest(_split(known)[1])
            # Bytes that are withheld now (another program's, or those that were missing when a step ran out of memory) were
            # logged when they were withheld, and the budget is not too small because of them.
            spare_bytes = self._room_bytes(known) + self._room.account.withheld - found[1].before_optimizer_bytes
            # The bytes that other steps took beyond their predictions are assumed to grow with the batch. Only a step of this
            # batch can show whether they do.
            outside_bytes = round(self._room.account.outside_model * self._growth(known))
            if spare_bytes < 0:
                self._report_floor(shapes, error, -spare_bytes, is_sure=spare_bytes + outside_bytes < 0)
            self.is_below_floor = True
        self._current = (known, found[1])
        return self._written(shapes, known, *found, signature)

    def _report_floor(self, shapes: Shapes, error: BudgetBelowFloor, over_bytes: int, *, is_sure: bool) -> None:
        """Report that no plan fits a batch of these shapes: with an error, with a warning, or by measuring its step first.

        ``over_bytes`` is the predicted excess under the plan with the lowest peak. The report is made again if it grows: the
        history of an L-BFGS that was made in mid-run took steps to 27% above the floor that was named first.

        ``is_sure`` says that the prediction alone exceeds the budget, under every plan. A MAML loop had a batch without inner
        steps refused in mid-run, because the steps before had taken twice the model's memory for their inner steps.

        A forecast that may be too high is never an error. The loop may hold a record that has just begun to grow. Several
        forwards are all counted as the largest. And a forecast may have failed before: a Faster R-CNN exceeded its forecast
        once, the excess made the next new shape too large, and its refusal ended a training that had changed weights.
        """
        has_failed = self._has_exceeded or self._in_flight > 1 or self._room.account.held_by_loop > 0
        may_be_too_high = has_failed or not is_sure
        is_new = shapes not in self._known
        if is_new and not may_be_too_high and self._may_refuse:
            raise error
        if shapes in self._reported and not is_more(over_bytes, self._reported[shapes], self._room.budget_bytes):
            return
        self._reported[shapes] = over_bytes
        if self._may_measure and (may_be_too_high or not is_new):
            self.has_doubt = True
        else:
            warn_of_floor(error, "this batch is too large" if is_new else "steps were measured to need more")

    def choose_unseen(self, shapes: Shapes) -> Plan:
        """Return the plan with the lowest peak, for calls of the model's parts whose batch is unknown. ``shapes`` are the
        arguments' shapes.
        """
        return self._unknown(shapes, lambda: shown(shapes))

    def _fitting_all(self, alike: list[Shapes]) -> tuple[Shapes, tuple[Plan, Forecast]]:
        """Return the cheapest rung that fits at all these shapes, and the shape where that plan needs the most memory.

        A rung that fits at the largest shape alone is not enough: it may keep more than the other shapes have room for. Under
        such a plan, a step of a Faster R-CNN needed 137 MiB of 122.
        """
        if len(alike) == 1 or self._in_flight > 1:
            known = self._planned_for(max(alike, key=self._unmanaged_bytes))
            return known, self._cheapest(known)
        for each in alike:
            self._cheapest(each)  # afterwards each ladder has a rung that fits
        fitting: list[dict[int, tuple[Shapes, tuple[Plan, Forecast]]]] = []
        for each in alike:
            rungs = self._known_ladder(each).fitting(_split(each)[1], self._room_bytes(each))
            fitting.append({id(plan): (each, (plan, at)) for plan, at in rungs})
        common = set.intersection(*map(set, fitting)) or set(fitting[0])
        plan = min(common, key=lambda key: fitting[0][key][1][1].seconds)
        return max((f[plan] for f in fitting if plan in f), key=lambda entry: entry[1][1].before_optimizer_bytes)

    def _planned_for(self, shapes: Shapes) -> Shapes:
        """Return the shapes to plan for in a call of ``shapes``. If other forwards wait at the same time, they may have larger
        batches, so these are the largest shapes so far.
        """
        if self._in_flight == 1:
            return shapes
        if self._largest is None or self._unmanaged_bytes(shapes) > self._unmanaged_bytes(self._largest):
            self._largest = shapes
        return self._largest

    def _room_bytes(self, shapes: Shapes) -> int:
        """Return the largest peak that a plan may predict at these shapes, so that the real step keeps to the budget.

        It is the budget minus the account, and less if activations are larger than predicted.
        """
        lasting_bytes = self._known_ladder(shapes).step.lasting_bytes
        room_bytes = self._room.bytes(self._growth(shapes)) - lasting_bytes
        return lasting_bytes + (int(room_bytes / self._inner_growth) if room_bytes > 0 else room_bytes)

    def _grown_bytes(self, shapes: Shapes, predicted_bytes: int) -> int:
        """Return the bytes that a step needs beyond a prediction because its activations are larger than predicted."""
        activation_bytes = max(0, predicted_bytes - self._known_ladder(shapes).step.lasting_bytes)
        return round((self._inner_growth - 1.0) * activation_bytes)

    def expected(self) -> tuple[int, int]:
        """Return two predictions for the step that a plan was last chosen for: the bytes that forward adds, and the peak
        including measured bytes.

        Both are 0 if they cannot be predicted.
        """
        if self._current is None:
            return 0, 0
        shapes, forecast = self._current
        unseen_bytes = self.measured_bytes(shapes) + self._room.account.held_by_loop
        return round(forecast.forward_bytes * self._inner_growth), forecast.before_optimizer_bytes + unseen_bytes

    def _unknown(self, shapes: Shapes, signature: Callable[[], str]) -> Plan:
        """Return the plan to use at shapes whose peak cannot be predicted: the plan with the lowest peak at the largest traced
        shape.
        """
        self.is_below_floor = self.has_doubt = False
        self._offer(tuple(self._rungs))
        traced = [_joined(kind, sizes) for kind, steps in self._steps.items() for sizes in steps.traces]
        known = max(traced, key=self._unmanaged_bytes)
        self._current = None
        return self._written(shapes, known, *self._known_ladder(known).lowest(_split(known)[1]), signature)

    def _cheapest(self, shapes: Shapes) -> tuple[Plan, Forecast]:
        """Return the cheapest rung that fits at these shapes, and its forecast. If none fits, or the shape is far larger than
        all before, a plan is solved for it first.
        """
        unmanaged_bytes = self._unmanaged_bytes(shapes)
        sizes = _split(shapes)[1]
        room_bytes = self._room_bytes(shapes)
        found = self._known_ladder(shapes).cheapest(sizes, room_bytes)
        if found is None or self._first is None or shapes != self._first[0]:
            self._offer(tuple(self._rungs))
            found = self._known_ladder(shapes).cheapest(sizes, room_bytes)
        is_larger = unmanaged_bytes > max(room_bytes, _WORTH_SOLVING * self._most_solved_bytes)
        if found is None or is_larger:
            self._most_solved_bytes = max(self._most_solved_bytes, unmanaged_bytes)
            planner = self._planner_at(shapes)
            if found is None:
                self._offer((self._solved(planner, shapes, room_bytes),))
            if is_larger:
                self._offer(tuple(planner.rungs()))
            found = self._known_ladder(shapes).cheapest(sizes, room_bytes)
        assert found is not None, "the plan that was solved for it fits"
        return found

    def _solved(self, planner: StepPlanner, shapes: Shapes, room_bytes: int) -> Plan:
        """Solve a plan for these shapes within ``room_bytes``. If an earlier solve failed with at least as many bytes, raise
        its error again, because solving takes about a second.
        """
        unfitting_bytes, refusal = self._unfitting.get(shapes, (0, None))
        if refusal is not None and room_bytes <= unfitting_bytes:
            raise copy.copy(refusal)
        with contextlib.suppress(BudgetBelowFloor):
            return planner.solve(self._room.budget_bytes, excess_bytes=self._room.budget_bytes - room_bytes)
        # Raise a copy: the traceback of the original would keep the batch alive, one more for each refused step.
        self._unfitting[shapes] = room_bytes, self._refusal(planner, shapes)
        raise copy.copy(self._unfitting[shapes][1])

    def _refusal(self, planner: StepPlanner, shapes: Shapes) -> BudgetBelowFloor:
        """Return the error that names the lowest peak at these shapes. The plan with the lowest peak keeps the least, so it
        grows the least if activations are larger than predicted.

        A hundredth is added to a peak with measured bytes. They differ by some KiB from run to run, and a named budget was
        refused with one that was 0.4% higher.
        """
        lowest = planner.lowest()
        unseen_bytes = self._room.account.withholding(0).total_bytes(self._growth(shapes))
        floor_bytes = lowest.peak.bytes + unseen_bytes + self._grown_bytes(shapes, lowest.peak.bytes)
        return planner.refusal(lowest, floor_bytes + (floor_bytes // 100 if unseen_bytes else 0))

    def measured_bytes(self, shapes: Shapes) -> int:
        """Return the bytes that a step of these shapes is expected to need in addition to the predicted peak of its plan."""
        account = self._room.account
        if self.is_below_floor and self._outside_at_lowest is not None:
            account = dataclasses.replace(account, outside_model=self._outside_at_lowest)
            return account.measured_bytes(self._growth(shapes))
        measured_bytes = account.measured_bytes(self._growth(shapes))
        if self._current is not None:
            measured_bytes += self._grown_bytes(self._current[0], self._current[1].before_optimizer_bytes)
        return measured_bytes

    @property
    def is_floor_measured(self) -> bool:
        """Whether a peak above the budget is the lowest one of such steps: the plan with the lowest peak runs, and was measured
        before. Its first step may have recorded operations, which needs more memory.
        """
        return self.is_below_floor and self._outside_at_lowest is not None

    def note_peak(self, peak_bytes: int, forward_growth: float = 1.0) -> None:
        """Compare the measured peak of a step with the forecast of its plan, which was chosen last. The largest difference so
        far is added to later forecasts.

        ``forward_growth`` is the bytes that forward has added, as a multiple of the prediction. If it is more than 1,
        activations are larger than predicted, and so they are under other plans. A plan that keeps half as much then needs half
        as many more. Only the rest of the difference is the same under each plan.
        """
        if self._current is None:
            return
        self._has_exceeded |= peak_bytes > self._room.budget_bytes
        shapes, forecast = self._current
        account = self._room.account
        unseen_bytes = peak_bytes - forecast.before_optimizer_bytes - account.held_by_loop - account.fixed_bytes
        if self.is_below_floor:
            self._outside_at_lowest = round(max(0, unseen_bytes) / self._growth(shapes))
        activation_bytes = forecast.before_optimizer_bytes - self._known_ladder(shapes).step.lasting_bytes
        if activation_bytes > 0:
            most_growth = 1.0 + max(0, unseen_bytes) / activation_bytes
            self._inner_growth = max(self._inner_growth, min(forward_growth, most_growth))
        unseen_bytes -= self._grown_bytes(shapes, forecast.before_optimizer_bytes)
        share_bytes = round(max(0, unseen_bytes) / self._growth(shapes))
        if share_bytes > account.outside_model:
            self._room.account = dataclasses.replace(account, outside_model=share_bytes)

    def tighten(self) -> Plan | None:
        """Return a plan with a peak halfway between the last step's peak and the lowest one, or None if no plan needs less than
        the last step's plan.

        Later plans are chosen under the same limit.
        """
        if self._current is None:
            return None
        shapes, forecast = self._current
        self._offer(tuple(self._rungs))
        lowest_bytes = self._known_ladder(shapes).lowest(_split(shapes)[1])[1].before_optimizer_bytes
        spare_bytes = forecast.before_optimizer_bytes - lowest_bytes
        if spare_bytes <= 0:
            return None
        room_bytes = lowest_bytes + (spare_bytes // 2 if spare_bytes > CLOSE * lowest_bytes else 0)
        free = self._room.account.withholding(0)
        room_bytes += self._grown_bytes(shapes, room_bytes)
        withheld_bytes = self._room.budget_bytes - free.total_bytes(self._growth(shapes)) - room_bytes
        self._room.account = free.withholding(withheld_bytes)
        try:
            plan, forecast = self._cheapest(shapes)
        except BudgetBelowFloor:  # forecasts are rounded, and the lowest peak may be a few bytes above the room
            plan, forecast = self._known_ladder(shapes).lowest(_split(shapes)[1])
        self._current = (shapes, forecast)
        signature = self._known[shapes].plan.signature if shapes in self._known else plan.signature
        return self._written(shapes, shapes, plan, forecast, lambda: signature)

    def current_planner(self) -> tuple[StepPlanner, int] | None:
        """Return a planner for the shape that a plan was last chosen for, and the bytes that steps there need in addition to
        their prediction. Return ``None`` before the first choice.
        """
        if self._current is None:
            return None
        return self._planner_at(self._current[0]), self.measured_bytes(self._current[0])

    def _growth(self, shapes: Shapes) -> float:
        """Return the bytes of activations at these shapes, divided by the bytes at the first shape. The result is at
        least 1.
        """
        if self._first is None or not self.knows(shapes):
            return 1.0
        return max(1.0, self._activation_bytes(shapes) / max(1, self._first[1]))

    def _activation_bytes(self, shapes: Shapes) -> int:
        return self._unmanaged_bytes(shapes) - self._known_ladder(shapes).step.lasting_bytes

    def _unmanaged_bytes(self, shapes: Shapes) -> int:
        """Return the largest peak that any plan of the ladder (plans with falling peaks) has at these shapes. Usually it is the
        peak with nothing dropped.
        """
        return max(each.before_optimizer_bytes for each in self._known_ladder(shapes).at(_split(shapes)[1]))

    def _offer(self, plans: tuple[Plan, ...]) -> None:
        """Add plans to the ladders (plans to choose from) of all families of steps."""
        if not plans:
            return
        known = {plan.effect for plan in self._plans}
        new = [plan for plan in plans if plan.effect not in known]
        self._plans += new
        for steps in self._steps.values():
            for ladder in steps.ladders:
                ladder.extend(new)

    def _build(self, steps: _Steps) -> None:
        """Group the traced steps into families (steps that can be derived from each other), and build a ladder of plans for
        each. If a family cannot predict other shapes, each shape gets its own ladder.
        """
        before = {each.step.family.shapes: each for each in steps.ladders}
        steps.ladders = []
        left = dict(steps.traces)
        share = 0.0 if self._planner is None else self._planner.loss_share
        how: dict[str, Any] = {"may_recompute": self._options.may_recompute, "in_flight": self._in_flight}
        how["loss_share"] = share
        while left:
            family = Family(left)
            is_exact = len(steps.traces) <= _MOST_TRACES and family.is_exact
            alone = [family] if is_exact else [Family({s: left[s]}) for s in family.shapes]
            known = {sizes: steps.costs[sizes] for sizes in family.shapes if sizes in steps.costs}
            for each in alone:
                if each.shapes not in before:
                    costs = {s: known[s] if s in known else family.seconds_at(s, known) for s in each.shapes}
                    step = ShapedStep(each, costs, **how)
                    before[each.shapes] = Ladder(step, self._plans)
                steps.ladders.append(before[each.shapes])
            left = {sizes: trace for sizes, trace in left.items() if sizes not in family.shapes}

    def _planner_at(self, shapes: Shapes) -> StepPlanner:
        """Return a planner for the step of these shapes, which must be known."""
        sizes = _split(shapes)[1]
        assert self._planner is not None, "shapes are known from the first plan on"
        planner = self._planner.beside(*self._known_ladder(shapes).step.traced(sizes))
        planner.wait_for(self._in_flight)
        return planner

    def _written(
        self, shapes: Shapes, known: Shapes, plan: Plan, forecast: Forecast, signature: Callable[[], str]
    ) -> Plan:
        """Return the plan with its peaks and seconds for ``shapes`` written into it. They are computed at the shapes ``known``,
        which are equal to ``shapes`` or bound them.
        """
        before = self._known.get(shapes)
        spare_bytes = self._room_bytes(known) - forecast.before_optimizer_bytes
        if before is None or not before.is_for(plan, forecast, spare_bytes):
            forecasts = self._known_ladder(known).at(_split(known)[1])
            written = msgspec.structs.replace(
                with_spare_bytes(plan, spare_bytes),
                signature=signature(),
                budget_bytes=self._room.budget_bytes,
                baseline_peak_bytes=max(each.peak_bytes for each in forecasts),
                baseline_seconds=min(each.seconds for each in forecasts),
                predicted_peak_bytes=forecast.peak_bytes,
                predicted_seconds=forecast.seconds,
            )
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[shapes] = before = _Written(written, plan, forecast, spare_bytes)
        return before.plan

    def _ladder_of(self, shapes: Shapes) -> Ladder[Sizes] | None:
        kind, sizes = _split(shapes)
        steps = self._steps.get(kind)
        return None if steps is None else steps.ladder_for(sizes)

    def _known_ladder(self, shapes: Shapes) -> Ladder[Sizes]:
        ladder = self._ladder_of(shapes)
        assert ladder is not None, "only known shapes are asked for"
        return ladder


def is_long(tracing_seconds: float, step_seconds: float) -> bool:
    """Return True if further traces of a training whose step takes ``step_seconds`` have taken long enough. Then a coarser
    plan costs less than another trace.

    Example:
        >>> is_long(9.0, 0.05), is_long(12.0, 0.05), is_long(12.0, 0.5)
        (False, True, False)
    """
    return tracing_seconds > max(_LONG_SECONDS, _MANY_STEPS * step_seconds)


def can_follow_shapes(options: PlanOptions, ranks: int) -> bool:
    """Return True if each call may choose a plan for its own shapes.

    Codecs and links are measured at one size only, and ranks that repeat collectives must share one plan.
    """
    repeats = ranks > 1 and options.may_repeat_collectives
    return options.may_recompute and not (options.wants_forms or repeats)


def _split(shapes: Shapes) -> tuple[_Kind, Sizes]:
    return tuple((kind, len(sizes)) for kind, sizes in shapes), tuple(size for _, sizes in shapes for size in sizes)


def _joined(kind: _Kind, sizes: Sizes) -> Shapes:
    left = iter(sizes)
    return tuple((name, tuple(next(left) for _ in range(count))) for name, count in kind)
