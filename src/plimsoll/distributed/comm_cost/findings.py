"""Collects the measurements of every method, and rules whether the method is worth it, by time saved and held-out loss."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from plimsoll.analysis.probe.statistics import mean_of_samples
from plimsoll.analysis.verify.evidence import versions
from plimsoll.artifacts.traffic import UNCOMPRESSED, MethodTraffic, Traffic, TrafficRuling, Validation
from plimsoll.artifacts.verdict import IntervalEstimate, Outcome
from plimsoll.distributed.comm_cost.figures import ReplicaFigures, ShardFigures, interval_of, saved_shares
from plimsoll.distributed.comm_cost.metering import Metering
from plimsoll.distributed.comm_cost.training import GradientError, Parallel
from plimsoll.tracing.recorder.fingerprint import fingerprint

LEAST_ROUNDS = 3
"""The minimum of measured rounds. Savings from fewer rounds do not have an interval, so then the prediction decides."""
LEAST_MARGIN = 0.01
"""A held-out loss counts as worse only if it is worse by at least this share."""
LEAST_SAVED_SHARE = 0.02
"""The least share of the step that must be saved to justify gradients with an error."""
_ERROR = 0.05
"""Error probability of the intervals of held-out differences."""

Losses = Sequence[Sequence[float | None]]
"""One row per order of the data, one loss per held-out batch (``None``: not finite)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFindings:
    """All measurements and their evaluation. ``rounds`` are seconds of whole steps, by method."""

    metering: Metering
    figures: ReplicaFigures | ShardFigures
    errors: Mapping[str, GradientError]
    rounds: Mapping[str, list[float]]
    validations: Mapping[str, Validation] = field(default_factory=dict)

    def traffic(self, *, optimizer: str, data: str) -> Traffic:
        """Return the whole artifact; ``optimizer`` and ``data`` are descriptions."""
        metering = self.metering
        methods = tuple(map(self._method, metering.methods))
        ruling, reason, best, missing = judge_all(methods)
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
        metering = self.metering
        if not metering.validate_steps:
            return (
                "saving time is not all: what a method does to training shows on held-out data only (--validate STEPS)",
            )
        if not self.validations:
            return ("no method saves time here, so none was trained with",)
        return (
            f"validation took {metering.validate_steps} steps, in {metering.orders} orders of the data: what a method does "
            "to a long training is not known from that",
        )

    def saved(self, method: str) -> IntervalEstimate:
        """The share of the uncompressed step that a method saves: measured if there are enough rounds, else predicted."""
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
        error, validation = self.errors.get(method), self.validations.get(method)
        ruling, reason = judge_method(method, self.saved(method), validation)
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
    """Train with the methods that may save time; for the others validation would not change the ruling."""
    others = (method for method in found.metering.methods if method != UNCOMPRESSED)
    wanted = parallel.agreed([method for method in others if found.saved(method).high >= LEAST_SAVED_SHARE])
    if not wanted:
        return {}
    orders = range(found.metering.orders)
    baseline = [parallel.held_out_losses(UNCOMPRESSED, order) for order in orders]
    validations = {}
    for method in wanted:
        losses = [parallel.held_out_losses(method, order) for order in orders]
        worse = differences(baseline, losses)
        mean = None if worse is None else mean_of_samples(np.asarray(worse, dtype=np.float64))
        difference = None if mean is None else mean.estimate(_ERROR)
        validations[method] = validate(baseline, losses, difference, found.metering.validate_steps)
    return validations


def differences(baseline: Losses, method: Losses) -> list[float] | None:
    """How much worse the method is on each held-out batch, as the mean over orders; ``None`` if a loss is not finite."""
    rows = []
    for one, other in zip(baseline, method, strict=True):
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
        if len(pairs) < len(one):
            return None
        rows.append([b - a for a, b in pairs])
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def validate(baseline: Losses, method: Losses, difference: IntervalEstimate | None, steps: int) -> Validation:
    """Compare held-out losses with the allowed difference: 1% worse, or the spread of uncompressed runs if that is larger.

    ``baseline`` and ``method`` have the same orders and batches, after ``steps`` steps. ``difference`` is the mean of
    ``differences`` with its interval; ``None`` if there are too few batches.
    """
    means = [_mean_of(row) for row in baseline]
    known = [mean for mean in means if mean is not None]
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    baseline_loss, method_loss = _mean_of(means), _mean_of([_mean_of(row) for row in method])
    allowed = max(spread, LEAST_MARGIN * abs(baseline_loss or 0.0))
    outcome, found = _outcome(baseline_loss, method_loss, difference, allowed)
    return Validation(
        outcome=outcome,
        steps=steps,
        orders=len(baseline),
        held_out_batches=len(baseline[0]),
        baseline_loss=baseline_loss,
        method_loss=method_loss,
        difference=difference,
        seed_spread=spread,
        allowed=allowed,
        found=found,
    )


def _mean_of(losses: Sequence[float | None]) -> float | None:
    """The mean; ``None`` if a loss is not finite."""
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if known and len(known) == len(losses) else None


def _outcome(
    baseline_loss: float | None, method_loss: float | None, difference: IntervalEstimate | None, allowed: float
) -> tuple[Outcome, str]:
    if baseline_loss is None:
        return Outcome.NOT_MEASURED, "training without compression reaches NaN or infinity"
    if method_loss is None:
        return Outcome.BROKEN, "NaN or infinity, where training without compression is finite"
    if difference is None:
        return Outcome.NOT_MEASURED, "too few held-out batches for an interval"
    found = (
        f"{difference.value:+.4f} ({difference.low:+.4f} to {difference.high:+.4f}) "
        f"beside {baseline_loss:.4f}, {allowed:.4f} allowed"
    )
    if difference.low > allowed:
        return Outcome.BROKEN, found
    return (Outcome.CLEAR if difference.high <= allowed else Outcome.OPEN), found


def judge_method(method: str, saved: IntervalEstimate, validation: Validation | None) -> tuple[TrafficRuling, str]:
    """Judge the time first, then the training: a method that does not save time need not be validated.

    ``saved`` is the share of the step that the method saves, measured if possible, else predicted.
    """
    if method == UNCOMPRESSED:
        return TrafficRuling.UNDECIDED, "what the others are compared with"
    said = f"saves {saved.value:.1%} ({saved.low:.1%} to {saved.high:.1%}) of the step"
    too_little = f"{said}: worth it from {LEAST_SAVED_SHARE:.0%} on"
    if saved.high < LEAST_SAVED_SHARE:
        return TrafficRuling.REFUSE, too_little
    if validation is not None and validation.outcome is Outcome.BROKEN:
        return TrafficRuling.REFUSE, f"held-out loss: {validation.found}"
    if saved.low < LEAST_SAVED_SHARE:
        return TrafficRuling.UNDECIDED, too_little
    if validation is None:
        return TrafficRuling.UNDECIDED, f"{said}; training is not validated"
    is_clear = validation.outcome is Outcome.CLEAR
    return TrafficRuling.KEEP if is_clear else TrafficRuling.UNDECIDED, f"{said}; held-out loss: {validation.found}"


def judge_all(methods: Sequence[MethodTraffic]) -> tuple[TrafficRuling, str, str | None, tuple[str, ...]]:
    """The ruling over all methods, its reason, the method to take, and which measurements are missing."""
    others = sorted(
        (each for each in methods if each.method != UNCOMPRESSED),
        key=lambda each: _saved_share(each).value,
        reverse=True,
    )
    best = next((each for each in others if each.ruling is TrafficRuling.KEEP), None)
    if best is not None:
        return TrafficRuling.KEEP, f"{best.method} {best.reason}", best.method, ()
    undecided = [each for each in others if each.ruling is TrafficRuling.UNDECIDED]
    if undecided:
        return TrafficRuling.UNDECIDED, f"{undecided[0].method} {undecided[0].reason}", None, _missing(undecided)
    return TrafficRuling.REFUSE, f"the fastest, {others[0].method}, {others[0].reason}", None, ()


def _missing(methods: Sequence[MethodTraffic]) -> tuple[str, ...]:
    found = []
    if any(_saved_share(each).low < LEAST_SAVED_SHARE <= _saved_share(each).high for each in methods):
        found.append("a narrower error bar of the step: more timed steps (--steps)")
    outcomes = {None if each.validation is None else each.validation.outcome for each in methods}
    if None in outcomes:
        found.append("training with and without, on held-out data (--validate STEPS)")
    if Outcome.OPEN in outcomes:
        found.append("more steps, more orders of the data or more held-out batches")
    if Outcome.NOT_MEASURED in outcomes:
        found.append("three held-out batches or more (--held-out), and training that stays finite without compression")
    return tuple(found)


def _saved_share(method: MethodTraffic) -> IntervalEstimate:
    """The measured share if it exists, else the predicted one."""
    saved = method.predicted_saved_share if method.measured_saved_share is None else method.measured_saved_share
    assert saved is not None, "one of both is known of every method"
    return saved
