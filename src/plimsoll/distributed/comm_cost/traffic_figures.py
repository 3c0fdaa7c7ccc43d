"""What is measured of a step besides whole steps in; what each method makes of it, as fields of the artifact, out.

Of replicas that is the step's parts, and a prediction. Of shards it is the step without the reduction of gradients: the
gathering of parameters shares the link with it, and a reduce-scatter of gloo holds backward up, so no prediction is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from plimsoll.artifacts.traffic import UNCOMPRESSED, ShardedStep
from plimsoll.artifacts.verdict import Estimate
from plimsoll.distributed.comm_cost import forecast
from plimsoll.distributed.comm_cost.traffic_metering import Measured
from plimsoll.tracing.meters.timing import median_interval


class Figures(Protocol):
    """What is known of a step of one layout."""

    @property
    def optimizer_seconds(self) -> float:
        """Of a step, in whole steps as well."""
        ...

    def predicted_saved(self, method: str) -> Estimate | None:
        """The share of the uncompressed step that a method saves, where that is predicted."""
        ...

    def of_method(self, method: str) -> dict[str, Any]:
        """Fields of ``MethodTraffic``."""
        ...

    def of_step(self, bucket_bytes: int | None) -> dict[str, Any]:
        """Fields of ``Traffic``."""
        ...

    def notes(self) -> tuple[str, ...]:
        """What the figures leave out."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Of a model under ``DistributedDataParallel``: its step taken apart, and put together with each method."""

    measured: Measured

    @property
    def optimizer_seconds(self) -> float:
        """As the machine was when whole steps were taken."""
        return self.measured.job.step.measured_optimizer_seconds

    def predicted_saved(self, method: str) -> Estimate | None:
        """From the parts."""
        return forecast.predict_saved(self.measured.job, self._program(method), self._program(UNCOMPRESSED))

    def of_method(self, method: str) -> dict[str, Any]:
        """Its bytes, its parts, the step that they make, and where it breaks even."""
        job, program, baseline = self.measured.job, self._program(method), self._program(UNCOMPRESSED)
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
        """The step without traffic, the links, and what of the uncompressed traffic is hidden."""
        job = self.measured.job
        largest_bytes = max(each.gradient_bytes for each in job.step.buckets)
        return {
            "gradient_bytes": self.measured.gradient_bytes,
            "bucket_bytes": largest_bytes if bucket_bytes is None else bucket_bytes,
            "hidden_share": forecast.hidden_share(job, self._program(UNCOMPRESSED)),
            "links": tuple(job.links.values()),
            "step": job.step,
        }

    def notes(self) -> tuple[str, ...]:
        """Nothing is left out."""
        return ()

    def _program(self, method: str) -> forecast.MethodProgram:
        return next(program for program in self.measured.programs if program.method == method)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFigures:
    """Of a model that FSDP2 shards: steps that send no gradients, one after each turn of a method.

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

    def predicted_saved(self, method: str) -> Estimate | None:
        """Nothing is predicted."""
        del method
        return None

    def of_method(self, method: str) -> dict[str, Any]:
        """Its bytes."""
        return {"wire_bytes": self.sent_bytes[method]}

    def of_step(self, bucket_bytes: int | None) -> dict[str, Any]:
        """The step without a reduction of gradients, and what could be saved at most."""
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
        """That there is no prediction, and where bytes are others than those shown."""
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


def saved_shares(without: Sequence[float], others: Sequence[float], optimizer_seconds: float) -> Estimate | None:
    """The share of the uncompressed step that another one saves, in pairs of one round.

    Example:
        >>> saved_shares([1.0, 1.0], [0.5, 0.5], 0.0).value
        0.5
    """
    pairs = zip(without, others, strict=True)
    return interval_of([(one - other) / (one + optimizer_seconds) for one, other in pairs])


def interval_of(samples: Sequence[float]) -> Estimate | None:
    """Their median and where it lies; ``None`` of none.

    Example:
        >>> interval_of([1.0, 1.0, 1.0]).value
        1.0
    """
    if not samples:
        return None
    found = median_interval(list(samples))
    return Estimate(value=found.median, low=found.low, high=found.high)
