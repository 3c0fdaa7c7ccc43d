"""The commands against the real pipeline: exit codes, pages and JSON, from the target to the receipt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from plimsoll.ui.cli.app import app

TARGETS = """
import torch
from steps import CheckpointedStack, conv_net, mean_square, stack


def without_loss():
    return stack()[:2]


def refused():
    return stack()[0], torch.ones(2, 31), mean_square


def larger():
    return stack(rows=64)


def checkpointed():
    return CheckpointedStack(), torch.ones(4, 32), mean_square


def broken_loss():
    return *stack()[:2], lambda output: output.loss
"""


@pytest.fixture
def run(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "real_targets.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "real_targets", raising=False)

    def invoke(*arguments: str) -> Result:
        result = runner.invoke(app, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return invoke


def test_plan_show_verify_and_compare_agree(run):
    planned = run("plan", "steps:stack", "-b", "515KiB", "-o", "plan.json")
    assert planned.exit_code == 0, planned.output
    assert "RECOMPUTE" in planned.stdout
    assert "saved in blocks.0–2" in planned.stdout or "rebuilt in blocks" in planned.stdout
    explained = run("show", "plan.json", "--explain").stdout
    assert "memory is worth" in explained
    assert "costs 0.0 µs" not in explained
    verified = run("verify", "steps:stack", "-p", "plan.json", "--steps", "1", "-o", "receipt.json")
    assert verified.exit_code == 0, verified.output
    assert "VERIFIED" in verified.stdout
    assert "VERIFIED" in run("show", "receipt.json").stdout
    compared = run("compare", "steps:stack", "-b", "515KiB", "--steps", "1", "-o", "comparison.json")
    assert compared.exit_code == 0, compared.output
    assert [line.split()[1] for line in compared.stdout.splitlines() if line.startswith("  auto")]
    assert "DIFFER" not in compared.stdout
    assert f"{run('show', 'comparison.json').stdout}\nsaved to comparison.json\n" == compared.stdout


@pytest.mark.parametrize("command", [["plan"], ["verify", "-s", "full", "--steps", "1"]])
def test_every_command_speaks_json(command: list[str], run):
    result = run(*command, "steps:stack", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["plimsoll"] == {"plan": "plan", "verify": "receipt"}[command[0]]


def test_an_unmanaged_peak_counts_the_optimizer_that_the_rows_count(run):
    fields = json.loads(run("compare", "steps:stack", "-s", "none", "--steps", "1", "--json").stdout)
    assert fields["plimsoll"] == "comparison"
    assert fields["baseline_peak_bytes"] == fields["rows"][0]["measured_peak_bytes"]


def test_a_plan_made_with_an_optimizer_is_verified_with_its_state_counted(run):
    run("plan", "steps:stack", "-b", "900KiB", "-o", "plan.json")
    fields = json.loads(
        run("verify", "steps:stack", "-p", "plan.json", "--optimizer", "none", "--steps", "1", "--json").stdout
    )
    assert fields["predicted_peak_bytes"] == pytest.approx(fields["measured_peak_bytes"], rel=0.02)
    assert "optimizer state" in fields["notes"][0]


STRATEGIES = ["none", "every:2", "sqrt", "input-only", "selective:mlp", "selective:addmm"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_planned(strategy: str, run):
    result = run("plan", "steps:stack", "-s", strategy, "--explain")
    assert result.exit_code == 0
    assert f"Plan {strategy!r}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "found"),
    [
        (["plan", "steps:stack", "-b", "100KiB"], 3, "BudgetBelowFloor"),
        (["verify", "steps:stack", "-b", "100KiB"], 3, "BudgetBelowFloor"),
        (["plan", "steps:stack", "-s", "none", "-b", "515KiB"], 3, "strategy 'none' peaks at"),
        (["plan", "steps:stack", "-b", "24G"], 2, "InvalidBudget"),
        (["plan", "steps:stack", "-b", "900TiB"], 2, "BudgetAboveDevice"),
        (["plan", "steps:stack", "--regions", "layers.*"], 2, "InvalidRegions"),
        (["plan", "steps:stack", "-s", "best"], 2, "InvalidStrategy"),
        (["plan", "steps:stack", "--device-profile", "H900"], 2, "UnknownDevice"),
        (["plan", "steps:stack", "-o", "no/such/place.json"], 2, "PlanFileError"),
        (["plan", "real_targets:without_loss"], 2, "InvalidLoss"),
        (["plan", "real_targets:broken_loss"], 2, "InvalidLoss"),
        (["plan", "real_targets:refused"], 2, "InvalidBatch"),
        (["plan", "real_targets:checkpointed"], 2, "already checkpoints"),
        (["plan", "nowhere:step"], 2, "InvalidTarget"),
        (["show", "nothing.json"], 2, "PlanFileError"),
    ],
)
def test_what_is_wrong_has_its_exit_code_and_three_lines(arguments: list[str], code: int, found: str, run):
    result = run(*arguments)
    assert result.exit_code == code
    assert found in result.stderr
    assert "  why   " in result.stderr
    assert "  next  " in result.stderr


def test_a_plan_for_another_step_is_refused(run):
    run("plan", "steps:stack", "-o", "plan.json")
    assert run("verify", "real_targets:larger", "-p", "plan.json").exit_code == 2
    assert run("verify", "steps:conv_net", "-p", "plan.json").exit_code == 2


def test_a_device_that_is_not_here_is_planned_for(run):
    pytest.importorskip("transformers")
    result = run("plan", "llama-tiny", "--seq", "64", "--device-profile", "H100-SXM", "-b", "auto")
    assert result.exit_code == 0
    assert "roofline on H100-SXM" in result.stdout
    assert "budget" not in result.stdout.split("Memory over the step")[1]  # far above the bars


def test_what_libraries_print_does_not_get_among_results(tmp_path: Path):
    script = """
import os
from rich.console import Console
from plimsoll.ui.cli.terminal import show_progress
with show_progress(Console(stderr=True)):
    os.write(1, b"from the solver")
print("result")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"
    assert "from the solver" in done.stderr
