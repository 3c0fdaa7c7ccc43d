"""What earlier tests left in cycles is collected before bytes are counted, not while."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    gc.collect()
