"""What all regions share besides memory: the error that a plan may cause, and the room at the other end of the link."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """``squared_error`` is the square of the relative gradient error; ``link_bytes`` is ``None`` without a host budget."""

    squared_error: float = 0.0
    link_bytes: int | None = None

    def allow(self, squared_error: float, link_bytes: int) -> bool:
        """Whether so much of both may be spent; a hair of the error is forgiven, as the solver forgives it.

        An infinite error (a mask made of something lossy) is a wrong gradient, which no limit allows.
        """
        if squared_error > self.squared_error * (1 + 1e-6) or math.isinf(squared_error):
            return False
        return self.link_bytes is None or link_bytes <= self.link_bytes

    def are_within(self, others: Limits) -> bool:
        """Whether whatever keeps to these keeps to the others too."""
        if others.link_bytes is not None and (self.link_bytes is None or self.link_bytes > others.link_bytes):
            return False
        return self.squared_error <= others.squared_error
