"""Measured speeds are the link's own."""

from __future__ import annotations

import pytest
import torch

from plimsoll.engine.offload import measure
from plimsoll.engine.offload.device_links import BounceLink
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.offload.measure import measure_link
from plimsoll.engine.offload.simulated import SimulatedLink
from plimsoll.units import MIB

CPU = torch.device("cpu")


def test_a_simulated_link_measures_as_what_it_simulates(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    link = SimulatedLink(50e6, latency_seconds=0.002, clock=lambda: now[0], sleep=sleep)
    speed = measure_link(link, CPU, nbytes=4 * MIB)
    assert speed.out_bytes_per_second == pytest.approx(50e6, rel=0.001)
    assert speed.in_bytes_per_second == pytest.approx(50e6, rel=0.001)
    assert speed.latency_seconds == pytest.approx(0.002 + 4096 / 50e6)
    assert speed.out_cpu_seconds_per_byte == speed.in_cpu_seconds_per_byte == 0.0
    assert now[0] < 1.0, "a few trips, not twenty"


@pytest.mark.parametrize("wrap", [lambda disk: disk, lambda disk: BounceLink(disk, CPU)], ids=["disk", "bounce"])
def test_a_disk_link_is_measured_with_the_cpu_time_of_its_copies(disk: DiskLink, wrap):
    speed = measure_link(wrap(disk), CPU, nbytes=MIB)
    assert speed.out_bytes_per_second > 1e6
    assert speed.in_bytes_per_second > 1e6
    assert 0 < speed.out_cpu_seconds_per_byte < 1e-6
    assert 0 < speed.in_cpu_seconds_per_byte < 1e-6
    assert 0 < speed.latency_seconds < 0.1
    assert disk.extents.taken_bytes == 0
