"""Rules whether a method of gradient compression is worth it: the time that it saves, and held-out loss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from plimsoll.artifacts.traffic import UNCOMPRESSED, MethodTraffic, TrafficRuling, Validation
from plimsoll.artifacts.verdict import IntervalEstimate, Outcome

LEAST_MARGIN = 0.01
"""A held-out loss that is worse by a smaller share is not called worse."""

Losses = Sequence[Sequence[float | None]]
"""One row per order of the data, one number per held-out batch (``None``: not finite)."""


def differences(baseline: Losses, method: Losses) -> list[float] | None:
    """How much worse the method is on every held-out batch, in the mean over orders; ``None`` where a loss is not finite."""
    rows = []
    for one, other in zip(baseline, method, strict=True):
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
        if len(pairs) < len(one):
            return None
        rows.append([b - a for a, b in pairs])
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def validate(baseline: Losses, method: Losses, difference: IntervalEstimate | None, steps: int) -> Validation:
    """Hold the method's held-out loss against what is allowed: 1%, or as far as uncompressed runs lie apart.

    Args:
        baseline: losses without compression.
        method: losses with it, of the same orders and batches.
        difference: the mean of ``differences`` with its interval, ``None`` for too few batches.
        steps: of training before.
    """
    means = [mean_of(row) for row in baseline]
    others = [mean_of(row) for row in method]
    known = [mean for mean in means if mean is not None]
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    baseline_loss = statistics.fmean(known) if len(known) == len(means) else None
    finite = [mean for mean in others if mean is not None]
    method_loss = statistics.fmean(finite) if len(finite) == len(others) else None
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


def mean_of(losses: Sequence[float | None]) -> float | None:
    """The mean, ``None`` where one is not finite."""
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


LEAST_SAVED_SHARE = 0.02
"""A smaller gain of the step is not worth gradients with an error."""


def judge_method(method: str, saved: IntervalEstimate, validation: Validation | None) -> tuple[TrafficRuling, str]:
    """Time first, then training: a method that saves no time needs no validation.

    Args:
        method: its name.
        saved: share of the step that it saves: measured where it was, else predicted.
        validation: of training with it, if there was one.
    """
    if method == UNCOMPRESSED:
        return TrafficRuling.UNDECIDED, "what the others are compared with"
    worth = f"worth it from {LEAST_SAVED_SHARE:.0%} on"
    if saved.high < LEAST_SAVED_SHARE:
        return TrafficRuling.REFUSE, f"saves {describe_share(saved)} of the step: {worth}"
    if validation is not None and validation.outcome is Outcome.BROKEN:
        return TrafficRuling.REFUSE, f"held-out loss: {validation.found}"
    if saved.low < LEAST_SAVED_SHARE:
        return TrafficRuling.UNDECIDED, f"saves {describe_share(saved)} of the step: {worth}"
    if validation is None:
        return TrafficRuling.UNDECIDED, f"saves {describe_share(saved)} of the step; training is not validated"
    if validation.outcome in (Outcome.OPEN, Outcome.NOT_MEASURED):
        return TrafficRuling.UNDECIDED, f"saves {describe_share(saved)} of the step; held-out loss: {validation.found}"
    return TrafficRuling.KEEP, f"saves {describe_share(saved)} of the step; held-out loss: {validation.found}"


def judge_all(methods: Sequence[MethodTraffic]) -> tuple[TrafficRuling, str, str | None, tuple[str, ...]]:
    """The ruling of all methods, its reason, the method to take, and what is missing."""
    others = [each for each in methods if each.method != UNCOMPRESSED]
    kept = [each for each in others if each.ruling is TrafficRuling.KEEP]
    if kept:
        best = max(kept, key=lambda each: saved_share(each).value)
        return TrafficRuling.KEEP, f"{best.method} {best.reason}", best.method, ()
    open_ones = [each for each in others if each.ruling is TrafficRuling.UNDECIDED]
    if open_ones:
        best = max(open_ones, key=lambda each: saved_share(each).value)
        return TrafficRuling.UNDECIDED, f"{best.method} {best.reason}", None, _missing(open_ones)
    best = max(others, key=lambda each: saved_share(each).value)
    return TrafficRuling.REFUSE, f"the fastest, {best.method}, {best.reason}", None, ()


def _missing(methods: Sequence[MethodTraffic]) -> tuple[str, ...]:
    found = []
    if any(saved_share(each).low < LEAST_SAVED_SHARE <= saved_share(each).high for each in methods):
        found.append("a narrower error bar of the step: more timed steps (--steps)")
    if any(each.validation is None for each in methods):
        found.append("training with and without, on held-out data (--validate STEPS)")
    validations = [each.validation for each in methods if each.validation is not None]
    if any(validation.outcome is Outcome.OPEN for validation in validations):
        found.append("more steps, more orders of the data or more held-out batches")
    if any(validation.outcome is Outcome.NOT_MEASURED for validation in validations):
        found.append("three held-out batches or more (--held-out), and training that stays finite without compression")
    return tuple(found)


def saved_share(method: MethodTraffic) -> IntervalEstimate:
    """What a method saves: measured where it was, else predicted."""
    saved = method.predicted_saved_share if method.measured_saved_share is None else method.measured_saved_share
    assert saved is not None, "one of both is known of every method"
    return saved


def describe_share(saved: IntervalEstimate) -> str:
    """``12.0% (9.1% to 14.8%)``."""
    return f"{saved.value:.1%} ({saved.low:.1%} to {saved.high:.1%})"
