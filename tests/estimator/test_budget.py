"""What a process takes beside its tensors: figures with sources, or the word unsupported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.job import Layout
from plimsoll.estimator.budget import framework_items
from plimsoll.planning.costing.devices import find_device, known_devices
from plimsoll.units import MIB


def buffers(layout: Layout, device: str) -> dict[str, int]:
    """MiB of every communicator."""
    items = framework_items(find_device(device), layout)
    return {item.name[14:-1]: (item.bytes or 0) // MIB for item in items if item.name.startswith("NCCL")}


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_every_figure_names_its_source_and_error_or_says_that_it_is_unsupported(device):
    items = framework_items(device, Layout(dp=2, tp=2, pp=2))
    for item in items:
        assert item.note
        assert (item.bytes is None) == (item.basis is Basis.UNSUPPORTED)
        assert (item.relative_error == 0) == (item.basis is Basis.UNSUPPORTED)
    if device.name.endswith("CPU"):
        assert items == ()
    else:
        assert len(items) >= 5


@pytest.mark.parametrize(
    "device", [find_device("MI300X"), replace(find_device("H100"), name="TPU-v7")], ids=lambda device: device.name
)
def test_devices_without_published_figures_are_not_guessed(device):
    items = framework_items(device, Layout(tp=2))
    assert {item.basis for item in items} == {Basis.UNSUPPORTED}
    assert [item.name for item in items] == ["device context", "library workspaces", "buffers (tp)"]
    assert all(device.name in item.note for item in items)


@pytest.mark.parametrize(
    ("device", "bytes_"), [("A100", 2 * 8_519_680), ("RTX-4090", 2 * 8_519_680), ("H100", 64 * MIB)]
)
def test_workspaces_are_those_that_recorded_training_steps_hold(device: str, bytes_: int):
    # Blocks of 8519680 or 33554432 bytes, two of them: public snapshots of training steps (docs/allocator.md).
    workspaces = next(i for i in framework_items(find_device(device), Layout()) if i.name == "cuBLAS workspaces")
    assert (workspaces.bytes, workspaces.basis) == (bytes_, Basis.EXACT)


@pytest.mark.parametrize(
    ("layout", "device", "mib"),
    [
        (Layout(micro_batches=4), "A100", {}),
        (Layout(tp=2), "A100", {"tp": 544}),  # groups of two take less than larger ones
        (Layout(tp=4, dp=2), "A100", {"tp": 688, "dp": 544}),
        (Layout(dp=2, cp=2, zero=3), "A100", {"cp": 544, "dp and cp": 688}),  # these ranks reduce together
        (Layout(pp=2), "A100", {"pp": 447}),  # neighbours cost more within a node than over the network
        (Layout(pp=4), "A100", {"pp": 894}),
        (Layout(tp=8, pp=4), "A100", {"tp": 688, "pp": 80, "norm": 688}),
        (Layout(dp=8, ep=8), "H100", {"dp": 688, "ep": 7 * 447}),  # an all-to-all takes buffers for every peer
        (Layout(dp=16, ep=16), "H100", {"dp": 688, "ep": 7 * 447 + 8 * 40}),
    ],
    ids=str,
)
def test_every_group_of_ranks_has_its_buffers(layout: Layout, device: str, mib: dict[str, int]):
    assert buffers(layout, device) == mib


def test_fewer_channels_over_pcie_take_less_and_are_less_certain():
    fast = framework_items(find_device("H100-SXM"), Layout(dp=8))[-1]
    slow = framework_items(find_device("H100-PCIe"), Layout(dp=8))[-1]
    assert slow.bytes < fast.bytes
    assert slow.relative_error > fast.relative_error
