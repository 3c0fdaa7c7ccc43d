"""Context parallelism on a trace: exchanges beside attention, everything else as it was."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from estimator.local_rank import families
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.parallelism.context import with_context_parallel
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_full, choose_none
from plimsoll.tracing.trace import trace

LAYERS, CP = 2, 4
KEYS_AND_VALUES = 2 * 2 * 64 * 64 * 2
"""Both, batch 2, 64 local positions, width 64, bf16."""


def _traced(sequence: int = 64, *, layers: int = 1, is_padded: bool = False) -> Trace:
    model = families.narrow("llama", hidden_size=64, num_hidden_layers=layers, num_key_value_heads=4)
    batch = families.labelled(2, sequence)
    if is_padded:
        batch["attention_mask"] = torch.ones(2, sequence, dtype=torch.long)
        batch["attention_mask"][1, :4] = 0
    return trace(model, batch, device_name="H100")


@pytest.fixture(scope="module")
def local() -> Trace:
    return _traced(layers=LAYERS)


@pytest.fixture(scope="module")
def ring(local: Trace) -> Trace:
    return with_context_parallel(local, CP)


def test_one_rank_needs_no_ring(local: Trace):
    assert with_context_parallel(local, 1) is local


def test_every_attention_op_has_an_exchange_before_it(local: Trace, ring: Trace):
    names = [op.name for op in ring.ops]
    exchanges = [tick for tick, name in enumerate(names) if name == "plimsoll.ring_exchange"]
    assert len(exchanges) == 2 * LAYERS
    assert all(names[tick + 1].startswith("_scaled_dot_product_cudnn_attention") for tick in exchanges)
    assert [name for name in names if "ring" not in name] == [op.name for op in local.ops]
    for tick in exchanges:
        spec = ring.specs[ring.ops[tick].cost_key]
        ways = 2 if ring.ops[tick].phase is Phase.BACKWARD else 1
        assert (spec.group, spec.moved_bytes) == ("cp", ways * CP * KEYS_AND_VALUES)


def test_attention_does_the_arithmetic_of_the_whole_sequence(local: Trace, ring: Trace):
    whole = _traced(sequence=CP * 64)

    def flops(step: Trace) -> int:
        return sum(step.specs[op.cost_key].flops for op in step.ops if "attention" in op.name)

    assert flops(ring) == CP * flops(local) == LAYERS * flops(whole) // CP


def test_lives_and_ranges_move_with_their_ops(local: Trace, ring: Trace):
    for before, after in zip(local.storages, ring.storages, strict=False):
        assert (before.id, before.bytes, before.label) == (after.id, after.bytes, after.label)
        if before.born >= 0:
            assert local.ops[before.born].name == ring.ops[after.born].name
        length = [op.name for op in ring.ops[max(after.born, 0) : after.dies] if "ring" not in op.name]
        assert len(length) == before.dies - max(before.born, 0)
    for before, after in zip(local.regions, ring.regions, strict=True):
        for old, new in zip((before.forward, before.backward), (after.forward, after.backward), strict=True):
            names = [op.name for op in ring.ops[slice(*new)]]
            assert [name for name in names if "ring" not in name] == [op.name for op in local.ops[slice(*old)]]
            assert "plimsoll.ring_exchange" in names
        for slot, moved in zip(before.graph.slots, after.graph.slots, strict=True):
            assert ring.ops[moved.packed - 1].name == local.ops[slot.packed - 1].name
    assert all(storage.id == place for place, storage in enumerate(ring.storages))


def test_receive_buffers_live_during_attention(ring: Trace):
    buffers = [storage for storage in ring.storages if storage.label.startswith("ring buffers:")]
    assert [buffer.bytes for buffer in buffers] == [2 * KEYS_AND_VALUES] * LAYERS + [4 * KEYS_AND_VALUES] * LAYERS
    assert all(buffer.category is Category.TEMPORARY and buffer.dies == buffer.born + 2 for buffer in buffers)


def test_graphs_stay_in_order_and_name_their_producers(ring: Trace):
    for region in ring.regions:
        graph = region.graph
        assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
        assert [value.id for value in graph.values] == list(range(len(graph.values)))
        assert all(value.id in graph.ops[value.producer].writes for value in graph.values if value.producer >= 0)
        assert all(ring.ops[op.tick].cost_key == op.cost_key for op in graph.ops)
        (attention,) = [op for op in graph.ops if "attention" in op.name]
        exchange = graph.ops[attention.id - 1]
        assert exchange.name == "plimsoll.ring_exchange"
        assert set(exchange.writes) < set(attention.reads)
    assert len({region.kind for region in ring.regions}) == 1


def test_repeating_attention_repeats_its_exchange(local: Trace, ring: Trace):
    def seconds(step: Trace, choose: object) -> float:
        index = StepIndex(step, roofline_costs(step, find_device("H100"), Layout(cp=CP)))
        return run_choices(index, choose(index, "")).seconds  # type: ignore[operator]

    prices = roofline_costs(ring, find_device("H100"), Layout(cp=CP))
    exchange = next(cost.seconds for key, cost in prices.ops.items() if "ring_exchange" in key and "ways=1" in key)
    added = [seconds(step, choose_full) - seconds(step, choose_none) for step in (local, ring)]
    assert math.isclose(added[1] - added[0], LAYERS * (exchange + prices.replay_seconds), rel_tol=0.1)


def test_the_trace_still_round_trips(ring: Trace):
    assert msgspec.json.decode(msgspec.json.encode(ring), type=Trace) == ring


def test_attention_made_of_single_ops_or_with_a_mask_is_refused():
    single = trace(families.plain(), torch.randn(2, 4, 8), loss=torch.sum, device_name="H100")
    for step, words in (
        (single, "attention is not a single fused op"),
        (_traced(sequence=16, is_padded=True), "attention uses a mask"),
    ):
        with pytest.raises(InvalidLayout, match=words):
            with_context_parallel(step, CP)
