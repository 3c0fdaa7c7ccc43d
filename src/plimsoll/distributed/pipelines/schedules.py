"""Reads a schedule of ``torch.distributed.pipelining``: the stages of this rank, and the order of the actions of all ranks.

An action is one piece of work on a micro-batch, such as the forward of one stage. Schedules with several stages per rank carry
a table of their actions. Schedules with one stage run fixed loops. The table that torch 2.13 prints for 1F1B counts the last
rank's forwards from one. So this module takes the orders of GPipe and 1F1B from ``orders``, which is tested against torch's
execution.

Only this file uses private members of torch's schedules and stages: seen in torch 2.9 to 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from plimsoll.artifacts.job import Layout, PipelineSchedule
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.estimator.pipeline_schedule.orders import Action, ActionKind, Orders, pipeline_orders
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds, bubble_growth
from plimsoll.tracing.torch_internals import is_at_least, lacking
from plimsoll.units import format_bytes, format_seconds

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
Stage = _PipelineStageBase
_READ = ("_loss_fn", "_has_backward", "_n_microbatches")
_COMPUTE = re.compile(r"(\d+)([FIBW])(\d+)")
_LOOPS: dict[type, PipelineSchedule] = {
    ScheduleGPipe: PipelineSchedule.GPIPE,
    Schedule1F1B: PipelineSchedule.ONE_F_ONE_B,
}


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """Data: the schedule of one rank.

    ``stages`` are this rank's stages, by index. ``orders`` are the actions of all pipeline ranks in order, and ``rank`` is this
    rank's position in ``orders``. With ``keeps_sends``, sent tensors are held until the step ends.
    """

    stages: dict[int, Stage]
    orders: Orders
    rank: int
    micro_batches: int
    keeps_sends: bool

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of this rank, in order."""
        return self.orders[self.rank]

    def splits_backward(self, stage: int) -> bool:
        """Return whether a stage of this rank computes the gradients of its input first, and the gradients of its weights
        later.
        """
        return any(action.stage == stage and action.work is ActionKind.INPUT_GRADIENT for action in self.actions)

    @property
    def stage_count(self) -> int:
        """The number of stages of the whole pipeline."""
        return 1 + max(action.stage for actions in self.orders for action in actions)


def read_schedule(schedule: object) -> RankSchedule:
    """Return this rank's stages and the actions of all ranks in a schedule.

    Raises:
        InvalidModel: the object is not a schedule of ``torch.distributed.pipelining``, or its order cannot be read.
        InvalidOption: the schedule does not have a loss, so it does not train.

    Example:
        >>> read_schedule(schedule).actions[:2]  # doctest: +SKIP
        (Action(stage=0, work=<ActionKind.FORWARD: 'F'>, micro_batch=0), ...)
    """
    if not isinstance(schedule, PipelineScheduleSingle | PipelineScheduleMulti):
        raise InvalidModel(
            f"A {type(schedule).__name__} is not a pipeline schedule.",
            why="stages, micro-batches and their order are read from a schedule of torch.distributed.pipelining",
            next="pass the schedule whose step() you call in training, or use plimsoll.attach for a plain model",
        )
    stages_in = "_stage" if isinstance(schedule, PipelineScheduleSingle) else "_stages"
    for name in (*_READ, stages_in, initializer(schedule)):
        if name not in dir(schedule):
            raise lacking(f"{type(schedule).__name__}.{name}")
    if schedule._loss_fn is None:
        raise InvalidOption(
            f"{type(schedule).__name__} does not have a loss.",
            why="without loss_fn= it runs only forward and does not keep activations for backward",
            next="create the schedule with loss_fn=",
        )
    if isinstance(schedule, PipelineScheduleSingle):
        return _single(schedule)
    stages = {stage.stage_index: stage for stage in schedule._stages}
    table = schedule.pipeline_order
    orders = tuple(tuple(_compute_actions(table[rank])) for rank in sorted(table))
    if not orders or not all(orders):
        raise _unreadable(schedule)
    return RankSchedule(
        stages=_checked(schedule, stages, orders[schedule.rank]),
        orders=_whole_where_first(orders),
        rank=schedule.rank,
        micro_batches=schedule._n_microbatches,
        keeps_sends=True,
    )


def initializer(schedule: Schedule) -> str:
    """Return the name of the method that the schedule calls when a step begins, with the step's first micro-batch."""
    return "_initialize_stage" if isinstance(schedule, PipelineScheduleSingle) else "_initialize_stages"


def trains(schedule: Schedule) -> bool:
    """Return whether a step of the schedule runs backward. It does not in ``eval``, or while gradients are switched off."""
    return bool(schedule._has_backward) and torch.is_grad_enabled()


def loss_of(schedule: Schedule, output: Any, target: Any, options: dict[str, Any] | None) -> torch.Tensor:
    """Return the loss of one micro-batch, by the schedule's own loss function."""
    assert schedule._loss_fn is not None
    value: torch.Tensor = schedule._loss_fn(output, target, **(options or {}))
    return value


def first_input(stage: Stage) -> tuple[Any, ...]:
    """Return tensors with the shapes of the buffers that receive the first micro-batch of a stage.

    Before torch 2.15 these are the buffers themselves, which exist when a step begins. Since then, torch allocates each buffer
    right before its receive, so this function allocates them.
    """
    if is_at_least(2, 15):
        infos: tuple[Any, ...] = stage.args_recv_info[0]
        for info in infos:
            info.allocate_buffer(stage.device)
    received: tuple[Any, ...] = stage._retrieve_recv_activations(0)
    return received


def _single(schedule: PipelineScheduleSingle) -> RankSchedule:
    stage = schedule._stage
    kind = next((kind for known, kind in _LOOPS.items() if isinstance(schedule, known)), None)
    if kind is None:
        raise _unreadable(schedule)
    orders = pipeline_orders(Layout(pp=stage.num_stages, micro_batches=schedule._n_microbatches, schedule=kind))
    return RankSchedule(
        stages=_checked(schedule, {stage.stage_index: stage}, orders[stage.stage_index]),
        orders=orders,
        rank=stage.stage_index,
        micro_batches=schedule._n_microbatches,
        keeps_sends=False,
    )


def _checked(schedule: Schedule, stages: dict[int, Stage], actions: Iterable[Action]) -> dict[int, Stage]:
    if {action.stage for action in actions} != stages.keys():
        raise _unreadable(schedule)
    for index, stage in stages.items():
        if not any(parameter.requires_grad for parameter in stage.submod.parameters()):
            raise InvalidModel(
                f"Stage {index} does not have trainable parameters.",
                why="its step does not compute gradients of parameters, so it cannot be planned",
                next="cut the model elsewhere, so that every stage has trainable parameters",
            )
    return stages


def _compute_actions(table: Iterable[Any]) -> Iterator[Action]:
    """Translate torch's actions to ours, without communication. A combined action becomes its parts in order."""
    for action in table:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _compute_actions(action.sub_actions)
            continue
        found = _COMPUTE.fullmatch(str(action))
        if found is not None:
            yield Action(int(found[1]), ActionKind(found[2]), int(found[3]))


def _whole_where_first(orders: Orders) -> Orders:
    """Join the two halves of backward in the first stage into one whole backward, and return the orders.

    torch skips this stage's action ``I`` (input gradient) and runs the whole backward in its action ``W`` (weight gradients).
    """
    halved = {action for actions in orders for action in actions if action.work is ActionKind.INPUT_GRADIENT}

    def as_run(action: Action) -> Action | None:
        if action.stage or Action(0, ActionKind.INPUT_GRADIENT, action.micro_batch) not in halved:
            return action
        if action.work is ActionKind.INPUT_GRADIENT:
            return None
        return action._replace(work=ActionKind.BACKWARD) if action.work is ActionKind.WEIGHT_GRADIENT else action

    return tuple(tuple(run for action in actions if (run := as_run(action)) is not None) for actions in orders)


def _unreadable(schedule: Schedule) -> InvalidModel:
    return InvalidModel(
        f"The order of {type(schedule).__name__} cannot be read.",
        why="the number of micro-batches in flight on a rank is computed from the actions of its schedule",
        next="use GPipe, 1F1B, or a schedule with a table of actions (interleaved, zero-bubble, ZBV, DualPipeV)",
    )


class Wrapped:
    """Replaces the method ``name`` of the object ``owner`` by ``run``, until ``remove``. The object's class does not change.

    ``run`` gets the original method, then the arguments of the call.
    """

    def __init__(self, owner: object, name: str, run: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._run: Callable[..., Any] | None = run
        self._own = vars(owner).get(name)
        self._original: Callable[..., Any] = getattr(owner, name)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:  # removed, but other code has wrapped this wrapper and still calls it
            return self._original(*args, **kwargs)
        return self._run(self._original, *args, **kwargs)

    def remove(self) -> None:
        """Restore the original method. A second call does nothing.

        If other code has wrapped this wrapper, it stays, but only passes calls through to the original method.
        """
        self._run = None
        if vars(self._owner).get(self._name) is not self:
            return
        if self._own is None:
            del vars(self._owner)[self._name]
        else:
            vars(self._owner)[self._name] = self._own


@dataclass(frozen=True, slots=True)
class StageReport:
    """Data: the predicted figures of one stage of this rank. ``predicted_extra_seconds`` are the seconds of recomputation in
    one micro-batch.

    ``in_flight`` is the most micro-batches that are between forward and backward at once.
    """

    stage: int
    in_flight: int
    managed_regions: int
    predicted_extra_seconds: float


@dataclass(frozen=True, slots=True)
class AddedSeconds:
    """Data: the seconds that recomputation adds to a step of the whole pipeline, and the rank that is busy longest."""

    predicted_step_seconds: float
    predicted_added_seconds: float
    predicted_bubble_share: float
    critical_rank: int

    def __str__(self) -> str:
        return (
            f"recomputation on all ranks adds {format_seconds(self.predicted_added_seconds)}, in total "
            f"{format_seconds(self.predicted_step_seconds)}; rank {self.critical_rank} is busy longest; bubbles are "
            f"{self.predicted_bubble_share:.0%}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """Data: the memory and time of one rank under its plans. ``rank`` is its pipeline rank. Bytes are the sum of everything on
    the rank during a step.

    ``excess_bytes`` are the measured peak minus the plans' own prediction; ``predicted_peak_bytes`` includes them. ``added`` is
    ``None`` if the seconds of other ranks' stages are not known.
    """

    schedule: str
    rank: int
    budget_bytes: int
    predicted_peak_bytes: int
    moment: str
    measured_peak_bytes: int
    excess_bytes: int
    is_calibrating: bool
    stages: tuple[StageReport, ...]
    added: AddedSeconds | None

    def __str__(self) -> str:
        state = "still calibrating" if self.is_calibrating else "settled"
        lines = [f"{self.schedule}, pipeline rank {self.rank}: {state}"]
        rows = [
            ["budget", format_bytes(self.budget_bytes)],
            [
                "predicted peak",
                f"{format_bytes(self.predicted_peak_bytes)} in {self.moment}, including {format_bytes(self.excess_bytes)} "
                "measured beyond the plans' predictions",
            ],
            ["measured peak", format_bytes(self.measured_peak_bytes) if self.measured_peak_bytes else "not yet"],
        ]
        rows += [
            [
                f"stage {stage.stage}",
                f"at most {stage.in_flight} micro-batches in flight, "
                f"{format_seconds(stage.predicted_extra_seconds)} of recomputation per micro-batch",
            ]
            for stage in self.stages
        ]
        if self.added is not None:
            rows.append(["step", str(self.added)])
        return "\n".join([*lines, *(f"  {name:<14}  {text}" for name, text in rows)])


def added_seconds(orders: Orders, seconds: Mapping[int, ActionSeconds], stage_count: int) -> AddedSeconds | None:
    """Return the seconds that the stages' recomputation adds to a step, by a simulation of the pipeline's timeline.

    The result is ``None`` if the seconds of a stage are not known.
    """
    if any(stage not in seconds for stage in range(stage_count)):
        return None
    growth = bubble_growth(orders, [seconds[stage] for stage in range(stage_count)])
    busy = growth.inside.busy_seconds
    return AddedSeconds(
        predicted_step_seconds=growth.inside.step_seconds,
        predicted_added_seconds=growth.added_seconds,
        predicted_bubble_share=growth.inside.bubble_share,
        critical_rank=busy.index(max(busy)),
    )
