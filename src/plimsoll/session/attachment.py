"""Keeps training under a budget when no batch is known in advance. ``plimsoll.attach`` creates an ``Attachment``.

The first training call of the model is traced on the spot and runs under the plan with the lowest peak. That step is measured
until the next call. The measurement includes what the trace cannot see: the user's loss and the optimizer's state. The
difference is subtracted from the budget, and the plan for the budget is solved. From then on each step takes the cheapest plan
of a ladder that keeps a batch of its shape within the budget (see ``shapes``). A few more shapes are traced for this ladder;
plans for all other shapes are derived.

With several ranks, the ranks agree on the first plan. Afterwards each rank has its own ladder and contacts the others only
where a trace needs them (see ``joint_traces``). If the options allow no ladder, all ranks share one plan. Then a batch larger
than any before starts over, provided that all ranks meet one in the same call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.engine.capturing import WARM_UP, is_capturing, refuse_capture
from plimsoll.errors import BudgetBelowFloor, InvalidBatch, PlimsollError
from plimsoll.session.account import planned_state_bytes, predicted_before_optimizer
from plimsoll.session.agreement import Agreement
from plimsoll.session.batch_shapes import Shapes, covers
from plimsoll.session.carried import Carried
from plimsoll.session.joint_traces import JointTraces, facts_of
from plimsoll.session.measured_step import taken_beside
from plimsoll.session.messages import (
    log_planning_overrun,
    warn,
    warn_of_floor,
    warn_of_larger,
    warn_of_overrun,
    warn_of_state,
    warn_of_unseen,
    warn_of_waiting,
)
from plimsoll.session.optimizer_watch import CountedState, OptimizerWatch, optimizer_in_view
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.plans_at_work import AttachedBudget
from plimsoll.session.pressure import Pressure
from plimsoll.session.shapes import ShapePlans, can_follow_shapes, told
from plimsoll.session.situations import MeteredSituations, Situation
from plimsoll.session.step_levels import is_more
from plimsoll.session.step_planner import StepPlanner
from plimsoll.session.step_watch import StepWatch
from plimsoll.session.task import TrainingTask
from plimsoll.session.tightest_rank import first_planner
from plimsoll.tracing.fsdp2 import every_gradient, every_parameter
from plimsoll.tracing.meters.memory import storage_bytes
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.recorder.untouched import Unread
from plimsoll.tracing.regions import find_regions
from plimsoll.tracing.torch_internals import is_profiled
from plimsoll.tracing.zero import WholeRegions, is_gathered_by_zero
from plimsoll.units import format_bytes

P = ParamSpec("P")
T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_MOST_TRIES = 3
"""If this many first steps fail, or run under the user's profiler, make the plan without a measurement."""
_FIRST_CALLS = 3
"""In these calls, take what the loop holds as the baseline: the first measured steps included it, or its record has just begun.
"""
_MOST_DEEPENED = 8
"""Trace at most this many steps to find one that runs as much as the step that exceeded the budget."""


class Attachment(AttachedBudget):
    """Keeps an eager model under a budget from its first training call on."""

    def __init__(
        self,
        model: nn.Module,
        budget: Budget,
        options: PlanOptions,
        agreement: Agreement,
        *,
        optimizer: torch.optim.Optimizer | None,
        verify_every: int,
        room: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(model, budget, options, agreement, optimizer=optimizer, verify_every=verify_every)
        self._has_ladder = can_follow_shapes(options, agreement.size)
        self._has_warned = self._is_given_up = False
        """`_is_given_up`: planning failed before the first plan for the budget was made, so training cannot be managed."""
        self._withheld_bytes = 0
        """Bytes subtracted from the budget for now because something else occupies the device."""
        self._pressure = Pressure(room)
        self._know_nothing()
        is_gathered = any(map(is_gathered_by_zero, model.parameters()))
        self._unread = Unread(model)
        self._whole = WholeRegions(model, find_regions(model, options.regions).values() if is_gathered else ())
        self._steps = StepWatch(model, self._before_call, self._after_step)
        self._work.on_larger_calls = self._steps.larger_call
        self._watch = OptimizerWatch(every_parameter(model), after_step=self._optimizer_stepped)

    def _know_nothing(self) -> None:
        """Reset the state so that the next call is treated as the first one."""
        self._shapes: list[Shapes] = []
        self._traced: Shapes = ()
        self._served: Shapes | None = None
        """The shapes that the current plan was last chosen for."""
        self._has_settled = self._accumulated = False
        self.is_calibrating = False
        """True until the plan for the budget is made; until then the model runs under the plan with the lowest peak."""
        self._planner = self._shaped = None
        self._error_scale, self._tries, self._carried = 1.0, 0, Carried()
        self._counted, self._metered = CountedState(), MeteredSituations()
        self._excess_bytes = self._overrun_bytes = self._deeper = self._deep_bytes = 0
        self._held_bytes = self._counted_held_bytes = 0
        """`_held_bytes`: what the loop holds beyond `_counted_held_bytes`, which it held when plans were made."""
        self._counted_batch_bytes = 0
        """What the storages of the traced batch held beyond its tensors."""
        self._seen: set[object] = set()
        """Effects (`Plan.effect`) of the plans that have run before."""

    def remove(self) -> None:
        """Undo everything. Calling it twice does no harm."""
        self._steps.end_step()
        for each in (self._steps, self._watch, self._work):
            each.remove()
        self._whole.put_back()
        self._unread.put_back()
        self.is_calibrating = False

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Override `AttachedBudget.step`: if planning failed before the first plan, also remove everything from the model."""
        try:
            return super().step(function, *args, **kwargs)
        except BaseException:
            if self._is_given_up:
                self.remove()
            raise

    def tighten(self, *, is_own: bool) -> bool:
        """Override `AttachedBudget.tighten`: without a ladder, all ranks replan for a peak halfway between the plan's and the
        lowest.
        """
        if self._has_ladder:
            before = self.plan
            is_tighter = super().tighten(is_own=is_own)
            if self._shaped is not None and self.plan is not None and self.plan is not before:
                self._pressure.lower((self.plan.budget_bytes or 0) - self._shaped.withheld_bytes)
            return is_tighter
        self._forget_step()
        if self._planner is None or self.plan is None or self.is_calibrating:
            return False
        room_bytes = self._planner.halfway_bytes(self.plan, self._error_scale)
        if room_bytes is None:
            return False
        self._pressure.lower(room_bytes + self._excess_bytes)
        self._withheld_bytes = self._pressure.withheld_bytes(self._planner.budget_bytes or 0)
        self._replan("the step ran out of memory")
        return True

    def _forget_step(self) -> None:
        super()._forget_step()
        self._is_given_up = False
        if not self._watch.is_settled:
            self._watch_optimizer()

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Make or choose the plan of a training call. Also react to the measurement of the previous step."""
        if is_capturing(self._steps.device.type):
            self._refuse_unready(situation)  # keep the current plan: a CUDA graph that replays does not call this hook
            return
        self._calls += 1
        if self._watch.is_settled:
            self._watch.remove()
        if situation.thawed and self._steps.is_between_steps:
            self._know_nothing()  # gradients of thawed parameters need saved tensors that the plan did not count
            situation = situation._replace(thawed=frozenset())
        try:
            if self._planner is None or self.is_calibrating:
                with self.agreement:
                    self._calibrate(args, kwargs, situation)
            elif self._shaped is None and not any(covers(known, situation.shapes) for known in self._shapes):
                self._grow(args, kwargs, situation)
            elif self._deeper and self._shaped is not None and self._steps.is_between_steps:
                self._deepen(args, kwargs, situation, self._shaped)
            elif self._overrun_bytes or situation.in_flight > self._planner.in_flight:
                self._tighten(situation)
            elif self._counted.is_behind(self._watch):
                self._count_state()
            elif self._steps.is_between_steps:
                self._count_held()
            if self._shaped is not None and self._planner is not None and not self.is_calibrating:
                self._choose(self._shaped, args, kwargs, situation, self._planner.in_flight)
            if not (self.is_calibrating or situation.accumulates) and self._steps.is_between_steps:
                self._heed_room(args, kwargs, situation)
        except BaseException as error:
            # If there is a plan for the budget, it stays in place after an error. An error that the model raised is not final:
            # the next call tries again.
            self._is_given_up = not self._has_settled and isinstance(error, PlimsollError)
            if self._is_given_up and not self._retry.is_running:
                self.remove()
            raise
        if not self.is_calibrating:
            self._served = situation.shapes
            self._steps.meter_if_new(args, kwargs, situation, self._metered)

    def _refuse_unready(self, situation: Situation) -> None:
        if self._served != situation.shapes:
            refuse_capture(
                self._steps.device.type,
                "A training step without a plan",
                why="the first training steps of a shape are traced and timed to make its plan",
                next=WARM_UP,
            )

    def _calibrate(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Run one call of the calibration. Every rank does this in every call until the plan for the budget exists."""
        facts = facts_of(self._task(args, kwargs))
        if self._planner is None:
            self.agreement.same("the first batch", facts)
            self._begin(args, kwargs, situation)
            return
        here = CallStanding(
            signature=str(facts),
            is_new=not any(covers(known, situation.shapes) for known in self._shapes),
            is_same=situation.shapes == self._traced,
            is_measured=self._steps.is_between_steps and self._steps.measured is not None,
            in_flight=situation.in_flight,
        )
        told = self.agreement.all_of("calibrating", here, CallStanding)
        can_follow = self._has_ladder and all(each.is_measured for each in told)
        if all(each.is_new for each in told) and len({each.signature for each in told}) == 1 and not can_follow:
            self._begin(args, kwargs, situation)
            return
        if here.is_new and not can_follow:
            self._stay(situation)
        if all(each.is_measured for each in told) or (self._tries == _MOST_TRIES and self._steps.is_between_steps):
            has_trial = not can_follow or all(each.is_same for each in told)
            joins = situation.accumulates and not self._accumulated
            try:
                self._settle(self._task(args, kwargs) if has_trial else None, max(each.in_flight for each in told))
            except BudgetBelowFloor:
                if not joins:
                    raise
            if joins and self.is_calibrating:
                # Traced without existing gradients, but accumulation starts with them. The peak moves to another moment, so
                # another plan has the lowest peak: retrace.
                self._begin(args, kwargs, situation)
                return
        if self.is_calibrating:
            self._measure(args, kwargs)

    def _grow(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Plan for a batch that may need more than any before, if all ranks have one in this call. Otherwise keep the plan."""
        facts = facts_of(self._task(args, kwargs))
        told = self.agreement.gathered(f"larger batch in call {self._calls}", str(facts), str)
        if told is None or len(set(told)) > 1:
            self._stay(situation)
        else:
            with self.agreement:
                self._begin(args, kwargs, situation)

    def _deepen(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation, plans: ShapePlans) -> None:
        """Retrace because a forward ran more operations than the traced one. Only the trace shows whether this call does so
        too.

        After `_MOST_DEEPENED` traces without success, subtract the measured overshoot from the budget instead.
        """
        self._deeper -= 1
        try:
            self._begin(args, kwargs, situation)
        except BudgetBelowFloor as error:
            self._deeper = 0
            warn_of_floor(error, "a forward runs more than was planned for")
        if self.is_calibrating:
            self._deeper = 0
        elif not self._deeper:
            plans.note_peak(self._deep_bytes)

    def _stay(self, situation: Situation) -> None:
        """Keep the plan that all ranks share, although this rank's batch is larger than the batches that it was made for."""
        self._shapes.append(situation.shapes)
        self._metered.know(situation)
        warn_of_larger(situation)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Trace this call. Keep the current plan if it is enough for the call; else run at the lowest peak and measure."""
        self._shapes.append(situation.shapes)
        self._steps.note_frozen()
        task = dataclasses.replace(self._task(args, kwargs), optimizer=optimizer_in_view(self.model, self._optimizer))
        self._accumulated, self._traced = situation.accumulates, situation.shapes
        self._counted_batch_bytes = self._steps.held.batch_bytes
        self._traces = JointTraces(self.agreement, self.model)
        with self._tracing():
            planner, self._error_scale = first_planner(
                self.agreement,
                task,
                self._options,
                self._budget,
                optimizer_is_optional=task.optimizer is not self._optimizer,
                taken_bytes=self._excess_bytes + self._withheld_bytes + self._held_bytes,
            )
            if self._planner is not None and self._is_enough_for(planner):
                return
            earlier, self._planner = self._planner, planner
            try:
                planner.wait_for(1 if earlier is None else earlier.in_flight)
                lowest = planner.lowest_allowed(task.step, self._error_scale)
                self._say_tried(planner, task, "the plan with the lowest peak")
            except BaseException:
                self._planner = earlier
                raise
        if self._work.has_moved():
            self._work.remove()
        self._run(lowest)
        self.is_calibrating, self._tries = True, 0
        self._measure(args, kwargs)

    def _say_tried(self, planner: StepPlanner, task: TrainingTask, tried: str) -> None:
        """Log if a trial took more than the budget."""
        taken_bytes = planner.tried_bytes + self._copied_bytes(task)
        budget_bytes = planner.own_budget_bytes or 0
        if planner.tried_bytes and is_more(taken_bytes, budget_bytes):
            why = f"{tried} was run once, with copies of the model's buffers and of the batch"
            log_planning_overrun(taken_bytes, budget_bytes, why, "a larger budget leaves room for the copies")

    def _heed_room(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Before a step: replan if the device has too little free memory for it, or has had more for a while."""
        assert self._planner is not None
        assert self.plan is not None
        shaped, budget_bytes = self._shaped, self._planner.budget_bytes or 0
        unseen_bytes = self._excess_bytes if shaped is None else shaped.unseen_bytes(situation.shapes)
        if not self._pressure.changes(budget_bytes, self.plan.predicted_peak_bytes + unseen_bytes):
            return
        self._withheld_bytes = self._pressure.withheld_bytes(budget_bytes)
        if shaped is None:
            self._replan("something else takes room on the device")
        else:
            shaped.withheld_bytes = self._withheld_bytes
            self._run(shaped.choose(situation.shapes, self._task(args, kwargs).signature))

    def _is_enough_for(self, planner: StepPlanner) -> bool:
        """True if the current plan also keeps the traced step within the budget, and that step needs at most what the planned
        one needs.
        """
        assert self._planner is not None
        assert self.plan is not None
        takes_less = planner.extremes.unmanaged_peak_bytes <= self._planner.extremes.unmanaged_peak_bytes
        is_kept = (
            takes_less
            and not (self.is_calibrating or self._work.has_moved())
            and planner.is_kept_by(self.plan, self._excess_bytes)
        )
        return self.agreement.every("enough", holds=is_kept)

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure the step that this call begins. If the call is within a step that has already begun, do nothing."""
        if not self._steps.is_between_steps:
            return
        self._tries += 1
        self._watch_optimizer()
        if self._tries == 1:
            self._carried.note_before(self._steps.device)
        self._steps.meter(args, kwargs, self._carried if self._tries > 1 else None, with_optimizer=True)

    def _watch_optimizer(self) -> None:
        """Watch the optimizer's steps, beginning with its next one."""
        self._watch.remove()
        seen = [each for each in (optimizer_in_view(self.model, self._optimizer),) if each is not None]
        self._watch = OptimizerWatch(every_parameter(self.model), seen, after_step=self._optimizer_stepped)

    def _settle(self, task: TrainingTask | None, in_flight: int) -> None:
        """Make the plan for the budget, after the first step. The bytes that the trace did not see are subtracted from the
        budget.

        Args:
            task: another step of the same shape on which the plan can be tried, or None.
            in_flight: the number of forwards before one backward.

        Raises:
            BudgetBelowFloor: the measured peak of the lowest plan exceeds the budget.
        """
        planner, measured, lowest = self._planner, self._steps.measured, self.plan
        self._steps.measured = None
        assert lowest is not None
        assert planner is not None
        assert planner.budget_bytes is not None
        if in_flight > planner.in_flight:
            planner.wait_for(in_flight)
            lowest = planner.lowest(self._error_scale)
        own = planner.own(lowest)
        self._counted.begin(self._watch, own)
        taken, self._excess_bytes = taken_beside(
            measured, self._watch, own, planner.recording_bytes if self._tries == 1 else 0
        )
        if measured is not None:
            known_bytes = (
                self._excess_bytes - taken.lasting_bytes - max(self._watch.bytes_after, planned_state_bytes(own))
            )
            planner.count_loss(own, measured.loss_peak_bytes - known_bytes)
        floor_bytes = planner.worst_bytes(taken.bytes)
        most_bytes = planner.worst_bytes(taken.most_bytes)
        if planner.worst_bytes(taken.optimizer_bytes) > planner.budget_bytes:
            raise planner.refusal(lowest, most_bytes, is_optimizer=True)
        try:
            plan = self._confirmed(task, taken.lasting_bytes)
        except BudgetBelowFloor as error:
            if floor_bytes > planner.budget_bytes:
                raise planner.refusal(lowest, most_bytes) from error
            if most_bytes > planner.budget_bytes and self._tries < _MOST_TRIES:
                # an estimate: measure a step that starts with what this one left and does not record
                return
            plan = msgspec.structs.replace(planner.lowest(self._error_scale), budget_bytes=planner.budget_bytes)
        if self._has_ladder:
            fixed_bytes = self._counted.bytes - planned_state_bytes(own) + taken.lasting_bytes
            self._planner, measured_bytes = planner.alone(), (self._excess_bytes, fixed_bytes)
            self._climb(self._planner, plan, self._traced, measured_bytes, accumulates=self._accumulated)
        self._counted_held_bytes = self._steps.held.bytes
        self._run(plan)
        self.is_calibrating, self._has_settled = False, True
        if self._has_ladder or self.agreement.size == 1:
            self._pressure.watch(self._steps.device, self._steps.beside_bytes or 0)
        _LOG.info(told(plan, self._excess_bytes))

    def _confirmed(self, task: TrainingTask | None, lasting_bytes: int) -> Plan:
        """Solve the plan for the budget and run it once if possible. The run also records what the plan needs.

        ``lasting_bytes`` is what the measured step left behind. Existing gradients are part of it and of the trial.
        """
        plan = self._solve_for_budget()
        has_trial = task is not None and any(region.dropped for region in plan.regions) and not is_profiled()
        has_trial = has_trial and self._has_room_to_try(plan, task)
        if task is None or self._planner is None or not self.agreement.every("trial", holds=has_trial):
            return plan
        step = dataclasses.replace(task, optimizer=optimizer_in_view(self.model, self._optimizer)).step()

        def resolve(excess_bytes: int) -> Plan:
            self._excess_bytes = excess_bytes
            return self._solve_for_budget()

        self._planner.managing = self._work.trying if self.agreement.size == 1 else None
        with self._steps.looking_away(), contextlib.nullcontext() if self._planner.managing else self._work.paused():
            seen_bytes = self._planner.mistake_bytes + (self._planner.recording_bytes if self._tries == 1 else 0)
            seen_bytes += min(lasting_bytes, step.gradient_bytes())
            self._planner.tried_bytes = 0  # the trial of the lowest plan was logged already
            try:
                return self._planner.confirmed_beside(plan, step, self._excess_bytes, resolve, seen_bytes=seen_bytes)
            except InvalidBatch:
                return plan  # this call cannot run twice; its step is measured instead
            finally:
                # This call may run more layers than the traced one (layers dropped at random), and so does its trial.
                self._say_tried(self._planner, task, "a plan for the budget")

    def _has_room_to_try(self, plan: Plan, task: TrainingTask | None) -> bool:
        """Whether a trial stays within the budget: it holds two copies of the buffers, one of the batch, one of the gradients.

        Without a trial the next step shows what the plan takes, as that step is measured.
        """
        assert self._planner is not None
        gradient_bytes = storage_bytes(every_gradient(self.model), self._steps.device)
        taken_bytes = plan.predicted_peak_bytes + self._excess_bytes + self._copied_bytes(task) + gradient_bytes
        return not is_more(taken_bytes, self._planner.budget_bytes or 0)

    def _copied_bytes(self, task: TrainingTask | None) -> int:
        """What a trial copies, so that it leaves no trace: the buffers twice, and the batch."""
        batch, device = () if task is None else output_tensors(task.call()), self._steps.device
        return 2 * storage_bytes(list(self.model.buffers()), device) + storage_bytes(batch, device)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        if is_profiled():
            warn("this training call is traced, which takes torch's profiler: yours records nothing of it")
        with super()._tracing():
            yield

    def _solve_for_budget(self) -> Plan:
        """The plan for the budget less what was measured on any rank."""
        assert self._planner is not None
        excess_bytes = self._planner.excess_bytes(self._excess_bytes + self._withheld_bytes + self._held_bytes)
        return self._planner.solve(self._planner.budget_bytes, excess_bytes=excess_bytes, error_scale=self._error_scale)

    def _after_step(self) -> None:
        """After a step: if it was measured under the plan for the budget and exceeded the budget, warn and plan for that."""
        planner, plan = self._planner, self.plan
        if self.is_calibrating or plan is None or planner is None or planner.own_budget_bytes is None:
            return
        limit_bytes = planner.own_budget_bytes - self._withheld_bytes
        peak_bytes, cause = self._steps.taken_by(self._watch.bytes_now, self._metered, limit_bytes)
        over_bytes = peak_bytes - limit_bytes
        next_ = "the next step is planned with that taken off, where a plan takes less"
        is_other_step = self._metered.has_run_more or self._steps.is_reordered
        if self._shaped is not None and over_bytes > 0 and is_other_step and self.agreement.size == 1:
            self._deeper, self._deep_bytes = _MOST_DEEPENED, peak_bytes
            self._steps.is_reordered = False
            next_ = (
                f"up to {_MOST_DEEPENED} steps are traced to find one that runs as much, and that one is planned for"
            )
        elif self._shaped is not None and peak_bytes:
            self._shaped.note_peak(peak_bytes)
        if over_bytes > 0:
            # Plans are discrete: subtracting only the overshoot may select the same plan again. So subtract the plan's whole
            # error if that is more.
            off_bytes = peak_bytes - predicted_before_optimizer(planner.own(plan))
            self._overrun_bytes = 0 if self._shaped is not None else max(self._excess_bytes + over_bytes, off_bytes)
            warn_of_overrun(peak_bytes, limit_bytes, cause, next_)

    def _tighten(self, situation: Situation) -> None:
        """Replan after a step exceeded the budget, or before one that will because more of its forwards wait at once."""
        assert self._planner is not None
        needed_bytes, self._overrun_bytes = max(self._overrun_bytes, self._excess_bytes), 0
        told: list[int] | None = [situation.in_flight]
        if self._shaped is None:
            told = self.agreement.gathered(f"over the budget in call {self._calls}", situation.in_flight, int)
        if situation.in_flight > self._planner.in_flight:
            warn_of_waiting(situation.in_flight, self._planner.in_flight, is_planned=told is not None)
        if told is not None:
            with self.agreement:
                self._planner.wait_for(max(self._planner.in_flight, *told))
                self._excess_bytes = needed_bytes
                self._replan("no plan takes less")

    def _count_state(self) -> None:
        """Subtract new optimizer state from the budget. Without a ladder this happens only if the optimizers of all ranks have
        stepped.
        """
        new_bytes = self._counted.take_new(self._watch)
        if self._shaped is not None:
            self._shaped.count_fixed(new_bytes)
            return
        told = self.agreement.gathered(f"first step of the optimizer before call {self._calls}", new_bytes, int)
        if told is None:
            warn_of_state(new_bytes)
        elif any(told):
            with self.agreement:
                self._excess_bytes += new_bytes
                self._replan(f"the optimizer has {format_bytes(new_bytes)} of new state")

    def _count_held(self) -> None:
        """Subtract from the budget what the loop holds now and did not hold when plans were made.

        Not on ranks that share one plan: they would have to agree on it.
        """
        held = self._steps.held
        if self._calls <= _FIRST_CALLS:
            self._counted_held_bytes = max(self._counted_held_bytes, held.bytes)
        new_bytes = self._counted.take_found(held.state_bytes)
        more_bytes = max(0, held.bytes - self._counted_held_bytes)
        more_bytes += max(0, held.batch_bytes - self._counted_batch_bytes)
        if self._shaped is not None:
            self._shaped.count_fixed(new_bytes)
            self._shaped.held_bytes = more_bytes
        elif self.agreement.size == 1 and (new_bytes or is_more(more_bytes, self._held_bytes)):
            self._excess_bytes += new_bytes
            self._held_bytes = more_bytes
            self._replan("the training loop holds more than before")

    def _replan(self, why: str) -> None:
        """Solve for the budget again, less all that was measured by now. If nothing fits, warn and take the plan with the
        lowest peak.
        """
        assert self._planner is not None
        if self._shaped is not None:
            return  # every call chooses its plan
        try:
            plan = self._solve_for_budget()
        except BudgetBelowFloor as error:
            warn_of_floor(error, why)
            lowest = self._planner.lowest(self._error_scale)
            plan = msgspec.structs.replace(lowest, budget_bytes=self._planner.budget_bytes)
        self._run(plan)

    def _run(self, plan: Plan) -> None:
        if self._work.run(plan) and plan.effect not in self._seen:
            self._seen.add(plan.effect)
            self._metered.expect()

    def _optimizer_stepped(self) -> None:
        """After an optimizer step: drop graphs that still wait for a backward. Warn once if the model is trained but was never
        called.
        """
        self._steps.graphs.abandon()
        if not self._watch.is_settled:
            self._metered = MeteredSituations()  # all situations are new again
        if self._calls == 0 and every_gradient(self.model) and not self._has_warned:
            self._has_warned = True
            warn_of_unseen(self.model)


class CallStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank's calibration.

    ``is_new``: its batch is not covered by a traced one. ``is_same``: its batch has the traced shapes. ``is_measured``: the
    first step was measured. ``in_flight``: how many graphs waited for a backward.
    """

    signature: str
    is_new: bool
    is_same: bool
    is_measured: bool
    in_flight: int
