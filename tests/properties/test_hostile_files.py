"""Whatever a file holds, reading it gives a result or an error for users, in little time and memory.

Files are good ones with some places broken, on purpose or at random. PLIMSOLL_FUZZ_EXAMPLES asks for a longer run.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import plimsoll
from analysis.diagnose.builders import recomputing_traces
from plimsoll.analysis.diagnose.diagnose import read_profiles
from plimsoll.analysis.probe.keeping import RunDirectory
from plimsoll.artifacts.base import ArtifactBase, to_json
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import Reportable, load_any
from plimsoll.errors import PlimsollError
from plimsoll.estimator.targets.recipe import facts_of, find_recipe
from plimsoll.ui.html.page import build_html
from plimsoll.ui.perfetto import render_perfetto
from ui.view_samples import ARTIFACTS

EXAMPLES = int(os.environ.get("PLIMSOLL_FUZZ_EXAMPLES", "25"))
MOST_SECONDS, MOST_KIB = 5.0, 1 << 20
DEEP = "a place for what is nested deeply"
ODD = [json.dumps(value) for value in (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**40, 1.5, -0.0, 1e-320, 1e308, -1e308, "", "-",
    "²", "٣", "1" * 5000, "x" * 10_000, "\x1b]0;title\x07\x1b[31m", "\u202e", "\ud800", "\x00", "../../etc/passwd", "<b>&",
    [], [[]], [None], [1, [2]], [-1], [10**30] * 40, {}, {"a": 1}, {"plimsoll.number": "inf"}, {"plimsoll.number": "nan"},
    {"plimsoll.number": "-inf"}, {"plimsoll.number": []}, "inf", "nan", "KEEP", "RECOMPUTE", DEEP,
)]  # fmt: skip
PLAIN = [json.loads(to_json(artifact)) for artifact in ARTIFACTS.values()]
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99,
    "num_attention_heads": 2, "max_position_embeddings": 32, "text_config": {"num_hidden_layers": 1}, "torch_dtype": "float32",
    "attn_implementation": "kernels-community/flash-attn", "quantization_config": {"bits": 4}, "use_pretrained_backbone": True,
}  # fmt: skip

ours = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
seeds = st.integers(min_value=0, max_value=2**48)


@contextmanager
def lawful() -> Iterator[None]:
    """What happens inside ends with a result or an error for users, within bounds."""
    before_seconds, before_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(PlimsollError):
        yield
    assert time.process_time() - before_seconds < MOST_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MOST_KIB


def broken(document: Any, chance: random.Random) -> bytes:
    """The document as JSON with a few places broken, and now and then its bytes too."""
    copy = json.loads(json.dumps(document))
    for _ in range(chance.randint(0, 3)):
        _break(copy, chance)
    levels = chance.choice([60, 900, 100_000])
    content = json.dumps(copy).encode().replace(f'"{DEEP}"'.encode(), b"[" * levels + b"]" * levels)
    kind = chance.randrange(12)
    if kind == 0:
        content = content[: chance.randrange(len(content))]
    elif kind == 1:
        at = chance.randrange(len(content))
        content = content[:at] + chance.randbytes(chance.randint(1, 4)) + content[at + chance.randint(0, 3) :]
    elif kind == 2:
        content = gzip.compress(content)[: chance.choice([None, 30])]
    return content


def _break(node: Any, chance: random.Random) -> None:
    """Walk down a random way and break what is there."""
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            return
        place = chance.choice(places)
        if not (isinstance(node[place], dict | list) and node[place]) or chance.random() < 0.15:
            break
        node = node[place]
    what = chance.randrange(6)
    if what == 0:
        del node[place]
    elif what == 1 and isinstance(node, dict):
        node[str(chance.choice(["", "bogus", "bytes", "schema_version"]))] = json.loads(chance.choice(ODD))
    elif what == 1:
        node += node[: chance.randint(0, 50)]
    else:
        node[place] = json.loads(chance.choice(ODD))


@ours
@given(seed=seeds)
@example(seed=0)
def test_any_artifact_is_read_shown_and_drawn_or_refused(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    path = tmp_path / "artifact.json"
    path.write_bytes(broken(chance.choice(PLAIN), chance))
    with lawful():
        found = load_any(path)
        str(found)
        ArtifactBase.render(found, with_details=True)
        to_json(found)
        if isinstance(found, Reportable):
            build_html([found])
        if isinstance(found, Plan):
            render_perfetto([found])


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("traces")
    recomputing_traces(folder)
    return json.loads((folder / "baseline.json").read_bytes()), folder / "with-plan.json"


@ours
@given(seed=seeds)
def test_any_chrome_trace_is_compared_or_refused(seed: int, traces: Any, tmp_path: Path):
    chance = random.Random(seed)
    path = tmp_path / "trace.json"
    path.write_bytes(broken(traces[0], chance))
    with lawful():
        finding = plimsoll.diagnose(*((path, traces[1]) if seed % 2 else (traces[1], path)))
        str(finding)
        build_html([finding])


COLUMNS = {
    "StringIds": "id, value",
    "NVTX_EVENTS": "start, end, globalTid, text, textId, eventType",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, shortName, gridX, gridY, gridZ, "
    "blockX, blockY, blockZ",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, streamId, correlationId, globalPid, bytes, copyKind",
    "TARGET_INFO_GPU": "id, name, memoryBandwidth",
}
ENDLESS = "WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more) SELECT"
VIEWS = (
    f"{ENDLESS} n AS id, n AS value FROM more",
    f"{ENDLESS} n AS id, n AS value FROM more WHERE n < 0",
    f"{ENDLESS} n AS id, hex(zeroblob(1000000)) AS value FROM more",
    f"{ENDLESS} count(*) AS id, 1 AS value FROM more",
)
CELLS: list[Any] = [
    None, -1, 0, 7, 59, 2**24 * 7, 2**63 - 1, -(2**63), float("inf"), float("-inf"), 1e300, 0.5, "", "aten::mm, seq = 12",
    f"aten::mm, seq = {'9' * 5000}", "ProfilerStep#1", "aten::mm", "MmBackward0", b"\xff\xfe", b"", "\x1b[31m", "x" * 5000,
]  # fmt: skip


def write_database(path: Path, chance: random.Random) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        for table, columns in COLUMNS.items():
            if chance.random() < 0.1:
                continue
            if chance.random() < 0.03:
                database.execute(f"CREATE VIEW {table} AS {chance.choice(VIEWS)}")
                continue
            names = columns.split(", ")
            kept = [f'"{name}"' for name in names if chance.random() < 0.95] or ['"start"']
            database.execute(f"CREATE TABLE {table} ({', '.join(kept)})")
            for index in range(chance.randint(0, 8)):
                row = [
                    chance.choice(CELLS) if chance.random() < 0.3 else {"start": 100 * index, "end": 100 * index + 50}.get(
                        name.strip('"'), chance.randint(0, 3)
                    )
                    for name in kept
                ]  # fmt: skip
                database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(kept))})", row)


@ours
@given(seed=seeds)
def test_any_database_is_compared_or_refused(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    paths = [tmp_path / "one.sqlite", tmp_path / "two.sqlite"]
    for path in paths:
        path.unlink(missing_ok=True)
        write_database(path, chance)
    if seed % 8 == 0:
        content = bytearray(paths[1].read_bytes())
        for _ in range(chance.randint(1, 20)):
            content[chance.randrange(16, len(content))] = chance.randrange(256)
        paths[1].write_bytes(content)
    with lawful():
        str(plimsoll.diagnose(*paths))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_without_an_end_is_refused_soon(view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plimsoll.analysis.diagnose.nsys_reader._PATIENCE_SECONDS", 0.5)
    path = tmp_path / "endless.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE VIEW StringIds AS {view}")
        database.execute("CREATE TABLE NVTX_EVENTS (start, end)")
    with lawful(), pytest.raises(plimsoll.PlimsollError, match="is a damaged database"):
        read_profiles(path, path)


@ours
@given(seed=seeds)
def test_any_configuration_is_a_recipe_or_refused(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    path = tmp_path / "config.json"
    path.write_bytes(broken(CONFIG, chance))
    with lawful():
        recipe = find_recipe(str(path))
        assert recipe is not None
        assert recipe.fields.get("attn_implementation") in (None, "eager", "sdpa", "flex_attention")
        assert recipe.fields.get("quantization_config") is None
        assert not recipe.fields.get("use_pretrained_backbone")
        facts_of(recipe)


@ours
@given(seed=seeds)
def test_any_run_directory_is_taken_up_or_refused(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    identity = {"model": "m", "weights": "w"}
    for name, document in {"run.json": identity, "verdict.json": json.loads(to_json(ARTIFACTS["verdict"]))}.items():
        (tmp_path / name).write_bytes(broken(document, chance))
    (tmp_path / "baseline.pt").write_bytes(chance.randbytes(chance.randint(0, 200)))
    directory = RunDirectory(tmp_path)
    steps: list[Callable[[], object]] = [
        lambda: directory.claim(identity),
        directory.verdict,
        lambda: directory.load("baseline"),
    ]
    for step in steps:
        with lawful():
            step()
