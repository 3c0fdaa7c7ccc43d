"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
# Every process that compiles would try by a compilation, and by a Python that imports torch, that the compiler knows what the
# CPU says it has: ten processor seconds for the first one, one for the others.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

_LONGEST = frozenset({"test_examples.py", "test_documentation.py", "ranks", "integrations", "session", "contracts"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests that take long come first, so that no worker ends with one of them while the others wait."""
    items.sort(key=lambda item: _LONGEST.isdisjoint(item.path.parts))


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Traces for estimates are made once in a run, by whichever worker asks first, and the user's own are left alone."""
    run = tmp_path_factory.getbasetemp()
    directory = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "cache-of-traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIMSOLL_CACHE_DIR", str(directory))
        yield


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
