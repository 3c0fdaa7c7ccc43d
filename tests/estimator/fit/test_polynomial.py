"""Sizes as polynomials of micro-batch and sequence: exact, or known not to be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.estimator.fit.polynomial import Fitter, Shape

SHAPES = [Shape(2, 32), Shape(4, 32), Shape(2, 64), Shape(3, 64), Shape(2, 128), Shape(4, 128)]


@settings(deadline=None)
@given(
    coefficients=st.dictionaries(
        st.sampled_from([(0, 0), (1, 1), (1, 2), (1, 0), (0, 1), (0, 2)]),
        st.integers(1, 10**12),
        min_size=1,
        max_size=2,
    ),
    batch=st.integers(1, 4096),
    sequence=st.integers(1, 2**17),
)
def test_a_size_made_of_two_terms_is_found_exactly_at_any_shape(coefficients, batch, sequence):
    def size(shape: Shape) -> int:
        return sum(c * shape.batch**i * shape.sequence**j for (i, j), c in coefficients.items())

    found = Fitter(SHAPES).fit(tuple(map(size, SHAPES)))
    assert found.is_exact
    assert found.is_checked
    assert found.at(Shape(batch, sequence)) == size(Shape(batch, sequence))


def test_a_padded_size_is_no_polynomial_and_says_so():
    found = Fitter(SHAPES).fit(tuple(-(-p.batch * p.sequence // 96) * 96 + (p.batch == 3) * 7 for p in SHAPES))
    assert not found.is_exact
    assert found.at(Shape(8, 128)) > 0


def test_two_points_determine_a_line_but_do_not_check_it():
    found = Fitter([Shape(2, 1), Shape(4, 1)]).fit((7, 11))
    assert (found.at(Shape(3, 1)), found.is_exact, found.is_checked) == (9, True, False)


def test_nothing_stays_nothing():
    assert Fitter(SHAPES).fit((0,) * len(SHAPES)).at(Shape(9, 9)) == 0
