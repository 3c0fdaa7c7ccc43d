"""Seconds of ops from a roofline."""

import msgspec
import pytest

from planning.builders import bare_trace
from plimsoll.artifacts.costs import Costs, CostSource
from plimsoll.artifacts.trace import OpSpec
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs, roofline_seconds


def _spec(name="add", flops=0, moved_bytes=0, dtype="f32"):
    return OpSpec(name=name, flops=flops, moved_bytes=moved_bytes, dtype=dtype)


def test_large_products_are_bound_by_arithmetic_and_sums_by_bandwidth():
    h100 = find_device("H100-SXM")
    product = _spec("mm", flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2, dtype="bf16")
    assert roofline_seconds(product, h100) == pytest.approx(2 * 8192**3 / (989.4e12 * 0.65) + 4e-6)
    total = _spec("add", flops=2**28, moved_bytes=3 * 2**29, dtype="bf16")
    assert roofline_seconds(total, h100) == pytest.approx(3 * 2**29 / (3350e9 * 0.85) + 4e-6)


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
