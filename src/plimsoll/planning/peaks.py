"""Computes within microseconds the memory and seconds of a plan at any batch size, from a small matrix.

The matrix has one row for each moment that can be the peak. A *family* is one model's step at many batch sizes, and a *replay*
is the recomputation of dropped values.

The bytes alive at a moment are a sum of storages. The bytes of each storage are an expression of the batch's dimensions (see
``expressions``), so their sum is one too. Its coefficients come from replaying the plan at as many sizes as there are terms.
Each moment within a replay has its own row, because another moment may be the highest at another size. A moment is left out if
another one is at least as large in every term. The peak of a batch is then one product of a small matrix with the values of
its terms, and a maximum.

Seconds are computed in the same way. They interpolate measured seconds, and are good enough to compare plans.

Known weakness: the bytes of forms other than KEEP and RECOMPUTE are known only for one batch size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, cast

import numpy as np
import numpy.typing as npt

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import RegionPlan
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.expressions import Sizes, Term, power, solve_exactly
from plimsoll.planning.family import Family, S
from plimsoll.planning.replay import Replay
from plimsoll.planning.simulate import StepReplays, choices_of, replay_seconds
from plimsoll.planning.step import StepIndex
from plimsoll.planning.windows import undominated

Floats = npt.NDArray[np.float64]
_SNAP = 1e-3
"""A coefficient whose distance from a whole number is below this is rounded to that number. The distance comes from floating
point."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Data: the memory and seconds of one plan at one batch size.

    ``before_optimizer_bytes`` is the peak of forward and backward, ``peak_bytes`` the peak of the whole step.
    ``forward_bytes`` are the bytes alive at the end of forward minus the bytes alive at its beginning.
    """

    before_optimizer_bytes: int
    peak_bytes: int
    seconds: float
    forward_bytes: int


class ShapedStep(Generic[S]):
    """One model's step at a few batch sizes. It computes the memory of any plan at any batch size.

    ``costs`` maps traced shapes to their costs; ``how`` are further arguments of ``StepIndex``.
    """

    def __init__(self, family: Family[S], costs: Mapping[S, Costs], **how: Any) -> None:
        self.family = family
        dimensions = family.dimensions
        smallest = min(family.shapes, key=lambda shape: (prod(shape), shape))
        self._unit = np.array(dimensions.of(smallest), dtype=np.float64)
        expressions = [*family.storage_sizes(), *family.workspaces()]
        terms = sorted({(0,) * dimensions.count, *(term for each in expressions for term in each.terms)})
        self._exponents = np.array(terms, dtype=np.float64).reshape(len(terms), dimensions.count)
        samples = _spread(terms, dimensions.points, dimensions.of(smallest))
        self._inverse = _inverse([[power(term, sample) for term in terms] for sample in samples])
        self._costs = dict(costs)
        shapes = [cast(S, dimensions.scaled(smallest, sample)) for sample in samples]
        self._indices = [StepIndex(*self.traced(shape), **how) for shape in shapes]
        self.lasting_bytes = self._indices[0].lasting_bytes

    def traced(self, shape: S) -> tuple[Trace, Costs]:
        """Return trace and costs of the step at a batch shape. They are predicted, unless the shape itself was traced."""
        if shape not in self.family.shapes:
            return self.family.alike(shape), self.family.seconds_at(shape, self._costs)
        return self.family.at(shape), self._costs.get(shape) or self.family.seconds_at(shape, self._costs)

    def under(self, regions: Sequence[RegionPlan]) -> ShapedPlan:
        """Return the coefficients that give the memory and seconds of a plan with these decisions at any batch size.

        Raises:
            Unreachable: a dropped value cannot be rebuilt in this family (one step at many batch sizes).
        """
        sampled, seconds = [], []
        for index in self._indices:
            choices = choices_of(index, regions)
            replays = StepReplays(index, choices)
            sampled.append(_moments(replays))
            ops = [op for outcome in replays.outcomes for op in outcome.ops]
            seconds.append(index.base_seconds + replay_seconds(index, dict(enumerate(choices)), ops))
        is_before = np.array([instant < self._indices[0].last_wait for instant, _ in sampled[0]])
        moments = np.array([[size for _, size in each] for each in sampled], dtype=np.float64)
        rows = (self._inverse @ moments).T
        whole = np.rint(rows)
        rows = np.where(np.abs(rows - whole) < _SNAP, whole, rows)
        forward = rows[self._indices[0].handover] - rows[0]  # the first rows are the instants, in order
        before = _undominated(rows[is_before])
        # The row of zeros is for steps without an optimizer.
        optimizer = np.concatenate([rows[~is_before], np.zeros((1, rows.shape[1]))])
        seconds_row = self._inverse @ np.array(seconds, dtype=np.float64)
        return ShapedPlan(before, _undominated(optimizer), forward, seconds_row)

    def terms_at(self, shape: S) -> Floats:
        """Return the values of all terms (products of powers of dimensions) at a shape, in units of the smallest shape."""
        scaled: Floats = np.array(self.family.dimensions.of(shape), dtype=np.float64) / self._unit
        return np.asarray(np.prod(scaled**self._exponents, axis=1))


@dataclass(frozen=True, slots=True)
class ShapedPlan:
    """Data: one plan's memory and seconds at all batch shapes of a family (one step at many batch sizes), as coefficients of
    the family's terms.

    ``before`` has a row for each moment before the optimizer's step that can be the peak, ``optimizer`` a row for each such
    moment in that step. ``forward`` is the row for the bytes that forward adds, ``seconds`` the row for the seconds.
    """

    before: Floats
    optimizer: Floats
    forward: Floats
    seconds: Floats


class ShapedPlans:
    """The coefficients of several plans of one family (the same step at many batch sizes).

    One matrix product computes the memory and seconds of all these plans at a batch shape.
    """

    def __init__(self, plans: Sequence[ShapedPlan]) -> None:
        parts = [part for plan in plans for part in (plan.before, plan.optimizer)]
        single = [row[None] for plan in plans for row in (plan.forward, plan.seconds)]
        self._rows = np.concatenate([*parts, *single]) if plans else np.zeros((0, 1))
        self._starts = np.cumsum([0, *map(len, parts)])

    def at(self, terms: Floats) -> tuple[Forecast, ...]:
        """Return the forecast (memory and seconds) of each plan at one batch shape, given by the values of its terms.

        A term is a product of powers of the batch's dimensions.
        """
        if not len(self._rows):
            return ()
        values = self._rows @ terms
        moments = values[: self._starts[-1]]
        peaks = np.rint(np.maximum.reduceat(moments, self._starts[:-1])).astype(np.int64).tolist()
        single = values[self._starts[-1] :].clip(0.0).tolist()
        figures = zip(peaks[::2], peaks[1::2], single[1::2], single[::2], strict=True)
        return tuple(
            Forecast(before, max(before, optimizer), seconds, round(forward))
            for before, optimizer, seconds, forward in figures
        )


def _moments(replays: StepReplays) -> list[tuple[int, int]]:
    """Return a list of (instant, bytes) with all moments of a simulated step that can be the peak.

    At all batch sizes the moments have the same order.
    """
    curve = replays.held()
    summits: dict[int, list[list[int]]] = {}
    for outcome in replays.outcomes:
        level = np.zeros_like(curve)
        for instant, start, highs, left in _levels(outcome):
            level[instant:] = start
            level[instant + 1 :] = left
            if highs:
                summits.setdefault(instant, []).append([high - start for high in highs])
        curve += level
    found = list(enumerate(curve.tolist()))
    for instant, each in sorted(summits.items()):
        found += [(instant, found[instant][1] + sum(highs)) for highs in itertools.product(*each)]
    return found


def _levels(outcome: Replay) -> Iterator[tuple[int, int, list[int], int]]:
    """Yield four entries for each instant at which a recomputation allocates or releases buffers.

    They are the instant, the bytes after the releases that are due before anything is rebuilt, a list of the bytes at the local
    maxima, and the bytes at the end.
    """
    now = 0
    for instant, together in itertools.groupby(outcome.buffers, key=lambda event: event.instant):
        events = list(together)
        made = list(itertools.dropwhile(lambda event: event.is_due, events))
        now += sum(event.bytes for event in events[: len(events) - len(made)])
        start, highs, is_rising = now, list[int](), True
        for event in made:
            if event.bytes < 0 and is_rising:
                highs.append(now)
            is_rising = event.bytes >= 0
            now += event.bytes
        if made and is_rising:
            highs.append(now)
        yield instant, start, highs, now


def _undominated(rows: Floats) -> Floats:
    """Return the rows of a table that can be the maximum: a row is left out if another is at least as large in all columns."""
    distinct = np.unique(rows, axis=0)
    largest_first = np.argsort(-distinct.sum(axis=1), kind="stable")
    return np.asarray(distinct[undominated(-distinct, largest_first.tolist())])


def _spread(terms: Sequence[Term], points: Sequence[Sizes], unit: Sizes) -> list[Sizes]:
    """Return the sizes at which to sample a step, as multiples of the smallest size (``unit``): one sample for each term.

    They are about within the range of the known points, and the terms' values at them are linearly independent.
    """
    choices = []
    for column, size in enumerate(unit):
        most = max(4, -(-max(point[column] for point in points) // size))
        choices.append(sorted({1, 2, 3, most, max(4, round(most**0.5))}))
    found: list[Sizes] = []
    for sample in sorted(itertools.product(*choices), key=lambda sample: (sum(sample), sample)):
        rows = np.array([[power(term, each) for term in terms] for each in [*found, sample]], dtype=np.float64)
        if np.linalg.matrix_rank(rows / rows.max(axis=0)) == len(rows):
            found.append(sample)
        if len(found) == len(terms):
            return found
    raise AssertionError("distinct products are told apart by enough multiples")


def _inverse(matrix: Sequence[Sequence[int]]) -> Floats:
    """Return the inverse of a matrix of whole numbers.

    It is computed in fractions, because terms of large sizes differ too much in magnitude for floating point.
    """
    units = np.eye(len(matrix), dtype=np.int64).tolist()
    columns = [solve_exactly(matrix, unit) or () for unit in units]
    return np.array([[float(entry) for entry in column] for column in columns]).T
