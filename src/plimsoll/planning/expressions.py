"""Finds how a counted number follows from the sizes of a batch: the simplest expression through the points that are known.

What a step counts (bytes, arithmetic) is a sum of products of the sizes of tensors. So it is a polynomial in the sizes of the
batch with few terms: constants (weights), b·s (activations), b·s² (attention scores), s² (masks). A number is *known* where
exactly one expression of the least number of terms passes through every point, with a point to spare that checks it. Where
several pass, or none, it is not: it comes with an upper estimate. Arithmetic is in fractions: nothing is rounded.

Known weakness: sizes that are padded to multiples are no polynomials, so these stay estimates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

Sizes = tuple[int, ...]
"""The sizes of a batch, in a fixed order: such as examples and tokens, or those of every dimension of every tensor."""
Term = tuple[int, ...]
"""The power of every dimension."""

_MOST_DEGREES = 3
_MOST_TERMS = 3
_MOST_COMBINATIONS = 3000
"""More dimensions than a few have too many combinations of terms to look through them all."""
_TOLERANCE = 1e-9
"""Floating point discards combinations that miss by more; fractions decide about the others."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of coefficients times products of dimensions.

    ``is_known``: nothing else that is as simple passes through the points. Otherwise it is an upper estimate.
    """

    terms: tuple[Term, ...]
    coefficients: tuple[Fraction, ...]
    is_known: bool = True

    def exactly_at(self, dimensions: Sizes) -> Fraction:
        """The value."""
        terms = zip(self.terms, self.coefficients, strict=True)
        return sum((c * power(term, dimensions) for term, c in terms), Fraction(0))

    def at(self, dimensions: Sizes) -> int:
        """The value, rounded up and never negative."""
        return max(0, math.ceil(self.exactly_at(dimensions)))


def power(term: Term, dimensions: Sizes) -> int:
    """The product that a term stands for.

    Example:
        >>> power((1, 2), (3, 10))
        300
    """
    return math.prod(size**exponent for size, exponent in zip(dimensions, term, strict=True))


class Dimensions:
    """Which sizes of a batch vary on their own between the known ones. Those that are multiples of others, or of the product of
    two, follow them, as strides do.

    A size of 0 or 1 is part of the structure, as it decides which operations run, so it may not vary.
    """

    def __init__(self, points: Sequence[Sizes]) -> None:
        self._first = points[0]
        self._columns: list[int] = []
        self._followers: list[tuple[int, tuple[int, ...]]] = []
        """Every other size, with those of which it is a multiple; none where it is constant."""
        for column, sizes in enumerate(zip(*points, strict=True)):
            leaders = () if len(set(sizes)) == 1 else self._find_leaders(points, column)
            if leaders is None:
                self._columns.append(column)
            else:
                self._followers.append((column, leaders))
        self.points = tuple(map(self.of, points))

    @property
    def count(self) -> int:
        """How many sizes vary on their own."""
        return len(self._columns)

    def of(self, sizes: Sizes) -> Sizes:
        """The dimensions of a batch."""
        return tuple(sizes[column] for column in self._columns)

    def scaled(self, sizes: Sizes, multiples: Sizes) -> Sizes:
        """A batch whose dimensions are so many times as large."""
        factors = dict(zip(self._columns, multiples, strict=True))
        factors |= {column: math.prod(factors[leader] for leader in leaders) for column, leaders in self._followers}
        return tuple(size * factors[column] for column, size in enumerate(sizes))

    def can_tell(self, sizes: Sizes) -> bool:
        """Whether a batch differs from the known ones in its dimensions alone."""
        return same_structure(sizes, self._first) and all(
            self._follows(sizes, column, leaders) for column, leaders in self._followers
        )

    def _find_leaders(self, points: Sequence[Sizes], column: int) -> tuple[int, ...] | None:
        single = ((leader,) for leader in self._columns)
        groups = itertools.chain(single, itertools.combinations_with_replacement(self._columns, 2))
        return next((g for g in groups if all(self._follows(point, column, g) for point in points)), None)

    def _follows(self, sizes: Sizes, column: int, leaders: tuple[int, ...]) -> bool:
        """Whether a size is the same multiple of the product of others as in the first batch."""
        now, first = (math.prod(of[leader] for leader in leaders) for of in (sizes, self._first))
        return sizes[column] * first == self._first[column] * now


def same_structure(one: Sizes, other: Sizes) -> bool:
    """Whether two batches have as many sizes, and are 0 or 1 at the same places."""
    return len(one) == len(other) and all(a == b or min(a, b) > 1 for a, b in zip(one, other, strict=True))


class Fitter:
    """Finds the expressions of numbers that were all counted at the same points."""

    def __init__(self, points: Sequence[Sizes]) -> None:
        self._points = tuple(points)
        self._known: dict[tuple[int, ...], Expression] = {}

    def fit(self, values: tuple[int, ...]) -> Expression:
        """The expression with the fewest terms through all points; failing that, an upper estimate.

        Example:
            >>> points = [(1, 8), (2, 8), (2, 16), (3, 16)]
            >>> found = Fitter(points).fit(tuple(5 + 4 * b * s for b, s in points))
            >>> found.at((7, 32)), found.is_known
            (901, True)
        """
        if values not in self._known:
            self._known[values] = self._fit(values)
        return self._known[values]

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Products of dimensions that may occur, the constant first."""
        count = len(self._points[0])
        found = (t for t in itertools.product(range(_MOST_DEGREES + 1), repeat=count) if sum(t) <= _MOST_DEGREES)
        return tuple(sorted(found, key=lambda t: (sum(t), t)))

    def _fit(self, values: tuple[int, ...]) -> Expression:
        if not any(values):
            return Expression((), ())
        simplest: Expression | None = None
        for supports in self._classes:
            for support in supports:
                coefficients = self._solved(support, values)
                if coefficients is None:
                    continue
                if simplest is not None:
                    return self._estimate(values)
                simplest = Expression(tuple(self.terms[at] for at in support), coefficients)
            if simplest is not None:
                return simplest
        return self._estimate(values)

    @cached_property
    def _classes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Sets of terms that are equally simple, the simplest first: all leave a point to spare that checks them."""
        return tuple(tuple(each) for each in self._simple_classes())

    def _simple_classes(self) -> Iterator[Iterator[tuple[int, ...]]]:
        everything = range(len(self.terms))
        if len(self._points) == 1 or not self._points[0]:
            yield iter([(0,)])
            return
        yield ((at,) for at in everything)
        if len(self._points) > 2:
            yield ((0, at) for at in everything[1:])
        for size in range(2, min(_MOST_TERMS, len(self._points) - 1) + 1):
            if len(everything) ** size <= _MOST_COMBINATIONS:
                yield itertools.combinations(everything, size)

    @cached_property
    def _powers(self) -> list[list[int]]:
        return [[power(term, point) for term in self.terms] for point in self._points]

    def _solved(self, support: tuple[int, ...], values: tuple[int, ...]) -> tuple[Fraction, ...] | None:
        """The coefficients with which terms pass through every point; ``None`` where they do not, or one of them is 0."""
        rows = [[row[at] for at in support] for row in self._powers]
        matrix = np.array(rows, dtype=np.float64)
        matrix /= matrix.max(axis=0)
        found, _, rank, _ = np.linalg.lstsq(matrix, np.array(values, dtype=np.float64), rcond=None)
        if rank < len(support) or np.abs(matrix @ found - values).max() > _TOLERANCE * max(values):
            return None
        exact = solve_exactly(rows, values)
        return exact if exact is not None and all(exact) else None

    def _estimate(self, values: tuple[int, ...]) -> Expression:
        """The multiple of one term that lies above all points, and not far."""
        best: tuple[Fraction, Term, Fraction] | None = None
        for at, term in enumerate(self.terms):
            ratio = max(Fraction(value, row[at]) for value, row in zip(values, self._powers, strict=True))
            excess = sum((ratio * row[at] for row in self._powers), Fraction(0))
            if best is None or excess < best[0]:
                best = (excess, term, ratio)
        assert best is not None
        return Expression((best[1],), (best[2],), is_known=False)


def solve_exactly(rows: Sequence[Sequence[int]], values: Sequence[int]) -> tuple[Fraction, ...] | None:
    """Solves linear equations by elimination in fractions; ``None`` if they contradict each other, or are too few.

    Example:
        >>> solve_exactly([[1, 2], [1, 4], [1, 6]], [7, 11, 15])
        (Fraction(3, 1), Fraction(2, 1))
    """
    wide = [[*map(Fraction, row), Fraction(value)] for row, value in zip(rows, values, strict=True)]
    size = len(rows[0])
    for column in range(size):
        pivot = next((row for row in range(column, len(wide)) if wide[row][column]), None)
        if pivot is None:
            return None
        wide[column], wide[pivot] = wide[pivot], wide[column]
        wide[column] = [entry / wide[column][column] for entry in wide[column]]
        for row in range(len(wide)):
            if row != column and wide[row][column]:
                factor = wide[row][column]
                wide[row] = [a - factor * b for a, b in zip(wide[row], wide[column], strict=True)]
    if any(row[size] for row in wide[size:]):
        return None
    return tuple(row[size] for row in wide[:size])
