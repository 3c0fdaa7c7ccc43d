"""Files that somebody broke, at every command that reads them: one clear error, its exit code, and every file as it was."""

from __future__ import annotations

import gzip
import json
import os
import select
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from analysis.diagnose.builders import recomputing_traces
from long_cases import some
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.store import load_plan
from samples import make_plan

PLAN: dict[str, Any] = json.loads(to_json(make_plan()))
REGION = PLAN["regions"][0]
VALUE = REGION["decisions"][0]
INF = {"plimsoll.number": "inf"}
BOMB = gzip.compress(b"\x00" * (140 << 20), compresslevel=9)


def with_value(**changes: Any) -> dict[str, Any]:
    return PLAN | {"regions": [REGION | {"decisions": [VALUE | changes]}]}


def nested(levels: int) -> str:
    return json.dumps(PLAN)[:-1] + f', "notes": {"[" * levels}{"]" * levels}}}'


BROKEN: dict[str, Any] = {
    "nothing": "",
    "zeros": b"\x00" * 100,
    "utf-16": json.dumps(PLAN).encode("utf-16"),
    "a mark of bytes": "\ufeff" + json.dumps(PLAN),
    "half a surrogate": json.dumps(PLAN | {"model": "\ud800"}),
    "cut": json.dumps(PLAN)[:-40],
    "two": json.dumps(PLAN) * 2,
    "a list": [PLAN],
    "900 levels": nested(900),
    "100,000 levels": nested(100_000),
    "brackets": "[" * 1_000_000,
    "six million items": f"[{'0,' * 6_000_000}0]",
    "a gzip bomb": BOMB,
    "a cut gzip": gzip.compress(json.dumps(PLAN).encode())[:-12],
    "another kind": PLAN | {"plimsoll": "cake"},
    "a kind of 100 KB": PLAN | {"plimsoll": "x" * 100_000},
    "a kind that is a list": PLAN | {"plimsoll": ["plan"]},
    "schema 0": PLAN | {"schema_version": 0},
    "schema true": PLAN | {"schema_version": True},
    "schema of 40 digits": PLAN | {"schema_version": 10**40},
    "an unknown field": PLAN | {"budgit_bytes": 1},
    "an unknown field inside": with_value(bytez=1),
    "negative bytes": PLAN | {"predicted_peak_bytes": -1},
    "negative bytes inside": with_value(bytes=-4096),
    "negative bytes by name": PLAN | {"classes": {"activation": -1}},
    "infinite bytes": PLAN | {"predicted_peak_bytes": INF},
    "bytes of 40 digits": PLAN | {"predicted_peak_bytes": 10**40},
    "bytes as text": PLAN | {"floor_bytes": "64MiB"},
    "half a byte": PLAN | {"floor_bytes": 0.5},
    "bytes that are true": PLAN | {"floor_bytes": True},
    "an unknown decision": with_value(decision="EAT"),
    "an unknown status": PLAN | {"status": "GREAT"},
    "two regions of a name": PLAN | {"regions": [REGION, REGION]},
    "two values of a name": PLAN | {"regions": [REGION | {"decisions": [VALUE, VALUE]}]},
    "regions as a dict": PLAN | {"regions": {"a": REGION}},
    "a null region": PLAN | {"regions": [None]},
    "an odd number": PLAN | {"predicted_seconds": {"plimsoll.number": "ten"}},
}
READERS = (
    "show {}",
    "show {} --json",
    "report {} -o page.html",
    "verify steps:stack --plan {}",
    "diagnose steps:stack --plan {}",
)
EVENT: dict[str, Any] = {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 1, "ts": 1.0, "dur": 1.0, "args": {"Sequence number": 1},
}  # fmt: skip
TRACES: dict[str, Any] = {
    "nothing": "",
    "a directory": None,
    "brackets": "[" * 1_000_000,
    "events as a number": {"traceEvents": 3},
    "an event as a list": [[EVENT]],
    "no number of microseconds": '[{"ph": "X", "cat": "cpu_op", "ts": NaN}]',
    "1e999 microseconds": '[{"ph": "X", "cat": "cpu_op", "ts": 1e999}]',
    "1e300 microseconds": [EVENT | {"ts": 1e300}],
    "a negative duration": [EVENT | {"dur": -5.0}],
    "an endless duration": [EVENT | {"dur": 1e300}],
    "a time as text": [EVENT | {"ts": "now"}],
}
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 99, "max_position_embeddings": 32, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "nothing": "",
    "900 levels": json.dumps(CONFIG)[:-1] + f', "rope_scaling": {"[" * 900}{"]" * 900}}}',
    "a billion layers": CONFIG | {"num_hidden_layers": 10**9},
    "a billion layers of a tower": CONFIG | {"text_config": {"num_hidden_layers": 10**9}},
    "a billion layers of GPT-2": {"model_type": "gpt2", "n_layer": 10**9},
    "layers of 40 digits": CONFIG | {"num_hidden_layers": 10**40},
    "negative layers": CONFIG | {"num_hidden_layers": -1, "vocab_size": -1},
    "a width of 2**40": CONFIG | {"hidden_size": 2**40},
    "a vocabulary of 2**40": CONFIG | {"vocab_size": 2**40},
    "layers as text": CONFIG | {"num_hidden_layers": "two"},
    "infinitely many heads": '{"model_type": "llama", "num_attention_heads": Infinity}',
    "a type that is a list": CONFIG | {"model_type": ["llama"]},
    "an architecture of dots": CONFIG | {"architectures": ["__class__.__mro__"]},
    "no class": CONFIG | {"architectures": ["utils"]},
    "code from a hub": CONFIG | {"model_type": "mine", "auto_map": {"AutoModel": "evil/repo--modeling.Evil"}},
    "a path as its backbone": {"model_type": "detr", "backbone": "https://evil.example/x", "use_timm_backbone": False,
                               "architectures": ["DetrForObjectDetection"]},
}  # fmt: skip


def write(path: Path, content: Any) -> None:
    if content is None:
        path.mkdir()
    else:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def refused(run: Any, command: str) -> None:
    """One error of three parts, and not a page of it."""
    result = run(*command.split(), code=2)
    if "--json" in command:
        assert json.loads(result.out)["exit_code"] == 2
        return
    assert result.err.count("\n  why   ") == result.err.count("\n  next  ") == 1
    assert result.out == ""
    assert len(result.err) < 2000
    assert "\x1b" not in result.err


@pytest.mark.parametrize("kind", some(BROKEN, 16))
def test_a_broken_plan_is_refused_by_every_command_that_reads_one(kind: str, run, tmp_path: Path):
    write(tmp_path / "plan.json", BROKEN[kind])
    before = (tmp_path / "plan.json").read_bytes()
    for command in READERS:
        refused(run, command.format("plan.json"))
    assert (tmp_path / "plan.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("kind", TRACES)
def test_a_broken_trace_is_refused_on_either_side(kind: str, run, tmp_path: Path):
    recomputing_traces(tmp_path)
    write(tmp_path / "broken", TRACES[kind])
    for command in ("diagnose baseline.json broken", "diagnose broken baseline.json", "diagnose broken broken --json"):
        refused(run, command)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_broken_configuration_is_refused(kind: str, run, tmp_path: Path):
    pytest.importorskip("transformers")
    write(tmp_path / "config.json", CONFIGS[kind])
    refused(run, "plan config.json --strategy none")


def test_what_would_be_fetched_is_left_out_of_a_configuration_and_said(run, tmp_path: Path):
    pytest.importorskip("transformers")
    fetching = {
        "attn_implementation": "evil/kernel",
        "_attn_implementation": "flash_attention_2",
        "use_pretrained_backbone": 1,
    }
    write(tmp_path / "config.json", CONFIG | fetching)
    ran = run("plan", "config.json", "--strategy", "none", "--json")
    assert ran.json["status"] == "OPTIMAL"
    assert all(f"config.json: ignored {name};" in " ".join(ran.err.split()) for name in fetching)


@pytest.mark.parametrize("place", ["/dev/zero", "silent", "sparse", ".", "closed"])
def test_what_is_no_file_is_refused_soon(place: str, run, tmp_path: Path):
    os.mkfifo(tmp_path / "silent")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(20 << 30)
    (tmp_path / "closed").symlink_to("closed")
    refused(run, f"show {place}")


def test_a_pipe_whose_writer_comes_at_the_end_of_the_wait_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pipe, text = tmp_path / "pipe", to_json(make_plan()).encode()
    os.mkfifo(pipe)

    class Late:
        def __init__(self) -> None:
            self.waits = 0

        def register(self, *_: object) -> None: ...

        def poll(self, _: int) -> list[int]:
            """Nothing came; then the other side writes all of it before anybody looks again."""
            self.waits += 1
            if self.waits > 1:
                return [1]
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, text)
            os.close(descriptor)
            return []

    late = Late()
    monkeypatch.setattr(select, "poll", lambda: late)
    assert load_plan(pipe) == make_plan()


def test_control_characters_of_a_file_are_shown_and_not_obeyed(run, tmp_path: Path):
    make_plan(model="Net\x1b]0;title\x07\x9b31m\u202e").save(tmp_path / "plan.json")
    shown, data = run("show", "plan.json", "--explain").out, run("show", "plan.json", "--json").out
    assert "Net␛]0;title" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*shown, *data}
    assert json.loads(data)["model"] == "Net\x1b]0;title\x07\x9b31m\u202e"


def test_outputs_go_through_links_pipes_and_devices_and_keep_their_mode(tmp_path: Path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    make_plan().save(link)
    assert link.is_symlink()
    assert load_plan(real) == make_plan()
    assert real.stat().st_mode & 0o777 == 0o640
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        make_plan().save(pipe)
        assert json.loads(reader.communicate()[0])["plimsoll"] == "plan"
    assert pipe.is_fifo()
    device = os.stat("/dev/null").st_ino
    make_plan().save("/dev/null")
    assert os.stat("/dev/null").st_ino == device


def test_the_result_is_shown_where_it_cannot_be_saved_and_the_place_is_looked_at_first(run):
    result = run("plan", "steps:stack", "--strategy", "none", "-o", "/dev/full", code=2)
    assert "Plan 'none'" in result.out
    assert "/dev/full cannot be written." in result.err
    refused(run, "plan steps:stack -o no/such/place.json")


def test_a_target_that_ends_the_process_is_an_error(run, tmp_path: Path):
    (tmp_path / "leaving.py").write_text(
        "import sys, torch\n"
        "class Leaves(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        sys.exit(0)\n"
        "def step():\n"
        "    return Leaves(4, 4), torch.randn(2, 4), torch.sum\n"
    )
    assert "sys.exit(0)" in run("plan", "leaving:step", code=2).err


@pytest.mark.parametrize(("place", "encoding"), some([("/dev/full", "utf-8"), ("/dev/null", "ascii")], 1))
def test_a_full_or_narrow_stdout_gives_no_traceback(place: str, encoding: str, tmp_path: Path):
    make_plan(model="Nèt").save(tmp_path / "plan.json")
    with open(place, "wb") as stdout:
        command = [sys.executable, "-m", "plimsoll", "show", str(tmp_path / "plan.json")]
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert ended.returncode == (2 if place == "/dev/full" else 0)
    assert "Traceback" not in ended.stderr
    assert ("No space left" in ended.stderr) == (place == "/dev/full")


@pytest.mark.parametrize("form", some(["--explain", "--json"], 1))
def test_a_reader_that_has_seen_enough_is_no_error(form: str, tmp_path: Path):
    make_plan().save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "plimsoll", "show", str(tmp_path / "plan.json"), form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.close()
        assert writer.stderr is not None
        assert writer.stderr.read() == ""
    assert writer.returncode == 0


def test_a_database_whose_rows_are_made_up_is_refused(run, tmp_path: Path):
    with closing(sqlite3.connect(tmp_path / "made.sqlite")) as database, database:
        rows = "WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more) SELECT n AS id, hex(n) AS value FROM more"
        database.execute(f"CREATE VIEW StringIds AS {rows}")
    refused(run, "diagnose made.sqlite made.sqlite")
