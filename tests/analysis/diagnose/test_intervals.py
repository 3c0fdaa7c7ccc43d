"""Unions, gaps and owners of intervals, against counting every instant."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.analysis.diagnose.intervals import clip, covered_ns, gaps, owned_ns, union

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12), st.integers(0, 2)).map(lambda s: (s[0], s[0] + s[1], s[2])),
    max_size=15,
)


def instants(intervals) -> set[int]:
    return {at for start, end, *_ in intervals for at in range(start, end)}


@given(spans)
def test_union_covers_what_any_interval_covers(pieces):
    merged = union((start, end) for start, end, _ in pieces)
    assert instants(merged) == instants(pieces)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(merged))


@given(spans, spans)
def test_gaps_and_cover_are_the_windows(pieces, others):
    windows = union((start, end) for start, end, _ in others)
    merged = union((start, end) for start, end, _ in pieces)
    idle = gaps(merged, windows)
    assert instants(idle) == instants(windows) - instants(merged)
    covered = sum(covered_ns(window, merged) for window in windows)
    assert len(instants(idle)) + covered == len(instants(windows))


@given(spans)
def test_every_instant_has_one_owner_of_the_lowest_rank(pieces):
    owned = owned_ns(pieces)
    expected = [0] * len(pieces)
    for at in instants(pieces):
        active = [index for index, (start, end, _) in enumerate(pieces) if start <= at < end]
        expected_rank = min(pieces[index][2] for index in active)
        earliest = min(pieces[index][0] for index in active if pieces[index][2] == expected_rank)
        candidates = [i for i in active if pieces[i][2] == expected_rank and pieces[i][0] == earliest]
        expected[candidates[0]] += 1
    assert sum(owned) == sum(expected) == len(instants(pieces))
    by_place: dict[tuple[int, int], list[int]] = {}
    for index, (start, _, rank) in enumerate(pieces):
        found = by_place.setdefault((start, rank), [0, 0])
        found[0] += owned[index]
        found[1] += expected[index]
    assert all(one == other for one, other in by_place.values())


@given(spans, st.integers(0, 60), st.integers(1, 20))
def test_clipping_keeps_what_lies_in_the_windows(others, start, length):
    windows = union((low, high) for low, high, _ in others)
    parts = clip((start, start + length), windows)
    assert instants(parts) == instants(windows) & set(range(start, start + length))
