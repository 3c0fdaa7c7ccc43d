"""Finds the peak memory of one rank of a pipeline, and the action in which it lies. No torch here.

Between actions a rank holds what its stages hold for good, what every micro-batch in flight holds, and what finished ones
leave until the step ends (outputs that are returned, tensors that were sent and not let go of). The peak lies in an action:
what it takes itself comes on top of what waits beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll.estimator.pipeline_schedule.orders import Action, ActionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of one stage under one plan.

    ``lasting_bytes`` are there for good: parameters, gradients, buffers. One micro-batch takes ``forward_bytes`` while its
    forward runs, ``held_bytes`` from then to its backward, ``backward_bytes`` while that runs; where backward runs in two
    halves ``input_gradient_bytes`` while the first one runs and ``between_bytes`` from then to the end of the second; and
    leaves ``left_bytes`` until the step ends. ``merged_bytes`` are the outputs of all micro-batches as one, made at the end
    of the step.
    """

    lasting_bytes: int
    forward_bytes: int
    held_bytes: int
    backward_bytes: int
    input_gradient_bytes: int = 0
    between_bytes: int = 0
    left_bytes: int = 0
    merged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The most that a rank holds, and in which action; ``None``: when the outputs are merged at the end."""

    peak_bytes: int
    action: Action | None

    @property
    def moment(self) -> str:
        """The action in words."""
        if self.action is None:
            return "merging the outputs"
        return f"{_NAMES[self.action.work]} of micro-batch {self.action.micro_batch} in stage {self.action.stage}"


_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input gradient",
    ActionKind.WEIGHT_GRADIENT: "weight gradients",
}


def rank_peak(actions: Sequence[Action], stages: Mapping[int, StageMemory], *, beside_bytes: int = 0) -> RankPeak:
    """The peak of one rank over one step.

    ``beside_bytes`` are held all the time besides: buffers for what is received, optimizer state.

    Example:
        >>> from plimsoll.artifacts.job import Layout
        >>> from plimsoll.estimator.pipeline_schedule.orders import pipeline_orders
        >>> stage = StageMemory(lasting_bytes=1000, forward_bytes=30, held_bytes=10, backward_bytes=50)
        >>> found = rank_peak(pipeline_orders(Layout(pp=2, micro_batches=4))[0], {0: stage})
        >>> found.peak_bytes, found.moment
        (1060, 'backward of micro-batch 0 in stage 0')
    """
    now = beside_bytes + sum(stage.lasting_bytes for stage in stages.values())
    peak = RankPeak(now, None)
    for action in actions:
        stage = stages[action.stage]
        before, during, after = _effect(action.work, stage)
        if now - before + during > peak.peak_bytes:
            peak = RankPeak(now - before + during, action)
        now += after - before
    end_bytes = now + sum(stage.merged_bytes for stage in stages.values())
    return peak if peak.peak_bytes >= end_bytes else RankPeak(end_bytes, None)


def _effect(work: ActionKind, stage: StageMemory) -> tuple[int, int, int]:
    """What the micro-batch of an action holds before it, takes while it runs, and holds after it."""
    match work:
        case ActionKind.FORWARD:
            return 0, stage.forward_bytes, stage.held_bytes
        case ActionKind.BACKWARD:
            return stage.held_bytes, stage.backward_bytes, stage.left_bytes
        case ActionKind.INPUT_GRADIENT:
            return stage.held_bytes, stage.input_gradient_bytes, stage.between_bytes + stage.left_bytes
        case ActionKind.WEIGHT_GRADIENT:
            return stage.between_bytes, stage.between_bytes, 0
