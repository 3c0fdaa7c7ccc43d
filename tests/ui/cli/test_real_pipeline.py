"""The commands against the real pipeline: exit codes, pages and JSON, from the target to the receipt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from long_cases import some


def test_plan_show_verify_and_compare_agree(run):
    planned = run("plan", "steps:stack", "-b", "515KiB", "-o", "plan.json").out
    assert "RECOMPUTE" in planned
    assert "saved in blocks.0–2" in planned or "rebuilt in blocks" in planned
    explained = run("show", "plan.json", "--explain").out
    assert "memory is worth" in explained
    assert "costs 0.0 µs" not in explained
    verify = "verify steps:stack -p plan.json --steps 1 -o receipt.json"
    assert "VERIFIED" in run(*verify.split()).out
    assert "VERIFIED" in run("show", "receipt.json").out
    compared = run("compare", "steps:stack", "-b", "515KiB", "--steps", "1", "-o", "comparison.json").out
    assert [line.split()[1] for line in compared.splitlines() if line.startswith("  auto")]
    assert "DIFFER" not in compared
    assert f"{run('show', 'comparison.json').out}\nsaved to comparison.json\n" == compared


@pytest.mark.parametrize(("command", "kind"), some([("plan", "plan"), ("verify -s full --steps 1", "receipt")], 1))
def test_every_command_speaks_json(command: str, kind: str, run):
    assert run(*command.split(), "steps:stack", "--json").json["plimsoll"] == kind


def test_an_unmanaged_peak_counts_the_optimizer_that_the_rows_count(run):
    fields = run("compare", "steps:stack", "-s", "none", "--steps", "1", "--json").json
    assert fields["plimsoll"] == "comparison"
    assert fields["baseline_peak_bytes"] == fields["rows"][0]["measured_peak_bytes"]


def test_a_plan_made_with_an_optimizer_is_verified_with_its_state_counted(run):
    run("plan", "steps:stack", "-b", "900KiB", "-o", "plan.json")
    fields = run("verify", "steps:stack", "-p", "plan.json", "--optimizer", "none", "--steps", "1", "--json").json
    assert fields["predicted_peak_bytes"] == pytest.approx(fields["measured_peak_bytes"], rel=0.02)
    assert "optimizer state" in fields["notes"][0]


STRATEGIES = ["none", "every:2", "sqrt", "input-only", "selective:mlp", "selective:addmm"]


@pytest.mark.parametrize("strategy", some(STRATEGIES, 2))
def test_every_strategy_is_planned(strategy: str, run):
    assert f"Plan {strategy!r}" in run("plan", "steps:stack", "-s", strategy, "--explain").out


def test_a_plan_for_another_step_is_refused(run):
    run("plan", "steps:stack", "-o", "plan.json")
    run("verify", "targets:larger", "-p", "plan.json", code=2)
    run("verify", "steps:conv_net", "-p", "plan.json", code=2)


@pytest.mark.long
def test_a_device_that_is_not_here_is_planned_for(run):
    pytest.importorskip("transformers")
    shown = run("plan", "llama-tiny", "--seq", "64", "--device-profile", "H100-SXM", "-b", "auto").out
    assert "roofline on H100-SXM" in shown
    assert "budget" not in shown.split("Memory over the step")[1]  # far above the bars


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
