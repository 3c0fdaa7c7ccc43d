"""What all tests share."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

_LONGEST = frozenset({"test_examples.py", "test_documentation.py", "ranks", "integrations", "session", "contracts"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests that take long come first, so that no worker ends with one of them while the others wait."""
    items.sort(key=lambda item: _LONGEST.isdisjoint(item.path.parts))


@pytest.fixture(autouse=True, scope="module")
def _without_garbage_of_other_modules() -> None:
    """Tensors in reference cycles of earlier tests must not be let go while a test of this module counts memory.

    What is still there afterwards, half a million objects of imported modules, is frozen: timing collects garbage and
    measuring memory lists all objects, several times in most tests, and neither has to look at those.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What was frozen may be let go at the exit: triton's bindings complain about objects that are left."""
    gc.unfreeze()
