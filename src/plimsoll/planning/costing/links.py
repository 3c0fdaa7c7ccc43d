"""Computes the seconds of a collective on a device's links and network.

    seconds = share · bytes / (bandwidth · achieved) + hops · latency + launch

``share`` is the number of bytes that each rank sends, per byte of the whole tensor: 2(n-1)/n for an all-reduce, (n-1)/n to
gather, scatter or exchange, 1 from one rank to another. A group within a node uses the node's links. A group that spans nodes
runs one ring per port, so its bandwidth is the sum of a node's ports, or the links' bandwidth if that is lower. An exchange
sends only the bytes for other nodes over the network.

Which groups lie within a node follows from the order of ranks in a layout: ``tp`` fastest, then ``cp``, ``dp``, ``pp``.

Source: the α-β model of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005;
shares as in nccl-tests (doc/PERFORMANCE.md, "bus bandwidth"). Known weaknesses: contention between groups, lower bandwidth of
small messages, and switches that reduce (which make an all-reduce up to 1.3 times as fast on eight H100) are not modelled.
All this together is assumed to change the seconds of messages of some MiB and more by up to 30%, up or down. It was not
measured.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from plimsoll.artifacts.job import Layout
from plimsoll.errors import InvalidLayout
from plimsoll.planning.costing.devices import Device

_LINK_HOP_SECONDS = 1e-6
"""Latency in seconds of one hop between two devices of a node."""
_NETWORK_HOP_SECONDS = 5e-6
"""Latency in seconds of one hop between two nodes."""
_ACHIEVED_EXCHANGE = 0.9
"""The share of the bandwidth of links and network that kernels for exchanging rows reach. DeepEP's dispatch and combine reached
153 to 158 of NVLink's 160 GB/s on an H800 within a node, and 43 to 58 GB/s with 50 GB/s ports among two to eight nodes; the
second range also counts bytes that stay in the node (DeepEP's ``docs/legacy.md``)."""


class Collective(enum.StrEnum):
    """Names of collectives. In a ``RING_EXCHANGE`` each rank's part passes all ranks (keys and values of ring attention)."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    RING_EXCHANGE = "ring_exchange"
    SEND = "send"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """Data: a group of ranks that communicate. It has ``ranks`` members; the numbers of neighbours differ by ``stride``."""

    ranks: int
    stride: int = 1

    def ranks_in_node(self, device: Device) -> int:
        """Return how many ranks of the group are on one node, at most: the node with the most of them counts."""
        return max(1, min(self.ranks, device.ranks_per_node // self.stride))


def group_of(layout: Layout, dimension: str) -> RankGroup:
    """Return the group of ranks along a dimension of a layout.

    The dimensions are ``tp``, ``cp``, ``dp``, ``pp``, ``ep``, ``shards`` (ZeRO's: dp · cp, or a replica's part of it) and
    ``replicas`` (HSDP's).

    Example:
        >>> group_of(Layout(tp=4, dp=2, pp=2), "dp")
        RankGroup(ranks=2, stride=4)
    """
    before_dp = layout.tp * layout.cp
    groups = {
        "tp": RankGroup(ranks=layout.tp),
        "cp": RankGroup(ranks=layout.cp, stride=layout.tp),
        "ep": RankGroup(ranks=layout.ep, stride=layout.tp),
        "dp": RankGroup(ranks=layout.dp, stride=before_dp),
        "shards": RankGroup(ranks=layout.shards, stride=layout.tp),
        "replicas": RankGroup(ranks=layout.replicas, stride=layout.tp * layout.shards),
        "pp": RankGroup(ranks=layout.pp, stride=before_dp * layout.dp),
    }
    return groups[dimension]


def collective_seconds(
    kind: Collective,
    whole_bytes: float,
    ranks: int,
    device: Device,
    *,
    stride: int = 1,
    copies: float = 0.0,
) -> float:
    """Return the seconds of one collective.

    Args:
        kind: the collective.
        whole_bytes: size of the whole tensor on one rank: after a gather, or before it is reduced, exchanged or sent.
        ranks: size of the group; a group of one rank sends nothing.
        device: a device with its links and network.
        stride: distance between neighbours of the group in the order of ranks.
        copies: for an exchange that sends each row to each node at most once: the number of ranks that get a row; else 0.

    Raises:
        InvalidLayout: the catalogue does not list links for this device.

    Example:
        >>> from plimsoll.planning.costing.devices import find_device
        >>> f"{collective_seconds(Collective.ALL_REDUCE, 2**30, 8, find_device('H100')) * 1e3:.1f} ms"
        '5.2 ms'
    """
    if ranks == 1:
        return 0.0
    if not device.link_bytes_per_second:
        raise InvalidLayout(
            f"unsupported: {ranks} ranks on {device.name}, because the catalogue does not have a link for this device.",
            why="without the speed of a link, the time of communication between ranks is unknown",
            next="use a device from the catalogue with links (A100-80GB, H100-SXM, …), or a layout of one rank",
        )
    group = RankGroup(ranks=ranks, stride=stride)
    within = group.ranks_in_node(device)
    nodes = math.ceil(ranks / within)
    transfer = (
        _row_seconds(whole_bytes, copies, group, device)
        if copies
        else _transfer_seconds(kind, whole_bytes, group, device)
    )
    return transfer + _hop_seconds(kind, within, nodes) + device.launch_seconds


def _row_seconds(whole_bytes: float, copies: float, group: RankGroup, device: Device) -> float:
    """Return the seconds of an exchange that sends each row to each node once, and then to the node's ranks over links.

    Network and links work at the same time, so the slower one counts. A row goes to a node if any of the node's ranks needs
    the row. Each rank needs the row with probability copies / ranks, independently of the others.
    """
    within = group.ranks_in_node(device)
    nodes = group.ranks / within
    links = whole_bytes * (within - 1) / within / (device.link_bytes_per_second * _ACHIEVED_EXCHANGE)
    if nodes <= 1:
        return links
    nodes_of_row = nodes * (1 - (1 - copies / group.ranks) ** within)
    sent = whole_bytes / copies * nodes_of_row * (nodes - 1) / nodes
    return max(links, sent / (device.network_bytes_per_second * _ACHIEVED_EXCHANGE))


def _transfer_seconds(kind: Collective, whole_bytes: float, group: RankGroup, device: Device) -> float:
    """Return the seconds that the bytes of a collective take over links and network, without the latency of hops."""
    ranks, within = group.ranks, group.ranks_in_node(device)
    link = device.link_bytes_per_second * device.achieved_link
    network = device.network_bytes_per_second * device.achieved_link
    if kind is Collective.SEND:
        return whole_bytes / (link if within > 1 else network)
    if kind is Collective.ALL_TO_ALL and within < ranks:
        beyond = whole_bytes * (ranks - within) / ranks / network
        inside = whole_bytes * (within - 1) / ranks / link
        return max(beyond, inside)
    rings = link if within == ranks else min(link if within > 1 else math.inf, network * within)
    passes = 2 if kind is Collective.ALL_REDUCE else 1
    return passes * whole_bytes * (ranks - 1) / ranks / rings


def _hop_seconds(kind: Collective, within: int, nodes: int) -> float:
    """Return the seconds that all hops of a collective add as latency.

    Hops form a chain within a node, a tree between nodes.
    """
    if kind is Collective.SEND:
        return _LINK_HOP_SECONDS if within > 1 else _NETWORK_HOP_SECONDS
    one_way = (within - 1) * _LINK_HOP_SECONDS + math.ceil(math.log2(nodes)) * _NETWORK_HOP_SECONDS
    return 2 * one_way if kind is Collective.ALL_REDUCE else one_way
