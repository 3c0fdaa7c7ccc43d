"""An optimizer's step on the host is as fast as the host's memory."""

from __future__ import annotations

import pytest

from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import OpSpec
from plimsoll.planning.costing.devices import find_device, known_devices
from plimsoll.planning.costing.host import HOST, HOST_STEP, host_seconds


def seconds(device: str, ranks: int, moved_bytes: int) -> float:
    spec = OpSpec(name=HOST_STEP, flops=0, moved_bytes=moved_bytes, dtype="f32", group=HOST)
    return host_seconds(spec, find_device(device), Layout(dp=ranks))


def test_the_ranks_of_a_node_share_the_hosts_memory():
    """28 bytes for each parameter of an 8B model, on eight H200: less than a second."""
    whole = 28 * 8_030_000_000
    assert 0.5 < seconds("H200", 8, whole // 8) < 1.0
    assert seconds("H200", 16, whole // 16) == pytest.approx(seconds("H200", 8, whole // 8) / 2), "two hosts"


def test_one_process_uses_one_socket():
    assert seconds("H200", 1, 2**30) == pytest.approx(seconds("H200", 2, 2**30))
    assert seconds("RTX-4090", 2, 2**30) == pytest.approx(2 * seconds("RTX-4090", 1, 2**30)), "a desktop has one"
    assert seconds("GB200", 1, 2**30) == pytest.approx(seconds("GB200", 36, 2**30))


def test_hosts_are_slower_than_their_devices():
    for device in known_devices():
        assert 40e9 < device.host_bandwidth_bytes_per_second / device.host_sockets < 600e9, device.name
