"""Keeps training under a budget when no batch is known in advance. ``plimsoll.attach`` creates an ``Attachment``.

``states`` lists all states and events as a table. For an eager model they mean this:

1. The first training call is traced before it runs. It then runs under the plan with the lowest peak.
2. This step is measured until the next call begins. The measurement includes bytes that the trace does not contain: the user's
   loss and the optimizer's state. An account counts them (see ``account``).
3. The next call solves the plan for the budget minus the account. From then on, each step runs under the cheapest plan of a
   ladder (plans with falling peaks) that keeps a batch of its shape within the budget (see ``shapes``). A few more shapes are
   traced for this ladder. The peaks at all other shapes are computed from these traces.

A compiled model is planned in its first call, without the measured step.

Several ranks agree on the first plan. Afterwards each rank has its own ladder. It contacts the others only if a trace runs
collectives (see ``joint_traces``). If the options do not allow a ladder, all ranks share one plan. If all ranks then get a
larger batch than ever before in the same call, they trace and plan again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import COLLECTIVES, Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.receipt import RegionOutcome
from plimsoll.artifacts.training_figures import ShowsFigures, TrainingFigures
from plimsoll.engine.apply import RemovedAtEnd
from plimsoll.engine.capturing import WARM_UP, is_capturing, refuse_capture
from plimsoll.errors import BudgetBelowFloor, InvalidBatch, InvalidRegions, PlanMismatch, PlimsollError
from plimsoll.session.account import MemoryAccount, PlanRoom, planned_state_bytes, predicted_before_optimizer
from plimsoll.session.agreement import Agreement
from plimsoll.session.backward_steps import LoopWatch, all_steps, check_steps_in_backward, with_backward_steps
from plimsoll.session.batch_shapes import Shapes, covers
from plimsoll.session.compiled_step import CompiledStep
from plimsoll.session.eager_step import EagerStep
from plimsoll.session.joint_traces import JointTraces, facts_of
from plimsoll.session.knowledge import Knowledge, LowestSteps, PlannedStep, Remembered
from plimsoll.session.measured_step import taken_beside
from plimsoll.session.messages import (
    PlanningNotice,
    announce,
    announce_no_backward_steps,
    log_fewer_forwards,
    log_planning_overrun,
    log_recurrence,
    name_batch,
    no_plan_is_lower,
    warn,
    warn_of_floor,
    warn_of_frozen,
    warn_of_larger,
    warn_of_overrun,
    warn_of_parts,
    warn_of_state,
    warn_of_unseen,
    warn_of_waiting,
)
from plimsoll.session.optimizer_watch import OptimizerWatch, optimized_parameters, optimizer_in_view
from plimsoll.session.options import STEP_IN_BACKWARD, Budget, PlanOptions
from plimsoll.session.plans_at_work import PlansAtWork
from plimsoll.session.pressure import Pressure
from plimsoll.session.retry import Retry, floor_of
from plimsoll.session.shapes import ShapePlans, can_follow_shapes, is_long
from plimsoll.session.situations import MeteredSituations, Situation, planned_situation
from plimsoll.session.state_offload import StateAtWork, checked_optimizer, most_offloaded, with_offloaded_state
from plimsoll.session.states import TABLE, State, TrainingEvent
from plimsoll.session.step_context import ContextWatch
from plimsoll.session.step_levels import is_more
from plimsoll.session.step_planner import StepPlanner, first_planner
from plimsoll.session.step_watch import StepWatch, watchers
from plimsoll.session.task import TrainingTask, task_of_call
from plimsoll.session.tiling import with_best_tiles
from plimsoll.tracing.compiled.units import Unit
from plimsoll.tracing.ddp import inner_module, is_without_reduction
from plimsoll.tracing.fsdp2 import every_gradient, every_parameter
from plimsoll.tracing.meters.memory import free_bytes, prepare_for_threads, storage_bytes
from plimsoll.tracing.recorder.calling import call_tensors, output_tensors
from plimsoll.tracing.recorder.kept_globals import globals_kept
from plimsoll.tracing.refusals import BackwardFailed
from plimsoll.tracing.regions import find_regions
from plimsoll.tracing.torch_internals import is_profiled
from plimsoll.units import format_bytes

P = ParamSpec("P")
T = TypeVar("T")

_MOST_TRIES = 3
"""If this many first steps fail, or run under the user's profiler, make the plan without a measurement. If backward fails in
more traces than that, give up.
"""
_MOST_OVER = 2
"""The number of steps over the budget that are measured before ``BudgetBelowFloor`` is raised."""
_SURE = 1.01
"""If the upper bound of a measured peak is at most this multiple of its lower bound, ``BudgetBelowFloor`` is raised at once and
names the upper bound. Otherwise, another step is measured first.
"""
_MUCH = 0.02
"""Bytes beyond the trace that are more than this share of the budget may be due to recording. Then another step is measured."""
_FIRST_CALLS = 3
"""In this many first training calls, tensors that the training loop holds are not subtracted from the budget.

The measured first steps contain these tensors already. Or the tensors are a record (outputs for a metric), which can only be
recognized when it has grown in two steps.
"""
_MOST_TRACED_AGAIN = 8
"""After a step that ran more operations than the traced one and exceeded the budget, trace at most this many steps to find
another one that runs as many.
"""


_MOST_REMEMBERED = 64
"""The largest number of sets of frozen parameters whose plans are remembered. A large model may be trained block by block."""


class _RaisedByModel(Exception):
    """Raised if the model itself raised an error while it was traced. ``own`` is the model's error if it came from forward, and
    ``None`` if it came from backward.
    """

    def __init__(self, own: BaseException | None) -> None:
        super().__init__()
        self.own = own


class TrainingCall(NamedTuple):
    """One call of the managed model in training, as data: its arguments, and what determines its peak (``situation``)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    situation: Situation


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks send each other in each call until the plan for the budget exists, as data: which steps this rank has traced
    and measured.
    """

    signature: str
    is_new: bool
    """True if no traced batch is at least as large as this rank's batch in each dimension."""
    is_same: bool
    """True if this rank's batch has the shapes of the traced batch."""
    is_measured: bool
    """True if this rank's first step was measured."""
    in_flight: int
    """The largest number of forwards that waited for their backward at the same time."""


class Attachment(ShowsFigures, RemovedAtEnd):
    """Keeps a model under a budget from its first training call on. ``plimsoll.attach`` returns it as the handle."""

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
        units: Sequence[Unit] = (),
        progress: Progress = silent,
    ) -> None:
        self.model, self.agreement = model, agreement
        self._progress = PlanningNotice(progress, budget.shown)
        self.measures_before_refusing = True
        """Whether ``BudgetBelowFloor`` is raised only after the loop's own step was measured, if the budget is below the lowest
        traced peak.

        It is False for a trainer that tries a smaller batch after this error: the error must come before the first step has
        changed anything.
        """
        self._noted: tuple[Plan | None, str, Plan | None] = None, "", None
        """The cache of the property `plan`: the plan without its note, the note, and the plan with its note."""
        self._unannounced_steps: int | None = 0
        """How many steps have ended under a plan for the budget before a line about the plan was logged; None once it was
        logged.
        """
        self.repeats_collectives = COLLECTIVES in options.allow
        if agreement.size > 1:
            options.refuse_tiles("A step of several ranks")
        self._budget, self._asked = budget, options
        # The loop may replace its optimizer, whose state must not stay alive here.
        self._passed = None if optimizer is None else weakref.ref(optimizer)
        self._has_ladder = can_follow_shapes(options, agreement.size)
        self._source = CompiledStep(model, units) if units else EagerStep(model, options)
        self._failed_traces = 0
        """How many traces have failed because backward raised an error."""
        self._unseen_steps = 0
        """How many steps of an optimizer were seen before any training call of the model."""
        self._calls = 0
        self._exchange = 0
        """The number of this training call. It is equal on all ranks, and is part of the names of messages between ranks.

        Counting begins at 0 again when all ranks begin anew.
        """
        self._is_removed = False
        self._pressure = Pressure(room)
        self._known = Knowledge(options, JointTraces(agreement, model), PlanRoom())
        self._remembered: dict[frozenset[str], Remembered] = {}
        """Plans and measurements for each set of frozen parameters (by name). The current set is the last entry."""
        self._state_at_work: StateAtWork | None = None
        """The object that keeps optimizer state offloaded, or None if the current plan does not offload optimizer state."""
        self._loop_watch: LoopWatch | None = None
        """The object that watches whether the loop lets parameters be stepped in backward, and then steps them; None if the
        options do not allow that, or if the loop does not.
        """
        self._state_at_begin = 0
        """The bytes of optimizer state when the running step began."""
        self._has_waited = False
        """Whether a warning said that attach waits for a call that trains parameters."""
        self._work = PlansAtWork(agreement, model, verify_every)
        self._retry = Retry(model, self)
        self._steps = StepWatch(self._source.watched, self._before_call, self._step_ended, self._before_parts)
        if self._steps.device.type == "cpu":
            prepare_for_threads()  # the loop may run in another thread
        with contextlib.suppress(InvalidRegions):  # the first training call raises it
            self._watch_parts()
        self._work.on_larger_calls = self._steps.larger_call
        self._watch = OptimizerWatch(optimized_parameters(model), after_step=self._optimizer_stepped)
        self._context = ContextWatch(inner_module(model), None)

    # What a user sees

    @property
    def state(self) -> State:
        """Which plan the model runs under now."""
        return self._known.state

    @property
    def plan(self) -> Plan | None:
        """The current plan, or ``None`` until the first training step has begun, and after a refused budget. Once that step is
        over, this is the plan for the budget.

        Its peaks belong to the traced step. A note of the plan compares them with the peaks of the training steps, which
        the handle's text shows. With several ranks there is no note: each rank has measured other peaks, and ranks that share
        a plan show the same one.
        """
        plan, figures = self._work.plan, self.figures
        if plan is None or figures is None or self.agreement.size > 1:
            return plan
        if not (figures.unseen_bytes or figures.measured_peak_bytes):
            return plan
        known, note, noted = self._noted
        if known is not plan or note != figures.note:
            note = figures.note
            noted = msgspec.structs.replace(plan, notes=(*plan.notes, note))
            self._noted = plan, note, noted
        return noted

    @property
    def is_calibrating(self) -> bool:
        """True until the plan for the budget is made. Until then an eager model runs under the plan with the lowest peak."""
        return self.state is State.MEASURING or (self.is_compiled and self._work.plan is None)

    @property
    def is_compiled(self) -> bool:
        """True if the plan decides about parts that torch.compile compiles."""
        return isinstance(self._source, CompiledStep)

    @property
    def is_trying(self) -> bool:
        """True while the model runs in order to make a plan. Such runs are not training steps."""
        return self._steps.is_looking_away

    @property
    def peak_bytes(self) -> int:
        """The highest measured peak of a step under a plan for the budget, in bytes. It is 0 until a step was measured."""
        return self._steps.peak_bytes

    @property
    def figures(self) -> TrainingFigures | None:
        """The measured and predicted figures of the training under its current plan, or ``None`` before the plan for the budget
        is made. Figures include the bytes that the loop's own step needed in addition to the traced step.
        """
        if self.state is not State.RUNNING:
            return None
        unseen_bytes = 0 if self.is_compiled else self._known.room.account.measured_bytes()
        if self._known.shaped is not None and self._known.served is not None:
            unseen_bytes = self._known.shaped.measured_bytes(self._known.served)
        return TrainingFigures.of(
            self._current_plan, unseen_bytes=unseen_bytes, measured_peak_bytes=self._steps.peak_bytes
        )

    def headline(self) -> str:
        """Return one line that names the model, its budget, and what happens to it now."""
        meaning = "removed, the model is unmanaged" if self._is_removed else self.state.meaning
        return f"plimsoll.attach({type(self.model).__name__}, budget {self._budget.shown}): {meaning}"

    def _shown_plan(self) -> Plan | None:
        return self.plan if self.state is State.RUNNING else None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults (rebuilt values that differed from the true ones) that ``verify_every`` has found so far, under all
        plans.
        """
        return self._work.faults

    def outcomes(self) -> tuple[RegionOutcome, ...]:
        """Return, for each region (managed module), how its calls were handled so far: with recomputation, by keeping
        everything, or without hooks (see `RegionOutcome`). The result is empty before the first plan.
        """
        return self._work.outcomes()

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one training step and return its result. If it runs out of memory, restore the state from before the step, switch
        to a plan with a lower peak, and run the step again.

        If planning failed before the first plan, everything is removed from the model. See `plimsoll.engine.apply.Handle.step`.
        """
        try:
            return self._retry.run(function, *args, **kwargs)
        except BaseException:
            if self.state is State.GIVEN_UP:
                self.remove()
            raise

    def remove(self) -> None:
        """Stop managing the model: remove the plan and all hooks. Calling it twice does no harm.

        A backward that comes later still computes the right gradients: the graph holds all that rebuilds its tensors.
        """
        self._is_removed = self.state is not State.GIVEN_UP  # then the headline says why
        self._steps.end_step()
        for each in (self._steps, self._watch, self._work, self._source, self._context):
            each.remove()
        self._release_state()
        self._forget_loop()
        if self.state is State.MEASURING:
            self._known.state = State.UNTRACED

    # Events

    def _react(self, event: TrainingEvent, *arguments: Any, **named: Any) -> Any:
        """Look up the method for this event in the current state in ``states.TABLE``, call it, and return its result."""
        reaction = TABLE[event][self.state]
        result = getattr(self, reaction.method)(*arguments, **named)
        assert self.state in reaction.leads_to, f"{event.name} has led to {self.state}"
        return result

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Runs before each training call. React to all that has happened since the last call, then apply the plan for this
        call.
        """
        if is_capturing(self._steps.device.type):
            self._refuse_unready(situation)  # keep the current plan: a CUDA graph that replays does not call this hook
            return
        if self._is_waiting(args, kwargs, situation.shapes):
            return
        self._calls += 1
        self._exchange += 1
        if self._watch.is_settled:
            self._watch.remove()  # not in the optimizer's own hook: torch iterates over all hooks at that moment
        try:
            if situation.thawed and self._steps.is_between_steps:
                self._react(TrainingEvent.THAWED)
                situation = situation._replace(thawed=frozenset())  # the next trace counts them
            call = TrainingCall(args, kwargs, situation)
            for event in self._events(call):
                self._react(event, call)
        except BaseException as error:
            self._react(TrainingEvent.FAILED, error)
            if isinstance(error, BudgetBelowFloor):
                name_batch(error, situation)
            if not isinstance(error, _RaisedByModel):
                raise
            # The call itself raises this too, and only then has it moved random states and running statistics as far as it does
            # without a budget. A loop may catch the error and go on.
            if error.own is not None:
                self._steps.raise_unless_it_fails(error.own)
        if self._steps.is_between_steps:
            self._state_at_begin = self._watch.bytes_now
        if self.state is State.RUNNING:
            self._known.served = situation.shapes
            self._steps.meter_if_new(args, kwargs, situation, self._known.metered)

    def _is_waiting(self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> bool:
        """Return True if this call trains no parameter, and would have to be traced or measured.

        A loop may freeze the model for a while, for instance to attack its input, or while a generator trains through it. Plans
        are made in calls that train the model. Until then, the current plan stays.
        """
        if self.agreement.size > 1 or (self.state is State.RUNNING and not self._must_trace(shapes)):
            return False
        if any(each.requires_grad for each in every_parameter(self.model)):
            return False
        is_untraced = self.state is State.UNTRACED
        if is_untraced and not self._has_waited and any(each.requires_grad for each in call_tensors(args, kwargs)):
            self._has_waited = True
            warn_of_frozen(self.model)
        if self.state is State.RUNNING and self._known.shaped is not None:
            self._run(self._known.shaped.choose_unseen(shapes))  # its batch is new, so only the lowest plan is safe
        return True

    def _must_trace(self, shapes: Shapes) -> bool:
        """Return True if plans exist, and a call of these shapes would be traced for them."""
        is_known = self._is_covered(shapes) if self._known.shaped is None else not self._known.shaped.lacks(shapes)
        return self._known.traces_left > 0 or not is_known

    def _is_covered(self, shapes: Shapes) -> bool:
        """Return True if each shape gets plans of its own, or if the plan that all batches share is for shapes as large."""
        return self._has_ladder or self.is_compiled or any(covers(each, shapes) for each in self._known.shapes)

    def _watch_parts(self) -> None:
        """Also follow steps that call the model's regions directly instead of the model."""
        if not self.is_compiled:
            self._steps.watch_parts(find_regions(self.model, self._known.options.regions))

    def _before_parts(self, part: str, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        """Runs before a step that calls parts of the model instead of the model. The batch of such a step is unknown, so the
        step runs under the plan with the lowest peak, and is measured.
        """
        if self.state is not State.RUNNING or is_capturing(self._steps.device.type):
            return
        if self._known.shaped is not None:
            self._run(self._known.shaped.choose_unseen(situation.shapes))
            levels = self._steps.levels
            levels.expected_forward_bytes, levels.expected_peak_bytes = self._known.shaped.expected()
        self._known.served = None
        self._state_at_begin = self._watch.bytes_now
        self._work.begin_step(part)
        self._steps.meter_if_new(args, kwargs, situation, self._known.metered)

    def _events(self, call: TrainingCall) -> Iterator[TrainingEvent]:
        """Find the events to react to before a training call, and yield them one by one. A reaction may change the state, so
        each event is looked for only after the reaction to the previous one.
        """
        if self.state is State.RUNNING:
            change = self._change_before(call)
            if change is not None:
                yield change
        else:
            yield TrainingEvent.CALL
        if self.state is State.RUNNING:
            yield TrainingEvent.CALL
            # Not between micro-batches. A loop that clears its gradients late begins every step with some.
            begins = self._steps.follows_update or not call.situation.accumulates
            if self._steps.is_between_steps and begins and self._is_room_changed(call.situation):
                yield TrainingEvent.ROOM_CHANGED

    def _change_before(self, call: TrainingCall) -> TrainingEvent | None:
        """Return the most important event since the last plan was made (such as new optimizer state), or ``None`` if nothing
        has changed.
        """
        planner, situation = self._planned_step.planner, call.situation
        begins = self._steps.is_between_steps
        if not self._is_covered(situation.shapes):
            return TrainingEvent.LARGER_BATCH
        if self._known.traces_left and begins:
            return TrainingEvent.RAN_MORE
        if self._known.corrected is not None:
            return TrainingEvent.EXCEEDED
        if situation.in_flight > planner.in_flight:
            return TrainingEvent.MORE_FORWARDS
        if begins and self._has_fewer_forwards(planner.in_flight):
            return TrainingEvent.FEWER_FORWARDS
        if self._known.counted.is_behind(self._watch):
            return TrainingEvent.NEW_STATE
        if begins and self._is_held_changed():
            return TrainingEvent.LOOP_HOLDS
        return None

    def _step_ended(self) -> None:
        if self._work.plan is not None and self.state in TABLE[TrainingEvent.STEP_ENDED]:
            self._react(TrainingEvent.STEP_ENDED)

    def tighten(self, *, is_own: bool) -> bool:
        """Called after a step ran out of memory. Switch to a plan with a lower peak, and return True if some rank found one."""
        self._steps.forget()
        # The ranks stopped in different calls, but the number of the call names their exchanges.
        self._exchange = 0
        self._known.traces.begin_anew()
        if not self._watch.is_settled:
            self._watch_optimizer()
        return bool(self._react(TrainingEvent.OUT_OF_MEMORY, is_own=is_own))

    def floor(self, *, is_optimizer: bool, is_own: bool) -> BudgetBelowFloor | None:
        """Return the error to raise when a step ran out of memory and no plan has a lower peak.

        Return ``None`` before there is a plan, and if only other ranks ran out of memory.
        """
        if self._known.traced is None:
            return None
        planner, measured_bytes = self._known.traced.planner, self._known.room.account.measured_bytes()
        if self._known.shaped is not None:
            if not is_own:
                return None
            planner, measured_bytes = self._known.shaped.current_planner() or (planner, measured_bytes)
        return floor_of(planner, measured_bytes, is_optimizer=is_optimizer)

    def _optimizer_stepped(self) -> None:
        """Called after each optimizer step. Forget graphs that still wait for a backward. If the optimizer trains the model but
        the model was never called, warn once.
        """
        self._steps.graphs.abandon()
        # New state raises every step's peak, so all situations are measured again. A compiled plan counts the state ahead.
        if not self._watch.is_settled and not self.is_compiled:
            self._known.metered = MeteredSituations()  # all situations are new again
        if self._calls == 0 and every_gradient(self.model):
            # The first such step may have begun before attach was called.
            self._unseen_steps += 1
            if self._unseen_steps == 2:
                warn_of_unseen(self.model, self._steps.parts.seen)

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that the user has passed, while it exists."""
        return None if self._passed is None else self._passed()

    # Reactions: any state

    def know_nothing(self) -> None:
        """Forget all plans and measurements, so that the next call is treated as the first one."""
        room = PlanRoom(MemoryAccount(withheld=self._known.room.account.withheld))
        self._known = Knowledge(self._asked, JointTraces(self.agreement, self.model), room)

    def recall(self) -> None:
        """Called if parameters are trained that were frozen when plans were made. If the same parameters were trained earlier,
        continue with the plans and measurements from then. Otherwise begin anew.

        A loop may train parts of a model in turns. Without this, it was traced again at every turn, and was 60 times as slow.
        """
        if self.is_compiled or self.agreement.size > 1:  # all ranks would have to recall together
            self.know_nothing()
            return
        if self._work.has_moved():
            self._remembered.clear()
        elif self._known.traced is not None:
            if self.state is State.MEASURING:
                self._watch.remove()  # it has seen the measured step, and must not see steps of other parameters
            left = Remembered(self._known, self._watch, self._steps.measured, self._work.plan)
            self._remembered.pop(self._known.frozen, None)
            self._remembered[self._known.frozen] = left
            while len(self._remembered) > _MOST_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        frozen = _frozen(self.model)
        # Plans for a step that trains more parameters also hold: it saves more.
        found = (
            frozen if frozen in self._remembered else next((each for each in self._remembered if each < frozen), None)
        )
        if found is None:
            self.know_nothing()
            return
        withheld = self._known.room.account.withheld
        remembered = self._remembered.pop(found)
        self._known, self._steps.measured = remembered.knowledge, remembered.measured
        self._known.room.account = self._known.room.account.withholding(withheld)
        self._steps.is_reordered = False
        self._steps.note_frozen()
        if self.state is State.RUNNING:
            self._count_all_state()
        else:  # the account is made from the remembered watch
            self._watch.remove()
            self._watch = remembered.watch
        if remembered.plan is not None:
            self._run(remembered.plan)  # the plan in force was made for the other parameters

    def _count_all_state(self) -> None:
        """Count the state that optimizers have made while other parameters were trained, and observe their steps."""
        if not (self._watch.is_watching or self._watch.is_settled):
            optimizers = self._watch.optimizers
            self._watch = OptimizerWatch(
                optimized_parameters(self.model), optimizers, after_step=self._optimizer_stepped
            )
        new_bytes = self._known.counted.take_found(self._watch.bytes_now)
        self._known.room.account = self._known.room.account.adding_state(new_bytes)

    def give_up(self, error: BaseException) -> None:
        """Called if a call failed before the plan for the budget existed. Stop managing the model if planning itself failed.
        After an error of the model, plan again in the next call.
        """
        self._progress("stopped", 1.0)
        if isinstance(error, PlimsollError):
            self._known.state = State.GIVEN_UP
            # Within `step`, the step may run again, and is planned then. If it does not, `step` removes everything.
            if not self._retry.is_running:
                self.remove()
                self._work.plan = None  # it was measured to exceed the budget

    def keep_plan(self, error: BaseException) -> None:
        """Called if a call failed under a plan for the budget. Keep the plan, because the error concerns only this call."""

    def have_none_tighter(self, *, is_own: bool) -> bool:
        """Called if a step ran out of memory before the plan for the budget exists. No other plan has a lower peak then, so the
        step runs once more as before.
        """
        if self.state is State.GIVEN_UP:
            self._known.state = State.UNTRACED  # the step begins again, and so does planning
        return self._no_rank_tightens() if self._has_ladder else False

    # Reactions: untraced

    def trace_first_call(self, call: TrainingCall) -> None:
        """Trace the first training call, and make the first plan from it. All ranks do so together."""
        with self.agreement:
            self.agreement.same("the first batch", facts_of(self._task(call)))
            self._begin(call)

    def _begin(self, call: TrainingCall) -> None:
        """Trace a call and make the plan for it. If the current plan is enough for the call, keep that plan."""
        self._steps.note_frozen()
        self._known.frozen = _frozen(self.model)
        self._watch_parts()
        self._known.traces = JointTraces(self.agreement, self.model)
        if isinstance(self._source, CompiledStep):
            self._begin_compiled(call, self._source)
        else:
            self._begin_eager(call)
        self._known.shapes.append(call.situation.shapes)  # not if it was refused: the next such batch is refused too

    def _begin_compiled(self, call: TrainingCall, source: CompiledStep) -> None:
        """Make the plan for the budget from the first call of a model that torch.compile compiles, and apply the plan."""
        # Without a reduction, gradients wait, so later micro-batches of the step begin with existing gradients.
        accumulates = call.situation.accumulates or is_without_reduction(self.model)
        self._progress.begin("compiling")
        self._progress.write()  # compiling takes seconds
        with self._tracing():
            planner, plan, unseen_bytes = source.plan(
                self.agreement, self._task(call), self._known.options, self._budget, accumulates=accumulates
            )
        self._known.traced = PlannedStep(planner.alone(), call.situation.shapes, accumulates)
        self._watch_optimizer()
        self._known.counted.begin(self._watch, plan)
        self._known.metered = MeteredSituations([planned_situation(plan.signature, plan.in_flight)])
        withheld = self._known.room.account.withheld
        self._known.room.account = MemoryAccount(outside_model=unseen_bytes, withheld=withheld)
        self._run_from_now_on(self._known.traced, plan)

    def _begin_eager(self, call: TrainingCall) -> None:
        """Trace the call, apply the plan with the lowest peak, and begin to measure the step. If the current plan keeps the
        call within the budget, only keep this plan.
        """
        if self._known.traced is None:
            self._progress.begin("tracing")
        task = dataclasses.replace(self._task(call), optimizer=optimizer_in_view(self.model, self._optimizer))
        with self._tracing():
            planned = functools.partial(
                first_planner,
                self.agreement,
                task,
                budget=self._budget,
                optimizer_is_optional=task.optimizer is not self._optimizer,
                taken_bytes=self._known.room.account.total_bytes() + self._steps.waiting_bytes,
            )
            report = part_of(self._progress, 0.0, 0.5) if self._known.traced is None else silent
            planner, error_scale = planned(options=self._known.options, progress=report)
            if self._known.options.may_tile and self._known.traced is None:
                planner = with_best_tiles(planner, task, lambda options: planned(options=options)[0])
                self._known.options = planner.options  # later steps run in the same tiles
            if self._known.options.may_offload_state and self._known.traced is None:
                planner = with_offloaded_state(planner, task)
                self._known.options = planner.options  # later steps offload the same state
            if self._known.options.may_step_in_backward and self._known.traced is None:
                self._watch_loop(checked_optimizer(task, STEP_IN_BACKWARD))
            traced = PlannedStep(
                planner,
                call.situation.shapes,
                call.situation.accumulates,
                error_scale=error_scale,
                batch_bytes=self._steps.held.batch_bytes,
            )
            if self._known.traced is not None and self._is_enough_for(traced, self._known.traced):
                self._known.traced = dataclasses.replace(traced, planner=self._known.traced.planner)
                return
            planner.wait_for(1 if self._known.traced is None else self._known.traced.planner.in_flight)
            try:
                lowest = self._lowest_to_measure(planner, task, error_scale)
            except BudgetBelowFloor:
                if self.state is State.RUNNING:
                    self._log_trial(planner, task, "the plan with the lowest peak")
                    if self._has_ladder:
                        self._follow_lowest(traced)
                raise
            if not self._known.lowest.is_over:
                self._log_trial(planner, task, "the plan with the lowest peak")
        self._known.traced = traced
        if self._work.has_moved():
            self._work.remove()
        self._run(lowest)
        self._known.state, self._known.is_mixed = State.MEASURING, False
        self._progress("measuring the first step", 0.6)
        self._measure(call)

    def _follow_lowest(self, traced: PlannedStep) -> None:
        """Choose from now on from the plans of a newly traced step, although none of them keeps to the budget.

        The plans before do not know what this step saves more, so they keep it. When fake quantization was switched on in
        mid-run, steps took 32 MiB under the old plan, and 20 under the lowest new one.
        """
        traced = dataclasses.replace(traced, planner=traced.planner.alone())
        if self._work.has_moved():
            self._work.remove()
        self._known.traced = traced
        self._run_from_now_on(traced, traced.planner.lowest_for_now(traced.error_scale))

    def _lowest_to_measure(self, planner: StepPlanner, task: TrainingTask, error_scale: float) -> Plan:
        """Return the plan with the lowest peak for the first step.

        If its peak exceeds the budget, the step runs all the same if the device has room for it. Its measurement contains what
        the trace does not: the loop's loss, existing gradients, the optimizer. So one refusal can name a budget that works. A
        loop with a loss outside of the model and accumulation was refused three times before, each time with a higher budget.

        Raises:
            BudgetBelowFloor: the peak exceeds the budget, and the device may be too small for the step.
        """
        self._known.lowest = LowestSteps()
        try:
            return planner.lowest_allowed(task.step, error_scale)
        except BudgetBelowFloor as error:
            lowest = planner.lowest_for_now(error_scale)
            has_room = free_bytes(self._steps.device) >= 2 * planner.own(lowest).predicted_peak_bytes
            # While a plan for the budget runs, that plan stays in force after a refusal.
            may_exceed = self.measures_before_refusing and self.state is not State.RUNNING
            if not self.agreement.every("room for a step", holds=may_exceed and has_room):
                raise
            # Its frames hold the tensors of a trial, which the measured step would count.
            error.__context__ = error.with_traceback(None).__cause__ = None
            self._known.lowest.is_over = True
            # A trial of this plan takes more than its prediction: it records the regions.
            self._known.lowest.planning_bytes = max(planner.own(lowest).predicted_peak_bytes, planner.tried_bytes)
            return lowest

    def _is_enough_for(self, traced: PlannedStep, earlier: PlannedStep) -> bool:
        """Return True if the current plan can stay. On each rank, the newly traced step must need at most as much memory as the
        step that the plan was made for, and the plan must keep it within the budget.
        """
        planner = traced.planner
        takes_less = planner.extremes.unmanaged_peak_bytes <= earlier.planner.extremes.unmanaged_peak_bytes
        is_kept = (
            self._work.plan is not None
            and takes_less
            and self.state is State.RUNNING
            and not self._work.has_moved()
            and planner.is_kept_by(self._work.plan, self._known.room.account.measured_bytes())
        )
        return self.agreement.every("enough", holds=is_kept)

    # Reactions: measuring

    def calibrate(self, call: TrainingCall) -> None:
        """Called in each training call until the plan for the budget exists. If the last step was measured on all ranks, make
        that plan. Otherwise measure this step.
        """
        with self.agreement:
            self._calibrate(call, self._planned_step)

    def _calibrate(self, call: TrainingCall, traced: PlannedStep) -> None:
        situation = call.situation
        here = Calibration(
            signature=str(facts_of(self._task(call))),
            is_new=not any(covers(known, situation.shapes) for known in self._known.shapes),
            is_same=situation.shapes == traced.shapes,
            is_measured=self._steps.is_between_steps and self._steps.measured is not None,
            in_flight=situation.in_flight,
        )
        everyone = self.agreement.all_of("calibrating", here, Calibration)
        in_flight = max(each.in_flight for each in everyone)
        if in_flight > traced.planner.in_flight and not (self.is_compiled or self._steps.is_between_steps):
            # The plan with the lowest peak of one forward may keep much of it until backward. Three such forwards before one
            # backward took 1.5 times the budget, where the plan for three keeps to it.
            traced.planner.wait_for(in_flight)
            self._run(traced.planner.lowest_for_now(traced.error_scale))
            self._known.is_mixed = True
        # Once a step is measured, a ladder derives plans for other shapes. Otherwise a larger batch must be measured itself.
        can_follow = self._has_ladder and all(each.is_measured for each in everyone)
        if all(each.is_new for each in everyone) and len({each.signature for each in everyone}) == 1 and not can_follow:
            self._begin(call)
            return
        if here.is_new and not can_follow:
            self._stay(situation)
        is_due = self._known.lowest.tries == _MOST_TRIES and self._steps.is_between_steps
        if all(each.is_measured for each in everyone) or is_due:
            if self._step_in_backward(call, must=False):
                return
            has_trial = not can_follow or all(each.is_same for each in everyone)
            joins = situation.accumulates and not traced.accumulates
            try:
                self._settle(traced, self._task(call) if has_trial else None, in_flight)
            except BudgetBelowFloor:
                if self._offload_more(call) or self._step_in_backward(call, must=True):
                    return
                if not joins:
                    raise  # if it joins, a plan for existing gradients may still fit
            if joins and self.state is State.MEASURING:
                # The step was traced without existing gradients, but this loop accumulates. With gradients the peak is at
                # another moment, so another plan has the lowest peak: EfficientNet-B0 over two micro-batches was refused below
                # 116.5 MiB, and fits 105 after a new trace.
                self._begin(call)
                return
        if self.state is State.MEASURING:
            self._measure(call)

    def _offload_more(self, call: TrainingCall) -> bool:
        """Called if no plan fits after the first step was measured. If less optimizer state is offloaded than possible, offload
        all that is possible, begin anew, and return True.

        The share of offloaded state was chosen for the traced step. The loop's own step may need more memory: a loss outside of
        the model, or gradients that wait.
        """
        if not self._known.options.may_offload_state:
            return False
        task = dataclasses.replace(self._task(call), optimizer=optimizer_in_view(self.model, self._optimizer))
        most = most_offloaded(self._planned_step.planner, task)
        if most is None or most.chunks == (self._known.options.state and self._known.options.state.chunks):
            return False
        self._known.options = dataclasses.replace(self._known.options, state=most)
        self._begin(call)
        return True

    def _watch_loop(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to watch whether the loop lets parameters be stepped in backward."""
        check_steps_in_backward(self.model, optimizer)
        self._forget_loop()
        self._loop_watch = LoopWatch(self.model, optimizer)

    def _forget_loop(self) -> None:
        """Stop watching the loop, and stop stepping parameters in backward."""
        found, self._loop_watch = self._loop_watch, None
        if found is not None:
            found.remove()

    def _step_in_backward(self, call: TrainingCall, *, must: bool) -> bool:
        """Called after a whole step of the loop was watched. If the loop does not need all gradients at once, and a plan that
        steps parameters in backward is faster, begin anew with such plans, and return True.

        With ``must``, no plan fits that steps them at the end, so the speed does not matter.
        """
        watch = self._loop_watch
        planner = self._planned_step.planner
        if watch is None or watch.steps is not None or not watch.has_watched:
            return False
        if planner.fits_unmanaged() and not must:
            return False
        if watch.reason:
            announce_no_backward_steps(watch.reason)
            self._forget_loop()
            return False
        task = dataclasses.replace(self._task(call), optimizer=optimizer_in_view(self.model, self._optimizer))
        steps = all_steps(planner, task) if must else with_backward_steps(planner, task).options.backward_steps
        if steps is None:
            return False
        assert task.optimizer is not None, "the steps were chosen for it"
        self._known.options = dataclasses.replace(self._known.options, backward_steps=steps)
        watch.start(
            task.optimizer, steps
        )  # before the trace, which must not find gradients that later steps do not have
        self._begin(call._replace(situation=call.situation._replace(accumulates=False)))
        return True

    def _measure(self, call: TrainingCall) -> None:
        """Measure the step that begins with this call. If this call is within a step that has already begun, do nothing."""
        if not self._steps.is_between_steps:
            return
        self._known.lowest.tries += 1
        self._watch_optimizer()
        if self._known.lowest.tries == 1:
            self._known.lowest.carried.note_before(self._steps.device)
        self._known.lowest.recorded_calls = self._work.recorded_calls
        self._known.held_at_plan_bytes = self._steps.held.bytes
        # Count what the loop has kept since the first measurement. Without that, a sharpness-aware loop, whose perturbations
        # exist before its second step begins, trained at 1.15 times its budget.
        carried = self._known.lowest.carried if self._known.lowest.tries > 1 else None
        self._steps.meter(call.args, call.kwargs, carried, with_optimizer=True)

    def _settle(self, traced: PlannedStep, task: TrainingTask | None, in_flight: int) -> None:
        """Make the plan for the budget, after the first step was measured. Measured bytes that the trace does not contain are
        added to the account.

        Args:
            traced: the step that was traced.
            task: another step of the same shape, which can be run to try the plan, or None.
            in_flight: the number of forwards before one backward.

        Raises:
            BudgetBelowFloor: the measured peak of the lowest plan exceeds the budget.
        """
        planner, lowest, tried = traced.planner, self._work.plan, self._known.lowest
        measured, self._steps.measured = self._steps.measured, None
        assert lowest is not None
        assert planner.budget_bytes is not None
        if measured is not None and not tried.is_over:
            peak_bytes = max(measured.step_peak_bytes, measured.optimizer_peak_bytes) + self._watch.bytes_before
            if peak_bytes > planner.budget_bytes:
                why = "this step was traced and recorded before Plimsoll had measured a whole step"
                if in_flight > 1:
                    why = (
                        f"{in_flight} forwards of the model waited for one backward, which only the last of them shows"
                    )
                log_planning_overrun(peak_bytes, planner.budget_bytes, why, "the plan counts what this step has shown")
        if self._known.is_mixed and measured is not None and tried.tries < _MOST_TRIES:
            # The first forwards of this step ran under plans for fewer forwards. Measure a step under one plan: such a loop was
            # refused below 16.5 MiB where it needs 10.
            self._known.is_mixed = False
            return
        if in_flight > planner.in_flight:
            planner.wait_for(in_flight)
            lowest = planner.lowest(traced.error_scale)
        own = planner.own(lowest)
        self._watch.count_running()
        self._known.counted.begin(self._watch, own)
        recording_bytes = planner.recording_bytes if tried.tries == 1 else 0  # only the first step recorded the plan
        was_blocked = self._steps.was_blocked
        taken, measured_bytes = taken_beside(measured, self._watch, own, recording_bytes, was_blocked=was_blocked)
        self._known.room.account = dataclasses.replace(
            self._known.room.account,
            optimizer_state=self._known.counted.bytes - planned_state_bytes(own),
            waiting_gradients=taken.lasting_bytes,
        ).measuring(measured_bytes)
        if self.agreement.size == 1 and self._takes_more_to_record(planner, measured_bytes):
            return  # measure the next step, which records less
        if measured is not None:
            state_bytes = max(self._watch.bytes_after, planned_state_bytes(own))
            # At the lowest peak, a block's backward may be higher than the loss and hide it. Plans that keep more then exceeded
            # the budget by up to 3% in the second step. So the loss is also counted at its own moment.
            planner.count_loss(own, measured.loss_peak_bytes - (measured_bytes - taken.lasting_bytes - state_bytes))
        floor_bytes = planner.ranks.worst_bytes(taken.bytes)
        most_bytes = planner.ranks.worst_bytes(taken.most_bytes)
        tried.peak_bytes = max(tried.peak_bytes, floor_bytes)
        tried.rest_bytes = max(tried.rest_bytes, planner.ranks.worst_bytes(taken.optimizer_bytes))
        # No activations are left when the optimizer steps, so no plan lowers that peak.
        if tried.rest_bytes > planner.budget_bytes:
            # What the step has left behind may be freed before the next peak, so measure the next step too. A MAML loop was
            # refused below a budget above its unmanaged peak.
            if most_bytes > floor_bytes and tried.tries < (_MOST_OVER if tried.is_over else _MOST_TRIES):
                return
            is_optimizer = tried.rest_bytes >= floor_bytes or not tried.is_over
            raise planner.refusal(lowest, self._refused_bytes(most_bytes), is_optimizer=is_optimizer)
        try:
            plan = self._confirmed(traced, task)
        except BudgetBelowFloor as error:
            if measured is None and tried.is_over:
                raise  # only the trace tells what such a step needs
            if floor_bytes > planner.budget_bytes:
                if tried.is_over and most_bytes > _SURE * floor_bytes and tried.tries < _MOST_OVER:
                    return  # measure the next step: it begins with the bytes that this one left behind
                raise planner.refusal(lowest, self._refused_bytes(most_bytes)) from error
            if most_bytes > planner.budget_bytes and tried.tries < _MOST_TRIES:
                # `most_bytes` is an estimate: this step recorded the plan, and began without what it left behind. Measure a
                # step that begins with those bytes and does not record.
                return
            plan = msgspec.structs.replace(planner.lowest(traced.error_scale), budget_bytes=planner.budget_bytes)
        if self._has_ladder:
            self._known.traced = traced = dataclasses.replace(traced, planner=planner.alone())
        # What the measured step left behind is in the account too.
        self._known.held_at_plan_bytes = max(self._known.held_at_plan_bytes, self._steps.held.bytes)
        if tried.is_over:  # and the measured step has shown that a plan fits
            why = "its trace was predicted to exceed the budget, with copies in memory of the batch, gradients, and buffers"
            taken_bytes, budget_bytes = (
                tried.planning_bytes + self._copied_bytes(planner, task),
                planner.own_budget_bytes,
            )
            taken_bytes += max(
                0, self._watch.bytes_before - planned_state_bytes(own)
            )  # a trial counts what the plan counts
            if budget_bytes is not None and taken_bytes > budget_bytes:
                log_planning_overrun(taken_bytes, budget_bytes, why, "they were measured to fit")
        self._run_from_now_on(traced, plan)
        if not (
            self._watch.is_watching or self._watch.is_settled
        ):  # this set was measured before other sets were trained
            self._count_all_state()
        # Ranks that share one plan do not watch the device: to change the plan, they would exchange messages in every step.
        if self._has_ladder or self.agreement.size == 1:
            self._pressure.watch(self._steps.device, self._steps.beside_bytes or 0)

    def _takes_more_to_record(self, planner: StepPlanner, measured_bytes: int) -> bool:
        """Return True if the measured step recorded calls, and what it took beyond the trace decides about the plan.

        A recorded call runs each op twice. Two GRUs took 2 MiB for that, and were refused below 1.08 times their unmanaged
        peak. Recording takes less than the step that is recorded. More than that, or more than the budget, has another cause.
        """
        assert self._work.plan is not None
        tried, budget_bytes = self._known.lowest, planner.budget_bytes or 0
        has_recorded = self._work.recorded_calls > tried.recorded_calls
        is_scarce = planner.extremes.unmanaged_peak_bytes + measured_bytes > budget_bytes
        most_bytes = min(budget_bytes, planner.own(self._work.plan).predicted_peak_bytes)
        is_much = _MUCH * budget_bytes < measured_bytes <= most_bytes
        return tried.tries < _MOST_TRIES and has_recorded and is_scarce and is_much

    def _refused_bytes(self, most_bytes: int) -> int:
        """Return the budget that ``BudgetBelowFloor`` advises after steps were measured. ``most_bytes`` is the upper bound of
        the last step's peak.

        If the steps exceeded the budget, a hundredth is added: the first steps under the advised budget are traced for it and
        may differ by some KiB (0.4% of a model of 1.7 MiB).
        """
        tried = self._known.lowest
        bytes_ = most_bytes if tried.tries == 1 else tried.peak_bytes
        return bytes_ + bytes_ // 100 if tried.is_over else bytes_

    def _run_from_now_on(self, traced: PlannedStep, plan: Plan) -> None:
        """Apply the first plan for the budget. A ladder begins with this plan, and later calls choose from the ladder."""
        traced.planner.gradients = None  # no plan is tried any more, and they are as large as the parameters
        if self._has_ladder:
            # A replay runs no collective, so ranks may run different plans. Only traces with collectives need other ranks.
            company = self._known.traces.among(traced.planner.trace)
            self._known.shaped = ShapePlans(
                self._known.options,
                lambda: self._optimizer,
                self._tracing,
                company,
                self._known.room,
                lambda: self._steps.waiting_bytes,
                accumulates=traced.accumulates,
                may_refuse=self.agreement.size == 1,
                may_measure=self._steps.device.type == "cpu",
            )
            with self._known.traces.together():
                self._known.shaped.begin(traced.shapes, traced.planner, plan)
        self._run(plan)
        self._known.is_mixed = self._steps.is_reordered = False  # what was noticed before is in this plan
        self._known.state = State.RUNNING
        self._progress("done", 1.0)

    def _confirmed(self, traced: PlannedStep, task: TrainingTask | None) -> Plan:
        """Solve the plan for the budget and return it. If possible, run it once to check its peak. That run also records the
        plan's regions.
        """
        planner = traced.planner
        self._progress("solving", 0.7)
        plan = self._solve_for_budget(traced)
        self._progress("trying the plan", 0.9)
        # No trial while the user's profiler runs: on a CPU a trial needs torch's profiler too, and only one can run.
        has_trial = task is not None and any(region.dropped for region in plan.regions) and not is_profiled()
        has_trial = has_trial and self._has_room_to_try(traced, plan, task)
        if task is None or not self.agreement.every("trial", holds=has_trial):
            return plan
        step = dataclasses.replace(task, optimizer=optimizer_in_view(self.model, self._optimizer)).step()

        def resolve(measured_bytes: int) -> Plan:
            self._known.room.account = self._known.room.account.measuring(measured_bytes)
            return self._solve_for_budget(traced)

        # Keep what the trial records. With records of its own, the trial and the next step recorded every region again, which
        # took 11.2 steps' time instead of 3.7.
        planner.managing = self._work.trying if self.agreement.size == 1 else None
        kept = globals_kept(self.model.modules())
        with self._steps.looking_away(), kept, contextlib.nullcontext() if planner.managing else self._work.paused():
            account = self._known.room.account
            seen_bytes = planner.mistake_bytes + (planner.recording_bytes if self._known.lowest.tries == 1 else 0)
            # Existing gradients are in the measurement (the step left them behind) and in the trial: do not count them twice.
            seen_bytes += min(account.waiting_gradients, step.gradient_bytes())
            planner.tried_bytes = 0  # the trial of the lowest plan was logged already
            try:
                return planner.confirmed_beside(plan, step, account.measured_bytes(), resolve, seen_bytes=seen_bytes)
            except InvalidBatch:
                # The call reads the graph of an earlier call, which the backward of a trial would free. Measure its step
                # instead.
                return plan
            finally:
                # Layers that are dropped at random: this call, and so its trial, may run more of them than the traced call.
                # The trial of an Informer exceeded the budget by 15 to 22%.
                self._log_trial(planner, task, "a plan for the budget")

    def _has_room_to_try(self, traced: PlannedStep, plan: Plan, task: TrainingTask | None) -> bool:
        """Return True if a trial (a measured run of the plan), with the copies that the trial makes, stays within the budget.

        Without a trial, the next step shows the peak of the plan, because that step is measured.
        """
        taken_bytes = plan.predicted_peak_bytes + self._known.room.account.measured_bytes()
        taken_bytes += self._copied_bytes(traced.planner, task)
        return taken_bytes <= (traced.planner.budget_bytes or 0)

    def _copied_bytes(self, planner: StepPlanner, task: TrainingTask | None) -> int:
        """Return the bytes of the copies that a trial (measured run of a plan) makes to restore everything later: two copies of
        the buffers and of the parameters that the step writes, one of the batch, and one of the existing gradients.
        """
        batch, device = () if task is None else output_tensors(task.call()), self._steps.device
        named = dict(inner_module(self.model).named_parameters())
        written = [named[name] for name in planner.trace.written if name in named]
        copied_once = [*batch, *every_gradient(self.model)]
        return 2 * storage_bytes([*self.model.buffers(), *written], device) + storage_bytes(copied_once, device)

    def _left_bytes(self) -> int:
        """Return the bytes, without gradients, that the measured first step left behind. A trial (measured run of a plan) does
        not count these bytes.
        """
        waiting_bytes = self._known.room.account.waiting_gradients
        if self._known.traced is not None and not self._known.traced.accumulates:
            trained = [each for each in every_parameter(self.model) if each.requires_grad]
            waiting_bytes -= storage_bytes(trained, self._steps.device)  # this step made the gradients
        return max(0, waiting_bytes)

    def _log_trial(self, planner: StepPlanner, task: TrainingTask, tried: str) -> None:
        """If a trial (measured run of a plan) took more bytes than the budget, log that, and name the plan that was tried."""
        taken_bytes = planner.tried_bytes + self._copied_bytes(planner, task) + self._left_bytes()
        budget_bytes = planner.own_budget_bytes or 0
        if planner.tried_bytes and taken_bytes > budget_bytes:
            why = f"{tried} was run once, with copies in memory of the batch, gradients, and buffers that the model writes"
            log_planning_overrun(taken_bytes, budget_bytes, why, "a larger budget leaves room for these copies")

    # Reactions: running

    def choose_plan(self, call: TrainingCall) -> None:
        """Apply the cheapest plan of the ladder that keeps a batch of this shape within the budget."""
        if self._known.shaped is None:
            return
        self._known.shaped.wait_for(self._planned_step.planner.in_flight)
        task = functools.partial(self._task, call)
        self._run(self._known.traces.plan_for(self._exchange, call.situation.shapes, self._known.shaped, task))
        if self._known.shaped.has_doubt:
            self._known.metered.expect()
        levels = self._steps.levels
        levels.expected_forward_bytes, levels.expected_peak_bytes = self._known.shaped.expected()

    def grow(self, call: TrainingCall) -> None:
        """Called if this rank's batch may need more memory than all earlier ones. If all ranks have such a batch in this call,
        plan again. Otherwise keep the plan.
        """
        facts = facts_of(self._task(call))
        everyone = self.agreement.gathered(f"larger batch in call {self._exchange}", str(facts), str)
        if everyone is None or len(set(everyone)) > 1:
            self._stay(call.situation)
        else:
            with self.agreement:
                self._begin(call)

    def _stay(self, situation: Situation) -> None:
        """Keep the plan that all ranks share and warn, because this rank's batch is larger than the batches that the plan is
        for.
        """
        self._known.shapes.append(situation.shapes)
        self._known.metered.know(situation)
        warn_of_larger(situation)

    def trace_again(self, call: TrainingCall) -> None:
        """Trace this call and plan for it if it needs more. An earlier forward ran more operations than the traced one, and
        only a trace shows whether this call does so too.

        After `_MOST_TRACED_AGAIN` traces without such a call, subtract the measured overshoot from the budget instead.
        """
        self._known.traces_left -= 1
        begun_seconds = time.monotonic()
        try:
            self._begin(call)
        except BudgetBelowFloor as error:
            self._known.traces_left = 0
            warn_of_floor(error, "a forward runs more operations than were planned for")
        except InvalidBatch as error:
            # In MAML, backward continues into the graph of the call before, which a trace would free.
            self._known.traces_left = 0
            warn(f"a training step that needed more than its plan could not be traced, and keeps it: {error.found}")
        self._known.tracing_seconds += time.monotonic() - begun_seconds
        if self.state is State.MEASURING or self._has_traced_long():
            self._known.traces_left = 0
        if self.state is State.RUNNING and not self._known.traces_left and self._known.shaped is not None:
            self._known.shaped.note_peak(self._known.ran_more_bytes)

    def _has_traced_long(self) -> bool:
        """Return True if searches for a forward that runs as many operations have taken too long for another one."""
        step_seconds = 0.0 if self._work.plan is None else self._work.plan.baseline_seconds
        return is_long(self._known.tracing_seconds, step_seconds)

    def correct_account(self) -> None:
        """Called when a step has ended. If the step exceeded the budget, warn, and add the overshoot to the account (bytes that
        predictions lack), so that later plans are tighter.
        """
        planner, plan = self._planned_step.planner, self._current_plan
        limit_bytes = (planner.own_budget_bytes or 0) - self._known.room.account.withheld
        peak_bytes, cause = self._steps.take_peak(self._state_bytes(), self._known.metered, limit_bytes)
        is_mixed, self._known.is_mixed = self._known.is_mixed, False
        if self._steps.parts.first:
            self._judge_parts(peak_bytes, limit_bytes)
            return
        self._known.fewer.step_ended(self._steps.in_flight, planner.in_flight)
        self._announce(is_measured=peak_bytes > 0)
        over_bytes = peak_bytes - limit_bytes
        next_ = "later steps are planned for a budget that is smaller by this amount, if some plan needs less"
        # A model whose modules began to run in another order was up to 39% over its budget in every later step.
        is_other_step = self._known.metered.has_run_more or self._steps.is_reordered
        if over_bytes > 0 and self._work.has_moved():
            is_other_step, cause = True, "modules that the plan manages were replaced by others"
        if self._work.take_other_step() and over_bytes > 0 and not is_other_step:
            is_other_step, cause = True, "it saved tensors that the plan does not name"
        # A rank cannot trace alone: the trace may run collectives, and the other ranks do not know of it.
        may_trace = self._known.shaped is not None and self.agreement.size == 1 and not self.is_compiled
        may_trace = may_trace and not self._has_traced_long()
        is_lowest = self._known.shaped is not None and self._known.shaped.is_floor_measured
        if may_trace and over_bytes > 0 and is_other_step:
            self._known.traces_left, self._known.ran_more_bytes = _MOST_TRACED_AGAIN, peak_bytes
            self._steps.is_reordered = False
            next_ = (
                f"up to {_MOST_TRACED_AGAIN} steps are traced to find one that runs as much; then plans are made for it"
            )
        elif is_mixed:
            # The first forwards kept more than the plan for later steps does, so this peak says nothing about those steps.
            next_ = "later steps are planned for as many forwards"
        elif self._known.shaped is not None and peak_bytes:
            self._known.shaped.note_peak(peak_bytes, self._steps.levels.forward_growth)
            if is_lowest:
                next_ = no_plan_is_lower(peak_bytes)
            elif over_bytes > 0 and self._known.shaped.is_below_floor:
                next_ = "no plan is predicted to need less, so the next step runs under this plan too, and is measured again"
                self._known.metered.expect()
        if over_bytes <= 0:
            return
        if self._known.shaped is None and self.is_compiled:
            next_ = "attach with a smaller budget, or leave allow= out: then plans are made for such steps"
        elif self._known.shaped is None:
            # Plans are discrete: subtracting only the overshoot may select the same plan again. So subtract the plan's whole
            # error if that is more.
            error_bytes = peak_bytes - predicted_before_optimizer(planner.own(plan))
            account = self._known.room.account
            self._known.corrected = account.measuring(max(account.measured_bytes() + over_bytes, error_bytes))
        is_new = self._known.said.is_new(peak_bytes, cause, is_lowest=is_lowest)
        held_bytes = self._known.room.account.held_by_loop
        if held_bytes >= over_bytes:
            # Without these bytes the step would have kept to the budget: a model that was pruned between two steps.
            cause = f"{cause}; since plans were made, the training loop holds {format_bytes(held_bytes)} more"
        if is_new:
            warn_of_overrun(peak_bytes, limit_bytes, cause, next_)
        elif self._known.said.is_logged():
            log_recurrence(peak_bytes, limit_bytes, self._known.said.recurrences, cause)

    def _announce(self, *, is_measured: bool) -> None:
        """Write one line about the first plan for the budget, as soon as a step under it was measured, or after three steps."""
        if self._unannounced_steps is None:
            return
        self._unannounced_steps += 1
        if (is_measured or self._unannounced_steps == _MOST_TRIES) and (figures := self.figures) is not None:
            self._unannounced_steps = None
            announce(figures.line)

    def _judge_parts(self, peak_bytes: int, limit_bytes: int) -> None:
        """Called when a step has ended that called parts of the model instead of the model. Warn of the first such step, and of
        each such step that exceeded the budget by more than the earlier ones. Such steps run under the plan with the lowest
        peak already.
        """
        next_ = (
            "call the model itself, model(batch), so that a plan is chosen for its batch; or attach to the called part"
        )
        if peak_bytes > limit_bytes and is_more(peak_bytes, self._known.said_parts_bytes):
            warn_of_overrun(peak_bytes, limit_bytes, self._steps.called_parts, next_)
        elif not self._known.said_parts_bytes:
            warn_of_parts(self._steps.called_parts, next_, has_lowest=self._known.shaped is not None)
        self._known.said_parts_bytes = max(self._known.said_parts_bytes, peak_bytes, 1)

    def _state_bytes(self) -> int:
        """Return the bytes of optimizer state to add to the measured peak of the step that has ended. They existed when it
        began. A compiled plan counts all state from its first step on.
        """
        return planned_state_bytes(self._current_plan) if self.is_compiled else self._state_at_begin

    def plan_tighter(self, call: TrainingCall) -> None:
        """Plan again, because a step exceeded the budget, or because more forwards than planned now wait for one backward."""
        planner, waiting = self._planned_step.planner, call.situation.in_flight
        corrected, self._known.corrected = self._known.corrected, None
        everyone: list[int] | None = [waiting]
        if self._known.shaped is None:
            everyone = self.agreement.gathered(f"over the budget in call {self._exchange}", waiting, int)
        if waiting > planner.in_flight:
            warn_of_waiting(waiting, planner.in_flight, is_planned=everyone is not None)
            self._known.is_mixed = self._known.shaped is not None and not self._steps.is_between_steps
        if everyone is not None:
            with self.agreement:
                planner.wait_for(max(planner.in_flight, *everyone))
                if corrected is not None:
                    self._known.room.account = corrected
                self._replan("no plan has a lower peak")

    def _has_fewer_forwards(self, planned: int) -> bool:
        """Return True if the latest steps had fewer forwards than ``planned`` before one backward.

        Always False on ranks that share one plan: they would have to agree before each step.
        """
        return self._known.shaped is not None and 0 < self._known.fewer.enough < planned

    def plan_for_fewer(self, call: TrainingCall) -> None:
        """Use plans for fewer forwards before one backward again. `choose_plan` then chooses one of them in the same call."""
        enough = self._known.fewer.enough
        self._known.fewer.planned_fewer()
        log_fewer_forwards(enough, self._planned_step.planner.in_flight)
        self._planned_step.planner.wait_for(enough)

    def count_state(self, call: TrainingCall) -> None:
        """Add new optimizer state to the account (bytes to subtract from the budget). Ranks that share one plan do so only if
        the optimizers of all ranks have made their first step before the same call. Otherwise the plan stays.
        """
        new_bytes = self._known.counted.take_new(self._watch)
        if self._known.shaped is not None:
            self._known.room.account = self._known.room.account.adding_state(new_bytes)
            return
        what = f"first step of the optimizer before call {self._exchange}"
        everyone = self.agreement.gathered(what, new_bytes, int)
        if everyone is None:
            if new_bytes:
                warn_of_state(new_bytes)
        elif any(everyone):
            with self.agreement:
                self._known.room.account = self._known.room.account.adding_state(new_bytes)
                self._replan(f"the optimizer has {format_bytes(new_bytes)} of new state")

    def _is_held_changed(self) -> bool:
        """Return True if the bytes that the training loop holds at the beginning of a step differ from the bytes in the
        account.

        Always False on ranks that share one plan: they would have to agree before each step.
        """
        held = self._steps.held
        if self._calls <= _FIRST_CALLS:
            self._known.held_at_plan_bytes = max(self._known.held_at_plan_bytes, held.bytes)
        if self._known.shaped is None and (self.agreement.size > 1 or self.is_compiled):
            return False
        found_bytes, known_bytes = self._held_bytes(), self._known.room.account.held_by_loop
        is_other = found_bytes != known_bytes
        if self._known.shaped is None:
            # Without a ladder every change is solved for, so a difference must be more than noise.
            is_other = is_more(found_bytes, known_bytes) or is_more(known_bytes, found_bytes)
        return is_other or self._known.counted.bytes < held.state_bytes

    def _held_bytes(self) -> int:
        """Return the bytes that the loop holds now, and did not hold when plans were made."""
        held, traced = self._steps.held, self._planned_step
        batch_bytes = max(0, held.batch_bytes - traced.batch_bytes)
        return max(0, held.bytes - self._known.held_at_plan_bytes) + batch_bytes

    def count_held(self, call: TrainingCall) -> None:
        """Count the bytes that the training loop holds at the beginning of a step, and plan for the budget minus these
        bytes.
        """
        new_bytes = self._known.counted.take_found(self._steps.held.state_bytes)
        self._known.room.account = self._known.room.account.adding_state(new_bytes).holding(self._held_bytes())
        self._replan("the training loop holds more than before")

    def _is_room_changed(self, situation: Situation) -> bool:
        """Return True if the device has too little free memory for the step. Also return True if the device has had more free
        memory than the limit for several steps.
        """
        shaped, budget_bytes = self._known.shaped, self._planned_step.planner.budget_bytes or 0
        measured_bytes = self._known.room.account.measured_bytes()
        if shaped is not None:
            measured_bytes = shaped.measured_bytes(situation.shapes)
        return self._pressure.changes(budget_bytes, self._current_plan.predicted_peak_bytes + measured_bytes)

    def follow_room(self, call: TrainingCall) -> None:
        """Plan for the memory that other programs leave free on the device."""
        self._withhold()
        if self._known.shaped is None:
            self._replan("something else takes memory on the device")
        else:
            self._run(self._known.shaped.choose(call.situation.shapes, self._task(call).signature))

    def _withhold(self) -> None:
        withheld_bytes = self._pressure.withheld_bytes(self._planned_step.planner.budget_bytes or 0)
        self._known.room.account = self._known.room.account.withholding(withheld_bytes)

    def plan_after_out_of_memory(self, *, is_own: bool) -> bool:
        """Called after a step ran out of memory under a plan for the budget. Switch to a plan whose peak is halfway between the
        current plan's peak and the lowest peak. Return True if some rank has such a plan.

        With a ladder, each rank that ran out of memory takes a plan of its own. Without a ladder, all ranks take the same plan.
        """
        if self._known.shaped is not None:
            tighter = self._known.shaped.tighten() if is_own else None
            if tighter is None:
                return self._no_rank_tightens()
            self._run(tighter)
            self._pressure.lower((tighter.budget_bytes or 0) - self._known.room.account.withheld)
            return any(self.agreement.all_of("tighter", True, bool))
        traced = self._planned_step
        if self.is_compiled:
            return self._no_rank_tightens()
        room_bytes = traced.planner.halfway_bytes(self._current_plan, traced.error_scale)
        if room_bytes is None:
            return False
        self._pressure.lower(room_bytes + self._known.room.account.measured_bytes())
        self._withhold()
        self._replan("the step ran out of memory")
        return True

    def _no_rank_tightens(self) -> bool:
        """Report to the other ranks that this rank cannot tighten its plan. Return True if another rank can."""
        return any(self.agreement.all_of("tighter", False, bool))

    # Plans

    @property
    def _planned_step(self) -> PlannedStep:
        assert self._known.traced is not None, "a step was traced before"
        return self._known.traced

    @property
    def _current_plan(self) -> Plan:
        assert self._work.plan is not None, "a plan was applied before"
        return self._work.plan

    def _solve_for_budget(self, traced: PlannedStep) -> Plan:
        """Solve the plan for the tightest rank (the rank with the least memory to spare): for its budget minus its account."""
        planner = traced.planner
        excess_bytes = planner.ranks.excess_bytes(self._known.room.account.total_bytes())
        return planner.solve(planner.budget_bytes, excess_bytes=excess_bytes, error_scale=traced.error_scale)

    def _replan(self, why: str) -> None:
        """Solve the plan again, because the account has changed, and apply it. If no plan fits, warn and apply the plan with
        the lowest peak.
        """
        if self._known.shaped is not None:
            return  # with a ladder, `choose_plan` follows in the same call
        traced = self._planned_step
        try:
            plan = self._solve_for_budget(traced)
        except BudgetBelowFloor as error:
            warn_of_floor(error, why)
            lowest = traced.planner.lowest(traced.error_scale)
            plan = msgspec.structs.replace(lowest, budget_bytes=traced.planner.budget_bytes)
        self._run(plan)

    def _run(self, plan: Plan) -> None:
        """Apply a plan. If a plan with these decisions has never run before, make sure that the next steps are measured."""
        with self._source.away():
            is_other = self._work.run(plan)
        self._keep_state(plan)
        self._keep_steps(plan)
        if is_other and plan.effect not in self._known.seen:
            self._known.seen.add(plan.effect)
            self._known.metered.expect()

    def _keep_state(self, plan: Plan) -> None:
        """Offload the optimizer state that the plan says to offload. Bring all other optimizer state back to the device."""
        found, wanted = self._state_at_work, plan.state
        if wanted is not None and found is not None and found.state.chunks == wanted.chunks:
            return
        if found is not None or wanted is not None:
            self._release_state()
            self._steps.held.state_has_moved()
        if wanted is not None:
            optimizer = optimizer_in_view(self.model, self._optimizer)
            self._state_at_work = StateAtWork(self.model, optimizer, wanted, plan.host_budget_bytes)

    def _keep_steps(self, plan: Plan) -> None:
        """Step the parameters in backward that the plan says to step there."""
        watch, wanted = self._loop_watch, plan.backward_steps
        if watch is None or watch.steps == wanted:
            return
        optimizer = optimizer_in_view(self.model, self._optimizer)
        if wanted is not None and optimizer is not None:
            watch.start(optimizer, wanted)
        elif wanted is None:
            self._forget_loop()

    def _release_state(self) -> None:
        """Bring offloaded optimizer state back to the device."""
        found, self._state_at_work = self._state_at_work, None
        if found is not None:
            found.remove()

    def _task(self, call: TrainingCall) -> TrainingTask:
        task = task_of_call(self.model, call.args, call.kwargs)
        if not isinstance(self._source, CompiledStep):
            return task
        optimizer = optimizer_in_view(inner_module(self.model), self._optimizer)
        return self._source.with_units(dataclasses.replace(task, optimizer=optimizer))

    def _watch_optimizer(self) -> None:
        """Begin to observe the steps of the optimizer that trains the model, and the size of its state. An earlier observer is
        removed.
        """
        self._watch.remove()
        seen = [each for each in (optimizer_in_view(self.model, self._optimizer),) if each is not None]
        self._watch = OptimizerWatch(optimized_parameters(self.model), seen, after_step=self._optimizer_stepped)

    def _refuse_unready(self, situation: Situation) -> None:
        if self._known.served != situation.shapes:
            refuse_capture(
                self._steps.device.type,
                "A training step without a plan",
                why="the first training steps of each shape are traced and timed, to make a plan for it",
                next=WARM_UP,
            )

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Trace steps of this call inside the block, without a plan applied and without a running measurement.

        Errors of the model itself are raised as they would be without a budget, because loops may catch them.
        """
        if is_profiled() and not self.is_compiled:
            warn("this training call is traced with torch's profiler; your profiler does not record the call")
        self._steps.drop()
        try:
            with (
                self._source.away(),
                self._steps.looking_away(),
                self._context.looking_away(),
                self._work.paused(),
                # A loop may collect losses of blocks in a global list. It must not find losses of traced steps there.
                globals_kept(self.model.modules()),
            ):
                yield
        except InvalidBatch as error:
            own = error.__cause__
            if own is None:
                raise
            own.add_note(f"plimsoll: {type(self.model).__name__} raised this while attach traced its training call")
            if self.agreement.size > 1:
                raise own from None  # other ranks wait for this one
            raise _RaisedByModel(own) from None
        except torch.OutOfMemoryError as error:
            # `step` restores the state from before the step and runs it again. Without it the error reaches the loop.
            if self.agreement.size > 1 or self._retry.is_running:
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.name} ({frame.filename}:{frame.lineno})"
            error.add_note(
                f"plimsoll: {type(self.model).__name__} ran out of memory in {place} while attach traced its call"
            )
            # The frames hold what the trace has made. The call itself needs that memory.
            raise _RaisedByModel(error.with_traceback(None)) from None
        except BackwardFailed as error:
            if self.agreement.size > 1 or self._failed_traces == _MOST_TRIES:
                raise
            self._failed_traces += 1
            warn(
                f"{error.found}\n  why   {error.why}\n  next  this step is not planned for; the next one is tried again"
            )
            raise _RaisedByModel(None) from None


def refuse_attached(model: nn.Module) -> None:
    """Raise an error if ``plimsoll.attach`` manages the model or a part of it, also before its first plan exists."""
    for name, module in model.named_modules():
        if any(isinstance(runner, Attachment) for runner in watchers(module)):
            raise PlanMismatch(
                f"plimsoll.attach already manages {name or type(model).__name__}.",
                why="attach makes and applies plans by itself, and two plans cannot decide about the same tensors",
                next="call remove() on the handle of plimsoll.attach before plimsoll.apply, or do not apply a plan",
            )


def _frozen(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are not trained now."""
    return frozenset(name for name, each in model.named_parameters() if not each.requires_grad)
