"""Charts draw what the artifacts say: same bytes, same decisions, the peak where it is, names that can be read."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import msgspec
import pytest

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.verdict import NormSummary
from plimsoll.ui.document import Chart, CurvesChart, DecisionMap, FrontierChart, MemoryChart, NormsChart
from plimsoll.ui.html.drawing import byte_scale, escape, shorten
from plimsoll.ui.html.evidence_charts import draw_curves, draw_norms
from plimsoll.ui.html.frontier_chart import draw_frontier
from plimsoll.ui.html.map_chart import draw_map
from plimsoll.ui.html.memory_chart import draw_memory
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
    figure = draw_memory(memory_of(plan)).figure
    *areas, total = figure["data"]
    assert {area["stackgroup"] for area in areas} == {"memory"}
    for index, point in enumerate(plan.timeline):
        assert sum(area["y"][index] for area in areas) == pytest.approx(point.bytes / MIB, abs=1e-3)
        assert total["y"][index] == pytest.approx(point.bytes / MIB, abs=1e-3)
    mark = next(note for note in figure["layout"]["annotations"] if note["showarrow"])
    highest = max(plan.timeline, key=lambda point: point.bytes)
    assert (mark["x"], mark["y"]) == (highest.tick, pytest.approx(highest.bytes / MIB, abs=1e-3))
    assert mark["text"].replace("<br>", " ").startswith("<b>peak 85.7 MiB</b> backward of blocks.")


def test_phases_are_named_where_they_begin(plan: Plan):
    notes = draw_memory(memory_of(plan)).figure["layout"]["annotations"]
    named = {note["text"]: note["x"] for note in notes if note.get("yref") == "paper"}
    assert named == {"forward": 0, "backward": 80, "optimizer": 170}


def test_a_budget_is_drawn_unless_it_lies_far_above(plan: Plan):
    def notes(budget_bytes: int | None) -> list[str]:
        chart = draw_memory(MemoryChart(plan.timeline, budget_bytes))
        return [note["text"] for note in chart.figure["layout"]["annotations"]]

    assert "budget 90.0 MiB" in notes(90 * MIB)
    assert not [text for text in notes(GIB) if "budget" in text]
    assert not [text for text in notes(None) if "budget" in text]


def test_the_words_of_a_peak_and_of_the_budget_are_on_different_sides(plan: Plan):
    for timeline in (plan.timeline, tuple(reversed_ticks(plan))):
        moved = msgspec.structs.replace(plan, timeline=timeline)
        notes = draw_memory(memory_of(moved)).figure["layout"]["annotations"]
        mark = next(note for note in notes if note["showarrow"])
        budget = next(note for note in notes if note["text"].startswith("budget"))
        assert mark["xanchor"] == budget["xanchor"] == ("left" if mark["x"] < 100 else "right")
        assert (budget["x"] == 0) == (mark["x"] < 100)


def reversed_ticks(plan: Plan):
    points = plan.timeline
    return [msgspec.structs.replace(p, tick=points[-1].tick - p.tick) for p in reversed(points)]


def test_the_map_has_a_cell_for_every_decision(plan: Plan):
    (trace,) = draw_map(DecisionMap(plan.regions)).figure["data"]
    letters = [[decision.decision[0] for decision in region.decisions] for region in plan.regions]
    assert trace["text"] == letters
    codes = {"K": 0, "R": 1, "C": 2, "O": 3}
    assert trace["z"] == [[codes[letter] for letter in row] for row in letters]


def test_pointing_at_a_cell_tells_bytes_seconds_price_and_reason(plan: Plan):
    (trace,) = draw_map(DecisionMap(plan.regions)).figure["data"]
    compressed = trace["customdata"][0][2]
    for words in (
        "COMPRESS",
        "3.0 MiB, 512.0 KiB stay as int8",
        "costs 400.0 µs a step",
        "1.8 ms per MiB",
        "0.1 ms/MiB",
    ):
        assert words in compressed


def test_values_that_a_region_lacks_are_gaps():
    first, second = make_region(0), make_region(1)
    second = msgspec.structs.replace(second, decisions=second.decisions[1:])
    (trace,) = draw_map(DecisionMap((first, second))).figure["data"]
    assert trace["z"] == [[0, 1], [None, 1]]
    assert trace["hoverongaps"] is False


def test_a_map_without_room_has_neither_letters_nor_names():
    region = make_region(0)
    decisions = tuple(msgspec.structs.replace(region.decisions[0], value=f"value {index}") for index in range(100))
    regions = tuple(msgspec.structs.replace(region, name=f"layers.{i}", decisions=decisions) for i in range(20))
    chart = draw_map(DecisionMap(regions)).figure
    assert "text" not in chart["data"][0]
    assert chart["layout"]["xaxis"]["showticklabels"] is False


def test_the_key_counts_every_decision(plan: Plan):
    entries = draw_map(DecisionMap(plan.regions)).key
    assert [(letter, name) for _, letter, name, _ in entries] == [(d[0], str(d)) for d in Decision]
    assert all(remark.startswith("12 values") for *_, remark in entries)
    assert len({colour for colour, *_ in entries}) == 4


def test_the_frontier_shows_curve_plan_and_peers():
    plan, comparison = make_full_plan(), make_full_comparison()
    curve, peers, chosen = draw_frontier(FrontierChart([plan], [comparison])).figure["data"]
    assert curve["y"] == pytest.approx([point.step_seconds / 0.1 for point in plan.frontier])
    assert peers["text"] == ["unmanaged", *(escape(shorten(row.strategy, 28)) for row in comparison.rows)]
    assert peers["error_y"]["array"] == pytest.approx([0, 0.02, 0.02, 0.02, 0.02, 0.02])
    assert chosen["y"] == [pytest.approx(1.03)]


def test_a_strategy_that_was_not_measured_is_no_point():
    comparison = make_full_comparison()
    rows = (*comparison.rows[:2], msgspec.structs.replace(comparison.rows[2], measured_ratio=None))
    (peers,) = draw_frontier(FrontierChart([], [msgspec.structs.replace(comparison, rows=rows)])).figure["data"]
    assert peers["text"] == ["unmanaged", "none", "full"]


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
    axis = draw_norms(NormsChart(comparisons)).figure["layout"]["yaxis"]
    assert axis["type"] == "log"
    shown = axis.get("ticktext")
    assert shown is None if ticks is None else shown[: len(ticks)] == ticks


def test_norms_over_many_decades_have_a_tick_for_each():
    first, *others = make_verdict().comparisons
    tiny = msgspec.structs.replace(
        first, plan=msgspec.structs.replace(first.plan, quantiles=tuple(1e-8 * q for q in first.plan.quantiles))
    )
    axis = draw_norms(NormsChart([tiny, *others])).figure["layout"]["yaxis"]
    assert axis["tickvals"] == pytest.approx([10.0**decade for decade in range(-9, 2)])


def test_a_box_spans_the_middle_half_of_the_norms():
    verdict = make_verdict()
    boxes, _ = draw_norms(NormsChart(verdict.comparisons)).figure["data"]
    quantiles = verdict.comparisons[0].baseline.quantiles
    found = [boxes[name][0] for name in ("lowerfence", "q1", "median", "q3", "upperfence")]
    assert found == list(quantiles[1:6])


def test_the_step_without_a_plan_is_an_outline_where_the_plan_knows_it(plan: Plan):
    timeline = tuple(msgspec.structs.replace(point, unmanaged_bytes=point.bytes + MIB) for point in plan.timeline)
    data = draw_memory(MemoryChart(timeline, None)).figure["data"]
    (outline,) = [trace for trace in data if trace.get("name") == "the whole step without a plan"]
    assert outline["y"][0] == pytest.approx(data[-1]["y"][0] + 1, abs=1e-3)
    assert len(draw_memory(memory_of(plan)).figure["data"]) == len(data) - 1


def test_pulling_the_budget_tells_peak_cost_and_what_is_dropped_at_every_point(plan: Plan):
    pulled = draw_frontier(FrontierChart([plan], [])).pulled
    assert len(pulled) == len(plan.frontier)
    assert pulled[0].startswith(f"A budget of {format_bytes(plan.frontier[0].peak_bytes)}: the step takes ")


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
    pictures = ElementTree.fromstring(f"<both>{draw_svg(_DRAW[type(chart)](chart).figure)}</both>")
    assert [picture.get("class") for picture in pictures] == list(WIDTHS)
    for picture, width in zip(pictures, WIDTHS.values(), strict=True):
        boxes = boxes_of(picture)
        assert boxes
        assert [box for box in boxes if box[0] < 0 or box[2] > width + 2] == []
        pairs = itertools.combinations(boxes, 2)
        assert [(a, b) for a, b in pairs if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]] == []


def test_a_picture_shows_names_letter_by_letter(plan: Plan):
    picture = draw_svg(draw_map(DecisionMap(plan.regions)).figure)
    words = "".join(ElementTree.fromstring(f"<both>{picture}</both>").itertext())
    assert "<script>alert(1)</script>" in words
    assert "<script" not in picture


def test_numbers_without_a_place_are_left_out():
    odd = (1.0, None, float("inf"), float("nan"), 1e308, 2.0)
    picture = draw_svg(draw_curves(CurvesChart("loss", odd, odd)).figure)
    assert "nan" not in picture
    assert "inf" not in picture


def test_one_axis_has_one_unit():
    assert byte_scale([3, 5 * GIB]).unit == "GiB"
    assert byte_scale([MIB]).unit == "MiB"
    assert byte_scale([KIB, 5]).of(512) == 0.5
    assert byte_scale([]).unit == "B"
