"""``plimsoll advise`` end to end on a real model, in words and as JSON, and its messages for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.store import load_any
from plimsoll.ui.cli.app import app
from samples import make_receipt

SOURCE = """
import torch
from torch import nn


def step():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(256, 32), lambda output: output.square().mean()
"""


@pytest.fixture
def real_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "advised_target.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return "advised_target:step"


def test_the_verdict_is_the_first_line_and_the_command_names_the_target(runner: CliRunner, real_target: str):
    arguments = ["advise", real_target, "--allow", "recompute", "--optimizer", "none", "-o", "advice.json"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Advice for Sequential on cpu: if the step fits, do nothing")
    assert f"plimsoll plan {real_target} --optimizer none --budget" in result.stdout
    for heading in ("Where the memory is", "Plans that were made", "torch.compile", "Checklist", "Failure modes"):
        assert heading in result.stdout
    assert "saved to advice.json" in result.stdout
    saved = load_any("advice.json")
    assert isinstance(saved, Advice)
    shown = runner.invoke(app, ["show", "advice.json"])
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[0] == result.stdout.splitlines()[0]


def test_json_is_the_artifact_and_nothing_else(runner: CliRunner, real_target: str):
    result = runner.invoke(app, ["advise", real_target, "--budget", "1GiB", "--compile-seconds", "0", "--json"])
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["plimsoll"] == "advice"
    assert fields["recommendation"]["kind"] == "do nothing"


def test_a_budget_that_nothing_keeps_to_ends_with_its_own_code(runner: CliRunner, real_target: str):
    arguments = ["advise", real_target, "--budget", "10KiB", "--allow", "recompute", "--compile-seconds", "0"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 3
    assert "no plan keeps to 10.0 KiB" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "24G"], "two readings"),
        (["--allow", "magic"], "is not understood"),
        (["--max-error", "5", "--allow", "recompute,compress"], "is not a share"),
        (["--receipt", "missing.json"], "cannot be read"),
        (["--receipt", "receipt.json"], "of another model: ffffffffffffffff, not Sequential-"),
        (["--device-profile", "Z9000"], "Z9000"),
    ],
)
def test_bad_input_is_a_message_and_no_traceback(runner: CliRunner, real_target: str, arguments: list[str], words: str):
    make_receipt().save("receipt.json")
    result = runner.invoke(app, ["advise", real_target, *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
