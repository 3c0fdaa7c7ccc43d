"""Decides when plans for several forwards before one backward have become unnecessary.

A failed step that is repeated within its own ``except`` clause keeps its graph alive, so for once two forwards wait for one
backward. Plans for two keep less, and are slower. If the next steps have one forward each, plans for one are used again.
"""

from __future__ import annotations

_STEPS_BEFORE = 8
_STEPS_FACTOR = 8
"""Each time plans for fewer forwards are used again, the number of steps to wait before the next time is multiplied by this.

A loop may have more forwards before one backward in every n-th step.
"""


class FewerForwards:
    """Counts the latest steps with fewer forwards before one backward than plans are made for."""

    def __init__(self) -> None:
        self._patience = _STEPS_BEFORE
        self._steps = self._most = 0

    def step_ended(self, in_flight: int, planned: int) -> None:
        """Count a step with ``in_flight`` forwards before one backward. Plans are made for ``planned`` forwards."""
        if in_flight < planned:
            self._steps, self._most = self._steps + 1, max(self._most, in_flight)
        else:
            self._steps = self._most = 0

    @property
    def enough(self) -> int:
        """The number of forwards that would have been enough for these steps, or 0 if there were too few steps to tell."""
        return self._most if self._steps >= self._patience else 0

    def planned_fewer(self) -> None:
        """Note that plans are made for fewer forwards from now on."""
        self._patience *= _STEPS_FACTOR
        self._steps = self._most = 0
