"""What a device says about a plan that was made without it: predicted beside measured, before and after solving again.

No torch in here. Seconds are those of forward and backward: verification does not run the optimizer, so its step is taken
off what was predicted.
"""

from __future__ import annotations

import msgspec

SECONDS_TOLERANCE = 0.10
"""A predicted step that is off by more than this share of the measured one is off."""
PEAK_TOLERANCE = 0.05
"""So is a predicted peak; one above the budget is off whatever was predicted."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One plan's prediction beside what was measured; the measured peak is that of the recording step or of a steady one."""

    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_seconds: float
    measured_seconds: float
    measured_spread_seconds: float = 0.0

    @property
    def peak_error(self) -> float:
        """How far the predicted peak is from the measured one, as a share of it; positive where it was too high."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1.0 if self.measured_peak_bytes else 0.0

    @property
    def seconds_error(self) -> float:
        """The same of the step's seconds."""
        return self.predicted_seconds / self.measured_seconds - 1.0 if self.measured_seconds else 0.0


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """A plan whose costs were the roofline of ``cost_device``, held against the device itself.

    ``given`` is the plan as it was made. Where it is off, the step was traced and timed on the device and the plan solved
    again: ``revised`` is that plan's claim, ``revised_verdict`` its receipt's verdict; ``obstacle`` says why there is none.
    """

    cost_device: str
    budget_bytes: int | None
    given: Claim
    revised: Claim | None = None
    revised_verdict: str = ""
    obstacle: str = ""
    peak_tolerance: float = PEAK_TOLERANCE
    seconds_tolerance: float = SECONDS_TOLERANCE

    @property
    def is_over_budget(self) -> bool:
        """Whether the plan as given takes more than its budget."""
        return self.budget_bytes is not None and self.given.measured_peak_bytes > self.budget_bytes

    @property
    def is_peak_off(self) -> bool:
        """Whether the peak is above the budget, or was predicted wrong."""
        return self.is_over_budget or abs(self.given.peak_error) > self.peak_tolerance

    @property
    def is_time_off(self) -> bool:
        """Whether the step's seconds were predicted wrong."""
        return abs(self.given.seconds_error) > self.seconds_tolerance

    @property
    def is_confirmed(self) -> bool:
        """Whether the plan may stay as it is."""
        return not (self.is_peak_off or self.is_time_off)
