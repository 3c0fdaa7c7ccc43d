"""How counted numbers follow from sizes: exactly, or known not to be known."""

from __future__ import annotations

import itertools

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plimsoll.planning.expressions import Dimensions, Fitter, power

SHAPES = [(2, 32), (4, 32), (2, 64), (3, 64), (2, 128), (4, 128)]


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
    def size(shape) -> int:
        return sum(c * power((i, j), shape) for (i, j), c in coefficients.items())

    found = Fitter(SHAPES).fit(tuple(map(size, SHAPES)))
    assert found.is_known
    assert found.at((batch, sequence)) == size((batch, sequence))


def test_a_padded_size_is_no_polynomial_and_says_so():
    found = Fitter(SHAPES).fit(tuple(-(-b * s // 96) * 96 + (b == 3) * 7 for b, s in SHAPES))
    assert not found.is_known
    assert found.at((8, 128)) > 0


def test_what_is_not_known_is_estimated_from_above():
    for points, values in [
        ([(2,), (4,)], (7, 11)),
        ([(33,), (128,), (512,)], (6528, 18688, 135680)),
        ([(2, 4), (4, 16)], (4, 16)),
    ]:
        found = Fitter(points).fit(values)
        assert not found.is_known
        assert all(found.at(point) >= value for point, value in zip(points, values, strict=True))


POINTS = st.lists(st.tuples(*[st.integers(2, 300)] * 3), min_size=2, max_size=6, unique=True)
TERMS = st.tuples(*[st.integers(0, 3)] * 3).filter(lambda term: sum(term) <= 3)


@settings(deadline=None, max_examples=60)
@given(points=POINTS, first=TERMS, second=TERMS, scale=st.integers(1, 10**9), offset=st.integers(0, 1000), other=POINTS)
def test_an_expression_that_is_known_is_the_one_that_made_the_points(points, first, second, scale, offset, other):
    assume(first != second)
    fitter = Fitter(points)
    for made in (
        lambda p: scale * power(first, p),
        lambda p: scale * power(first, p) + offset,
        lambda p: scale * power(first, p) + (offset + 1) * power(second, p),
    ):
        found = fitter.fit(tuple(map(made, points)))
        assert all(found.at(point) >= made(point) for point in points)
        # One term is told by two points; more terms than that may be mistaken for fewer where points happen to lie so.
        if found.is_known and len(points) > 2 and _lies_well(points):
            assert [found.at(each) for each in other] == [made(each) for each in other]


def _lies_well(points) -> bool:
    """No two products of sizes are proportional over the points, nor together with a constant."""
    terms = Fitter(points).terms
    rows = [[power(term, point) for point in points] for term in terms]
    for a, b in itertools.combinations(rows, 2):
        if all((a[0] - x) * (b[0] - b[1]) == (b[0] - y) * (a[0] - a[1]) for x, y in zip(a, b, strict=True)):
            return False
    return True


def test_dimensions_are_the_sizes_that_vary_on_their_own():
    for points, dimensions, told, untold in [
        ([(2, 8, 2, 8), (2, 16, 2, 16)], [(8,), (16,)], (2, 24, 2, 24), (2, 24, 2, 16)),
        ([(2, 8, 4), (2, 16, 8)], [(8,), (16,)], (2, 6, 3), (2, 6, 4)),
        ([(4, 9, 9), (6, 9, 7)], [(4, 9), (6, 7)], (5, 9, 3), (5, 8, 3)),
        ([(4, 9), (6, 7)], [(4, 9), (6, 7)], (5, 3), (5, 1)),
        ([(3, 3)], [()], (3, 3), (3, 4)),
    ]:
        found = Dimensions(points)
        assert list(found.points) == dimensions
        assert found.can_tell(told)
        assert not found.can_tell(untold)


def test_nothing_stays_nothing():
    assert Fitter(SHAPES).fit((0,) * len(SHAPES)).at((9, 9)) == 0
