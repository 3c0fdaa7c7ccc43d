"""The meter of tests sees what ops make, what goes, and storages that change their size, as FSDP2's do."""

from __future__ import annotations

import torch

from metering import LiveStorages


def test_storages_count_as_large_as_they_are_now():
    with LiveStorages() as meter:
        meter.begin()
        held = torch.zeros(256)
        storage = held.untyped_storage()
        sizes = [meter.bytes]
        for size in (0, 2048, 1024):
            storage.resize_(size)
            sizes.append(meter.bytes)
        del held, storage
        sizes.append(meter.bytes)
    assert sizes == [1024, 0, 2048, 1024, 0]
    assert meter.peaks == [2048]


def test_a_random_state_counts_while_somebody_holds_it():
    with LiveStorages() as meter:
        meter.begin()
        held = torch.get_rng_state()
        sizes = [meter.bytes]
        del held
        sizes.append(meter.bytes)
    assert sizes == [torch.get_rng_state().numel(), 0]
