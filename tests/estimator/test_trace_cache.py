"""The trace of a target comes from the cache when, and only when, the question is the same; files are whole or gone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll.artifacts.job import Precision
from plimsoll.estimator import trace_cache
from plimsoll.estimator.targets import tracing
from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
from plimsoll.estimator.trace_cache import FileCache, TraceCache, TracedTarget, cache_directory, key_of

REQUEST = TraceRequest(target="llama-tiny", device_name="H100-SXM", batch=1, sequence=16, precision=Precision.BF16)
AGAIN = """
import sys
from plimsoll.artifacts.job import Precision
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
