"""Decide when a region that reads values of tensors is recorded, if backward could run it again instead.

A recording costs as much as ten forwards or more, and saves a part of one forward in each later call that its recipe serves. So
a region gets a few recordings at once. From then on it has to earn them by calls that recipes serve. A region whose calls keep
differing earns nothing: its calls run again in backward, at the price of activation checkpointing.
"""

from __future__ import annotations

FIRST_RECORDINGS = 8
"""The number of recordings that a region gets before it has to earn more. They are enough for two or three ways through its
code, because it takes three recordings to find the numbers that change in one way.
"""
PAYING_CALLS = 32
"""The number of calls that recipes have to serve for one more recording."""
FIRST_STEPS = 8
"""The number of first steps that may record all regions. Each later step records at most one, so that no step takes several
times as long as its neighbours.
"""


class Learning:
    """Counts the recordings of one region that reads values, and the calls that recipes served, under all signatures."""

    def __init__(self) -> None:
        self.recordings = 0
        """The number of recordings since the region was found to read values of tensors."""
        self.served = 0
        """The number of calls without a recording that recipes served."""

    def pays(self) -> bool:
        """Return whether the region may be recorded once more."""
        return self.recordings < FIRST_RECORDINGS + self.served // PAYING_CALLS


class Pace:
    """Spreads recordings that can wait over the steps of one model."""

    def __init__(self) -> None:
        self._steps = 0
        self._is_taken = False

    def begin_step(self) -> None:
        """Note that a step begins. It may record one region."""
        self._steps += 1
        self._is_taken = False

    def take(self) -> bool:
        """Return whether a region may be recorded now. If so, note that it will be."""
        is_free = self._steps <= FIRST_STEPS or not self._is_taken
        self._is_taken = True
        return is_free
