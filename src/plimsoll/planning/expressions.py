"""Finds how a counted number (such as bytes) depends on the sizes of a batch: the simplest expression through known points.

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
"""A product of powers of a batch's dimensions, such as b·s². It is stored as the exponent of each dimension: (1, 2)."""

_MOST_DEGREES = 3
_MOST_TERMS = 3
_MOST_COMBINATIONS = 3000
"""Combinations of several terms are tried only if there are at most this many. If a batch has more than a few dimensions, there
are too many to try them all."""
_TOLERANCE = 1e-9
"""A combination of terms whose relative error in floating point is larger than this is discarded; fractions decide about the
others."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of terms: each term is a product of powers of the batch's dimensions, times its coefficient.

    With ``is_known``, no other expression that is as simple passes through the known points. Otherwise the expression is an
    upper estimate.
    """

    terms: tuple[Term, ...]
    coefficients: tuple[Fraction, ...]
    is_known: bool = True

    def exactly_at(self, dimensions: Sizes) -> Fraction:
        """Return the value that the expression has for a batch with these dimensions, as an exact fraction."""
        terms = zip(self.terms, self.coefficients, strict=True)
        return sum((c * power(term, dimensions) for term, c in terms), Fraction(0))

    def at(self, dimensions: Sizes) -> int:
        """Return the value that the expression has for a batch with these dimensions, as a whole number.

        It is rounded up, and 0 instead of a negative value.
        """
        return max(0, math.ceil(self.exactly_at(dimensions)))


def power(term: Term, dimensions: Sizes) -> int:
    """Return the value of a term: the product of all dimensions, each to the power of its exponent.

    Example:
        >>> power((1, 2), (3, 10))
        300
    """
    return math.prod(size**exponent for size, exponent in zip(dimensions, term, strict=True))


class Dimensions:
    """Finds which sizes of a batch vary independently, and reduces each batch to these sizes.

    A size that is always the same multiple of another size, or of the product of two sizes, depends on them; strides are an
    example. A size of 0 or 1 decides which operations run, so it is a part of the structure and must not vary.
    """

    def __init__(self, points: Sequence[Sizes]) -> None:
        self._first = points[0]
        self._columns: list[int] = []
        self._followers: list[tuple[int, tuple[int, ...]]] = []
        """A list of (position, positions) for the dependent sizes of a batch: the position of such a size, and the positions of
        the sizes whose product it is a multiple of. If the size is constant, the second tuple is empty."""
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
        """Return those sizes of a batch that vary independently of the others, in their order."""
        return tuple(sizes[column] for column in self._columns)

    def scaled(self, sizes: Sizes, multiples: Sizes) -> Sizes:
        """Return all sizes of the batch after multiplying each independent size by its entry of ``multiples``.

        The sizes that depend on them grow accordingly.
        """
        factors = dict(zip(self._columns, multiples, strict=True))
        factors |= {column: math.prod(factors[leader] for leader in leaders) for column, leaders in self._followers}
        return tuple(size * factors[column] for column, size in enumerate(sizes))

    def can_tell(self, sizes: Sizes) -> bool:
        """Return True if the known batches suffice to say how a batch's sizes depend on each other.

        The batch may differ from the known batches only in independent sizes, and in sizes that depend on them as before.
        """
        return same_structure(sizes, self._first) and all(
            self._follows(sizes, column, leaders) for column, leaders in self._followers
        )

    def _find_leaders(self, points: Sequence[Sizes], column: int) -> tuple[int, ...] | None:
        """Return the positions of one or two independent sizes that determine the size in a column, or ``None``.

        The size must be a constant times their product at all points (known batches).
        """
        single = ((leader,) for leader in self._columns)
        groups = itertools.chain(single, itertools.combinations_with_replacement(self._columns, 2))
        return next((g for g in groups if all(self._follows(point, column, g) for point in points)), None)

    def _follows(self, sizes: Sizes, column: int, leaders: tuple[int, ...]) -> bool:
        """Return True if a size is a multiple of the product of its leaders, with the same factor as in the first batch.

        The leaders are the positions of other sizes; without leaders the size has to be constant.
        """
        now, first = (math.prod(of[leader] for leader in leaders) for of in (sizes, self._first))
        return sizes[column] * first == self._first[column] * now


def same_structure(one: Sizes, other: Sizes) -> bool:
    """Return True if two batches may run the same ops, as far as their sizes show.

    They must have equally many sizes, and each size that is 0 or 1 in one batch must be the same in both.
    """
    return len(one) == len(other) and all(a == b or min(a, b) > 1 for a, b in zip(one, other, strict=True))


class Fitter:
    """Finds the expression (a sum of products of dimensions) for a number that was counted at several known batches.

    All numbers are counted at the same points: the independent sizes of the known batches.
    """

    def __init__(self, points: Sequence[Sizes]) -> None:
        self._points = tuple(points)
        self._known: dict[tuple[int, ...], Expression] = {}

    def fit(self, values: tuple[int, ...]) -> Expression:
        """Return the expression with the fewest terms that has these values at the points.

        If not exactly one such expression exists, return an upper estimate.

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
        """The terms that an expression may have, the constant first. A term is a product of powers of dimensions."""
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
        """Groups of combinations of terms. All combinations of a group are equally simple; the simplest group comes first.

        If there are several points, each combination has fewer terms than there are points, so that one more point confirms it.
        """
        return tuple(tuple(each) for each in self._simple_classes())

    def _simple_classes(self) -> Iterator[Iterator[tuple[int, ...]]]:
        """Yield groups of combinations of terms (as positions in ``terms``), the simplest group first."""
        everything = range(len(self.terms))
        if len(self._points) == 1 or not self._points[0]:
            yield iter([(0,)])
            return
        yield ((at,) for at in everything)
        # A form with as many terms as points would always pass: three points determine any parabola, also a wrong one. So one
        # more point has to confirm it (docs/project/design/one-ladder-for-all-shapes.md).
        if len(self._points) > 2:
            yield ((0, at) for at in everything[1:])
        for size in range(2, min(_MOST_TERMS, len(self._points) - 1) + 1):
            if len(everything) ** size <= _MOST_COMBINATIONS:
                yield itertools.combinations(everything, size)

    @cached_property
    def _powers(self) -> list[list[int]]:
        return [[power(term, point) for term in self.terms] for point in self._points]

    def _solved(self, support: tuple[int, ...], values: tuple[int, ...]) -> tuple[Fraction, ...] | None:
        """Return the coefficients that make these terms have the right value at all points.

        ``None`` if such coefficients do not exist, or if one of them is 0.
        """
        rows = [[row[at] for at in support] for row in self._powers]
        matrix = np.array(rows, dtype=np.float64)
        matrix /= matrix.max(axis=0)
        found, _, rank, _ = np.linalg.lstsq(matrix, np.array(values, dtype=np.float64), rcond=None)
        if rank < len(support) or np.abs(matrix @ found - values).max() > _TOLERANCE * max(values):
            return None
        exact = solve_exactly(rows, values)
        return exact if exact is not None and all(exact) else None

    def _estimate(self, values: tuple[int, ...]) -> Expression:
        """Return an upper estimate: a multiple of a single term that is at no point below the counted values.

        Of all terms, the one is taken whose multiple exceeds the values least.
        """
        best: tuple[Fraction, Term, Fraction] | None = None
        for at, term in enumerate(self.terms):
            ratio = max(Fraction(value, row[at]) for value, row in zip(values, self._powers, strict=True))
            excess = sum((ratio * row[at] for row in self._powers), Fraction(0))
            if best is None or excess < best[0]:
                best = (excess, term, ratio)
        assert best is not None
        return Expression((best[1],), (best[2],), is_known=False)


def solve_exactly(rows: Sequence[Sequence[int]], values: Sequence[int]) -> tuple[Fraction, ...] | None:
    """Return the exact solution of linear equations, by elimination in fractions.

    ``rows`` are the coefficients, ``values`` the right sides. ``None`` if the equations contradict each other or are too few.

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
