"""Every request of a recorded training step lands at the address that it had on the GPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plimsoll.estimator.allocator_sim.allocator import AllocatorSettings

ROOT = Path(__file__).parents[3]
STREAM = 0


@pytest.fixture(scope="module")
def snapshots() -> Iterator[ModuleType]:
    """The benchmark that compares whole snapshots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("benchmarks.allocator_snapshots")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """24 transformer layers on an Ampere GPU, after warm-up; the file says where it comes from."""
    found: dict[str, Any] = json.loads(
        (Path(__file__).parent / "recorded_training_step.json").read_text(encoding="utf-8")
    )
    return found


def replay(snapshots: ModuleType, recorded: dict[str, Any], shift: int = 0) -> tuple[int, int]:
    """How many requests were made, and how many of them landed elsewhere; with ``shift`` every request is larger."""
    state = snapshots.State(
        segments={512 * at: (length, STREAM, is_small) for at, length, is_small in recorded["segments"]},
        live={512 * at: length for at, length in recorded["live"]},
    )
    allocator, out = snapshots.restore(state, AllocatorSettings())
    requests = elsewhere = 0
    for at, size in recorded["events"]:
        if size < 0:
            allocator.release(out.pop(512 * at))
            continue
        out[512 * at] = allocator.allocate(size + shift, stream=STREAM)
        requests += 1
        elsewhere += out[512 * at].address != 512 * at
    assert shift or allocator.device_allocations == 0
    return requests, elsewhere


def test_every_request_lands_where_it_did_on_the_gpu(snapshots: ModuleType, recorded: dict[str, Any]):
    requests, elsewhere = replay(snapshots, recorded)
    assert requests > 1000
    assert elsewhere == 0


def test_requests_of_other_sizes_would_land_elsewhere(snapshots: ModuleType, recorded: dict[str, Any]):
    requests, elsewhere = replay(snapshots, recorded, shift=4096)
    assert elsewhere > 0.2 * requests
