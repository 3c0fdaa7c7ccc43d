"""The report on a pipeline's plans: bytes and seconds of each stage, and what recomputation does to the bubble."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.estimator.pipeline_schedule.orders import Orders
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds, bubble_growth
from plimsoll.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage of this rank. ``predicted_extra_seconds`` are those of recomputing one micro-batch."""

    stage: int
    in_flight: int
    managed_regions: int
    predicted_extra_seconds: float


@dataclass(frozen=True, slots=True)
class AddedSeconds:
    """What recomputation adds to a step of the whole pipeline, by its timeline; and to the rank that takes longest."""

    predicted_step_seconds: float
    predicted_added_seconds: float
    predicted_bubble_share: float
    critical_rank: int

    def __str__(self) -> str:
        return (
            f"recomputation on all ranks adds {format_seconds(self.predicted_added_seconds)} to come to "
            f"{format_seconds(self.predicted_step_seconds)}; rank {self.critical_rank} works longest, bubbles take "
            f"{self.predicted_bubble_share:.0%}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """A rank under its plans. ``rank`` is that of the pipeline; bytes are of everything on it over a step.

    ``excess_bytes`` were measured beyond what plans predict, and are in the prediction. ``added`` is ``None`` where the
    seconds of other ranks' stages are not known.
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
                f"{format_bytes(self.predicted_peak_bytes)} in {self.moment}, {format_bytes(self.excess_bytes)} of it as "
                "measured beyond the plans",
            ],
            ["measured peak", format_bytes(self.measured_peak_bytes) if self.measured_peak_bytes else "not yet"],
        ]
        rows += [
            [
                f"stage {stage.stage}",
                f"{stage.in_flight} micro-batches in flight at most, "
                f"{format_seconds(stage.predicted_extra_seconds)} of recomputation per micro-batch",
            ]
            for stage in self.stages
        ]
        if self.added is not None:
            rows.append(["step", str(self.added)])
        return "\n".join([*lines, *(f"  {name:<14}  {text}" for name, text in rows)])


def added_seconds(orders: Orders, seconds: Mapping[int, ActionSeconds], stage_count: int) -> AddedSeconds | None:
    """The timeline of the pipeline with its stages' recomputation; ``None`` if some stage's seconds are not known."""
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
