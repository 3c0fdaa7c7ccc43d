"""Files of the cache: whole or gone, shared by processes, within their limit."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll.estimator.trace_cache import FileCache, cache_directory

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


def test_what_was_put_comes_back_in_another_cache_of_the_same_directory(cache: FileCache, tmp_path: Path):
    cache.put(KEY, b"answer" * 1000)
    assert FileCache(tmp_path / "cache").get(KEY) == b"answer" * 1000
    assert cache.get(OTHER) is None


def test_an_answer_is_replaced(cache: FileCache):
    cache.put(KEY, b"first")
    cache.put(KEY, b"second")
    assert cache.get(KEY) == b"second"


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


def test_any_flipped_byte_is_found(cache: FileCache, tmp_path: Path):
    cache.put(KEY, b"answer")
    path = only_file(tmp_path / "cache")
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        assert cache.get(KEY) is None, f"byte {position}"


def test_a_foreign_file_is_dropped_and_can_be_replaced(cache: FileCache, tmp_path: Path):
    cache.put(KEY, b"answer")
    only_file(tmp_path / "cache").write_bytes(b"GIF89a" * 100)
    assert cache.get(KEY) is None
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
