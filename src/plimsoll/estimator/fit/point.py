"""What the search varies: examples per micro-batch and tokens per example."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """One micro-batch: ``batch`` examples of ``sequence`` tokens (1 for models that have no sequence to vary)."""

    batch: int
    sequence: int

    @property
    def items(self) -> int:
        """Tokens, or examples, in it."""
        return self.batch * self.sequence

    def __str__(self) -> str:
        return f"{self.batch} × {self.sequence}" if self.sequence > 1 else f"{self.batch}"
