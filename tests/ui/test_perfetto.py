"""A timeline as a trace file: counters per category, phases as slices, the peak as an instant, the budget beside them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest

from plimsoll.artifacts.plan import Plan
from plimsoll.errors import InvalidReport
from plimsoll.ui.perfetto import render_perfetto
from samples import make_plan
from ui.pages.page_samples import make_full_plan


def events_of(*plans: Plan, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(render_perfetto(plans))["traceEvents"] if event["ph"] == kind]


def test_counters_hold_the_bytes_of_every_category():
    plan = make_full_plan()
    counters = [event for event in events_of(plan, kind="C") if event["name"].startswith("memory by category")]
    assert len(counters) == len(plan.timeline)
    for event, point in zip(counters, plan.timeline, strict=True):
        assert sum(event["args"].values()) == point.bytes
        assert event["ts"] == pytest.approx(point.unmanaged_seconds * 1e6)


def test_the_peak_is_an_instant_that_names_moment_and_holders():
    plan = make_full_plan()
    (peak,) = events_of(plan, kind="i")
    highest = max(plan.timeline, key=lambda point: point.bytes)
    assert peak["ts"] == pytest.approx(highest.unmanaged_seconds * 1e6)
    assert peak["name"].startswith("peak 85.7 MiB, backward of blocks.")
    assert peak["args"]["parameters"] == "20.0 MiB"


def test_phases_follow_each_other_without_gaps():
    phases = events_of(make_full_plan(), kind="X")
    assert [phase["name"] for phase in phases] == ["forward", "backward", "optimizer"]
    for one, other in itertools.pairwise(phases):
        assert one["ts"] + one["dur"] == pytest.approx(other["ts"])


def test_the_budget_is_a_counter_of_its_own_where_there_is_one():
    budgets = [event["args"] for event in events_of(make_full_plan(), kind="C") if event["name"].startswith("budget")]
    assert [set(args) for args in budgets] == [{"budget"}] * 2
    without = events_of(make_plan(budget_bytes=None), kind="C")
    assert not [event for event in without if event["name"].startswith("budget")]


def test_several_plans_are_processes_of_one_trace():
    names = events_of(make_plan(), make_plan(strategy="full"), kind="M")
    processes = [(event["pid"], event["args"]["name"]) for event in names if event["name"] == "process_name"]
    both = enumerate(("auto", "full"), start=1)
    assert processes == [(pid, f"TinyModel, plan {name}, budget 64.0 MiB") for pid, name in both]


def test_a_plan_without_seconds_counts_operations_and_says_so():
    text = render_perfetto([make_plan()])
    assert json.loads(text)["otherData"]["clock"] == "one microsecond per operation"
    assert [event["ts"] for event in events_of(make_plan(), kind="C")][-3] == 59.0


def test_every_event_has_what_the_format_asks_for():
    for event in json.loads(render_perfetto([make_full_plan()]))["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert "ts" in event or event["ph"] == "M"
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())


@pytest.mark.parametrize("plans", [[], [msgspec.structs.replace(make_plan(), timeline=())]])
def test_without_a_timeline_there_is_no_trace(plans: list[Plan]):
    with pytest.raises(InvalidReport, match="no timeline"):
        render_perfetto(plans)
