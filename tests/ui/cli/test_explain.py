"""``plimsoll explain``: targets, strategies, saved plans, and what it refuses."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.store import load_any
from plimsoll.ui.cli.app import app
from samples import make_plan, make_receipt

SOURCE = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x


    def step():
        return Net(), torch.randn(64, 16), lambda y: y.square().mean()
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "explained_target.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.chdir(tmp_path)
    return "explained_target:step"


def test_a_target_that_checkpoints_is_explained_shown_and_saved(runner: CliRunner, step: str, tmp_path: Path):
    result = runner.invoke(app, ["explain", step, "--optimizer", "none", "--output", "explanation.json"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in (
        "Explanation of the peak of Net",
        "torch.utils.checkpoint (3 times a step)",
        "Made again in backward",
        "saved to",
    ):
        assert part in text
    explanation = load_any(tmp_path / "explanation.json")
    assert isinstance(explanation, Explanation)
    shown = runner.invoke(app, ["show", "explanation.json"])
    assert shown.exit_code == 0
    assert "What would lower it" in shown.stdout


def test_json_holds_the_same_numbers(runner: CliRunner, step: str):
    result = runner.invoke(app, ["explain", step, "--strategy", "every:2", "--optimizer", "none", "--json"])
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["plimsoll"] == "explanation"
    assert fields["setup"] == "strategy every:2, by Plimsoll"
    assert fields["peak"]["bytes"] > fields["resident_bytes"] > 0


def test_a_saved_plan_is_explained_from_its_file(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    plan = make_plan()
    plan.save("plan.json")
    result = runner.invoke(app, ["explain", "plan.json"])
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == plan.explain()
    make_receipt().save("receipt.json")
    for arguments, message in (
        (["receipt.json"], "holds a receipt, not a plan"),
        (["plan.json", "--strategy", "full"], "would have no effect on a saved plan"),
    ):
        refused = runner.invoke(app, ["explain", *arguments])
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "int8"], "cannot be replayed"),
        (["--strategy", "evry:2"], "closest: every:2"),
        (["--strategy", "full", "--plan", "plan.json"], "exclude each other"),
        (["--plan", "missing.json"], "cannot be read"),
    ],
)
def test_bad_input_is_a_clear_error(runner: CliRunner, step: str, arguments: list[str], message: str):
    result = runner.invoke(app, ["explain", step, *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
