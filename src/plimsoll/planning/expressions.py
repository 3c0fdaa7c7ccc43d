"""Finds how a counted number depends on the sizes of a batch: the simplest expression through the known points.

The numbers counted in a step (bytes, arithmetic) are sums of products of tensor sizes. So each is a polynomial in the sizes
of the batch with few terms: constants (weights), b·s (activations), b·s² (attention scores), s² (masks). A number is *known*
if exactly one expression with the fewest terms passes through every point, and one more point than needed confirms it. If
several expressions pass, or none, the number is not known, and `Fitter` returns an upper estimate. Arithmetic uses
fractions, so nothing is rounded.

Known weakness: sizes padded to multiples are not polynomials, so these numbers stay estimates.
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
"""The sizes of a batch, in a fixed order: for example examples and tokens, or every dimension of every tensor."""
Term = tuple[int, ...]
"""The exponent of every dimension."""

_MOST_DEGREES = 3
_MOST_TERMS = 3
_MOST_COMBINATIONS = 3000
"""With more than a few dimensions there are too many combinations of terms to try them all."""
_TOLERANCE = 1e-9
"""Floating point discards combinations with a larger error; fractions decide about the others."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of coefficients times products of dimensions.

    ``is_known``: no other expression that is as simple passes through the points. If False, this is an upper estimate.
    """

    terms: tuple[Term, ...]
    coefficients: tuple[Fraction, ...]
    is_known: bool = True

    def exactly_at(self, dimensions: Sizes) -> Fraction:
        """The exact value at these dimensions."""
        terms = zip(self.terms, self.coefficients, strict=True)
        return sum((c * power(term, dimensions) for term, c in terms), Fraction(0))

    def at(self, dimensions: Sizes) -> int:
        """The value at these dimensions, rounded up and never negative."""
        return max(0, math.ceil(self.exactly_at(dimensions)))


def power(term: Term, dimensions: Sizes) -> int:
    """The value of a term: each dimension to the power of its exponent, multiplied.

    Example:
        >>> power((1, 2), (3, 10))
        300
    """
    return math.prod(size**exponent for size, exponent in zip(dimensions, term, strict=True))


class Dimensions:
    """Finds the sizes of a batch that vary independently between the known batches.

    A size that is always a multiple of another size, or of the product of two, depends on them, as strides do. A size of 0
    or 1 decides which operations run, so it is a part of the structure and must not vary.
    """

    def __init__(self, points: Sequence[Sizes]) -> None:
        self._first = points[0]
        self._columns: list[int] = []
        self._followers: list[tuple[int, tuple[int, ...]]] = []
        """Every other size, with the sizes that it is a multiple of (empty if it is constant)."""
        for column, sizes in enumerate(zip(*points, strict=True)):
            leaders = () if len(set(sizes)) == 1 else self._find_leaders(points, column)
            if leaders is None:
                self._columns.append(column)
            else:
                self._followers.append((column, leaders))
        self.points = tuple(map(self.of, points))

    @property
    def count(self) -> int:
        """The number of sizes that vary independently."""
        return len(self._columns)

    def of(self, sizes: Sizes) -> Sizes:
        """The independent sizes of a batch."""
        return tuple(sizes[column] for column in self._columns)

    def scaled(self, sizes: Sizes, multiples: Sizes) -> Sizes:
        """The batch after multiplying each independent size by its entry of ``multiples``."""
        factors = dict(zip(self._columns, multiples, strict=True))
        factors |= {column: math.prod(factors[leader] for leader in leaders) for column, leaders in self._followers}
        return tuple(size * factors[column] for column, size in enumerate(sizes))

    def can_tell(self, sizes: Sizes) -> bool:
        """True if a batch differs from the known ones only in its independent sizes and what depends on them."""
        return same_structure(sizes, self._first) and all(
            self._follows(sizes, column, leaders) for column, leaders in self._followers
        )

    def _find_leaders(self, points: Sequence[Sizes], column: int) -> tuple[int, ...] | None:
        single = ((leader,) for leader in self._columns)
        groups = itertools.chain(single, itertools.combinations_with_replacement(self._columns, 2))
        return next((g for g in groups if all(self._follows(point, column, g) for point in points)), None)

    def _follows(self, sizes: Sizes, column: int, leaders: tuple[int, ...]) -> bool:
        """True if a size is the same multiple of the product of other sizes as in the first batch."""
        now, first = (math.prod(of[leader] for leader in leaders) for of in (sizes, self._first))
        return sizes[column] * first == self._first[column] * now


def same_structure(one: Sizes, other: Sizes) -> bool:
    """True if two batches have equally many sizes, and every size of 0 or 1 is the same in both."""
    return len(one) == len(other) and all(a == b or min(a, b) > 1 for a, b in zip(one, other, strict=True))


class Fitter:
    """Finds the expressions of numbers that were all counted at the same points."""

    def __init__(self, points: Sequence[Sizes]) -> None:
        self._points = tuple(points)
        self._known: dict[tuple[int, ...], Expression] = {}

    def fit(self, values: tuple[int, ...]) -> Expression:
        """The expression with the fewest terms through all points; an upper estimate if there is not exactly one.

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
        """Sets of terms by simplicity, the simplest first. Each set leaves at least one point to confirm it."""
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
        """The coefficients that make these terms pass through every point; ``None`` if none exist, or if one is 0."""
        rows = [[row[at] for at in support] for row in self._powers]
        matrix = np.array(rows, dtype=np.float64)
        matrix /= matrix.max(axis=0)
        found, _, rank, _ = np.linalg.lstsq(matrix, np.array(values, dtype=np.float64), rcond=None)
        if rank < len(support) or np.abs(matrix @ found - values).max() > _TOLERANCE * max(values):
            return None
        exact = solve_exactly(rows, values)
        return exact if exact is not None and all(exact) else None

    def _estimate(self, values: tuple[int, ...]) -> Expression:
        """The closest multiple of a single term that is not below any point."""
        best: tuple[Fraction, Term, Fraction] | None = None
        for at, term in enumerate(self.terms):
            ratio = max(Fraction(value, row[at]) for value, row in zip(values, self._powers, strict=True))
            excess = sum((ratio * row[at] for row in self._powers), Fraction(0))
            if best is None or excess < best[0]:
                best = (excess, term, ratio)
        assert best is not None
        return Expression((best[1],), (best[2],), is_known=False)


def solve_exactly(rows: Sequence[Sequence[int]], values: Sequence[int]) -> tuple[Fraction, ...] | None:
    """Solve linear equations by elimination in fractions; ``None`` if they contradict each other or are too few.

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
