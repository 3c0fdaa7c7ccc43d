"""Finds the peak memory of one rank of a pipeline, and the action during which it occurs, without torch.

An action is one stage's forward or backward of one micro-batch. Between actions a rank holds its stages' lasting bytes, the
bytes of every micro-batch in flight, and what finished micro-batches leave until the step ends (returned outputs, sent tensors
that were not freed). The peak occurs during an action: the action's own bytes are added to the bytes held meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll.estimator.pipeline_schedule.orders import Action, ActionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The memory of one pipeline stage under one plan, as data. All fields are in bytes.

    ``lasting_bytes`` are held all the time: parameters, gradients, buffers. One micro-batch takes ``forward_bytes`` while its
    forward runs, ``held_bytes`` between forward and backward, and ``backward_bytes`` while backward runs. If backward is split
    in two, it takes ``input_gradient_bytes`` during the first half and ``between_bytes`` from then to the end of the second. It
    leaves ``left_bytes`` until the step ends. ``merged_bytes`` are the outputs of all micro-batches merged at the end of the
    step.
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
    """The most bytes that a rank holds, and the action during which it holds them.

    ``action`` is ``None`` if the peak is at the end, when outputs are merged.
    """

    peak_bytes: int
    action: Action | None

    @property
    def moment(self) -> str:
        """The action of the peak in words, such as ``backward of micro-batch 0 in stage 0``."""
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
    """Return the most bytes that one rank holds at any moment of a step, and the action during which it holds them.

    ``actions`` are the rank's actions in order, ``stages`` maps the rank's stages to their memory. ``beside_bytes`` are held
    all the time in addition: receive buffers, optimizer state.

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
    """Return three numbers of bytes that one micro-batch takes in its stage: held before the action, used while the action
    runs, and held after it.
    """
    match work:
        case ActionKind.FORWARD:
            return 0, stage.forward_bytes, stage.held_bytes
        case ActionKind.BACKWARD:
            return stage.held_bytes, stage.backward_bytes, stage.left_bytes
        case ActionKind.INPUT_GRADIENT:
            return stage.held_bytes, stage.input_gradient_bytes, stage.between_bytes + stage.left_bytes
        case ActionKind.WEIGHT_GRADIENT:
            return stage.between_bytes, stage.between_bytes, 0
