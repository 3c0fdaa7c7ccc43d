"""The device that a contract is asked on: the CPU and, where there is one, a GPU; ``DEVICE=cuda`` asks the GPU alone.

On a GPU two equal steps need not give equal bits. These contracts compare bits, so kernels have to be the deterministic ones:
attention's backward on one split, cuBLAS with a workspace of its own, no atomic additions.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.register_assert_rewrite("contracts.harness")

WANTED = os.environ.get("DEVICE", "")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks no device has been answered by the suite."""
    if WANTED:
        items[:] = [item for item in items if "device" in getattr(item, "fixturenames", ())]


@pytest.fixture(scope="session", params=[WANTED] if WANTED else ["cpu", *["cuda"] * torch.cuda.is_available()])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the model lives."""
    found = torch.device(request.param)
    if found.type == "cuda" and not torch.cuda.is_available():
        pytest.fail("DEVICE=cuda, and torch sees no CUDA device")
    return found


@pytest.fixture(autouse=True, scope="package")
def _small_and_steady():
    """Tensors are small: one thread is faster than two that wait for each other."""
    threads, is_strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # an op more per `empty`: not what users run
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_strict)
    torch.utils.deterministic.fill_uninitialized_memory = fills
