"""Seconds of ops from a roofline."""

from dataclasses import replace

import msgspec
import pytest
from msgspec.structs import replace as replace_field

from planning.builders import bare_trace
from plimsoll.artifacts.costs import Costs, CostSource
from plimsoll.artifacts.trace import OpSpec
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import achieved_share, roofline_costs, roofline_seconds


def _spec(name="add", flops=0, moved_bytes=0, dtype="f32"):
    return OpSpec(name=name, flops=flops, moved_bytes=moved_bytes, dtype=dtype)


def test_large_products_are_bound_by_arithmetic_and_sums_by_bandwidth():
    h100 = find_device("H100-SXM")
    product = _spec("mm", flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2, dtype="bf16")
    assert roofline_seconds(product, h100) == pytest.approx(2 * 8192**3 / (989.4e12 * h100.achieved_arithmetic) + 4e-6)
    total = _spec("add", flops=2**28, moved_bytes=3 * 2**29, dtype="bf16")
    assert roofline_seconds(total, h100) == pytest.approx(3 * 2**29 / (3350e9 * h100.achieved_bandwidth) + 4e-6)


# Azure/AI-benchmarking-guide, ND_A100_v4_results.md: FP16, random values, 10,000 products of size · size · size before.
@pytest.mark.parametrize(
    ("size", "teraflops"), [(1024, 119.4), (2048, 221.8), (4096, 228.0), (8192, 253.7), (16384, 256.5)]
)
def test_products_by_their_size_follow_the_measured_curve(size, teraflops):
    a100 = find_device("A100")
    product = OpSpec(name="mm", flops=2 * size**3, moved_bytes=6 * size**2, dtype="f16", product=(1, size, size, size))
    alone = replace(a100, achieved_arithmetic=0.82)  # in training less is reached than by products alone
    assert product.flops / roofline_seconds(product, alone) / 1e12 == pytest.approx(teraflops, rel=0.2)


def test_a_wave_that_is_hardly_filled_takes_as_long_as_a_full_one():
    h100 = find_device("H100")
    full, more = (
        achieved_share(OpSpec(name="mm", flops=0, moved_bytes=0, dtype="bf16", product=(batch, 256, 128, 4096)), h100)
        for batch in (h100.multiprocessors, h100.multiprocessors + 1)
    )
    assert full == h100.achieved_arithmetic
    assert more < 0.8 * full


def test_causal_attention_runs_half_of_what_it_counts():
    h100, flops = find_device("H100"), 10**15
    spec = _spec("_scaled_dot_product_flash_attention", flops, dtype="bf16")
    whole, causal = (roofline_seconds(replace_field(spec, is_causal=each), h100) for each in (False, True))
    assert causal == pytest.approx(whole / 2, rel=1e-3)
    assert whole > flops / h100.flops_per_second("bf16") / h100.achieved_arithmetic


def test_the_smallest_op_takes_a_launch():
    device = find_device("L40S")
    assert roofline_seconds(_spec(), device) == device.launch_seconds


def test_f32_convolutions_use_tf32_where_there_is_one():
    flops = 10**12
    product, convolution = _spec("mm", flops), _spec("convolution", flops)
    a100, cpu = find_device("A100"), find_device("cpu")
    assert roofline_seconds(convolution, a100) < roofline_seconds(product, a100)
    assert roofline_seconds(convolution, cpu) == roofline_seconds(product, cpu)


def test_roofline_costs_cover_every_key_and_name_the_device():
    costs = roofline_costs(bare_trace({"a": _spec(moved_bytes=10), "b": _spec("mm", 10)}), find_device("B200"))
    assert set(costs.ops) == {"a", "b"}
    assert (costs.device, costs.source) == ("B200", CostSource.ROOFLINE)
    assert costs.memory_bytes == find_device("B200").memory_bytes


def test_costs_of_before_regions_had_seconds_of_their_own_can_be_read():
    old = b'{"device": "cpu", "source": "measured", "ops": {}, "slot_seconds": 1e-6, "replay_seconds": 1e-7}'
    assert msgspec.json.decode(old, type=Costs).region_seconds == 0.0
