"""Traces and estimates come from the cache when, and only when, the question is the same; files are whole or gone."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plimsoll
from long_cases import some
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.job import Precision
from plimsoll.estimator import trace_cache
from plimsoll.estimator.estimate_job import EstimateJob
from plimsoll.estimator.targets import tracing
from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
from plimsoll.estimator.trace_cache import AnswerCache, FileCache, TracedTarget, cache_directory, key_of

REQUEST = TraceRequest(target="llama-tiny", device_name="H100-SXM", batch=1, sequence=16, precision=Precision.BF16)
AGAIN = """
import sys
from plimsoll.artifacts.job import Precision
from plimsoll.estimator.trace_cache import AnswerCache, TracedTarget
from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
made = trace_target(
    TraceRequest(target="llama-tiny", device_name="A100-80GB", batch=1, sequence=16, precision=Precision.BF16),
    cache=AnswerCache(TracedTarget),
)
print(made.trace.device, len(made.trace.ops), made.facts.parameters, *({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TracedTarget]:
    directory = tmp_path_factory.mktemp("cache")
    return directory, trace_target(REQUEST, cache=AnswerCache(TracedTarget, directory))


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
    again = trace_target(REQUEST, cache=AnswerCache(TracedTarget, directory))
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
    assert trace_target(REQUEST, cache=AnswerCache(TracedTarget, directory)) == traced
    assert traced_anew == [REQUEST]
    assert trace_target(REQUEST, cache=AnswerCache(TracedTarget, directory)) == traced
    assert traced_anew == [REQUEST]


def test_what_is_whole_but_no_trace_is_traced_again(tmp_path: Path):
    cache = AnswerCache(TracedTarget, tmp_path)
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


# Estimates ------------------------------------------------------------------------------------------------------------

ASKED = {"precision": "bf16", "batch": 1, "sequence": 16, "layout": "dp=2,zero=1", "budget": "1GiB"}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one answered question."""
    directory = tmp_path_factory.mktemp("answered")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIMSOLL_CACHE_DIR", str(directory))
        plimsoll.estimate("llama-tiny", **ASKED)
    return directory


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answered: Path) -> Path:
    """The cache in use: a copy of that directory."""
    monkeypatch.setenv("PLIMSOLL_CACHE_DIR", str(tmp_path / "estimates"))
    return Path(shutil.copytree(answered, tmp_path / "estimates"))


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strategies of estimates that were made anew."""
    found: list[str] = []
    run = EstimateJob.run

    def watched(job: EstimateJob, *how: Any) -> Estimate:
        found.append(job.setting.strategy)
        return run(job, *how)

    monkeypatch.setattr(EstimateJob, "run", watched)
    return found


def test_an_estimate_that_is_asked_for_again_is_not_made_again(estimates: Path, decided: list[str]):
    again = plimsoll.estimate("llama-tiny", **ASKED)
    assert not decided
    for path in estimates.iterdir():
        path.unlink()
    anew = plimsoll.estimate("llama-tiny", **ASKED)
    assert decided == ["auto"]
    seconds = {"trace_seconds": 0.0, "total_seconds": 0.0}
    assert msgspec.structs.replace(again, **seconds) == msgspec.structs.replace(anew, **seconds)
    assert again.trace_seconds == 0.0


@pytest.mark.parametrize(
    "change",
    some(
        [
            {"device": "A100-80GB"},
            {"device": "H100-SXM@500W"},
            {"batch": 2},
            {"sequence": 32},
            {"precision": "fp32"},
            {"optimizer": "sgd"},
            {"has_master_weights": True},
            {"layout": "dp=2,zero=1,micro-batches=2"},
            {"strategy": "full"},
            {"budget": "2GiB"},
            {"budget": None},
            {"techniques": "loss=fused"},
            {"budget": None, "export": "transformers"},
        ],
        4,
    ),
    ids=str,
)
def test_another_question_is_not_answered_by_a_kept_estimate(
    estimates: Path, decided: list[str], change: dict[str, Any]
):
    plimsoll.estimate("llama-tiny", **(ASKED | change))
    assert len(decided) == 1


@pytest.mark.long
def test_another_configuration_and_another_device_of_the_same_name_are_other_questions(
    estimates: Path, decided: list[str], tmp_path: Path
):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 64}
    small = {"intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    path, device = tmp_path / "own.json", tmp_path / "mine.json"
    for layers, factor in ((1, 1.0), (1, 1.0), (2, 1.0), (2, 0.5), (2, 0.5)):
        path.write_text(json.dumps(config | small | {"num_hidden_layers": layers}))
        device.write_text(json.dumps({"device": "H100-SXM", "arithmetic": factor}))
        plimsoll.estimate(str(path), sequence=16, device=str(device))
    assert len(decided) == 3


@pytest.mark.long
def test_a_damaged_estimate_is_made_again(estimates: Path, decided: list[str]):
    for path in estimates.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    plimsoll.estimate("llama-tiny", **ASKED)
    assert len(decided) == 1


def test_what_a_model_or_a_function_gives_is_not_kept(estimates: Path):
    before = set(estimates.iterdir())
    plimsoll.estimate("targets:linear", device="A100-80GB")
    assert set(estimates.iterdir()) == before


@pytest.mark.long
def test_an_estimate_whose_plan_ran_out_of_time_is_not_kept(
    estimates: Path, decided: list[str], monkeypatch: pytest.MonkeyPatch
):
    run = EstimateJob.run

    def out_of_time(job: EstimateJob, *how: Any) -> Estimate:
        found = run(job, *how)
        late = [msgspec.structs.replace(plan, status=Status.TIMED_OUT) for plan in found.stages[0].plans]
        assert late, "the budget asks for a plan"
        return msgspec.structs.replace(found, stages=(msgspec.structs.replace(found.stages[0], plans=tuple(late)),))

    monkeypatch.setattr(EstimateJob, "run", out_of_time)
    tight = ASKED | {"batch": 8, "sequence": 128, "strategy": "auto", "budget": "60MiB"}
    for _ in range(2):
        plimsoll.estimate("llama-tiny", **tight)
    assert len(decided) == 2


@pytest.mark.parametrize("source", ["planning/solve.py", "estimator/budget.py", "planning/costing/devices.toml"])
def test_sources_of_planning_change_the_key_of_estimates_alone(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = tmp_path / "plimsoll"
    (package / source).parent.mkdir(parents=True)
    monkeypatch.setattr(trace_cache, "_PACKAGE", package)
    keys = []
    for text in ("a = 1", "a = 10"):
        (package / source).write_text(text)
        keys.append((key_of({"a": 1}), key_of({"a": 1}, Estimate)))
    (trace, estimate), (other_trace, other_estimate) = keys
    assert trace == other_trace
    assert len({trace, estimate, other_estimate}) == 3


# Files ----------------------------------------------------------------------------------------------------------------

KEY = "0123456789abcdef"
OTHER = "fedcba9876543210"
WRITER = """
import sys
from pathlib import Path
from plimsoll.estimator.trace_cache import FileCache
cache, mine = FileCache(Path(sys.argv[1]), most_bytes=40_000), sys.argv[2].encode()
for turn in range(20):
    for number in range(6):
        key = f"{number:016x}"
        found = cache.get(key)
        assert found is None or found == found[:1] * len(found), "a torn answer"
        cache.put(key, mine * (3000 + turn))
"""


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache")


def only_file(cache_path: Path) -> Path:
    (path,) = cache_path.iterdir()
    return path


def test_what_was_put_last_comes_back_in_another_cache_of_the_same_directory(cache: FileCache, tmp_path: Path):
    cache.put(KEY, b"first")
    cache.put(KEY, b"answer" * 1000)
    assert FileCache(tmp_path / "cache").get(KEY) == b"answer" * 1000
    assert cache.get(OTHER) is None


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_dropped_without_a_word(
    cache: FileCache, tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture
):
    cache.put(KEY, os.urandom(1000))
    path = only_file(tmp_path / "cache")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with caplog.at_level(logging.INFO):
        assert cache.get(KEY) is None
    assert not caplog.records
    assert not path.exists()


def test_any_flipped_byte_and_a_foreign_file_are_found_and_can_be_replaced(cache: FileCache, tmp_path: Path):
    cache.put(KEY, b"answer")
    path = only_file(tmp_path / "cache")
    whole = path.read_bytes()
    for position in range(len(whole) + 1):
        flipped = bytearray(whole)
        if position < len(whole):
            flipped[position] ^= 1
        path.write_bytes(flipped if position < len(whole) else b"GIF89a" * 100)
        assert cache.get(KEY) is None, f"byte {position}"
    cache.put(KEY, b"answer")
    assert cache.get(KEY) == b"answer"


def test_the_least_recently_used_answers_go_first(tmp_path: Path):
    cache = FileCache(tmp_path, most_bytes=2500)
    for age, key in enumerate(("a" * 16, "b" * 16)):
        cache.put(key, os.urandom(1000))
        os.utime(tmp_path / f"{key}.trace", (time.time() - 100 + age,) * 2)
    assert cache.get("a" * 16) is not None
    cache.put("c" * 16, os.urandom(1000))
    assert cache.get("b" * 16) is None
    assert cache.get("a" * 16) is not None
    assert cache.get("c" * 16) is not None


def test_an_answer_above_the_limit_is_kept_alone(tmp_path: Path):
    cache = FileCache(tmp_path, most_bytes=500)
    cache.put(KEY, os.urandom(100))
    cache.put(OTHER, os.urandom(1000))
    assert cache.get(OTHER) is not None
    assert cache.get(KEY) is None


def test_remains_of_a_killed_writer_are_removed(cache: FileCache, tmp_path: Path):
    cache.put(KEY, b"answer")
    old, new = tmp_path / "cache" / "x.part", tmp_path / "cache" / "y.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.put(OTHER, b"answer")
    assert not old.exists()
    assert new.exists()


def test_a_place_that_cannot_be_written_only_costs_time(tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    cache = FileCache(tmp_path / "file")
    cache.put(KEY, b"answer")
    assert cache.get(KEY) is None


def test_processes_may_write_and_read_at_once(tmp_path: Path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), letter], stderr=subprocess.PIPE, text=True)
        for letter in "abc"
    ]
    errors = [writer.communicate()[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], errors
    assert not list(tmp_path.glob("*.part"))
    cache = FileCache(tmp_path)
    for number in range(6):
        found = cache.get(f"{number:016x}")
        assert found is not None
        assert len(set(found)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name other directories")
def test_the_directory_follows_the_environment(tmp_path: Path):
    home = Path.home()
    assert cache_directory({"PLIMSOLL_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/plimsoll")
    assert cache_directory({"XDG_CACHE_HOME": "relative"}) == home / ".cache" / "plimsoll"
    assert cache_directory({}) == home / ".cache" / "plimsoll"
