"""One account of the bytes that a plan's prediction does not contain, and what a prediction contains.

A plan predicts the peak of the traced step. A training step takes more: the user's loss, state of optimizers, what the loop
holds. A plan must therefore fit into the budget less the account, which is its *room*.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Category, Phase


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes of a training step that a plan's prediction does not contain.

    The first three are *measured*: a step of the first traced shape took so much more than its prediction.

    Example:
        >>> account = MemoryAccount(optimizer_state=100, outside_model=10)
        >>> account.measured_bytes(growth=2.0)
        120
    """

    optimizer_state: int = 0
    """State of optimizers, beyond the state that the plan counts. The same at every batch shape."""
    waiting_gradients: int = 0
    """What a step leaves behind for the next one, mostly gradients. The same at every batch shape."""
    outside_model: int = 0
    """What the loop makes during a step (its loss), and the error of the prediction. It grows with the batch."""
    held_by_loop: int = 0
    """What the loop holds when a step begins, beyond what it held when plans were made."""
    withheld: int = 0
    """What other programs on the device take of the budget now."""

    @property
    def fixed_bytes(self) -> int:
        """The measured bytes that are the same at every batch shape."""
        return self.optimizer_state + self.waiting_gradients

    def measured_bytes(self, growth: float = 1.0) -> int:
        """Return the measured bytes at a shape whose activations are ``growth`` times those of the first shape."""
        return self.fixed_bytes + round(self.outside_model * growth)

    def total_bytes(self, growth: float = 1.0) -> int:
        """Return all bytes to subtract from the budget."""
        return self.measured_bytes(growth) + self.held_by_loop + self.withheld

    def measuring(self, measured_bytes: int) -> MemoryAccount:
        """Return the account with ``measured_bytes`` of measured bytes. What is not fixed counts as outside of the model."""
        state = min(self.optimizer_state, measured_bytes)
        waiting = min(self.waiting_gradients, measured_bytes - state)
        outside = measured_bytes - state - waiting
        return dataclasses.replace(self, optimizer_state=state, waiting_gradients=waiting, outside_model=outside)

    def adding_state(self, new_bytes: int) -> MemoryAccount:
        """Return the account with more optimizer state."""
        return dataclasses.replace(self, optimizer_state=self.optimizer_state + new_bytes)

    def holding(self, held_by_loop: int) -> MemoryAccount:
        """Return the account with other bytes that the loop holds."""
        return dataclasses.replace(self, held_by_loop=held_by_loop)

    def withholding(self, withheld: int) -> MemoryAccount:
        """Return the account with other bytes withheld for the rest of the device."""
        return dataclasses.replace(self, withheld=withheld)


class PlanRoom:
    """The bytes that a plan may take on this rank: the budget less the current account."""

    def __init__(self, account: MemoryAccount | None = None, budget_bytes: int = 0) -> None:
        self.account = account or MemoryAccount()
        self.budget_bytes = budget_bytes

    def bytes(self, growth: float = 1.0) -> int:
        """Return the room at a shape whose activations are ``growth`` times those of the first shape."""
        return self.budget_bytes - self.account.total_bytes(growth)


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
