"""Turns measurements of a step into the fields of the artifact `Traffic`: one class for replicas, one for shards.

For a model under ``DistributedDataParallel`` the step is measured in parts, and a step with each method is predicted from
them. For a model that FSDP2 shards, the whole step is measured without sending gradients, and nothing is predicted: gathering
parameters shares the link with gradients, and gloo's reduce-scatter blocks backward.

Both classes have the same methods, so `TrafficFindings` can use either: ``predicted_saved`` is the share of the uncompressed
step that a method saves, ``of_method`` gives fields of ``MethodTraffic``, ``of_step`` fields of ``Traffic``, and ``notes`` says
what the figures leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch.distributed as dist

from plimsoll.artifacts.traffic import UNCOMPRESSED, ShardedStep
from plimsoll.artifacts.verdict import IntervalEstimate
from plimsoll.distributed.comm_cost import forecast
from plimsoll.tracing.meters.timing import median_interval


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Figures of a model under DDP.

    ``job`` has the step (its optimizer not yet timed) and the links; ``programs`` begin with the uncompressed one.
    ``alone_seconds`` is the time of a step of the unwrapped model in the same period: it shows the machine's speed then.
    """

    job: forecast.ForecastJob
    programs: tuple[forecast.MethodProgram, ...]
    gradient_bytes: int
    alone_seconds: float

    def with_optimizer(self, seconds: float) -> ReplicaFigures:
        """Return the same figures with the optimizer's seconds in the step."""
        step = msgspec.structs.replace(self.job.step, measured_optimizer_seconds=seconds)
        return replace(self, job=replace(self.job, step=step))

    def when_alone_takes(self, seconds: float) -> ReplicaFigures:
        """Rescale the figures to the machine's speed in a later period, because other jobs may have started or ended."""
        factor = seconds / self.alone_seconds
        step = self.job.step
        slower = msgspec.structs.replace(
            step,
            measured_compute_seconds=step.measured_compute_seconds * factor,
            measured_optimizer_seconds=step.measured_optimizer_seconds * factor,
            buckets=tuple(
                msgspec.structs.replace(each, measured_ready_seconds=each.measured_ready_seconds * factor)
                for each in step.buckets
            ),
        )
        return replace(
            self,
            job=replace(self.job, step=slower),
            programs=tuple(program.slower(factor) for program in self.programs),
            alone_seconds=seconds,
        )

    @property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer, at the machine's speed during the whole steps."""
        return self.job.step.measured_optimizer_seconds

    def predicted_saved(self, method: str) -> IntervalEstimate | None:
        return forecast.predict_saved(self.job, self._program(method), self._program(UNCOMPRESSED))

    def of_method(self, method: str) -> dict[str, Any]:
        job, program, baseline = self.job, self._program(method), self._program(UNCOMPRESSED)
        timeline = job.timeline(program)
        return {
            "wire_bytes": program.wire_bytes(job.ranks),
            "transfers": len(program.transfers),
            "measured_local_seconds": timeline.local_seconds,
            "transfer_seconds": timeline.transfer_seconds,
            "exposed_seconds": timeline.exposed_seconds,
            "predicted_step_seconds": forecast.predict_step(job, program),
            "predicted_saved_share": self.predicted_saved(method),
            "break_even_bytes_per_second": forecast.break_even_bandwidth(job, program, baseline),
            "break_even_hidden_share": forecast.break_even_hidden_share(job, program, baseline),
        }

    def of_step(self, bucket_bytes: int | None) -> dict[str, Any]:
        job = self.job
        largest_bytes = max(each.gradient_bytes for each in job.step.buckets)
        return {
            "gradient_bytes": self.gradient_bytes,
            "bucket_bytes": largest_bytes if bucket_bytes is None else bucket_bytes,
            "hidden_share": forecast.hidden_share(job, self._program(UNCOMPRESSED)),
            "links": tuple(job.links.values()),
            "step": job.step,
        }

    def notes(self) -> tuple[str, ...]:
        return ()

    def _program(self, method: str) -> forecast.MethodProgram:
        return next(program for program in self.programs if program.method == method)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFigures:
    """Figures of a sharded model: steps that send no gradients (one after each turn of a method), and uncompressed steps.

    ``silent_seconds`` and ``uncompressed_seconds`` are of forward and backward, by rounds; ``unused`` counts trained
    parameters without a gradient.
    """

    silent_seconds: Sequence[float]
    uncompressed_seconds: Sequence[float]
    optimizer_seconds: float
    units: int
    gradient_bytes: int
    sent_bytes: Mapping[str, int]
    unused: int
    backend: str

    def predicted_saved(self, method: str) -> IntervalEstimate | None:
        del method
        return None

    def of_method(self, method: str) -> dict[str, Any]:
        return {"wire_bytes": self.sent_bytes[method]}

    def of_step(self, bucket_bytes: int | None) -> dict[str, Any]:
        del bucket_bytes
        silent = interval_of([each + self.optimizer_seconds for each in self.silent_seconds])
        most = saved_shares(self.uncompressed_seconds, self.silent_seconds, self.optimizer_seconds)
        assert silent is not None
        assert most is not None
        return {
            "gradient_bytes": self.gradient_bytes,
            "sharded": ShardedStep(
                units=self.units,
                measured_silent_seconds=silent,
                measured_most_saved_share=most,
                measured_optimizer_seconds=self.optimizer_seconds,
            ),
        }

    def notes(self) -> tuple[str, ...]:
        found = [
            "no step is predicted for a model that FSDP2 shards: gathering parameters shares the link with gradients. "
            "What was measured holds for this link and this batch"
        ]
        if self.backend == dist.Backend.GLOO:
            found.append(
                "gloo makes a reduce-scatter of an all-reduce: what is not compressed, and what randomk sends, takes twice the "
                "bytes shown, so compression saves more here than where a reduce-scatter is one"
            )
        if self.unused:
            found.append(
                f"{self.unused} trained parameters get no gradient from the first batch: FSDP2 does not say which, so the "
                "others of their modules are sent uncompressed, and the column of bytes does not show it"
            )
        return tuple(found)


def saved_shares(
    without: Sequence[float], others: Sequence[float], optimizer_seconds: float
) -> IntervalEstimate | None:
    """The share of the uncompressed step that another step saves, from pairs of the same round.

    Example:
        >>> saved_shares([1.0, 1.0], [0.5, 0.5], 0.0).value
        0.5
    """
    pairs = zip(without, others, strict=True)
    return interval_of([(one - other) / (one + optimizer_seconds) for one, other in pairs])


def interval_of(samples: Sequence[float]) -> IntervalEstimate | None:
    """The median with its interval; ``None`` without samples."""
    if not samples:
        return None
    found = median_interval(list(samples))
    return IntervalEstimate(value=found.median, low=found.low, high=found.high)
