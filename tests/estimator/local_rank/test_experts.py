"""Fused kernels of experts and DeepEP's exchange: what they hold and send, against sums by hand."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

import plimsoll
from plimsoll.artifacts.job import Layout, Precision, Techniques
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidLayout, InvalidOption
from plimsoll.estimator.budget import framework_items
from plimsoll.estimator.local_rank.cuts import expected_ranks
from plimsoll.estimator.local_rank.local import localised
from plimsoll.estimator.targets.recipe import find_recipe
from plimsoll.estimator.targets.target import TargetOptions, load_target
from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.links import Collective, collective_seconds

TOKENS = 64


def traced(moe: str, ep: int = 1) -> Trace:
    request = TraceRequest(
        target="mixtral-tiny",
        device_name="H100-SXM",
        batch=1,
        sequence=TOKENS,
        precision=Precision.BF16,
        ep=ep,
        how=Techniques(moe=moe),
    )
    return trace_target(request).trace


def saved(trace: Trace) -> dict[str, int]:
    """What the experts of the first block leave for backward, in bytes."""
    graph = trace.regions[0].graph
    values = [graph.values[value] for value in {slot.value for slot in graph.slots}]
    return {value.name.removeprefix("mlp.experts::"): value.bytes for value in values if "experts::" in value.name}


@pytest.mark.parametrize(("moe", "ep"), [("fused", 1), ("fused", 2), ("deepep", 2)])
def test_experts_in_fused_kernels_train_and_are_put_back(moe: str, ep: int):
    target = load_target("mixtral-tiny", TargetOptions(batch=2, sequence=16))
    with localised(target.model, ep=ep, moe=moe):
        target.model(**target.batch).loss.backward()
        assert all(p.grad is not None for p in target.model.parameters())
    assert not any("forward" in vars(module) for module in target.model.modules())


@pytest.mark.long
def test_fused_kernels_save_rows_and_products_and_a_map_alone():
    fields = find_recipe("mixtral-tiny").fields
    rows, experts = TOKENS * fields["num_experts_per_tok"], fields["num_local_experts"]
    hidden, inner = 2 * rows * fields["hidden_size"], 2 * rows * fields["intermediate_size"]
    ends = 4 * experts
    found = saved(traced("fused"))
    assert sorted(found.values()) == sorted([hidden, 2 * inner, inner, 4 * TOKENS * (2 * experts + 1), ends])
    assert sum(saved(traced("")).values()) > sum(found.values()) + hidden


def test_deepep_sends_a_token_once_to_a_rank_and_makes_its_rows_there():
    trace = traced("deepep", ep=2)
    sent = [spec for spec in trace.specs.values() if "dispatch" in spec.name]
    fields = find_recipe("mixtral-tiny").fields
    copies = expected_ranks(2, fields["num_local_experts"], fields["num_experts_per_tok"])
    assert copies == pytest.approx(5 / 3)  # of six pairs of experts, two lie on one rank
    assert {spec.copies for spec in sent} == {copies}
    assert {spec.moved_bytes for spec in sent} == {2 * math.ceil(TOKENS * copies) * fields["hidden_size"]}
    phases = [op.phase.value for op in trace.ops if "dispatch" in op.cost_key and op.region == 0]
    assert sorted(phases) == ["backward", "backward", "forward", "forward"]


@pytest.mark.parametrize(("ep", "experts", "top_k"), [(8, 64, 6), (16, 32, 4), (4, 8, 8)])
def test_the_ranks_of_a_token_are_those_of_a_draw(ep: int, experts: int, top_k: int):
    draw = random.Random(0)
    found = [len({each * ep // experts for each in draw.sample(range(experts), top_k)}) for _ in range(20_000)]
    assert expected_ranks(ep, experts, top_k) == pytest.approx(sum(found) / len(found), rel=0.01)


def test_rows_cross_the_network_once_for_a_node():
    device = find_device("H100-SXM")
    tokens_bytes, ep, copies = 2.0**30, 64, expected_ranks(64, 256, 8)
    draw, nodes = random.Random(0), 0
    for _ in range(20_000):
        nodes += len({expert // 32 for expert in draw.sample(range(256), 8)})
    sent = tokens_bytes * nodes / 20_000 * 7 / 8
    seconds = collective_seconds(Collective.ALL_TO_ALL, tokens_bytes * copies, ep, device, copies=copies)
    assert seconds == pytest.approx(sent / (0.9 * device.network_bytes_per_second), rel=0.05)
    rows = collective_seconds(Collective.ALL_TO_ALL, tokens_bytes * 8, ep, device)
    assert seconds < 0.7 * rows


def test_published_dispatches_take_what_was_measured():
    """DeepEP's table of its first version: 4096 tokens of 7168 in fp8, eight experts of four nodes at most, on H800."""
    node = 4096 * 7168 * expected_ranks(8, 256, 8)
    device = replace(find_device("H100-SXM"), link_bytes_per_second=160e9)
    seconds = collective_seconds(Collective.ALL_TO_ALL, node, 8, device, copies=expected_ranks(8, 256, 8))
    assert seconds == pytest.approx(node * 7 / 8 / 153e9, rel=0.08)


def test_buffers_of_deepep_are_those_that_it_asks_for():
    hidden_bytes = 2 * 7168
    row = hidden_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4
    within = 10 * 8 * 256 * row
    between = 10 * 8 * 288 * row + 2 * 10 * 8 * 128 * (row + 16)
    for ep, expected in ((8, within), (64, between)):
        items = framework_items(find_device("H100-SXM"), Layout(dp=ep, ep=ep), hidden_bytes)
        (found,) = [item.bytes for item in items if "(ep)" in item.name]
        assert found == pytest.approx(expected, rel=0.001)


@pytest.mark.long
def test_the_budget_of_the_whole_device_leaves_room_for_deepeps_buffers_not_nccls():
    ask = {"precision": "bf16", "layout": "dp=2,ep=2", "budget": "auto"}
    own, deepep = (plimsoll.estimate("mixtral-tiny", techniques=moe, **ask) for moe in ("", "moe=deepep"))
    buffers = [sum(i.bytes or 0 for i in each.tightest.items if "(ep)" in i.name) for each in (own, deepep)]
    assert deepep.budget_bytes - own.budget_bytes == pytest.approx(0.92 * (buffers[0] - buffers[1]), abs=2)
    assert buffers[0] > 2 * buffers[1]


@pytest.mark.long
def test_fused_kernels_hold_less_and_deepep_has_buffers_of_its_own():
    ask = {"batch": 4, "sequence": 1024, "precision": "bf16", "layout": "dp=4,ep=4", "device": "H100-SXM"}
    own, fused, deepep = (
        plimsoll.estimate("mixtral-tiny", techniques=moe, **ask) for moe in ("", "moe=fused", "moe=deepep")
    )
    assert fused.tightest.allocated_bytes < own.tightest.allocated_bytes
    assert fused.throughput.step_seconds < own.throughput.step_seconds
    names = [item.name for item in deepep.tightest.items]
    assert "DeepEP buffers (ep)" in names
    assert "NCCL buffers (ep)" not in names


@pytest.mark.parametrize(
    ("name", "how", "error", "words"),
    [
        ("mixtral-tiny", {"techniques": "moe=deepep"}, InvalidOption, "every rank has all"),
        ("llama-tiny", {"techniques": "moe=fused"}, InvalidLayout, "does not have experts"),
        ("mixtral-tiny", {"techniques": "moe=tutel"}, InvalidOption, "fused or deepep"),
    ],
)
def test_kernels_of_experts_are_refused_where_they_mean_nothing(
    name: str, how: dict[str, str], error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        plimsoll.estimate(name, precision="bf16", **how)


def test_experts_with_biases_have_no_fused_kernels(tmp_path: Path):
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]} | sizes | heads
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidLayout, match="biases"):
        plimsoll.estimate(str(tmp_path), sequence=16, precision="bf16", techniques="moe=fused")
