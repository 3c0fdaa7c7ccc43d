"""What collectives cost: the shares of the ring, nodes, and what has no price."""

from __future__ import annotations

import math

import pytest

from planning.builders import bare_trace
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import OpSpec, Trace
from plimsoll.errors import InvalidLayout
from plimsoll.planning.costing.devices import find_device, known_devices
from plimsoll.planning.costing.links import Collective, RankGroup, collective_seconds, group_of
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.units import GIB

H100 = find_device("H100")
LINK = H100.link_bytes_per_second * H100.achieved_link
NETWORK = H100.network_bytes_per_second * H100.achieved_link


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        (Collective.ALL_REDUCE, 2 * 7 / 8),
        (Collective.ALL_GATHER, 7 / 8),
        (Collective.REDUCE_SCATTER, 7 / 8),
        (Collective.ALL_TO_ALL, 7 / 8),
        (Collective.RING_EXCHANGE, 7 / 8),
        (Collective.SEND, 1),
    ],
)
def test_large_messages_within_a_node_take_their_share_over_the_links(kind: Collective, share: float):
    assert math.isclose(collective_seconds(kind, 8 * GIB, 8, H100), share * 8 * GIB / LINK, rel_tol=1e-2)


@pytest.mark.parametrize(
    ("kind", "stride", "seconds"),
    [
        (Collective.ALL_GATHER, 1, 15 / 16 * 8 * GIB / min(LINK, 8 * NETWORK)),  # as fast as its nodes' ports
        (Collective.ALL_GATHER, 8, 15 / 16 * 8 * GIB / NETWORK),
        (Collective.ALL_TO_ALL, 1, 8 / 16 * 8 * GIB / NETWORK),  # what goes to other nodes
    ],
)
def test_a_group_over_nodes_takes_what_goes_over_the_network(kind: Collective, stride: int, seconds: float):
    assert math.isclose(collective_seconds(kind, 8 * GIB, 16, H100, stride=stride), seconds, rel_tol=1e-2)


def test_small_messages_cost_latency_that_grows_with_the_group():
    small = [collective_seconds(Collective.ALL_REDUCE, 1, ranks, H100) for ranks in (2, 8, 64, 1024)]
    assert small == sorted(small)
    assert 1e-6 < small[0] < small[-1] < 2e-4


def test_one_rank_sends_nothing_and_a_device_without_links_has_no_price_for_two():
    assert collective_seconds(Collective.ALL_REDUCE, GIB, 1, find_device("cpu")) == 0.0
    with pytest.raises(InvalidLayout, match="laptop-CPU, because the catalogue does not have a link"):
        collective_seconds(Collective.ALL_REDUCE, GIB, 2, find_device("cpu"))


@pytest.mark.parametrize(
    "device", [d for d in known_devices() if d.link_bytes_per_second], ids=lambda device: device.name
)
def test_links_are_slower_than_memory_and_faster_than_the_network(device):
    assert device.bandwidth_bytes_per_second > device.link_bytes_per_second >= device.network_bytes_per_second > 0
    others = {
        "GH200-96GB": 1,
        "GB200": 72,
        "GB300": 72,
        "TPU-v4": 4096,
        "TPU-v5e": 256,
        "TPU-v5p": 8960,
        "TPU-v6e": 256,
    }
    assert device.ranks_per_node == others.get(device.name, 8)
    assert device.bandwidth_bytes_per_second > device.host_link_bytes_per_second > 0


def test_tensor_parallel_groups_stand_closest_and_pipelines_widest():
    layout = Layout(tp=4, cp=2, dp=8, pp=2, ep=4)
    groups = {"tp": (4, 1), "cp": (2, 4), "ep": (4, 4), "dp": (8, 8), "shards": (16, 4), "pp": (2, 64)}
    for name, (ranks, stride) in groups.items():
        assert group_of(layout, name) == RankGroup(ranks=ranks, stride=stride)
    in_node = {name: group_of(layout, name).ranks_in_node(H100) for name in ("tp", "cp", "ep", "dp", "pp")}
    assert in_node == {"tp": 4, "cp": 2, "ep": 2, "dp": 1, "pp": 1}


def _trace_with(*specs: OpSpec) -> Trace:
    return bare_trace({spec.name: spec for spec in specs})


def test_collectives_of_a_trace_go_by_their_group_and_other_ops_by_the_roofline():
    reduce = OpSpec(name="plimsoll.all_reduce_", flops=0, moved_bytes=GIB, dtype="bf16", group="tp")
    copy = OpSpec(name="clone", flops=0, moved_bytes=GIB, dtype="bf16")
    prices = roofline_costs(_trace_with(reduce, copy), H100, Layout(tp=4, dp=2)).ops
    assert prices["plimsoll.all_reduce_"].seconds == collective_seconds(Collective.ALL_REDUCE, GIB, 4, H100)
    assert prices["clone"] == roofline_costs(_trace_with(copy), H100).ops["clone"]
