"""Puts together what was measured of every method, as the artifact `Traffic`, with a ruling for each.

Of replicas that is the step's parts, and a prediction. Of shards it is the step without the reduction of gradients: gathering
parameters shares the link with it, and a reduce-scatter of gloo holds backward up, so nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from plimsoll.analysis.probe import statistics
from plimsoll.analysis.verify.evidence import versions
from plimsoll.artifacts.traffic import UNCOMPRESSED, MethodTraffic, ShardedStep, Traffic, Validation
from plimsoll.artifacts.verdict import IntervalEstimate
from plimsoll.distributed.comm_cost import forecast, judging
from plimsoll.distributed.comm_cost.metering import MeteredTraffic, Metering
from plimsoll.distributed.comm_cost.training import GradientError, Parallel, ValidationTraining
from plimsoll.tracing.meters.timing import median_interval
from plimsoll.tracing.recorder.fingerprint import fingerprint


class StepFigures(Protocol):
    """What is known of a step of one layout."""

    @property
    def optimizer_seconds(self) -> float:
        """Of a step, in whole steps as well."""
        ...

    def predicted_saved(self, method: str) -> IntervalEstimate | None:
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

    measured: MeteredTraffic

    @property
    def optimizer_seconds(self) -> float:
        """As the machine was when whole steps were taken."""
        return self.measured.job.step.measured_optimizer_seconds

    def predicted_saved(self, method: str) -> IntervalEstimate | None:
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

    def predicted_saved(self, method: str) -> IntervalEstimate | None:
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


def saved_shares(
    without: Sequence[float], others: Sequence[float], optimizer_seconds: float
) -> IntervalEstimate | None:
    """The share of the uncompressed step that another one saves, in pairs of one round.

    Example:
        >>> saved_shares([1.0, 1.0], [0.5, 0.5], 0.0).value
        0.5
    """
    pairs = zip(without, others, strict=True)
    return interval_of([(one - other) / (one + optimizer_seconds) for one, other in pairs])


def interval_of(samples: Sequence[float]) -> IntervalEstimate | None:
    """Their median and where it lies; ``None`` of none.

    Example:
        >>> interval_of([1.0, 1.0, 1.0]).value
        1.0
    """
    if not samples:
        return None
    found = median_interval(list(samples))
    return IntervalEstimate(value=found.median, low=found.low, high=found.high)


LEAST_ROUNDS = 3
"""Of measured steps: what fewer rounds save has no interval, and the prediction decides."""
_ERROR = 0.05
"""Of the intervals of held-out differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFindings:
    """Everything that was measured, and what follows from it."""

    metering: Metering
    training: ValidationTraining
    figures: StepFigures
    errors: dict[str, GradientError]
    rounds: dict[str, list[float]]
    validations: dict[str, Validation]

    def traffic(self, *, optimizer: str, data: str) -> Traffic:
        """The whole artifact."""
        metering = self.metering
        methods = tuple(map(self._method, metering.methods))
        ruling, reason, best, missing = judging.judge_all(methods)
        return Traffic(
            ruling=ruling,
            reason=reason,
            missing=missing,
            best=best,
            model=type(metering.model).__name__,
            fingerprint=fingerprint(metering.model),
            device=str(metering.device),
            backend=metering.backend,
            ranks=metering.world.size,
            optimizer=optimizer,
            data=data,
            seed=metering.seed,
            versions={**versions(), "threads": str(torch.get_num_threads())},
            methods=methods,
            notes=(*self.figures.notes(), *self._notes()),
            **self.figures.of_step(metering.bucket_bytes),
        )

    def _notes(self) -> tuple[str, ...]:
        training = self.training
        if not training.steps:
            return (
                "saving time is not all: what a method does to training shows on held-out data only (--validate STEPS)",
            )
        if not self.validations:
            return ("no method saves time here, so none was trained with",)
        return (
            f"validation took {training.steps} steps, in {training.orders} orders of the data: what a method does to a "
            "long training is not known from that",
        )

    def saved(self, method: str) -> IntervalEstimate:
        """The share of the uncompressed step that a method saves: measured where it was, else predicted."""
        measured = self._measured_saved(method)
        saved = self.figures.predicted_saved(method) if measured is None else measured
        assert saved is not None, "without a prediction there are rounds enough"
        return saved

    def _measured_saved(self, method: str) -> IntervalEstimate | None:
        rounds = self.rounds[method]
        if len(rounds) < LEAST_ROUNDS:
            return None
        return saved_shares(self.rounds[UNCOMPRESSED], rounds, self.figures.optimizer_seconds)

    def _method(self, method: str) -> MethodTraffic:
        error: GradientError | None = self.errors.get(method)
        validation = self.validations.get(method)
        ruling, reason = judging.judge_method(method, self.saved(method), validation)
        return MethodTraffic(
            method=method,
            measured_step_seconds=interval_of([each + self.figures.optimizer_seconds for each in self.rounds[method]]),
            measured_saved_share=self._measured_saved(method),
            gradient_error=None if error is None else error.relative,
            gradient_cosine=None if error is None else error.cosine,
            validation=validation,
            ruling=ruling,
            reason=reason,
            **self.figures.of_method(method),
        )


def validate_methods(found: TrafficFindings, parallel: Parallel) -> dict[str, Validation]:
    """Of the methods that may save time: validating the others would change nothing."""
    training = found.training
    wanted = parallel.agreed(
        [
            method
            for method in found.metering.methods
            if method != UNCOMPRESSED and found.saved(method).high >= judging.LEAST_SAVED_SHARE
        ]
    )
    if not wanted:
        return {}
    orders = range(training.orders)
    baseline = [parallel.held_out_losses(training, UNCOMPRESSED, order) for order in orders]
    validations = {}
    for method in wanted:
        losses = [parallel.held_out_losses(training, method, order) for order in orders]
        differences = judging.differences(baseline, losses)
        validations[method] = judging.validate(baseline, losses, _mean(differences), training.steps)
    return validations


def _mean(differences: Sequence[float] | None) -> IntervalEstimate | None:
    mean = None if differences is None else statistics.mean_of_samples(np.asarray(differences, dtype=np.float64))
    if mean is None:
        return None
    low, high = mean.interval(_ERROR)
    return IntervalEstimate(value=mean.value, low=low, high=high)
