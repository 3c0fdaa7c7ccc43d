"""Small tensors: one thread is faster than two that wait for each other."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from plimsoll.engine import region

pytest.register_assert_rewrite("contracts.harness")


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_the_collector():
    """Reference counts alone must free everything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts recorded calls."""
    calls, record = [0], region.record_call

    def counting(*args: Any) -> Any:
        calls[0] += 1
        return record(*args)

    monkeypatch.setattr(region, "record_call", counting)
    return calls
