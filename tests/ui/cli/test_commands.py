"""Commands call the public functions, show or save what comes back, and exit with a code that a script can use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fakes import FakeVerbs
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.store import load_any
from plimsoll.errors import BudgetBelowFloor, ReplayMismatch
from plimsoll.ui.cli.app import app
from samples import make_mismatch, make_plan, make_receipt


def test_plan_passes_its_options_on(runner: CliRunner, verbs: FakeVerbs, target: str):
    arguments = [
        "--budget",
        "64MiB",
        "--strategy",
        "full",
        "--regions",
        "a.*",
        "--regions",
        "b.*",
        "--optimizer",
        "sgd",
    ]
    result = runner.invoke(app, ["plan", target, *arguments])
    assert result.exit_code == 0, result.output
    name, given = verbs.calls[0]
    assert name == "plan"
    assert given["budget"] == "64MiB"
    assert given["strategy"] == "full"
    assert given["regions"] == ("a.*", "b.*")
    assert type(given["optimizer"]).__name__ == "SGD"
    assert given["loss"] is not None
    assert "OPTIMAL" in result.stdout


def test_plan_without_an_optimizer_plans_forward_and_backward(runner: CliRunner, verbs: FakeVerbs, target: str):
    runner.invoke(app, ["plan", target, "--optimizer", "none"])
    assert verbs.calls[0][1]["optimizer"] is None


def test_plan_saves_and_show_shows(runner: CliRunner, verbs: FakeVerbs, target: str):
    result = runner.invoke(app, ["plan", target, "--output", "plan.json"])
    assert result.exit_code == 0, result.output
    assert "saved to plan.json" in result.stdout
    assert load_any("plan.json") == verbs.planned
    shown = runner.invoke(app, ["show", "plan.json"])
    assert shown.exit_code == 0
    assert "model.layers.0–2" in shown.stdout
    assert "▲ peak" in shown.stdout
    explained = runner.invoke(app, ["show", "plan.json", "--explain"])
    assert "memory is worth" in explained.stdout


def test_json_is_all_that_a_machine_reads(runner: CliRunner, verbs: FakeVerbs, target: str):
    result = runner.invoke(app, ["plan", target, "--json"])
    assert json.loads(result.stdout)["plimsoll"] == "plan"


def test_a_plan_that_fits_nowhere_exits_as_such(runner: CliRunner, verbs: FakeVerbs, target: str):
    verbs.planned = make_plan(status=Status.INFEASIBLE, budget_bytes=2**20, regions=())
    assert runner.invoke(app, ["plan", target]).exit_code == 3
    verbs.planned = make_plan(status=Status.TIMED_OUT, regions=())
    assert runner.invoke(app, ["plan", target]).exit_code == 2


def test_verify_takes_a_saved_plan(runner: CliRunner, verbs: FakeVerbs, target: str):
    make_plan(strategy="full").save("plan.json")
    result = runner.invoke(app, ["verify", target, "--plan", "plan.json", "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert [name for name, _ in verbs.calls] == ["verify"]
    assert verbs.calls[0][1]["plan"].strategy == "full"
    assert verbs.calls[0][1]["steps"] == 3
    assert "VERIFIED" in result.stdout


def test_verify_without_a_plan_makes_one(runner: CliRunner, verbs: FakeVerbs, target: str):
    result = runner.invoke(app, ["verify", target, "--budget", "64MiB", "--output", "receipt.json"])
    assert [name for name, _ in verbs.calls] == ["plan", "verify"]
    assert result.exit_code == 0
    assert load_any("receipt.json") == verbs.receipt


def test_verify_exits_with_one_when_gradients_differ(runner: CliRunner, verbs: FakeVerbs, target: str):
    verbs.receipt = make_receipt(gradient_mismatches=(make_mismatch(),))
    result = runner.invoke(app, ["verify", target])
    assert result.exit_code == 1
    assert "GRADIENTS_DIFFER" in result.stdout


def test_compare_measures_the_named_strategies(runner: CliRunner, verbs: FakeVerbs, target: str):
    result = runner.invoke(app, ["compare", target, "-s", "full", "-s", "sqrt"])
    assert result.exit_code == 0, result.output
    assert verbs.calls[0][1]["strategies"] == ["full", "sqrt"]
    assert "1.310" in result.stdout


def test_compare_adds_auto_where_there_is_a_budget(runner: CliRunner, verbs: FakeVerbs, target: str):
    runner.invoke(app, ["compare", target])
    runner.invoke(app, ["compare", target, "--budget", "64MiB"])
    assert "auto" not in verbs.calls[0][1]["strategies"]
    assert verbs.calls[1][1]["strategies"][-1] == "auto"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BudgetBelowFloor("too little.", why="it is so", next="more"), 3),
        (ReplayMismatch("another value.", why="an op changed", next="report it"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_exit_codes_and_no_traceback(
    error: BaseException, code: int, runner: CliRunner, verbs: FakeVerbs, target: str
):
    verbs.error = error
    result = runner.invoke(app, ["plan", target])
    assert result.exit_code == code
    assert "Traceback" not in result.output
    if code != 130:
        assert f"{type(error).__name__}: " in result.stderr
        assert "  why   " in result.stderr
        assert "  next  " in result.stderr


def test_errors_are_json_where_a_machine_reads(runner: CliRunner, verbs: FakeVerbs, target: str):
    result = runner.invoke(app, ["plan", target, "--budget", "24G", "--json"])
    assert result.exit_code == 2
    fields = json.loads(result.stdout)
    assert fields["plimsoll"] == "error"
    assert fields["error"] == "InvalidBudget"
    assert fields["exit_code"] == 2
    assert "24GiB" in fields["next"]


def test_our_own_mistakes_keep_their_traceback(runner: CliRunner, verbs: FakeVerbs, target: str):
    verbs.error = AssertionError("ours")
    result = runner.invoke(app, ["plan", target])
    assert isinstance(result.exception, AssertionError)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nonsense", "'nonsense' is no target."),
        ("sample_target:", "'sample_target:' is no target."),
        ("sample_target:nothing", "sample_target:nothing does not exist."),
        ("sample_target:number", "sample_target:number cannot be called"),
        ("sample_target:wrong", "sample_target:wrong returned an object of type int."),
        ("sample_target:broken", "sample_target:broken failed."),
        ("no_import:step", "no_import does not import."),
        ("no_such_module:step", "no_such_module does not import."),
        ("missing.json", "missing.json cannot be read as JSON."),
        ("empty.json", "empty.json is no configuration of a model."),
        ("unknown.json", "knows no model_type 'perpetuum-mobile'"),
    ],
)
def test_a_target_that_does_not_load_says_why(text: str, found: str, runner: CliRunner, verbs: FakeVerbs, target: str):
    Path("empty.json").write_text("{}")
    Path("unknown.json").write_text('{"model_type": "perpetuum-mobile"}')
    result = runner.invoke(app, ["plan", text])
    assert result.exit_code == 2
    assert found in result.stderr
    assert not verbs.calls


@pytest.mark.parametrize("command", ["plan", "verify", "compare", "explain", "probe", "diagnose"])
def test_a_strategy_that_is_none_is_refused_before_the_target_loads(
    command: str, runner: CliRunner, verbs: FakeVerbs, target: str
):
    result = runner.invoke(app, [command, "sample_target:broken", "--strategy", "nonsense"])
    assert result.exit_code == 2
    assert "'nonsense' is not a strategy." in result.stderr
    assert not verbs.calls


def test_the_working_directory_is_importable_only_while_it_is_needed(runner: CliRunner, verbs: FakeVerbs, target: str):
    before = list(sys.path)
    runner.invoke(app, ["plan", target])
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "sizes"), [("llama-tiny", ["--seq", "16"]), ("gpt2-tiny", ["--seq", "16"]), ("vit-tiny", [])]
)
def test_a_catalogue_model_trains(name: str, sizes: list[str], runner: CliRunner, verbs: FakeVerbs):
    pytest.importorskip("transformers")
    result = runner.invoke(app, ["plan", name, "--batch", "2", *sizes])
    assert result.exit_code == 0, result.output
    given = verbs.calls[0][1]
    assert given["model"](**given["batch"]).loss.isfinite()


def test_a_model_for_another_device_takes_no_memory_here(runner: CliRunner, verbs: FakeVerbs):
    pytest.importorskip("transformers")
    result = runner.invoke(app, ["plan", "llama-3-70b", "--device-profile", "h100"])
    assert result.exit_code == 0, result.output
    given = verbs.calls[0][1]
    assert given["device_profile"] == "h100"
    assert all(parameter.is_meta for parameter in given["model"].parameters())
    assert given["batch"]["input_ids"].shape == (1, 8192)


def test_a_configuration_file_builds_its_architecture(runner: CliRunner, verbs: FakeVerbs, tmp_path: Path):
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"architectures": ["GPT2LMHeadModel"]}))
    for target in (tmp_path, tmp_path / "config.json"):
        result = runner.invoke(app, ["plan", str(target), "--seq", "16"])
        assert result.exit_code == 0, result.output
    assert type(verbs.calls[0][1]["model"]).__name__ == "GPT2LMHeadModel"
    assert verbs.calls[0][1]["batch"]["input_ids"].shape == (1, 16)


def test_a_small_configuration_gets_a_batch_that_fits_it(runner: CliRunner, verbs: FakeVerbs, tmp_path: Path):
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert runner.invoke(app, ["plan", str(tmp_path)]).exit_code == 0
    assert verbs.calls[0][1]["batch"]["input_ids"].shape == (1, 64)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["sample_target:step", "--batch", "4"], "--batch would have no effect on sample_target:step."),
        (["sample_target:step", "--seq", "4", "--device", "cuda"], "--seq and --device would have no effect"),
        (["vit-tiny", "--seq", "4"], "--seq would have no effect on ViTForImageClassification."),
        (["llama-tiny", "--device", "abacus"], "There is no device 'abacus' here."),
        (["sample_target:leaves"], "sample_target:leaves failed."),
    ],
)
def test_an_option_without_effect_is_refused_not_ignored(
    arguments: list[str], found: str, runner: CliRunner, verbs: FakeVerbs, target: str
):
    pytest.importorskip("transformers")
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert found in result.stderr
    assert not verbs.calls


def test_missing_transformers_is_said_clearly(runner: CliRunner, verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = runner.invoke(app, ["plan", "llama-tiny"])
    assert result.exit_code == 2
    assert "needs transformers" in result.stderr


def test_show_refuses_what_is_no_plan(runner: CliRunner, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text('{"plimsoll": "plan", "schema')
    result = runner.invoke(app, ["show", str(path)])
    assert result.exit_code == 2
    assert "not whole JSON" in result.stderr


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
