"""Searches the micro-batches of a fit for the fastest one that fits, while solving only a limited number of plans.

A larger micro-batch needs more memory (every size grows with it), but is not always faster: fixed costs (launches, reading the
weights, the optimizer's step) spread over more examples, while a plan has to recompute more. The search has three steps. It
doubles the micro-batch until nothing fits. It finds the largest micro-batch that does not need a plan, by simulation without a
solve. Then it halves the gaps on both sides of the best point (a micro-batch and sequence) as long as a point in between could
be better: the step without a plan bounds every plan's speed, and does not cost a solve.

Known weakness: throughput is assumed to be concave between neighbouring points; a second maximum there is not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from plimsoll.artifacts.fit import FitPoint

MOST_SOLVES = 16
_WORTH = 1.002
"""A plan is solved for a point (micro-batch and sequence) only if the point could be faster than the best point so far by this
factor.
"""
_FINEST_SHARE = 0.03
"""Gaps between two micro-batches are not divided further if they are smaller than this share of the smaller micro-batch."""


class Shape(NamedTuple):
    """The size of one micro-batch: ``batch`` examples of ``sequence`` tokens.

    ``sequence`` is 1 for models whose sequence cannot vary.
    """

    batch: int
    sequence: int

    @property
    def items(self) -> int:
        """The number of tokens in the micro-batch, or of examples if the sequence cannot vary."""
        return self.batch * self.sequence

    def __str__(self) -> str:
        return f"{self.batch} × {self.sequence}" if self.sequence > 1 else f"{self.batch}"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of a point before a plan is solved for it, as data: the peak and the speed of its step without a plan."""

    unmanaged_peak_bytes: int
    most_items_per_second: float
    """Tokens (or examples) per second without a plan. The speed under a plan cannot be higher."""


class Evaluate(Protocol):
    """The interface through which the search evaluates a size of micro-batch. ``outlook`` is fast. ``evaluate`` may solve a
    plan, which takes long.
    """

    @property
    def solves(self) -> int:
        """The number of plans that were solved so far."""

    def outlook(self, shape: Shape) -> Outlook: ...

    def evaluate(self, shape: Shape) -> FitPoint: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The sizes of micro-batch that may be chosen, as data.

    ``allowed`` lists the micro-batches in ascending order. ``None`` allows any number up to ``most_batch``.
    """

    sequences: tuple[int, ...]
    most_batch: int
    allowed: tuple[int, ...] | None = None

    def ladder(self) -> tuple[int, ...]:
        """Return the micro-batches to try first, in ascending order: each is about twice as large as the one before."""
        if self.allowed is None:
            doubled = (1 << power for power in range(self.most_batch.bit_length()))
            return tuple(dict.fromkeys([*doubled, self.most_batch]))
        rungs = [self.allowed[0]]
        for batch in self.allowed[1:]:
            if batch >= 2 * rungs[-1] or batch == self.allowed[-1]:
                rungs.append(batch)
        return tuple(rungs)

    def between(self, low: int, high: int) -> int | None:
        """Return an allowed micro-batch about halfway between two others, or ``None`` if nothing is allowed between them."""
        if self.allowed is None:
            return (low + high) // 2 if high - low > 1 else None
        inner = [batch for batch in self.allowed if low < batch < high]
        return inner[len(inner) // 2] if inner else None


@dataclass(slots=True)
class Search:
    """A search over micro-batches and sequence lengths. ``found`` maps each size that was evaluated to its point (the predicted
    memory and speed).
    """

    space: Space
    evaluator: Evaluate
    budget_bytes: int
    most_solves: int = MOST_SOLVES
    found: dict[Shape, FitPoint] = field(default_factory=dict)

    def run(self) -> None:
        """Evaluate micro-batches for each sequence length. Each length may use an equal share of the plans that the search may
        solve.
        """
        sequences: Sequence[int] = self.space.sequences
        for place, sequence in enumerate(sequences):
            limit = self.most_solves * (place + 1) // len(sequences)
            _Climb(self, sequence, limit).run()

    def best(self) -> FitPoint | None:
        """Return the point with the most tokens per second among the points that fit, or ``None`` if none fits.

        Among equally fast points, return the point with the lowest peak.
        """
        fitting = [point for point in self.found.values() if point.does_fit]
        return max(fitting, key=lambda p: (p.items_per_second, -p.predicted_peak_bytes), default=None)

    def points(self) -> tuple[FitPoint, ...]:
        """Return all points (micro-batches with their sequences) that were evaluated, ordered by sequence length and
        micro-batch.
        """
        return tuple(self.found[shape] for shape in sorted(self.found, key=lambda s: (s.sequence, s.batch)))

    def know(self, shape: Shape) -> FitPoint:
        """Return the point (predicted memory and speed) of this size of micro-batch. It is evaluated at the first request and
        then remembered.
        """
        if shape not in self.found:
            self.found[shape] = self.evaluator.evaluate(shape)
        return self.found[shape]


@dataclass(slots=True)
class _Climb:
    """The search of the micro-batches for one sequence length. It stops when ``solve_limit`` plans have been solved."""

    search: Search
    sequence: int
    solve_limit: int

    def run(self) -> None:
        fitting, too_large = self._climb()
        if fitting is None:
            return
        self._refine_unmanaged()
        if too_large is not None:
            self._refine_largest(fitting, too_large)
        self._refine_best()

    def _climb(self) -> tuple[int | None, int | None]:
        """Double the micro-batch until it does not fit. Return two micro-batches: the largest that fits and the smallest that
        does not. Each is ``None`` if none was found.
        """
        fitting = None
        for batch in self.search.space.ladder():
            if fitting is not None and self._is_spent():
                return fitting, None
            if not self._know(batch).does_fit:
                return fitting, batch
            fitting = batch
        return fitting, None

    def _refine_unmanaged(self) -> None:
        """Find the largest micro-batch that fits without a plan, and evaluate it."""
        low = max((batch for batch in self._batches() if self._know(batch).is_unmanaged), default=None)
        high = min((batch for batch in self._batches() if low is not None and batch > low), default=None)
        if low is None or high is None:
            return
        while (middle := self.search.space.between(low, high)) is not None:
            fits = self.search.evaluator.outlook(self._shape(middle)).unmanaged_peak_bytes <= self.search.budget_bytes
            low, high = (middle, high) if fits else (low, middle)
        self._know(low)

    def _refine_largest(self, low: int, high: int) -> None:
        """Bisect between ``low``, which fits, and ``high``, which does not, towards the largest micro-batch that fits. Use at
        most a quarter of the solves that are left.
        """
        rounds = max(1, (self.solve_limit - self.search.evaluator.solves) // 4)
        for _ in range(rounds):
            middle = self.search.space.between(low, high)
            if middle is None or self._is_spent() or high - low <= _FINEST_SHARE * low:
                return
            low, high = (middle, high) if self._know(middle).does_fit else (low, middle)

    def _refine_best(self) -> None:
        """Halve the gaps on both sides of the best point (a micro-batch and sequence), as long as a point in a gap could be
        better than the best point.
        """
        while not self._is_spent():
            middle = self._next_beside_best()
            if middle is None:
                return
            self._know(middle)

    def _next_beside_best(self) -> int | None:
        batches = self._batches()
        best = max((b for b in batches if self._know(b).does_fit), key=self._speed)
        place = batches.index(best)
        below = batches[place - 1] if place else None
        above = batches[place + 1] if place + 1 < len(batches) else None
        gaps = [(near, far) for near, far in ((below, above), (above, below)) if near is not None]
        for near, far in sorted(gaps, key=lambda gap: -abs(gap[0] - best)):
            low, high = min(near, best), max(near, best)
            middle = self.search.space.between(low, high)
            if middle is None or high - low <= _FINEST_SHARE * low:
                continue
            if self._most_at(middle, best, far) > _WORTH * self._speed(best):
                return middle
        return None

    def _most_at(self, middle: int, best: int, far: int | None) -> float:
        """Return an upper bound of the speed at the micro-batch ``middle``. It lies between ``best``, the fastest micro-batch
        so far, and the next evaluated one.

        One bound is the step without a plan. The other bound is the line from ``far``, the neighbour on the other side, through
        ``best``; it holds because throughput is assumed to be concave.
        """
        most = self.search.evaluator.outlook(self._shape(middle)).most_items_per_second
        if far is None or not self._know(far).does_fit:
            return most
        slope = (self._speed(best) - self._speed(far)) / (best - far)
        return min(most, self._speed(best) + slope * (middle - best))

    def _speed(self, batch: int) -> float:
        return self._know(batch).items_per_second

    def _batches(self) -> list[int]:
        return sorted(shape.batch for shape in self.search.found if shape.sequence == self.sequence)

    def _shape(self, batch: int) -> Shape:
        return Shape(batch, self.sequence)

    def _know(self, batch: int) -> FitPoint:
        return self.search.know(self._shape(batch))

    def _is_spent(self) -> bool:
        return self.search.evaluator.solves >= self.solve_limit
