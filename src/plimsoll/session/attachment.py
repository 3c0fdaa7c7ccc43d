"""A budget at work on a model whose batches are not known yet: what the verb ``attach`` puts on it.

The first call of the model in training is traced on the spot and runs under the plan with the lowest peak that there is.
What that step takes in truth (the user's loss, the optimizer's state) is measured until the next call, and the plan for
the budget is solved with the difference taken off. Later steps take the cheapest of a ladder of plans that keeps a batch of
their shape within the budget (see ``shapes``): a few more shapes are traced for that, and no more.

On several ranks the first plan is agreed. From then on each has a ladder of its own, and asks the others only where it has to
trace with them (see ``joint_traces``). Where there is no ladder, all have one plan, and a batch that is larger than any before
it starts over, if all ranks see one in the same call.
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
from plimsoll.session.agreement import Agreement
from plimsoll.session.batch_shapes import Shapes, covers
from plimsoll.session.calibration import (
    CallStanding,
    Carried,
    CountedState,
    OptimizerWatch,
    optimizer_in_view,
    planned_state_bytes,
    predicted_before_optimizer,
)
from plimsoll.session.joint_traces import JointTraces, facts_of
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.plans_at_work import AttachedBudget
from plimsoll.session.pressure import Pressure
from plimsoll.session.shapes import ShapePlans, can_follow_shapes, told
from plimsoll.session.step_levels import is_more
from plimsoll.session.step_planner import StepPlanner
from plimsoll.session.step_watch import (
    MeteredSituations,
    Situation,
    StepWatch,
    taken_beside,
    warn,
    warn_of_floor,
    warn_of_larger,
    warn_of_overrun,
    warn_of_planning,
    warn_of_state,
    warn_of_unseen,
    warn_of_waiting,
)
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
"""So many first steps may fail, or be profiled by the user, before the plan is made without a measurement."""
_FIRST_CALLS = 3
"""What the loop holds in these calls was measured with the first steps, or is a record that has just begun."""
_MOST_DEEPENED = 8
"""So many steps are traced to find one that runs as much as one that took more than the budget."""


class Attachment(AttachedBudget):
    """A budget at work on a model."""

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
        """Planning has failed before there was a plan for the budget: no training can be managed."""
        self._withheld_bytes = 0
        """Taken off the budget for now, as something else takes room on the device."""
        self._pressure = Pressure(room)
        self._know_nothing()
        is_gathered = any(map(is_gathered_by_zero, model.parameters()))
        self._unread = Unread(model)
        self._whole = WholeRegions(model, find_regions(model, options.regions).values() if is_gathered else ())
        self._steps = StepWatch(model, self._before_call, self._after_step)
        self._work.on_larger_calls = self._steps.larger_call
        self._watch = OptimizerWatch(every_parameter(model), after_step=self._optimizer_stepped)

    def _know_nothing(self) -> None:
        """Begin with the next call as with the first one."""
        self._shapes: list[Shapes] = []
        self._traced: Shapes = ()
        self._served: Shapes | None = None
        """The shapes for which the current plan was chosen last."""
        self._has_settled = self._accumulated = False
        self.is_calibrating = False
        """Whether the plan for the budget is still to come: the model runs at its lowest peak."""
        self._planner = self._shaped = None
        self._error_scale, self._tries, self._carried = 1.0, 0, Carried()
        self._counted, self._metered = CountedState(), MeteredSituations()
        self._excess_bytes = self._overrun_bytes = self._deeper = self._deep_bytes = 0
        self._held_bytes = self._counted_held_bytes = 0
        """What the loop holds more than when plans were made, and what it held then."""
        self._seen: set[object] = set()
        """Effects of plans that were at work before."""

    def remove(self) -> None:
        """Undo everything; harmless when called twice."""
        self._steps.end_step()
        for each in (self._steps, self._watch, self._work):
            each.remove()
        self._whole.put_back()
        self._unread.put_back()
        self.is_calibrating = False

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `AttachedBudget.step`; where no training can be managed, everything is undone."""
        try:
            return super().step(function, *args, **kwargs)
        except BaseException:
            if self._is_given_up:
                self.remove()
            raise

    def tighten(self, *, is_own: bool) -> bool:
        """As `AttachedBudget.tighten`; without a ladder all ranks plan for a peak nearer to the lowest one."""
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
        """Before a training call: plan for it, or for what the one before it showed."""
        if is_capturing(self._steps.device.type):
            self._refuse_unready(situation)  # the current plan stays: a graph does not ask again
            return
        self._calls += 1
        if self._watch.is_settled:
            self._watch.remove()
        if situation.thawed and self._steps.is_between_steps:
            self._know_nothing()  # such a step saves more than was planned
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
            # Later the plan at work stays. After an error of the model's own the next call tries again.
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
        """What every rank does in every call until the plan for the budget is there."""
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
                # It was planned for gradients that come up on the way. They are there from the start, so other moments are the
                # peak, and another plan takes least.
                self._begin(args, kwargs, situation)
                return
        if self.is_calibrating:
            self._measure(args, kwargs)

    def _grow(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """A batch that may take more than any before it: plan for it, if all ranks have one."""
        facts = facts_of(self._task(args, kwargs))
        told = self.agreement.gathered(f"larger batch in call {self._calls}", str(facts), str)
        if told is None or len(set(told)) > 1:
            self._stay(situation)
        else:
            with self.agreement:
                self._begin(args, kwargs, situation)

    def _deepen(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation, plans: ShapePlans) -> None:
        """A forward has run more than was traced: start over with this one if it does as well, which only a trace can tell."""
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
        """Go on under the plan that all ranks have, although this rank's batch is larger than those that it is for."""
        self._shapes.append(situation.shapes)
        self._metered.know(situation)
        warn_of_larger(situation)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Trace this very call. Unless the plan at work is enough for it, let it run at the lowest peak, measured."""
        self._shapes.append(situation.shapes)
        self._steps.note_frozen()
        task = dataclasses.replace(self._task(args, kwargs), optimizer=optimizer_in_view(self.model, self._optimizer))
        self._accumulated, self._traced = situation.accumulates, situation.shapes
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
                self._say_tried(planner, task)
            except BaseException:
                self._planner = earlier
                raise
        if self._work.has_moved():
            self._work.remove()
        self._run(lowest)
        self.is_calibrating, self._tries = True, 0
        self._measure(args, kwargs)

    def _say_tried(self, planner: StepPlanner, task: TrainingTask) -> None:
        """Warn where trying the lowest plan took more than the budget."""
        taken_bytes = planner.tried_bytes + self._copied_bytes(task)
        budget_bytes = planner.own_budget_bytes or 0
        if planner.tried_bytes and is_more(taken_bytes, budget_bytes):
            why = "the plan with the lowest peak was run once, with copies of the model's buffers and of the batch"
            warn_of_planning(taken_bytes, budget_bytes, why, "a larger budget leaves room for the copies")

    def _heed_room(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """A step is about to begin: plan anew where there is less room than it takes, or has been more for a while."""
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
        """Whether the plan at work keeps another step within the budget too, which takes less than the one that it is for."""
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
        """Measure the step that this call begins; within another one there is nothing to be measured."""
        if not self._steps.is_between_steps:
            return
        self._tries += 1
        self._watch_optimizer()
        if self._tries == 1:
            self._carried.note_before(self._steps.device)
        self._steps.meter(args, kwargs, self._carried if self._tries > 1 else None, with_optimizer=True)

    def _watch_optimizer(self) -> None:
        """Notice its steps, from one on that is about to come."""
        self._watch.remove()
        seen = [each for each in (optimizer_in_view(self.model, self._optimizer),) if each is not None]
        self._watch = OptimizerWatch(every_parameter(self.model), seen, after_step=self._optimizer_stepped)

    def _settle(self, task: TrainingTask | None, in_flight: int) -> None:
        """The first step is over: the plan for the budget, with what the trace did not see taken off; ``task`` is another such
        step, if one is at hand.

        Raises:
            BudgetBelowFloor: what was measured at the lowest peak is more than the budget.
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
                return  # that is a guess: measure a step that begins with what this one left, and records nothing
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
        """The plan for the budget, run once: it is recorded then, beside the gradients that are among ``lasting_bytes``."""
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
            try:
                return self._planner.confirmed_beside(plan, step, self._excess_bytes, resolve, seen_bytes=seen_bytes)
            except InvalidBatch:
                return plan  # this call cannot run twice; its step is measured instead

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
        """A step is over. Where it was measured under the plan for the budget, it has to have kept to that."""
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
            # Plans are discrete: less than what this one was off by may give the same plan again.
            off_bytes = peak_bytes - predicted_before_optimizer(planner.own(plan))
            self._overrun_bytes = 0 if self._shaped is not None else max(self._excess_bytes + over_bytes, off_bytes)
            warn_of_overrun(peak_bytes, limit_bytes, cause, next_)

    def _tighten(self, situation: Situation) -> None:
        """Plan anew for a step that took more than the budget, or that is about to: more of its forwards wait at once."""
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
        """Take optimizer state that has come up off the budget, where all ranks have seen their optimizer step."""
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
        if self._shaped is not None:
            self._shaped.count_fixed(new_bytes)
            self._shaped.held_bytes = more_bytes
        elif self.agreement.size == 1 and (new_bytes or is_more(more_bytes, self._held_bytes)):
            self._excess_bytes += new_bytes
            self._held_bytes = more_bytes
            self._replan("the training loop holds more than before")

    def _replan(self, why: str) -> None:
        """The plan for the budget with what has shown since taken off; the one with the lowest peak where none fits."""
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
        """What waits for a backward now waits in vain; and a model that somebody trains has to have been called."""
        self._steps.graphs.abandon()
        if not self._watch.is_settled:
            self._metered = MeteredSituations()  # its state is there from now on
        if self._calls == 0 and every_gradient(self.model) and not self._has_warned:
            self._has_warned = True
            warn_of_unseen(self.model)
