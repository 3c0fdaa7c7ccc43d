"""Links by name, and their measured speeds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.offload.simulated import SimulatedLink
from plimsoll.engine.offload import measure
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.offload.measure import measure_link
from plimsoll.engine.offload.open import BounceLink, default_link_name, open_link
from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB

CPU = torch.device("cpu")


def test_disk_for_cpu_tensors_is_the_disk_itself(tmp_path: Path):
    with open_link("disk", CPU, host_budget=None, directory=str(tmp_path)) as link:
        assert isinstance(link, DiskLink)
        assert link.directory == str(tmp_path)


def test_disk_for_tensors_of_a_device_bounces(tmp_path: Path):
    with open_link("disk", torch.device("cuda:0"), host_budget=10**6, directory=str(tmp_path)) as link:
        assert isinstance(link, BounceLink)


@pytest.mark.parametrize(("name", "words"), [("host", ("already", "disk")), ("tape", ("disk, host",))])
def test_host_memory_is_no_link_for_itself_and_an_unknown_link_is_told_the_known_ones(
    name: str, words: tuple[str, ...]
):
    with pytest.raises(OffloadFailed) as failure:
        open_link(name, CPU, host_budget=None, directory=None)
    assert all(word in failure.value.why + failure.value.next for word in words)


def test_a_link_that_is_refused_leaves_no_file_open(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OffloadFailed):
        open_link("disk", CPU, host_budget=None, directory=str(tmp_path / "missing"))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("device", "name"), [("cpu", "disk"), ("cuda:1", "host"), ("mps", "disk")])
def test_every_device_has_a_default(device: str, name: str):
    assert default_link_name(torch.device(device)) == name


def test_a_simulated_link_measures_as_what_it_simulates(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]

    def carry(nbytes: int) -> None:
        now[0] += 0.002 + nbytes / 50e6

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    link = SimulatedLink(carry=carry)
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
