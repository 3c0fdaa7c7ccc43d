"""What all tests share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _without_garbage_of_other_modules() -> None:
    """Tensors in reference cycles of earlier tests must not be let go while a test of this module counts memory."""
    gc.collect()
