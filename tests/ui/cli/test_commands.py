"""Commands call the public functions, show or save what comes back, and exit with a code that a script can use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import FakeVerbs
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.store import load_any
from samples import make_mismatch, make_plan, make_receipt


@pytest.mark.long
def test_plan_passes_its_options_on(run, verbs: FakeVerbs):
    options = "--budget 64MiB --strategy full --regions a.* --regions b.* --optimizer sgd"
    assert "OPTIMAL" in run("plan", "targets:linear", *options.split()).out
    name, given = verbs.calls[0]
    assert (name, given["budget"], given["strategy"]) == ("plan", "64MiB", "full")
    assert given["regions"] == ["a.*", "b.*"]
    assert type(given["optimizer"]).__name__ == "SGD"
    assert given["loss"] is not None


def test_plan_without_an_optimizer_plans_forward_and_backward(run, verbs: FakeVerbs):
    run("plan", "targets:linear", "--optimizer", "none")
    assert verbs.calls[0][1]["optimizer"] is None


def test_plan_saves_and_show_shows(run, verbs: FakeVerbs):
    assert "saved to plan.json" in run("plan", "targets:linear", "--output", "plan.json").out
    assert load_any("plan.json") == verbs.planned
    shown = run("show", "plan.json").out
    assert "model.layers.0–2" in shown
    assert "▲ peak" in shown
    assert "memory is worth" in run("show", "plan.json", "--explain").out


def test_show_writes_a_plan_as_a_policy(run):
    make_plan().save("plan.json")
    run("show", "plan.json", "--export-sac", "policy.py")
    assert "def apply(model" in Path("policy.py").read_text()
    make_receipt().save("receipt.json")
    assert "does not hold a plan" in run("show", "receipt.json", "--export-sac", "policy.py", code=2).err


def test_json_is_all_that_a_machine_reads(run, verbs: FakeVerbs):
    assert run("plan", "targets:linear", "--json").json["plimsoll"] == "plan"


def test_a_plan_that_fits_nowhere_exits_as_such(run, verbs: FakeVerbs):
    verbs.planned = make_plan(status=Status.INFEASIBLE, budget_bytes=2**20, regions=())
    run("plan", "targets:linear", code=3)
    verbs.planned = make_plan(status=Status.TIMED_OUT, regions=())
    run("plan", "targets:linear", code=2)


def test_verify_takes_a_saved_plan_or_makes_one(run, verbs: FakeVerbs):
    make_plan(strategy="full").save("plan.json")
    assert "VERIFIED" in run("verify", "targets:linear", "--plan", "plan.json", "--steps", "3").out
    run("verify", "targets:linear", "--budget", "64MiB", "--output", "receipt.json")
    assert [name for name, _ in verbs.calls] == ["verify", "plan", "verify"]
    assert (verbs.calls[0][1]["plan"].strategy, verbs.calls[0][1]["steps"]) == ("full", 3)
    assert load_any("receipt.json") == verbs.receipt


def test_verify_exits_with_one_when_gradients_differ(run, verbs: FakeVerbs):
    verbs.receipt = make_receipt(gradient_mismatches=(make_mismatch(),))
    assert "GRADIENTS_DIFFER" in run("verify", "targets:linear", code=1).out


def test_compare_measures_the_named_strategies(run, verbs: FakeVerbs):
    assert "1.310" in run("compare", "targets:linear", "-s", "full", "-s", "sqrt").out
    assert verbs.calls[0][1]["strategies"] == ["full", "sqrt"]


def test_the_working_directory_is_importable_only_while_it_is_needed(
    run, verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch
):
    Path("target_here.py").write_text("from targets import linear")
    before = list(sys.path)
    run("plan", "target_here:linear")
    assert sys.path == before
    assert verbs.calls
    monkeypatch.delitem(sys.modules, "target_here")


@pytest.mark.parametrize(
    ("name", "sizes"), [("llama-tiny", ["--seq", "16"]), ("gpt2-tiny", ["--seq", "16"]), ("vit-tiny", [])]
)
def test_a_catalogue_model_trains(name: str, sizes: list[str], run, verbs: FakeVerbs):
    pytest.importorskip("transformers")
    run("plan", name, "--batch", "2", *sizes)
    given = verbs.calls[0][1]
    assert given["model"](**given["batch"]).loss.isfinite()


def test_a_model_for_another_device_takes_no_memory_here(run, verbs: FakeVerbs):
    pytest.importorskip("transformers")
    run("plan", "llama-3-70b", "--device-profile", "h100")
    given = verbs.calls[0][1]
    assert given["device_profile"] == "h100"
    assert all(parameter.is_meta for parameter in given["model"].parameters())
    assert given["batch"]["input_ids"].shape == (1, 8192)


def test_a_configuration_file_builds_its_architecture_with_a_batch_that_fits(run, verbs: FakeVerbs, tmp_path: Path):
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    named, unnamed = tmp_path / "config.json", tmp_path / "unnamed.json"
    named.write_text(json.dumps(fields | {"architectures": ["GPT2LMHeadModel"]}))
    unnamed.write_text(json.dumps(fields))
    for target, length in {(tmp_path, 16), (named, 16), (unnamed, 64)}:
        run("plan", str(target), *(["--seq", "16"] if length == 16 else []))
        assert verbs.calls[-1][1]["batch"]["input_ids"].shape == (1, length)
        assert target == unnamed or type(verbs.calls[-1][1]["model"]).__name__ == "GPT2LMHeadModel"


def test_show_loads_no_torch(tmp_path: Path):
    make_plan().save(tmp_path / "plan.json")
    script = f"""
import sys
from plimsoll.ui.cli.app import app
try:
    app(["show", {str(tmp_path / "plan.json")!r}])
except SystemExit as end:
    print("torch" in sys.modules, end.code)
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False 0"
