"""``attach_schedule``: manages the stages of a pipeline under one budget per rank, from the first step on.

The first ``schedule.step(...)`` that trains traces each stage before anything else runs. The trace uses the micro-batch of the
stage's call, or tensors with the shapes of its receive buffers. If any rank cannot meet its budget, all ranks raise an error.
This first step runs at the lowest memory, and its memory is measured as a whole. From the second step on, stages run plans for
the budget minus the bytes that were measured but not traced. Steps are measured until one step keeps to the budget on all
ranks. If an optimizer steps for the first time after that (gradients were accumulated over several steps), its state is
subtracted from the budget, and steps are measured again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.distributed.pipelines.rank_plans import TIMEOUT_SECONDS, RankPlan, RankPlanner, StageAgreement, Standing
from plimsoll.distributed.pipelines.schedules import (
    RankSchedule,
    Schedule,
    ScheduleReport,
    Stage,
    StageReport,
    Wrapped,
    added_seconds,
    first_input,
    initializer,
    loss_of,
    read_schedule,
    trains,
)
from plimsoll.distributed.pipelines.stage_steps import StageStep, bytes_of, trace_stage
from plimsoll.engine.apply import Handle, RemovedAtEnd
from plimsoll.engine.copies import ModelHook
from plimsoll.errors import InvalidModel, PlimsollError
from plimsoll.estimator.pipeline_schedule.orders import most_in_flight
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds
from plimsoll.estimator.rank_estimates import KnownChoices
from plimsoll.planning.explain import optimizer_floor_error
from plimsoll.session.manage import manage
from plimsoll.session.measured_step import OPTIMIZER, MeasuredStep
from plimsoll.session.optimizer_watch import OptimizerWatch
from plimsoll.session.options import Budget, as_patterns
from plimsoll.session.rendezvous.world import current_world
from plimsoll.session.task import check_model
from plimsoll.tracing.meters.memory import storage_bytes
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.torch_internals import is_at_least
from plimsoll.units import check_count, format_bytes

_MOST_STEPS = 5
"""The maximum number of measured steps. If the last of them still exceeds the budget, its plans stay, with a warning."""


class ScheduleAttachment(RemovedAtEnd):
    """Manages the stages of a schedule under one budget. As a context manager, it ends the management at the end of the block.

    ``plans``, by stage, exist after the first training step has begun.
    """

    def __init__(
        self,
        schedule: Schedule,
        budget: Budget,
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        regions: tuple[str, ...] | None,
        verify_every: int,
        agreement: StageAgreement,
    ) -> None:
        self.schedule = schedule
        self.plans: dict[int, Plan] = {}
        self.measured_peak_bytes = 0
        self._rank: RankSchedule = read_schedule(schedule)
        self._budget = budget
        self._budget_bytes = 0
        self._optimizers = tuple(optimizers)
        self._regions = regions
        self._verify_every = verify_every
        self._agreement = agreement
        self._arguments: tuple[Any, ...] = ()
        self._call: dict[str, Any] = {}
        self._steps: dict[int, StageStep] = {}
        self._known_choices: KnownChoices = {}
        self._errors: list[Exception] = []
        self._planner: RankPlanner | None = None
        self._made: RankPlan | None = None
        self._seconds: dict[int, ActionSeconds] = {}
        self._excess_bytes = 0
        self._counted_state_bytes = 0
        self._steps_run = 0
        self.is_calibrating = True
        """Whether steps are still measured, so that plans may change."""
        self._is_tracing = False
        self._measuring: MeasuredStep | None = None
        self._measured: MeasuredStep | None = None
        self._watch: OptimizerWatch | None = None
        self._has_stepped = False
        self._awaits_optimizers = True
        """Whether an optimizer of some rank has not stepped yet, so that its state is not measured."""
        self._handles: dict[int, Handle] = {}
        self._wrapped = [
            Wrapped(schedule, "step", self._step),
            Wrapped(schedule, initializer(schedule), self._initialize),
        ]
        self._hooks = [
            stage.submod.register_forward_pre_hook(
                ModelHook(stage.submod, functools.partial(self._before_forward, index)), with_kwargs=True, prepend=True
            )
            for index, stage in self._rank.stages.items()
        ]

    @property
    def report(self) -> ScheduleReport:
        """A report on this rank's stages under their plans, with predicted and measured figures. ``str`` shows it as text."""
        made = self._made
        return ScheduleReport(
            schedule=type(self.schedule).__name__,
            rank=self._rank.rank,
            budget_bytes=self._budget_bytes,
            predicted_peak_bytes=0 if made is None else made.peak.peak_bytes + self._excess_bytes,
            moment="no step yet" if made is None else made.peak.moment,
            measured_peak_bytes=self.measured_peak_bytes,
            excess_bytes=self._excess_bytes,
            is_calibrating=self.is_calibrating,
            stages=tuple(
                StageReport(index, plan.in_flight, len(plan.regions), self._seconds[index].recompute_seconds)
                for index, plan in sorted(self.plans.items())
                if index in self._seconds
            ),
            added=added_seconds(self._rank.orders, self._seconds, self._rank.stage_count),
        )

    def remove(self) -> None:
        """Restore the schedule and the stages. A second call does nothing."""
        self._stop_measuring()
        if self._watch is not None:
            self._watch.remove()
        for wrapped in self._wrapped:
            wrapped.remove()
        self._drop_hooks()
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        self.is_calibrating = False

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one step of the schedule, and measure it if needed. This method replaces ``schedule.step``."""
        if not trains(self.schedule):
            self._stop_measuring()  # evaluation does not belong to the training step before it
            return original(*args, **kwargs)
        self._arguments, self._call = args, kwargs
        try:
            if self._planner is not None:
                if self.is_calibrating:
                    self._settle()
                elif self._awaits_optimizers:
                    self._look_for_optimizers()
                if self.is_calibrating:
                    self._measure()
            result = original(*args, **kwargs)
            if self._measuring is not None:
                self._measuring.has_trained = True
            return result
        except BaseException as error:
            if self._measuring is not None:
                self._measuring.has_failed = True
            if isinstance(error, PlimsollError) or self._planner is None:
                self.remove()
            if self._planner is None:
                self.plans = {}
            raise
        finally:
            self._arguments, self._call = (), {}  # the batch may be freed between steps

    def _initialize(self, original: Callable[..., Any], args: Any, kwargs: Any, *more: Any, **named: Any) -> None:
        """In the first training step, plan the stages.

        This method replaces the method that a step calls first, with its first micro-batch.
        """
        original(args, kwargs, *more, **named)
        if not trains(self.schedule) or self._planner is not None:
            return
        for index, stage in self._rank.stages.items():
            if index not in self._steps and not self._errors:
                self._begin_stage(index, args if stage.is_first else first_input(stage), kwargs or {})
        self._drop_hooks()
        self._agree_at_first()
        self._measure()  # not earlier: tracing uses its own meter, and on a CPU only one can run

    def _before_forward(self, index: int, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace a stage right before it runs. If torch infers shapes, this happens before everything else in the step."""
        if trains(self.schedule) and not self._is_tracing and index not in self._steps and not self._errors:
            self._begin_stage(index, args, kwargs)

    def _begin_stage(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace a stage, and let it run at its smallest peak in this step. Errors are stored, and raised once all ranks have
        agreed to raise.
        """
        stage, rank = self._rank.stages[index], self._rank
        self._is_tracing = True
        try:
            traced = trace_stage(
                index,
                stage.submod,
                args if stage.is_first else stand_ins(args),
                kwargs,
                loss=self._loss if stage.is_last else None,
                regions=self._regions,
                micro_batches=rank.micro_batches,
            )
            does_return = stage.is_last and self._call.get("return_outputs", True)
            returned_bytes = traced.output_bytes if does_return else 0
            sent_bytes = (0 if stage.is_last else traced.output_bytes) + (0 if stage.is_first else bytes_of(args))
            step = StageStep(
                traced,
                most_in_flight(rank.actions)[index],
                left_bytes=returned_bytes + (sent_bytes if rank.keeps_sends else 0),
                merged_bytes=returned_bytes * rank.micro_batches,
                known_choices=self._known_choices,
            )
            self._steps[index] = step
            self._run(index, step.plan(step.range_bytes[0]))
        except Exception as error:  # noqa: BLE001 - any error: the other ranks wait, so `_agree_at_first` must raise on all
            self._errors.append(error)
        finally:
            self._is_tracing = False

    def _loss(self, output: Any) -> torch.Tensor:
        """Return the loss of the step's first micro-batch, by the schedule's loss function."""
        target = self._call.get("target")
        if isinstance(target, torch.Tensor):
            target = torch.tensor_split(target, self._rank.micro_batches)[0]
        return loss_of(self.schedule, output, target, self._call.get("loss_kwargs"))

    def _agree_at_first(self) -> None:
        """Called in the first training step, after the stages were traced and before a micro-batch runs. If any rank has an
        error, all ranks raise one; otherwise all continue.
        """
        with self._agreement.together("traced"):
            for error in self._errors:
                raise error
            budget_bytes = self._budget.bytes_on(next(iter(self._steps.values())).traced.costs)
            assert budget_bytes is not None
        # The traces do not contain an optimizer, so the state that exists now counts as bytes beyond the predictions.
        self._budget_bytes, self._excess_bytes = budget_bytes, self._state_bytes
        self._counted_state_bytes = self._state_bytes
        mine, _, _ = self._agreement.compare(self._standing(does_fit=False))
        planner = RankPlanner(self._steps, self._rank.actions, self._beside_bytes)
        with self._agreement.together("lowest"):
            planner.solve(budget_bytes, budget_bytes - mine.room_bytes)  # raises below the floor, before the step
            made = planner.lowest()
        self._planner = planner
        self._take(mine, made)

    def _settle(self) -> None:
        """Called after a measured step. If the step was within the budget on all ranks, keep the plans.

        Otherwise plan again. The difference between the measured peak and the plans' prediction is subtracted from the budget.
        """
        assert self._planner is not None
        self._stop_measuring()
        step, self._measured = self._measured, None
        self._steps_run += 1
        with self._agreement.together("noted"):
            if step is not None:
                self._note(step)
        fits = step is not None and self.measured_peak_bytes <= self._budget_bytes
        # The first step runs at the lowest memory, so its plans are replaced even if they fit.
        mine, all_fit, all_stepped = self._agreement.compare(self._standing(does_fit=fits and self._steps_run > 1))
        self._awaits_optimizers = not all_stepped
        if all_fit or self._steps_run >= _MOST_STEPS:
            self._end_calibration(does_fit=fits)
            return
        self._plan_again(mine)

    def _plan_again(self, mine: Standing) -> None:
        assert self._planner is not None
        with self._agreement.together("solved"):
            made = self._planner.solve(self._budget_bytes, self._budget_bytes - mine.room_bytes)
        self._take(mine, made)

    def _look_for_optimizers(self) -> None:
        """If an optimizer of any rank has stepped for the first time since the last measured step, plan and measure again."""
        assert self._watch is not None
        is_first = self._watch.has_stepped and not self._has_stepped
        if is_first:
            self._has_stepped = True
            self._excess_bytes += max(0, self._state_bytes - self._counted_state_bytes)
        mine, is_unchanged, all_stepped = self._agreement.compare(self._standing(does_fit=not is_first))
        if is_unchanged:
            return
        self._awaits_optimizers = not all_stepped
        self.is_calibrating, self._steps_run = True, 1
        self._watch.remove()
        self._plan_again(mine)

    def _note(self, step: MeasuredStep) -> None:
        """Store the peak of a measured step, and the measured peak minus the peak that the plans predicted.

        Raises:
            BudgetBelowFloor: the optimizer's step alone takes more than the budget.
        """
        assert self._made is not None
        self._counted_state_bytes = state_bytes = self._state_bytes
        self.measured_peak_bytes = step.step_peak_bytes + state_bytes
        self._excess_bytes = max(self._excess_bytes, self.measured_peak_bytes - self._made.peak.peak_bytes)
        before_bytes = 0 if self._watch is None else self._watch.bytes_before
        optimizer_bytes = step.optimizer_peak_bytes + before_bytes
        if optimizer_bytes > self._budget_bytes:
            where = f", on the rank of stages {sorted(self._steps)}"
            raise optimizer_floor_error(self._budget_bytes, optimizer_bytes, where)

    def _end_calibration(self, *, does_fit: bool) -> None:
        self.is_calibrating = False
        if self._awaits_optimizers:
            self._watch = self._watching()
        if does_fit:
            return
        said = (
            f"is still {format_bytes(self.measured_peak_bytes)}, above the budget of {format_bytes(self._budget_bytes)}"
        )
        if self.measured_peak_bytes <= self._budget_bytes:
            said = "is not known, because a profiler was running or the step failed"
        warnings.warn(
            f"plimsoll: after {self._steps_run} steps the peak of the rank with stages {sorted(self._steps)} {said}",
            stacklevel=5,
        )

    def _take(self, mine: Standing, made: RankPlan) -> None:
        """Apply the plans that all ranks with the same stages agreed on. ``made`` are this rank's own plans."""
        assert self._planner is not None
        plans, self._seconds = self._agreement.adopt(mine, made)
        self._made = RankPlan(plans, self._planner.peak_of(plans), made.seconds)
        for index, plan in plans.items():
            self._run(index, plan)

    def _run(self, index: int, plan: Plan) -> None:
        earlier = self.plans.get(index)
        self.plans[index] = plan
        if earlier is not None and earlier.regions == plan.regions:
            return
        if index in self._handles:
            self._handles.pop(index).remove()
        self._handles[index] = manage(
            self._rank.stages[index].submod,
            plan,
            verify_every=self._verify_every,
            splits_backward=self._rank.splits_backward(index),
        )

    def _measure(self) -> None:
        """Start to measure memory from now until the next step begins."""
        self._stop_measuring()
        stages = self._rank.stages.values()
        for stage in stages:
            stage.clear_runtime_states()  # the step would free these states too; if measured, they would count as its own
        modules = nn.ModuleList([stage.submod for stage in stages])
        received = [tensor for stage in stages for tensor in received_buffers(stage)]
        self._measuring = step = MeasuredStep(modules, (self._arguments, received), self._call)
        self._watch = self._watching(lambda: step.note(OPTIMIZER))

    def _watching(self, on_step: Callable[[], None] | None = None) -> OptimizerWatch:
        """Watch the optimizers that were passed or have stepped."""
        stages = nn.ModuleList([stage.submod for stage in self._rank.stages.values()])
        stepped = () if self._watch is None else self._watch.optimizers
        known = {id(each): each for each in (*self._optimizers, *stepped)}
        return OptimizerWatch(frozenset(map(id, stages.parameters())), known.values(), on_step)

    def _stop_measuring(self) -> None:
        """End the measurement of a step. ``_settle``, which runs after each measured step, reads its result."""
        step, self._measuring = self._measuring, None
        if step is not None and self._watch is not None:
            self._measured = step if step.end() else None
            self._has_stepped |= self._watch.has_stepped
            self._watch.remove()

    def _drop_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _standing(self, *, does_fit: bool) -> Standing:
        indices = sorted(self._steps)
        return Standing(
            stages=tuple(indices),
            fingerprints=tuple(self._steps[index].traced.trace.fingerprint for index in indices),
            room_bytes=self._budget_bytes - self._excess_bytes,
            does_fit=does_fit,
            has_stepped=self._has_stepped,
        )

    @property
    def _beside_bytes(self) -> int:
        """The bytes of a step's arguments and receive buffers. The one micro-batch that the traces contain already does not
        count.
        """
        stages = self._rank.stages
        traced = {index: step.traced.received_bytes for index, step in self._steps.items()}
        if is_at_least(2, 15):  # a buffer lives from its receive to the end of its micro-batch's backward
            in_flight = most_in_flight(self._rank.actions)
            received_bytes = sum(in_flight[index] * traced[index] for index in traced if not stages[index].is_first)
        else:
            received = [tensor for stage in stages.values() for tensor in received_buffers(stage)]
            received_bytes = storage_bytes(received, self._device)
        given_bytes = storage_bytes(output_tensors((self._arguments, self._call)), self._device)
        return max(0, received_bytes + given_bytes - sum(traced.values()))

    @property
    def _state_bytes(self) -> int:
        """The bytes of the optimizers' state on the device."""
        states = output_tensors([list(optimizer.state.values()) for optimizer in self._optimizers])
        known_bytes = storage_bytes(states, self._device)
        return max(known_bytes, 0 if self._watch is None else self._watch.bytes_after)

    @property
    def _device(self) -> torch.device:
        return next(next(iter(self._rank.stages.values())).submod.parameters()).device


def received_buffers(stage: Stage) -> list[torch.Tensor]:
    """Return the receive buffers of a stage that exist now.

    Before torch 2.15, the buffers of all micro-batches exist through a step.
    """
    chunks = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    found = (getattr(info, "buffer", None) for chunk in chunks for info in chunk)  # None for the model's own input
    return [buffer for buffer in found if isinstance(buffer, torch.Tensor)]


def stand_ins(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of the same shapes for tracing: tensors of ones (or zeros, for integers) in place of the given tensors.

    A receive buffer may contain any numbers before its first receive.
    """
    return tuple(
        (torch.ones_like(arg) if arg.is_floating_point() else torch.zeros_like(arg)).requires_grad_(arg.requires_grad)
        if isinstance(arg, torch.Tensor)
        else arg
        for arg in args
    )


def attach_schedule(
    schedule: Schedule,
    budget: int | str,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    regions: Sequence[str] | None = None,
    verify_every: int = 100,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> ScheduleAttachment:
    """Keep all stages of this rank together under ``budget`` while ``schedule.step`` trains.

    Call this function on all ranks of the job. The first training step traces each stage on this rank alone, and runs at the
    lowest memory that the engine (the code that runs plans) can reach. From the second step on, the stages run the cheapest
    plans under the budget, for the number of micro-batches that the schedule has in flight (between forward and backward) on
    this rank. ``schedule.eval`` is not changed.

    Args:
        schedule: a schedule of ``torch.distributed.pipelining``, with its stages and ``loss_fn``; its stages' modules must be
            unmanaged (without a plan).
        budget: bytes per rank, as for ``plimsoll.plan``: everything that its stages take together during a whole
            ``schedule.step`` and the optimizer's step, including receive buffers, kept outputs and optimizer state.
        optimizer: one or several optimizers, whose existing state counts from the start. State that an optimizer makes in its
            first step counts from then on, with or without this argument.
        regions: as for ``plimsoll.plan``, within each stage's module.
        verify_every: as for ``plimsoll.apply``.
        ranks: global ranks that run this job; by default all.
        timeout_seconds: how long ranks wait for each other when they agree.

    Returns:
        An attachment with ``plans`` (by stage), ``report`` and ``remove()``; also a context manager.

    Raises:
        InvalidBudget, InvalidModel, InvalidOption: raised by this call. A stage without trainable parameters is an
            InvalidModel.
        BudgetBelowFloor: raised by ``step``, before any of its micro-batches runs, on the rank whose stages cannot meet the
            budget. All other ranks raise RankFailed, which names that rank. Schedule and stages are restored.
        RanksDiffer: replicas of a stage have different models.

    Example:
        >>> handle = plimsoll.distributed.attach_schedule(schedule, "60GiB", optimizer=optimizer)  # doctest: +SKIP
        >>> schedule.step(batch, target=labels)  # doctest: +SKIP
        >>> print(handle.report)  # doctest: +SKIP

    Known weakness: recomputation only; all stages of a rank use the same share of their ranges, not a common price.
    """
    check_count("verify_every", verify_every, least=0)
    limit = Budget.required(budget)
    optimizers = (
        () if optimizer is None else (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    )
    if isinstance(schedule, Schedule) and isinstance(vars(schedule).get("step"), Wrapped):
        raise InvalidModel(
            f"This {type(schedule).__name__} already has a budget.",
            why="two budgets cannot manage the same stages",
            next="call remove() on the first handle",
        )
    for stage in read_schedule(schedule).stages.values():
        check_model(stage.submod)
    for each in optimizers:
        check_model(nn.Module(), each)
    return ScheduleAttachment(
        schedule,
        limit,
        optimizers=tuple(optimizers),
        regions=as_patterns(regions),
        verify_every=verify_every,
        agreement=StageAgreement(current_world(ranks), timeout_seconds),
    )
