"""``plimsoll probe`` on small targets: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import plimsoll
from plimsoll.artifacts.store import load_any
from plimsoll.artifacts.verdict import Ruling, Verdict
from plimsoll.estimator.targets.target import TargetOptions, load_target
from plimsoll.ui.cli.app import app
from plimsoll.ui.cli.work import data_for

SOURCE = """
import torch


def model():
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)]
    return torch.nn.Sequential(*blocks)


def loss(output):
    return output.square().mean()


def batches(count=30):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, generator=random) for _ in range(count)]


def stream():
    return model(), batches(), loss


def loader():
    return model(), torch.utils.data.DataLoader(torch.stack(batches()).flatten(0, 1), batch_size=4, shuffle=True), loss


def once():
    return model(), iter(batches(5)), loss


def fixed():
    return model(), batches(1)[0], loss


def empty():
    return model(), [], loss


def diverging():
    return model(), [*batches(3), torch.full((4, 8), float("nan")), *batches(8)], loss
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "probe_target.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "probe_target", raising=False)
    return tmp_path


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "dumb")
    return CliRunner()


def probe(runner: CliRunner, function: str, *arguments: str) -> object:
    strategy = () if "--plan" in arguments else ("--strategy", "full")
    return runner.invoke(app, ["probe", f"probe_target:{function}", *strategy, *arguments])


def test_a_good_plan_exits_with_0_and_its_verdict_is_saved_and_shown(runner: CliRunner, here: Path):
    result = probe(runner, "stream", "--steps", "24", "--held-out", "4", "--output", "verdict.json")
    assert result.exit_code == 0, result.output
    assert "IDENTICAL" in result.stdout
    verdict = load_any(here / "verdict.json")
    assert isinstance(verdict, Verdict)
    assert verdict.baseline.held_out_loss is not None
    shown = runner.invoke(app, ["show", "verdict.json"])
    assert shown.exit_code == 0
    assert result.stdout == f"{shown.stdout}\nsaved to verdict.json\n"


@pytest.mark.parametrize("function", ["loader", "fixed"])
def test_a_loader_and_one_batch_are_data_too(function: str, runner: CliRunner, here: Path):
    result = probe(runner, function, "--steps", "6", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ruling"] == "IDENTICAL"


def test_an_undecided_probe_exits_with_1_and_says_what_is_missing(runner: CliRunner, here: Path):
    plan = here / "plan.json"
    assert runner.invoke(app, ["plan", "probe_target:stream", "--strategy", "full", "-o", str(plan)]).exit_code == 0
    other = here / "noisy.py"
    other.write_text(
        SOURCE.replace("output.square().mean()", "(output.square() * torch.empty(8).normal_(generator=noise)).mean()")
        + "\n\nnoise = torch.Generator().manual_seed(0)\n"
    )
    result = runner.invoke(app, ["probe", "noisy:stream", "--strategy", "full", "--steps", "6"])
    assert result.exit_code == 1, result.output
    assert "UNDECIDED" in result.stdout
    assert "Missing: shift: more steps" in result.stdout
    assert "not deterministic" in result.stdout


def test_a_target_that_goes_to_nan_is_named_and_exits_with_1(runner: CliRunner, here: Path):
    result = probe(runner, "diverging", "--steps", "8", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ruling"] == Ruling.BASELINE_DIVERGED


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["stream", "--steps", "0"], "greater than or equal to 1"),
        (["empty", "--steps", "4"], "returned a stream without batches."),
        (["stream", "--steps", "4", "--held-out", "30"], "30 of 30 batches cannot be set apart."),
        (["once", "--steps", "9"], "The stream of batches ended after 5."),
        (["stream", "--steps", "4", "--optimizer", "none"], "A probe trains, and --optimizer none does not."),
        (["stream", "--steps", "4", "--run", "."], "is not empty, and holds no probe."),
        (["stream", "--plan", "absent.json"], "absent.json cannot be read."),
        (["stream", "--plan", "absent.json", "--budget", "1GiB"], "--budget would have no effect beside --plan."),
        (["stream", "--target-loss", "nan"], "target_loss=nan is no loss"),
    ],
)
def test_bad_input_is_said_in_three_lines_and_exits_with_2(
    arguments: list[str], found: str, runner: CliRunner, here: Path
):
    result = probe(runner, *arguments)
    assert result.exit_code == 2, result.output
    assert found in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_directory_of_another_probe_shows_what_differs(runner: CliRunner, here: Path):
    assert probe(runner, "stream", "--steps", "4", "--run", "kept").exit_code == 0
    assert probe(runner, "stream", "--steps", "4", "--run", "kept").exit_code == 0
    result = probe(runner, "stream", "--steps", "4", "--run", "kept", "--seed", "1")
    assert result.exit_code == 2
    assert "differs in settings" in result.stderr


def test_an_interruption_exits_with_130_and_says_how_to_go_on(
    runner: CliRunner, here: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plimsoll, "probe", interrupted)
    result = probe(runner, "stream", "--run", "kept")
    assert result.exit_code == 130
    assert "the same command goes on in kept" in result.stderr


def test_a_configured_language_model_is_probed_on_text_that_does_not_overlap():
    pytest.importorskip("transformers")
    target = load_target("llama-tiny", TargetOptions(batch=2, sequence=32))
    data = data_for(target)
    assert "standard library" in data.description
    assert len(data.batches) > 1000
    first, second = data.batches[0], data.batches[-1]
    assert first.keys() == target.batch.keys()
    assert first["input_ids"].shape == target.batch["input_ids"].shape
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert bytes(first["input_ids"][0].tolist()).isascii()


def test_a_configured_image_classifier_is_probed_on_digits():
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    target = load_target("vit-tiny", TargetOptions(batch=2))
    data = data_for(target)
    assert "handwritten digits" in data.description
    batch = data.batches[0]
    assert batch["pixel_values"].shape == target.batch["pixel_values"].shape
    assert int(batch["labels"].max()) < target.model.config.num_labels
