"""Counts the bytes of a training step that a plan's prediction does not contain, in one account.

A plan predicts the peak of the traced step. A real training step needs more memory: for the user's loss, for optimizer state,
and for other tensors that the loop holds. The account is the sum of these bytes. A plan must fit into the budget minus the
account. This difference is the plan's *room*.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Category, Phase


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Data: the bytes of a training step that a plan's prediction does not contain, with one field for each cause.

    The sum of the first three fields, the *measured* bytes, is the measured peak of a step of the first traced shape minus its
    predicted peak.

    Example:
        >>> account = MemoryAccount(optimizer_state=100, outside_model=10)
        >>> account.measured_bytes(growth=2.0)
        120
    """

    optimizer_state: int = 0
    """Optimizer state that the plan does not count. It has the same size at all batch shapes."""
    waiting_gradients: int = 0
    """Bytes that a step leaves behind for the next step, mostly gradients. They are the same at all batch shapes."""
    outside_model: int = 0
    """Bytes that the loop allocates during a step (for its loss), plus the prediction's error. They grow with the batch."""
    held_by_loop: int = 0
    """Bytes that the training loop holds now when a step begins, and did not hold when plans were made."""
    withheld: int = 0
    """Bytes of the budget that plans may not use now, because other programs use the device's memory."""

    @property
    def fixed_bytes(self) -> int:
        """The measured bytes that are the same at all batch shapes: optimizer state and waiting gradients."""
        return self.optimizer_state + self.waiting_gradients

    def measured_bytes(self, growth: float = 1.0) -> int:
        """Return the measured bytes: optimizer state, gradients that wait, and bytes outside of the model.

        ``growth`` is the bytes of activations at the batch's shape, divided by those at the first shape. Only ``outside_model``
        is multiplied by it.
        """
        return self.fixed_bytes + round(self.outside_model * growth)

    def total_bytes(self, growth: float = 1.0) -> int:
        """Return the sum of all fields: the bytes to subtract from the budget.

        ``growth`` is the bytes of activations at the batch's shape, divided by those at the first shape.
        """
        return self.measured_bytes(growth) + self.held_by_loop + self.withheld

    def measuring(self, measured_bytes: int) -> MemoryAccount:
        """Return a copy of the account (bytes that predictions lack) whose first three fields sum up to ``measured_bytes``.

        The fields ``optimizer_state`` and ``waiting_gradients`` stay the same, and the rest goes to ``outside_model``. If
        ``measured_bytes`` is less than these two fields together, they are reduced to that sum.
        """
        state = min(self.optimizer_state, measured_bytes)
        waiting = min(self.waiting_gradients, measured_bytes - state)
        outside = measured_bytes - state - waiting
        return dataclasses.replace(self, optimizer_state=state, waiting_gradients=waiting, outside_model=outside)

    def adding_state(self, new_bytes: int) -> MemoryAccount:
        """Return a copy of the account with ``new_bytes`` more optimizer state."""
        return dataclasses.replace(self, optimizer_state=self.optimizer_state + new_bytes)

    def holding(self, held_by_loop: int) -> MemoryAccount:
        """Return a copy of the account for a training loop that now holds ``held_by_loop`` bytes."""
        return dataclasses.replace(self, held_by_loop=held_by_loop)

    def withholding(self, withheld: int) -> MemoryAccount:
        """Return a copy of the account with ``withheld`` bytes, which plans may not use now."""
        return dataclasses.replace(self, withheld=withheld)


class PlanRoom:
    """The budget and the account (bytes that predictions do not contain) of this rank. The room is the budget minus the
    account: the bytes that a plan may use.
    """

    def __init__(self, account: MemoryAccount | None = None, budget_bytes: int = 0) -> None:
        self.account = account or MemoryAccount()
        self.budget_bytes = budget_bytes

    def bytes(self, growth: float = 1.0) -> int:
        """Return the room in bytes: the budget minus the account.

        ``growth`` is the bytes of activations at the batch's shape, divided by those at the first shape.
        """
        return self.budget_bytes - self.account.total_bytes(growth)


def planned_state_bytes(plan: Plan) -> int:
    """Return the bytes of optimizer state that a plan's prediction contains in forward and backward."""
    if plan.state is not None:
        return plan.state.resident_bytes
    return plan.classes.get(Category.OPTIMIZER_STATE, 0)


def predicted_optimizer_bytes(plan: Plan) -> int:
    """Return the predicted peak of the optimizer's step in bytes, or 0 if the plan was made without an optimizer."""
    return max((point.bytes for point in plan.timeline if point.moment.startswith(Phase.OPTIMIZER)), default=0)


def predicted_before_optimizer(plan: Plan) -> int:
    """Return the predicted peak of forward and backward in bytes, without the optimizer's step."""
    peaks = [point.bytes for point in plan.timeline if not point.moment.startswith(Phase.OPTIMIZER)]
    return max(peaks, default=plan.predicted_peak_bytes)
