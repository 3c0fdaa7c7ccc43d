"""The trace of a target comes from the cache when, and only when, the question is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll.artifacts.precision import Precision
from plimsoll.estimator import trace_cache
from plimsoll.estimator.targets import tracing
from plimsoll.estimator.targets.tracing import TracedTarget, TraceRequest, trace_target
from plimsoll.estimator.trace_cache import TraceCache, key_of

REQUEST = TraceRequest(target="llama-tiny", device_name="H100-SXM", batch=1, sequence=16, precision=Precision.BF16)
AGAIN = """
import sys
from plimsoll.artifacts.precision import Precision
from plimsoll.estimator.trace_cache import TraceCache
from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
made = trace_target(
    TraceRequest(target="llama-tiny", device_name="A100-80GB", batch=1, sequence=16, precision=Precision.BF16),
    cache=TraceCache(),
)
print(made.trace.device, len(made.trace.ops), made.facts.parameters, *({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TracedTarget]:
    directory = tmp_path_factory.mktemp("cache")
    return directory, trace_target(REQUEST, cache=TraceCache(directory))


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch, kept: tuple[Path, TracedTarget]) -> list[TraceRequest]:
    """The requests that were not answered by the cache; their answer is known already."""
    requests: list[TraceRequest] = []

    def watched(request: TraceRequest, recipe: object, progress: object) -> TracedTarget:
        requests.append(request)
        return kept[1]

    monkeypatch.setattr(tracing, "_trace", watched)
    return requests


def test_the_answer_of_the_cache_equals_the_trace(kept: tuple[Path, TracedTarget], traced_anew: list[TraceRequest]):
    directory, traced = kept
    again = trace_target(REQUEST, cache=TraceCache(directory))
    assert again == traced
    assert not traced_anew
    assert traced.facts.layers == len(traced.trace.regions) == 4
    assert traced.facts.tokens == 16


def test_another_process_and_gpu_is_answered_without_torch(kept: tuple[Path, TracedTarget]):
    directory, traced = kept
    environment = os.environ | {"PLIMSOLL_CACHE_DIR": str(directory)}
    script = subprocess.run([sys.executable, "-c", AGAIN], env=environment, capture_output=True, text=True, check=True)
    assert script.stdout.split() == ["A100-80GB", str(len(traced.trace.ops)), str(traced.facts.parameters)]


def test_a_damaged_answer_is_traced_again(kept: tuple[Path, TracedTarget], traced_anew: list[TraceRequest]):
    directory, traced = kept
    (path,) = directory.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert trace_target(REQUEST, cache=TraceCache(directory)) == traced
    assert traced_anew == [REQUEST]
    assert trace_target(REQUEST, cache=TraceCache(directory)) == traced
    assert traced_anew == [REQUEST]


def test_what_is_whole_but_no_trace_is_traced_again(tmp_path: Path):
    cache = TraceCache(tmp_path)
    cache._files.put(key_of({"a": 1}), b"\x81\xa5trace\x90")
    assert cache.get({"a": 1}) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 2},
        {"sequence": 8},
        {"precision": Precision.FP32},
        {"precision": None},
        {"device_name": "laptop-CPU"},
        {"tp": 2},
        {"ep": 2},
        {"tp": 2, "sequence_parallel": True},
        {"target": "qwen3-tiny"},
    ],
    ids=str,
)
def test_whatever_changes_the_step_changes_the_key(change: dict[str, object]):
    assert question_key(replace(REQUEST, **change)) != question_key(REQUEST)


def test_gpus_share_an_answer():
    assert question_key(replace(REQUEST, device_name="MI300X")) == question_key(REQUEST)


def test_another_version_of_a_library_is_another_question(monkeypatch: pytest.MonkeyPatch):
    before = key_of({"a": 1})
    monkeypatch.setattr(trace_cache, "_version", lambda library: "9.9" if library == "torch" else "1.0")
    assert key_of({"a": 1}) != before


@pytest.mark.parametrize("source", ["tracing/trace.py", "estimator/catalogue/llama.toml"])
def test_changed_sources_are_another_question(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package = tmp_path / "plimsoll"
    (package / source).parent.mkdir(parents=True)
    monkeypatch.setattr(trace_cache, "_PACKAGE", package)
    (package / source).write_text("a = 1")
    before = key_of({"a": 1})
    assert key_of({"a": 1}) == before
    (package / source).write_text("a = 10")
    assert key_of({"a": 1}) != before


def question_key(request: TraceRequest) -> str:
    recipe = tracing.find_recipe(request.target)
    return key_of(tracing._question(request, recipe))
