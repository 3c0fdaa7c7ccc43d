"""What all tests share."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from long_cases import has_long_tests, is_long

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

_MAIN, _LONG = "not long", "long"
"""What ``-m`` says in `make test` (and in `make quick`, for some rooms) and in `make contracts`."""
_LONGEST = frozenset({"test_examples.py", "test_documentation.py", "ranks", "integrations", "session", "contracts"})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test that is asked for are not imported: a framework alone takes ten seconds, in every worker."""
    expression = config.option.markexpr
    if expression not in (_MAIN, _LONG) or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    asked = has_long_tests(text) if expression == _LONG else not is_long(text)
    return None if asked else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests that take long come first, so that no worker ends with one of them while the others wait."""
    items.sort(key=lambda item: _LONGEST.isdisjoint(item.path.parts))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what this run left to the other target."""
    if config.option.markexpr == _MAIN:
        files = Path(__file__).parent.rglob("test_*.py")
        count = sum(has_long_tests(path.read_text(encoding="utf-8")) for path in files)
        terminalreporter.line(
            f"These were tests that are not marked as long. `make contracts` runs the long ones of {count} files: "
            "compiled steps, most layouts of ranks, frameworks, examples, commands of the documentation, and of every room "
            "what takes seconds."
        )
    elif config.option.markexpr == _LONG:
        terminalreporter.line(
            "These were the tests that are marked as long. `make test` runs all others, linter and types."
        )


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
