"""Held-out losses of training with and without a method in; whether the method did harm, out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from plimsoll.artifacts.traffic import Validation
from plimsoll.artifacts.verdict import Estimate, Outcome

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


def validate(baseline: Losses, method: Losses, difference: Estimate | None, steps: int) -> Validation:
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
    baseline_loss: float | None, method_loss: float | None, difference: Estimate | None, allowed: float
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
