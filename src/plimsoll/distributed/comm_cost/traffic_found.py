"""Measured steps, errors of gradients and held-out losses in; the figures and the ruling of every method out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plimsoll.analysis.probe import statistics
from plimsoll.analysis.verify.evidence import versions
from plimsoll.artifacts.traffic import UNCOMPRESSED, MethodTraffic, Traffic, Validation
from plimsoll.artifacts.verdict import Estimate
from plimsoll.distributed.comm_cost import judging, validating
from plimsoll.distributed.comm_cost.traffic_figures import Figures, interval_of, saved_shares
from plimsoll.distributed.comm_cost.traffic_metering import Metering
from plimsoll.distributed.comm_cost.traffic_training import GradientError, Parallel, Training
from plimsoll.tracing.recorder.fingerprint import fingerprint

LEAST_ROUNDS = 3
"""Of measured steps: what fewer rounds save has no interval, and the prediction decides."""
_ERROR = 0.05
"""Of the intervals of held-out differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything that was measured, and what follows from it."""

    metering: Metering
    training: Training
    figures: Figures
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

    def saved(self, method: str) -> Estimate:
        """The share of the uncompressed step that a method saves: measured where it was, else predicted."""
        measured = self._measured_saved(method)
        saved = self.figures.predicted_saved(method) if measured is None else measured
        assert saved is not None, "without a prediction there are rounds enough"
        return saved

    def _measured_saved(self, method: str) -> Estimate | None:
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


def validate_methods(found: Found, parallel: Parallel) -> dict[str, Validation]:
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
        differences = validating.differences(baseline, losses)
        validations[method] = validating.validate(baseline, losses, _mean(differences), training.steps)
    return validations


def _mean(differences: Sequence[float] | None) -> Estimate | None:
    mean = None if differences is None else statistics.mean_of_samples(np.asarray(differences, dtype=np.float64))
    if mean is None:
        return None
    low, high = mean.interval(_ERROR)
    return Estimate(value=mean.value, low=low, high=high)
