"""The picture of a timeline marks the moment of the peak; errors as JSON have all their parts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from plimsoll.artifacts.plan import TimelinePoint
from plimsoll.ui.terminal import draw_bar, draw_timeline
from plimsoll.units import MIB


def point(bytes_: int, moment: str = "forward") -> TimelinePoint:
    return TimelinePoint(tick=0, moment=moment, bytes=bytes_, by_category={})


def numbered(points: Sequence[TimelinePoint]) -> list[TimelinePoint]:
    return [msgspec.structs.replace(each, tick=tick) for tick, each in enumerate(points)]


def test_a_timeline_never_hides_its_peak():
    points = [point(MIB)] * 1000
    points[617] = point(8 * MIB, "backward of the loss")
    picture = draw_timeline(numbered(points), width=50).plain
    assert "peak 8.0 MiB, backward of the loss" in picture
    lines = picture.splitlines()
    assert lines[0].index("█") == lines[-1].index("▲")


def test_a_peak_at_the_right_edge_is_named_to_its_left():
    points = [point(MIB)] * 59 + [point(8 * MIB, "step of the optimizer")]
    last = draw_timeline(numbered(points), width=60).plain.splitlines()[-1]
    assert last.endswith("step of the optimizer ▲")
    assert len(last) == 10 + 1 + 60


def test_a_peak_with_a_long_name_is_named_below_its_mark():
    points = [point(MIB)] * 29 + [point(8 * MIB, "backward of " + "very." * 20)] + [point(MIB)] * 30
    mark, name = draw_timeline(numbered(points), width=60).plain.splitlines()[-2:]
    assert mark.index("▲") == 10 + 1 + 29
    assert name.strip().startswith("peak 8.0 MiB, backward of very.")


def test_a_phase_is_as_wide_as_it_is_long():
    steps = [(2 * MIB, 0.001 * at) for at in range(10)] + [(MIB, 0.01 + 0.00001 * at) for at in range(100)]
    points = [
        TimelinePoint(tick=tick, moment="forward", bytes=bytes_, by_category={}, unmanaged_seconds=seconds)
        for tick, (bytes_, seconds) in enumerate(steps)
    ]
    top, *_ = draw_timeline(points, width=44, height=2).plain.splitlines()
    assert top.count("█") in (40, 41)


def test_the_budget_is_drawn():
    picture = draw_timeline(numbered([point(MIB)] * 10), budget_bytes=2 * MIB, height=4).plain
    assert "┄┄┄ budget" in picture


def test_an_empty_timeline_says_so():
    assert "no timeline" in draw_timeline([]).plain


def test_a_bar_stays_within_its_width():
    assert draw_bar(0.5, width=4) == "██░░"
    assert draw_bar(7.0, width=4) == "████"
    assert draw_bar(-1.0, width=4) == "░░░░"
