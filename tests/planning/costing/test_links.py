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


def test_a_group_over_nodes_is_as_fast_as_its_nodes_ports():
    wide = collective_seconds(Collective.ALL_GATHER, 8 * GIB, 16, H100)
    assert math.isclose(wide, 15 / 16 * 8 * GIB / min(LINK, 8 * NETWORK), rel_tol=1e-2)
    alone = collective_seconds(Collective.ALL_GATHER, 8 * GIB, 16, H100, stride=8)
    assert math.isclose(alone, 15 / 16 * 8 * GIB / NETWORK, rel_tol=1e-2)


def test_an_exchange_over_nodes_sends_over_the_network_what_goes_to_other_nodes():
    seconds = collective_seconds(Collective.ALL_TO_ALL, 8 * GIB, 16, H100)
    assert math.isclose(seconds, 8 / 16 * 8 * GIB / NETWORK, rel_tol=1e-2)


def test_small_messages_cost_latency_that_grows_with_the_group():
    small = [collective_seconds(Collective.ALL_REDUCE, 1, ranks, H100) for ranks in (2, 8, 64, 1024)]
    assert small == sorted(small)
    assert 1e-6 < small[0] < small[-1] < 2e-4


def test_one_rank_sends_nothing():
    assert collective_seconds(Collective.ALL_REDUCE, GIB, 1, find_device("cpu")) == 0.0


def test_a_device_without_links_has_no_price():
    with pytest.raises(InvalidLayout, match="laptop-CPU, of which no link is known"):
        collective_seconds(Collective.ALL_REDUCE, GIB, 2, find_device("cpu"))


@pytest.mark.parametrize(
    "device", [d for d in known_devices() if d.link_bytes_per_second], ids=lambda device: device.name
)
def test_links_are_slower_than_memory_and_faster_than_the_network(device):
    assert device.bandwidth_bytes_per_second > device.link_bytes_per_second > device.network_bytes_per_second > 0
    assert device.ranks_per_node == 8


def test_tensor_parallel_groups_stand_closest_and_pipelines_widest():
    layout = Layout(tp=4, cp=2, dp=8, pp=2, ep=4)
    assert group_of(layout, "tp") == RankGroup(ranks=4, stride=1)
    assert group_of(layout, "cp") == RankGroup(ranks=2, stride=4)
    assert group_of(layout, "ep") == RankGroup(ranks=4, stride=4)
    assert group_of(layout, "dp") == RankGroup(ranks=8, stride=8)
    assert group_of(layout, "shards") == RankGroup(ranks=16, stride=4)
    assert group_of(layout, "pp") == RankGroup(ranks=2, stride=64)
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


def test_a_group_of_one_costs_nothing():
    gather = OpSpec(name="plimsoll.all_gather", flops=0, moved_bytes=GIB, dtype="bf16", group="cp")
    assert roofline_costs(_trace_with(gather), H100, Layout(tp=4)).ops["plimsoll.all_gather"].seconds == 0.0
