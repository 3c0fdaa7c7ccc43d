"""Plans in words: grouped decisions, the price of memory, who holds the peak."""

from __future__ import annotations

import msgspec
import pytest

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.grouping import compress_names, group_regions, name_call
from samples import make_plan, make_region


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["layers.0"], "layers.0"),
        (["layers.0", "layers.1", "layers.2"], "layers.0–2"),
        (["layers.0", "layers.2", "layers.3"], "layers.0,2–3"),
        (["h.0.attn", "h.1.attn", "head"], "h.0–1.attn, head"),
        (["enc.layers.0", "enc.layers.1", "dec.layers.0"], "enc.layers.0–1, dec.layers.0"),
        (["stage1.block0", "stage1.block1"], "stage1.block0–1"),
        ([], ""),
    ],
)
def test_names_that_differ_in_one_number_become_a_range(names: list[str], text: str):
    assert compress_names(names) == text


def test_later_calls_of_a_region_are_counted_from_one():
    assert name_call("block", 0) == "block"
    assert name_call("block", 1) == "block (call 2)"
    assert name_call("", 0) == "(the model)"


def test_identical_regions_share_a_group():
    groups = group_regions(make_plan().regions)
    assert [group.label for group in groups] == ["model.layers.0–2", "model.layers.3"]
    assert groups[0].replay_seconds == pytest.approx(0.003)


def test_a_dropped_boundary_is_a_group_of_its_own():
    dropped = msgspec.structs.replace(make_region(1), is_boundary_dropped=True)
    assert len(group_regions([make_region(0), dropped])) == 2


def test_a_plan_prints_as_a_table():
    text = str(make_plan())
    for part in (
        "OPTIMAL",
        "64.0 MiB (floor 40.0 MiB)",
        "60.0 MiB, 60% of the unmanaged 100.0 MiB",
        "+3.0%",
        "model.layers.0–2",
        "RECOMPUTE 1 of 2 values",
        "KEEP everything",
        "activation",
        "holder 0",
        "3 others",
        "the logits hold",
    ):
        assert part in text
    assert "buffer" not in text


def test_one_more_gib_never_saves_more_than_the_overhead():
    assert "one more GiB would save 3.0 ms a step" in str(make_plan())


def test_memory_that_is_not_scarce_has_no_price():
    assert "would not make this step faster" in str(make_plan(price_seconds_per_byte=0.0))


def test_a_plan_explains_every_value():
    text = make_plan().explain()
    assert "recompute costs 0.1 ms/MiB, memory is worth 0.3 ms/MiB here" in text
    assert "attn.out" in text
    assert "(3 alike, figures for one)" in text
    assert "Without a plan the peak is 100.0 MiB, in forward of the loss" in text
    assert "What other budgets would cost" in text


def test_a_plan_whose_peak_does_not_move_says_why():
    text = make_plan(predicted_peak_bytes=100 * 2**20).explain()
    assert "but not the peak" in text


def test_an_empty_plan_prints():
    plan = make_plan(status=Status.INFEASIBLE, regions=(), classes={}, baseline_seconds=0.0, baseline_peak_bytes=0)
    assert "INFEASIBLE" in str(plan)
    assert plan.explain()


def test_columns_line_up():
    assert align([["a", "1"], ["bb", "22"]], right=[1], indent=0) == ["a    1", "bb  22"]
    assert align([]) == []
