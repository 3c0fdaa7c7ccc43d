"""What a plan's prediction contains."""

from __future__ import annotations

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Category, Phase


def planned_state_bytes(plan: Plan) -> int:
    """Return the bytes of optimizer state that a plan counts."""
    return plan.classes.get(Category.OPTIMIZER_STATE, 0)


def predicted_optimizer_bytes(plan: Plan) -> int:
    """Return the predicted peak of the optimizer's step; 0 if the plan was made without an optimizer."""
    return max((point.bytes for point in plan.timeline if point.moment.startswith(Phase.OPTIMIZER)), default=0)


def predicted_before_optimizer(plan: Plan) -> int:
    """Return the predicted peak of forward and backward."""
    peaks = [point.bytes for point in plan.timeline if not point.moment.startswith(Phase.OPTIMIZER)]
    return max(peaks, default=plan.predicted_peak_bytes)
