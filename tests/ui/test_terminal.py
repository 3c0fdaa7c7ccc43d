"""Reports show every figure that the artifact holds, and mark the moment of the peak."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console, RenderableType

from plimsoll.artifacts.plan import TimelinePoint
from plimsoll.errors import BudgetBelowFloor
from plimsoll.ui.comparison_terminal import render_comparison
from plimsoll.ui.machine import render_error_json
from plimsoll.ui.plan_terminal import render_plan
from plimsoll.ui.receipt_terminal import render_receipt
from plimsoll.ui.timeline import draw_bar, draw_timeline
from plimsoll.units import MIB
from samples import make_comparison, make_mismatch, make_plan, make_receipt


def text_of(view: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue()


def point(bytes_: int, moment: str = "forward") -> TimelinePoint:
    return TimelinePoint(tick=0, moment=moment, bytes=bytes_, by_category={})


def test_a_plan_shows_its_figures_classes_decisions_and_peak():
    text = text_of(render_plan(make_plan()))
    for part in (
        "OPTIMAL",
        "60.0 MiB",
        "+3.0%",
        "activation",
        "holder 0",
        "model.layers.0–2",
        "RECOMPUTE 1 of 2",
        "▲ peak",
    ):
        assert part in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_plan_can_be_shown_at_any_width(width: int):
    assert text_of(render_plan(make_plan()), width)


def test_a_plan_without_regions_or_timeline_can_be_shown():
    plan = make_plan(regions=(), timeline=(), classes={}, budget_bytes=None)
    assert "none (floor" in text_of(render_plan(plan))


def test_a_receipt_shows_its_verdict_and_what_differs():
    assert "VERIFIED" in text_of(render_receipt(make_receipt()))
    text = text_of(render_receipt(make_receipt(gradient_mismatches=(make_mismatch(),) * 12)))
    assert "GRADIENTS_DIFFER" in text
    assert "and 2 more" in text


def test_a_comparison_marks_gradients_that_differ():
    comparison = make_comparison()
    rows = (msgspec.structs.replace(comparison.rows[0], is_bit_equal=False), comparison.rows[1])
    assert "DIFFER" in text_of(render_comparison(msgspec.structs.replace(comparison, rows=rows)), 140)


def test_names_with_brackets_are_shown_as_they_are():
    assert "[bold]model[/bold]" in text_of(render_plan(make_plan(model="[bold]model[/bold]")))
    assert "[red]" in text_of(render_plan(make_plan(classes={"[red]": 1})))


def test_a_timeline_never_hides_its_peak():
    points = [point(MIB)] * 1000
    points[617] = point(8 * MIB, "backward of the loss")
    picture = draw_timeline(points, width=50).plain
    assert "peak 8.0 MiB, backward of the loss" in picture
    lines = picture.splitlines()
    assert lines[0].index("█") == lines[-1].index("▲")


def test_a_peak_at_the_right_edge_is_named_to_its_left():
    points = [point(MIB)] * 59 + [point(8 * MIB, "step of the optimizer")]
    last = draw_timeline(points, width=60).plain.splitlines()[-1]
    assert last.endswith("step of the optimizer ▲")
    assert len(last) == 10 + 1 + 60


def test_a_peak_with_a_long_name_is_named_below_its_mark():
    points = [point(MIB)] * 29 + [point(8 * MIB, "backward of " + "very." * 20)] + [point(MIB)] * 30
    mark, name = draw_timeline(points, width=60).plain.splitlines()[-2:]
    assert mark.index("▲") == 10 + 1 + 29
    assert name.strip().startswith("peak 8.0 MiB, backward of very.")


def test_the_budget_is_drawn():
    picture = draw_timeline([point(MIB)] * 10, budget_bytes=2 * MIB, height=4).plain
    assert "┄┄┄ budget" in picture


def test_an_empty_timeline_says_so():
    assert "no timeline" in draw_timeline([]).plain


def test_a_bar_stays_within_its_width():
    assert draw_bar(0.5, width=4) == "██░░"
    assert draw_bar(7.0, width=4) == "████"
    assert draw_bar(-1.0, width=4) == "░░░░"


def test_an_error_as_json_has_all_its_parts():
    fields = json.loads(render_error_json(BudgetBelowFloor("a", why="b", next="c")))
    assert fields == {
        "plimsoll": "error",
        "error": "BudgetBelowFloor",
        "found": "a",
        "why": "b",
        "next": "c",
        "exit_code": 3,
    }
