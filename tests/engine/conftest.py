"""Small tensors: one thread is faster than two that wait for each other."""

from __future__ import annotations

import gc

import pytest
import torch

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
