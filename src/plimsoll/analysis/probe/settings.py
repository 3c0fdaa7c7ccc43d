"""What a probe is asked to do: how long, how often the arms take turns, how sure it has to be. And when it looks."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHIFT = 0.10
"""How much a norm, or the gradient's length along the right direction, may change."""
LEAST_COSINE = 0.90
"""Of the angle between the plan's gradient and the unmanaged one."""
MOST_DELAY = 1.10
"""How many times as many steps the plan may need for the same loss."""
LEAST_HELD_OUT_MARGIN = 0.01
"""A held-out loss that is worse by a smaller share than this is not called worse."""
SPIKE = 3.0
"""A norm that is so many times the running median is a spike."""
STATISTICAL_RULES = 5
"""Rules that can be broken by chance: each gets its share of the error allowed."""

_FIRST_LOOK = 40
_HALVINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How both arms are run.

    ``chunk_steps`` are taken by one arm before it makes way for the other; ``identical_steps`` are enough to call two arms
    identical; ``error`` is allowed for the whole verdict (0.05: wrong once in twenty).
    """

    steps: int = 1000
    chunk_steps: int = 20
    seed: int = 0
    target_loss: float | None = None
    is_early: bool = True
    identical_steps: int = 100
    error: float = 0.05

    @property
    def looks(self) -> tuple[int, ...]:
        """Steps after which the rules are held against what was logged: whole chunks, each about twice the one before."""
        found = {self.steps}
        for halving in range(1, _HALVINGS + 1):
            whole = -(-self.steps // (2**halving * self.chunk_steps)) * self.chunk_steps
            if _FIRST_LOOK <= whole < self.steps:
                found.add(whole)
        return tuple(sorted(found))

    @property
    def error_to_clear(self) -> float:
        """Two-sided error of the intervals that clear a rule: every look has an equal share.

        All rules have to be clear, so an error in any one of them does no harm beside the others.
        """
        return self.error / self._decisions

    @property
    def error_to_break(self) -> float:
        """Two-sided error of the intervals that break a rule: any rule at any look can do it, so they share the error."""
        return self.error / (self._decisions * STATISTICAL_RULES)

    @property
    def _decisions(self) -> int:
        """How often the rules decide: at every look, or at the end alone."""
        return len(self.looks) if self.is_early else 1
