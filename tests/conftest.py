"""What all tests share."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# The suite draws the same examples in every run, or a change would fail by an example that has nothing to do with it.
# `make fuzz` draws others, and more of them.
settings.register_profile(
    "same examples", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile("new examples", settings.get_profile("same examples"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("PLIMSOLL_EXAMPLES", "same") + " examples")
# Every process that compiles would try by a compilation, and by a Python that imports torch, that the compiler knows what the
# CPU says it has: ten processor seconds for the first one, one for the others.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command line sets it, which tests call in this process

_LONGEST = frozenset({"test_examples.py", "test_documentation.py", "ranks", "integrations", "session", "contracts"})


_QUICK = frozenset({"artifacts", "planning", "tracing", "engine", "distributed"})
_QUICK_FILES = frozenset(
    {"test_architecture.py", "test_docstrings.py", "test_errors.py", "test_units.py", "test_metering.py"}
)
_NOT_QUICK = frozenset(
    {"test_open_numbers.py", "test_modes.py", "test_stored_forms.py", "test_planted_faults.py", "test_any_size.py"}
    | {"test_fake.py", "test_family.py", "test_ladder.py", "test_host_state.py", "test_torch_flags.py", "test_pins.py"}
    | {"test_solve_forms.py", "test_kernels.py", "test_contract.py", "test_contents.py", "test_surroundings.py"}
)
"""Each of these takes 8 to 60 seconds on one core."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--quick``: the tests of ``make quick``, which run on one rank, without compilers, frameworks and documents."""
    parser.addoption("--quick", action="store_true", help="only tests that take a minute and a half together")


def _is_quick(item: pytest.Item) -> bool:
    parts = item.path.relative_to(item.config.rootpath).parts
    is_in_room = len(parts) > 1 and parts[1] in _QUICK
    return parts[-1] in _QUICK_FILES or (is_in_room and parts[-1] not in _NOT_QUICK and "compiled" not in item.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of few tests that take long come first, so that no worker ends with one of them while the others wait."""
    if config.getoption("--quick"):
        left_out = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_quick(item)]
    items.sort(key=lambda item: _LONGEST.isdisjoint(item.path.parts))


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Traces for estimates are made once in a run, by whichever worker asks first, and the user's own are left alone."""
    run = tmp_path_factory.getbasetemp()
    directory = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "cache-of-traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIMSOLL_CACHE_DIR", str(directory))
        yield


@pytest.fixture(autouse=True, scope="session")
def _says_nothing_of_slow_planning() -> Iterator[None]:
    """How long planning takes depends on what else runs on the machine. Tests of the line about it set this figure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plimsoll.session.messages._QUIET_SECONDS", math.inf)
        yield


@pytest.fixture(autouse=True, scope="module")
def _without_garbage_of_other_modules() -> None:
    """Tensors in reference cycles of earlier tests must not be let go while a test of this module counts memory.

    What is still there afterwards, half a million objects of imported modules, is frozen: timing collects garbage and
    measuring memory lists all objects, several times in most tests, and neither has to look at those.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _settings_of_torch_stay() -> Iterator[None]:
    """A module that leaves one of torch's settings changed would fail the modules after it, on some workers only."""
    before = _settings()
    yield
    left = {name: value for name, value in _settings().items() if before.get(name) != value}
    left |= dict.fromkeys(before.keys() - _settings().keys(), "unset")
    assert not left, f"this module leaves settings of torch changed: {left}"


_SET_BY_IMPORTS = frozenset({"PYTORCH_NVML_BASED_CUDA_CHECK"})
"""Lightning sets it when it is imported."""


def _settings() -> dict[str, object]:
    named = {name: value for name, value in os.environ.items() if name.startswith(("TORCH_", "PYTORCH_", "CUBLAS_"))}
    variables = {name: value for name, value in named.items() if name not in _SET_BY_IMPORTS}
    kernels = ("cudnn", "flash", "math", "mem_efficient")
    return {
        **variables,
        **{f"{kernel} attention": getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in kernels},
        "deterministic": torch.get_deterministic_debug_mode(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


def pytest_sessionfinish() -> None:
    """What was frozen may be let go at the exit: triton's bindings complain about objects that are left."""
    gc.unfreeze()
