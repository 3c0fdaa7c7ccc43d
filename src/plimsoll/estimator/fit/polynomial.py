"""Finds the polynomial in micro-batch b and sequence s that passes through whole numbers counted at a few shapes, exactly.

What a step counts (bytes, arithmetic) is a sum of products of the sizes of tensors, so it is a polynomial in b and s with few
terms: constants (weights), b·s (activations), b·s² (attention scores), s² (masks), b² (contrastive losses). The one with the
fewest terms that passes through every point is taken; as it has fewer terms than there are points, the others check it.
Arithmetic is in fractions: nothing is rounded.

Known weakness: sizes that are padded to multiples are not polynomials. `fit` then says so, and gives an upper estimate.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Term = tuple[int, int]
"""The powers of b and s."""

_TERMS: tuple[Term, ...] = ((0, 0), (1, 1), (1, 2), (1, 0), (0, 1), (0, 2), (2, 0))
"""In the order of preference where several fit."""
_MOST_TERMS = 4


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Coefficients by term. ``is_exact``: it passes through every point it was made from.

    ``is_checked``: and there were more points than terms.
    """

    coefficients: Mapping[Term, Fraction]
    is_exact: bool = True
    is_checked: bool = True

    def at(self, shape: Shape) -> int:
        """The value, rounded up and never negative."""
        value = sum((c * shape.batch**i * shape.sequence**j for (i, j), c in self.coefficients.items()), Fraction(0))
        return max(0, -((-value.numerator) // value.denominator))


class Fitter:
    """Fits quantities that were all counted at the same points."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = tuple(shapes)
        self._supports = _supports(self._shapes)
        self._known: dict[tuple[int, ...], Polynomial] = {}

    def fit(self, values: tuple[int, ...]) -> Polynomial:
        """The polynomial with the fewest terms through all points; failing that, the least-squares one, not exact.

        Example:
            >>> shapes = [Shape(1, 8), Shape(2, 8), Shape(2, 16), Shape(3, 16)]
            >>> found = Fitter(shapes).fit(tuple(5 + 4 * p.batch * p.sequence for p in shapes))
            >>> found.at(Shape(7, 32)), found.is_exact
            (901, True)
        """
        if values not in self._known:
            self._known[values] = self._fit(values)
        return self._known[values]

    def _fit(self, values: tuple[int, ...]) -> Polynomial:
        if not any(values[1:]) and not values[0]:
            return Polynomial({})
        for support in self._supports:
            coefficients = [
                sum(w * values[row] for w, row in zip(weights, support.rows, strict=True))
                for weights in support.inverse
            ]
            fits = all(
                sum(c * v for c, v in zip(coefficients, powers, strict=True)) == value
                for powers, value in zip(support.powers, values, strict=True)
            )
            if fits:
                found = {term: c for term, c in zip(support.terms, coefficients, strict=True) if c}
                return Polynomial(found, is_checked=len(support.terms) < len(values))
        return self._least_squares(values)

    def _least_squares(self, values: tuple[int, ...]) -> Polynomial:
        terms = tuple(dict.fromkeys(term for support in self._supports[: len(_TERMS)] for term in support.terms))
        terms = terms[: max(1, len(values) - 1)]
        matrix = np.array([[float(b**i * s**j) for i, j in terms] for b, s in self._shapes])
        found, *_ = np.linalg.lstsq(matrix, np.array(values, dtype=np.float64), rcond=None)
        return Polynomial(
            {term: Fraction(float(c)) for term, c in zip(terms, found, strict=True)}, is_exact=False, is_checked=False
        )


@dataclass(frozen=True, slots=True)
class _Support:
    """Terms that the points tell apart: the rows that determine them, the inverse of those, and all rows' powers."""

    terms: tuple[Term, ...]
    rows: tuple[int, ...]
    inverse: tuple[tuple[Fraction, ...], ...]
    powers: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=32)
def _supports(shapes: tuple[Shape, ...]) -> tuple[_Support, ...]:
    """Every set of terms that the points tell apart, small ones first; where one size never changes, it is no term."""
    batches, sequences = ({shape.batch for shape in shapes}, {shape.sequence for shape in shapes})
    terms = [t for t in _TERMS if (len(batches) > 1 or not t[0]) and (len(sequences) > 1 or not t[1])]
    found = []
    for size in range(1, min(len(shapes), _MOST_TERMS) + 1):
        for chosen in itertools.combinations(terms, size):
            powers = tuple(tuple(p.batch**i * p.sequence**j for i, j in chosen) for p in shapes)
            solved = _solvable(powers, size)
            if solved is not None:
                found.append(_Support(chosen, *solved, powers))
    return tuple(found)


def _solvable(
    powers: Sequence[Sequence[int]], size: int
) -> tuple[tuple[int, ...], tuple[tuple[Fraction, ...], ...]] | None:
    """The first rows that determine the coefficients, and their inverse; ``None`` if no rows do."""
    for rows in itertools.combinations(range(len(powers)), size):
        inverse = _inverse([list(map(Fraction, powers[row])) for row in rows])
        if inverse is not None:
            return rows, inverse
    return None


def _inverse(matrix: list[list[Fraction]]) -> tuple[tuple[Fraction, ...], ...] | None:
    """Gauss and Jordan, in fractions."""
    size = len(matrix)
    wide = [[*row, *(Fraction(int(i == j)) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((row for row in range(column, size) if wide[row][column]), None)
        if pivot is None:
            return None
        wide[column], wide[pivot] = wide[pivot], wide[column]
        wide[column] = [entry / wide[column][column] for entry in wide[column]]
        for row in range(size):
            if row != column and wide[row][column]:
                factor = wide[row][column]
                wide[row] = [a - factor * b for a, b in zip(wide[row], wide[column], strict=True)]
    return tuple(tuple(row[size:]) for row in wide)


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
