"""A traced rank: its collectives are ops with prices, and a planner repeats one only where that pays."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from estimator.local_rank.families import WORDS, labelled, narrow
from planning.builders import sweep_prices
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import Phase, Trace
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.local import localised
from plimsoll.planning.choices import prices_of
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.step import StepIndex
from plimsoll.tracing.trace import trace

LAYERS = 2


def _traced(*, is_split: bool) -> Trace:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = narrow("llama", **sizes, num_hidden_layers=LAYERS)
    with localised(model, tp=4, sequence_parallel=is_split):
        return trace(model, labelled(2, 64), device_name="H100")


@pytest.fixture(scope="module")
def whole() -> Trace:
    return _traced(is_split=False)


@pytest.fixture(scope="module")
def split() -> Trace:
    return _traced(is_split=True)


def _counts(step: Trace, *, in_regions: bool) -> Counter[tuple[str, str]]:
    return Counter(
        (op.name.removeprefix("plimsoll."), op.phase.value)
        for op in step.ops
        if step.specs[op.cost_key].group == "tp" and (op.region >= 0) == in_regions
    )


def test_a_layer_reduces_twice_in_forward_and_twice_in_backward(whole: Trace):
    assert _counts(whole, in_regions=True) == {
        ("all_reduce_", "forward"): 2 * LAYERS,
        ("all_reduce_", "backward"): 2 * LAYERS,
    }
    assert _counts(whole, in_regions=False) == {
        ("all_reduce_", "forward"): 1 + 3,  # the embedding; largest logit, sum and logit of the label
        ("all_reduce_", "backward"): 1,  # the input of the head
    }


def test_with_sequence_parallelism_a_layer_gathers_and_scatters_as_often(split: Trace):
    assert _counts(split, in_regions=True) == {
        (name, phase): 2 * LAYERS for name in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")
    }
    assert _counts(split, in_regions=False) == {
        ("all_reduce_", "forward"): 1 + 3,
        ("all_gather", "forward"): 1,  # before the head
        ("reduce_scatter", "backward"): 1,
        ("all_gather", "backward"): 1,  # of the embedding's gradient
    }


def test_blocks_save_less_of_a_split_stream(whole: Trace, split: Trace):
    def inputs(step: Trace) -> int:
        graph = step.regions[1].graph
        return next(value.bytes for value in graph.values if value.name == "input:0")

    assert inputs(whole) == 4 * inputs(split) == 2 * 64 * 128 * 2


def test_collectives_in_blocks_can_be_replayed(split: Trace):
    for region in split.regions:
        collectives = [op for op in region.graph.ops if split.specs[op.cost_key].group]
        assert not region.obstacle
        assert len(collectives) == 4
        assert all(op.is_replayable and not op.is_random for op in collectives)


def _bytes_held_when_gathers_are_first_repeated(step: Trace, link_bytes_per_second: float) -> float:
    """Down the hull of a layer: what it still holds, as a share, where its cheapest choice starts to gather again."""
    device = dataclasses.replace(find_device("H100"), link_bytes_per_second=link_bytes_per_second)
    index = StepIndex(step, roofline_costs(step, device, Layout(tp=4, sequence_parallel=True)))
    view = index.views[1]
    gathers = {op.id for op in view.graph.ops if op.name == "plimsoll.all_gather"}
    cuts = sweep_prices(view, prices_of(index, view)).cuts
    return next(cut.held_bytes for cut in cuts if cut.ops & gathers) / cuts[0].held_bytes


def test_a_gather_is_repeated_early_where_links_are_fast_and_last_where_they_are_slow(split: Trace):
    fast, slow = (_bytes_held_when_gathers_are_first_repeated(split, link) for link in (1e15, 1e7))
    assert fast > 0.25
    assert slow < 0.1


def test_collectives_have_no_price_without_a_layout(split: Trace):
    with pytest.raises(InvalidLayout, match="collectives over the tp group"):
        roofline_costs(split, find_device("H100"))


def test_the_logits_of_one_rank_are_a_part_of_the_words(whole: Trace):
    head = [op for op in whole.ops if op.module == "lm_head" and op.phase is Phase.FORWARD]
    assert f"{WORDS // 4}]" in head[-1].cost_key or f"x{WORDS // 4}" in head[-1].cost_key
    assert not [s for s in whole.storages if s.bytes == 2 * 64 * WORDS * 4]
