"""What all regions share besides memory: the error that a plan may cause, and the room at the other end of the link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plimsoll.planning.effects import Effect


@dataclass(frozen=True, slots=True)
class Limits:
    """``squared_error`` is the square of the relative gradient error; ``link_bytes`` is ``None`` without a host budget."""

    squared_error: float = 0.0
    link_bytes: int | None = None

    def allow(self, squared_error: float, link_bytes: int) -> bool:
        """Whether so much of both may be spent; a hair of the error is forgiven, as the solver forgives it."""
        if squared_error > self.squared_error * (1 + 1e-6):
            return False
        return self.link_bytes is None or link_bytes <= self.link_bytes

    def hold_for(self, effects: Iterable[Effect]) -> bool:
        """Whether one choice per region keeps within."""
        taken = list(effects)
        return self.allow(sum(e.squared_error for e in taken), sum(e.link_bytes for e in taken))
