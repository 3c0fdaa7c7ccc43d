"""Charts draw what the artifacts say: same bytes, same decisions, the peak where it is, names that can be read."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import msgspec
import pytest

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan, TimelinePoint
from plimsoll.artifacts.verdict import NormSummary
from plimsoll.ui.document import BytesChart, Chart, CurvesChart, DecisionMap, FrontierChart, MemoryChart, NormsChart
from plimsoll.ui.html.drawing import byte_scale, shorten
from plimsoll.ui.html.evidence_charts import draw_bytes, draw_curves, draw_norms
from plimsoll.ui.html.frontier_chart import draw_frontier
from plimsoll.ui.html.map_chart import DECISIONS, draw_map
from plimsoll.ui.html.memory_chart import CATEGORIES, draw_memory
from plimsoll.ui.html.page import _DRAW
from plimsoll.ui.html.svg import WIDTHS, draw_svg
from plimsoll.ui.views import view
from plimsoll.units import GIB, KIB, MIB, format_bytes
from samples import make_region
from ui.pages.page_samples import full_page, make_full_comparison, make_full_plan, make_verdict

CHARTS = [
    element
    for artifact in full_page()
    for section in view(artifact).sections
    for element in section.elements
    if isinstance(element, Chart)
]


@pytest.fixture
def plan() -> Plan:
    return make_full_plan()


def memory_of(plan: Plan) -> MemoryChart:
    return MemoryChart(plan.timeline, plan.budget_bytes)


def test_stacked_categories_add_up_to_the_total_and_the_peak_is_marked_where_it_is_and_named(plan: Plan):
    drawing = draw_memory(memory_of(plan))
    *areas, total = drawing.layers
    for index, point in enumerate(plan.timeline):
        heights = [area.ys[index] - area.lows[index] for area in areas]
        assert sum(heights) == pytest.approx(point.bytes / MIB, abs=1e-3)
        assert areas[-1].ys[index] == pytest.approx(total.ys[index], abs=1e-3)
    mark = next(note for note in drawing.notes if note.is_peak)
    highest = max(plan.timeline, key=lambda point: point.bytes)
    assert (mark.x, mark.y) == (1000 * highest.unmanaged_seconds, pytest.approx(highest.bytes / MIB, abs=1e-3))
    assert " ".join(mark.lines).startswith("peak 85.7 MiB backward of blocks.")


def first_of(plan: Plan, phase: str) -> TimelinePoint:
    return next(point for point in plan.timeline if point.phase == phase)


def test_phases_are_named_where_they_begin(plan: Plan):
    named = {note.lines[0]: note.x for note in draw_memory(memory_of(plan)).notes if note.y is None}
    assert named == {
        phase: 1000 * first_of(plan, phase).unmanaged_seconds for phase in ("forward", "backward", "optimizer")
    }


def test_a_plan_without_times_is_drawn_by_operations(plan: Plan):
    timeline = tuple(msgspec.structs.replace(point, unmanaged_seconds=None) for point in plan.timeline)
    drawing = draw_memory(MemoryChart(timeline, None))
    assert drawing.x.title == "operation of the training step"
    named = {note.lines[0]: note.x for note in drawing.notes if note.y is None}
    assert named == {phase: first_of(plan, phase).tick for phase in ("forward", "backward", "optimizer")}


def test_a_budget_is_drawn_unless_it_lies_far_above(plan: Plan):
    def notes(budget_bytes: int | None) -> list[str]:
        return [note.lines[0] for note in draw_memory(MemoryChart(plan.timeline, budget_bytes)).notes]

    assert "budget 90.0 MiB" in notes(90 * MIB)
    assert not [text for text in notes(GIB) if "budget" in text]
    assert not [text for text in notes(None) if "budget" in text]


def test_the_words_of_a_peak_and_of_the_budget_are_on_different_sides(plan: Plan):
    for timeline in (plan.timeline, tuple(reversed_ticks(plan))):
        moved = msgspec.structs.replace(plan, timeline=timeline)
        notes = draw_memory(memory_of(moved)).notes
        mark = next(note for note in notes if note.is_peak)
        budget = next(note for note in notes if note.lines[0].startswith("budget"))
        assert mark.anchor == budget.anchor == ("start" if mark.x < 100 else "end")
        assert budget.x is None


def reversed_ticks(plan: Plan):
    points = plan.timeline
    return [msgspec.structs.replace(p, tick=points[-1].tick - p.tick) for p in reversed(points)]


def test_the_map_has_a_cell_for_every_decision(plan: Plan):
    (cells,) = draw_map(DecisionMap(plan.regions)).layers
    for row, region in zip(cells.rows, plan.regions, strict=True):
        assert [letter for _, letter, _ in row] == [decision.decision[0] for decision in region.decisions]
        assert [colour for colour, *_ in row] == [DECISIONS[decision.decision] for decision in region.decisions]


def test_pointing_at_a_cell_tells_bytes_seconds_price_and_reason(plan: Plan):
    (cells,) = draw_map(DecisionMap(plan.regions)).layers
    _, _, compressed = cells.rows[0][2]
    for words in (
        "COMPRESS",
        "3.0 MiB, 512.0 KiB held as int8",
        "costs 400.0 µs a step",
        "1.8 ms per MiB",
        "0.1 ms/MiB",
    ):
        assert words in compressed


def test_values_that_a_region_lacks_are_gaps():
    first, second = make_region(0), make_region(1)
    second = msgspec.structs.replace(second, decisions=second.decisions[1:])
    (cells,) = draw_map(DecisionMap((first, second))).layers
    assert [[cell and cell[1] for cell in row] for row in cells.rows] == [["K", "R"], [None, "R"]]


def test_a_map_without_room_has_neither_letters_nor_names():
    region = make_region(0)
    decisions = tuple(msgspec.structs.replace(region.decisions[0], value=f"value {index}") for index in range(100))
    regions = tuple(msgspec.structs.replace(region, name=f"layers.{i}", decisions=decisions) for i in range(20))
    drawing = draw_map(DecisionMap(regions))
    assert drawing.x.ticks == ()
    picture = draw_svg(drawing)
    assert "letter" not in picture
    assert picture.count("<rect") == 2 * len(regions)  # equal neighbours are one


def test_the_key_counts_every_decision(plan: Plan):
    entries = draw_map(DecisionMap(plan.regions)).key
    assert [(letter, name) for _, letter, name, _ in entries] == [(d[0], str(d)) for d in Decision]
    assert all(remark.startswith("12 values") for *_, remark in entries)
    assert len({colour for colour, *_ in entries}) == 4


def test_the_frontier_shows_curve_plan_and_peers():
    plan, comparison = make_full_plan(), make_full_comparison()
    curve, marks, peers, chosen = draw_frontier(FrontierChart([plan], [comparison])).layers
    assert curve.xs == marks.xs == sorted(curve.xs)
    for point in plan.frontier[0], plan.frontier[-1]:
        assert point.step_seconds / 0.1 in map(pytest.approx, curve.ys)
    assert (chosen.xs[0], chosen.ys[0]) in zip(curve.xs, curve.ys, strict=True)
    assert peers.labels == ["unmanaged", *(shorten(row.strategy, 28) for row in comparison.rows)]
    widths = [high - low for low, high in peers.spreads]
    assert widths == pytest.approx([0, 0.04, 0.04, 0.04, 0.04, 0.04])
    assert chosen.ys == [pytest.approx(1.03)]


def test_a_strategy_that_was_not_measured_is_no_point():
    comparison = make_full_comparison()
    rows = (*comparison.rows[:2], msgspec.structs.replace(comparison.rows[2], measured_ratio=None))
    (peers,) = draw_frontier(FrontierChart([], [msgspec.structs.replace(comparison, rows=rows)])).layers
    assert peers.labels == ["unmanaged", "none", "full"]


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [(1.0, ["0.1", "0.2", "0.5", "1", "2", "5", "10", "20", "50"]), (1e-9, ["1e-10", "2e-10", "5e-10"]), (0.0, None)],
)
def test_norms_have_ticks_that_do_not_lie_on_each_other(scale: float, ticks: list[str] | None):
    def scaled(summary: NormSummary, factor: float) -> NormSummary:
        return msgspec.structs.replace(summary, quantiles=tuple(factor * q for q in summary.quantiles))

    comparisons = [
        msgspec.structs.replace(each, baseline=scaled(each.baseline, scale), plan=scaled(each.plan, 10 * scale))
        for each in make_verdict().comparisons
    ]
    axis = draw_norms(NormsChart(comparisons)).y
    assert axis.is_log
    assert axis.ticks is None if ticks is None else [name for _, name in axis.ticks][: len(ticks)] == ticks


def test_norms_over_many_decades_have_a_tick_for_each():
    first, *others = make_verdict().comparisons
    tiny = msgspec.structs.replace(
        first, plan=msgspec.structs.replace(first.plan, quantiles=tuple(1e-8 * q for q in first.plan.quantiles))
    )
    ticks = draw_norms(NormsChart([tiny, *others])).y.ticks
    assert [tick for tick, _ in ticks] == pytest.approx([10.0**decade for decade in range(-9, 2)])


def test_a_box_spans_the_middle_half_of_the_norms():
    verdict = make_verdict()
    boxes, _ = draw_norms(NormsChart(verdict.comparisons)).layers
    assert boxes.boxes[0] == list(verdict.comparisons[0].baseline.quantiles[1:6])


def test_the_step_without_a_plan_is_an_outline_where_the_plan_knows_it(plan: Plan):
    timeline = tuple(msgspec.structs.replace(point, unmanaged_bytes=point.bytes + MIB) for point in plan.timeline)
    *areas, outline, total = draw_memory(MemoryChart(timeline, None)).layers
    assert outline.name == "total without a plan"
    assert outline.colour not in {area.colour for area in areas} | set(CATEGORIES.values())
    assert outline.ys[0] == pytest.approx(total.ys[0] + 1, abs=1e-3)
    assert len(draw_memory(memory_of(plan)).layers) == len(areas) + 1


def test_pulling_the_budget_tells_peak_cost_and_what_is_dropped_at_every_point(plan: Plan):
    drawing = draw_frontier(FrontierChart([plan], []))
    pulled = drawing.pulled
    assert len(pulled) >= len(plan.frontier)
    budget = format_bytes(plan.frontier[0].peak_bytes)
    assert pulled[0][0] == budget
    assert pulled[0][1].startswith(f"A budget of {budget}: the step takes ")
    assert pulled[drawing.pulled_at][0] == format_bytes(plan.predicted_peak_bytes)


def test_the_bars_of_an_estimate_carry_their_errors_and_what_the_device_has():
    rows = [("parameters", 2 * GIB, 0), ("fragmentation", GIB, GIB // 4)]
    drawing = draw_bytes(BytesChart("memory of a rank", rows, 3 * GIB))
    (bars,) = drawing.layers
    assert (bars.lengths, bars.spreads) == ([2.0, 1.0], [0.0, 0.25])
    assert [rule.x for rule in drawing.rules] == [3.0]
    assert not draw_bytes(BytesChart("memory of a rank", rows, 80 * GIB)).rules
    assert draw_svg(draw_bytes(BytesChart("memory of a rank", []))).count("<svg") == 2


def boxes_of(picture: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Where its upright words stand, as far as their letters are as wide as most."""
    found = []
    for node in picture.iter("text"):
        if "transform" not in node.attrib and node.get("class") != "letter":
            words, x, y = "".join(node.itertext()), float(node.attrib["x"]), float(node.attrib["y"])
            left = x - 6.0 * len(words) if node.get("text-anchor") == "end" else x
            found.append((left, y - 10, left + 6.0 * len(words), y + 2))
    return found


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_pictures_are_well_formed_with_no_word_outside_or_on_another(chart: Chart):
    pictures = ElementTree.fromstring(f"<both>{draw_svg(_DRAW[type(chart)](chart))}</both>")
    assert [picture.get("class") for picture in pictures] == list(WIDTHS)
    for picture, width in zip(pictures, WIDTHS.values(), strict=True):
        boxes = boxes_of(picture)
        assert boxes
        assert [box for box in boxes if box[0] < 0 or box[2] > width + 2] == []
        pairs = itertools.combinations(boxes, 2)
        assert [(a, b) for a, b in pairs if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]] == []


def test_a_picture_shows_names_letter_by_letter(plan: Plan):
    picture = draw_svg(draw_map(DecisionMap(plan.regions)))
    words = "".join(ElementTree.fromstring(f"<both>{picture}</both>").itertext())
    assert "<script>alert(1)</script>" in words
    assert "<script" not in picture


def test_numbers_without_a_place_are_left_out():
    odd = (1.0, None, float("inf"), float("nan"), 1e308, 2.0)
    picture = draw_svg(draw_curves(CurvesChart("loss", odd, odd)))
    assert "nan" not in picture
    assert "inf" not in picture


def test_one_axis_has_one_unit():
    assert byte_scale([3, 5 * GIB]).unit == "GiB"
    assert byte_scale([MIB]).unit == "MiB"
    assert byte_scale([KIB, 5]).of(512) == 0.5
    assert byte_scale([]).unit == "B"
