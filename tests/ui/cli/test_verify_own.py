"""``plimsoll verify`` of a model that checkpoints itself, and of what it compares besides."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll.ui.cli.app import app

TARGETS = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint


    class Net(nn.Module):
        def __init__(self, preserve):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.GELU()) for _ in range(3)
            )
            self.preserve = preserve

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=self.preserve)
            return x


    def good():
        torch.manual_seed(0)
        return Net(True), torch.randn(8, 16), lambda y: y.square().mean()


    def bad():
        torch.manual_seed(0)
        return Net(False), torch.randn(8, 16), lambda y: y.square().mean()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_targets.py").write_text(textwrap.dedent(TARGETS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_checkpointing_that_is_right_passes(here: Path):
    result = CliRunner().invoke(
        app, ["verify", "own_targets:good", "--steps", "1", "--curve", "2", "--intermediate", "layers.0"]
    )
    assert result.exit_code == 0, result.output
    assert "torch.utils.checkpoint (3 times a step)" in result.output
    assert "VERIFIED" in result.output
    assert "layers.0" in result.output


def test_checkpointing_that_is_wrong_fails_and_names_the_cause(here: Path):
    result = CliRunner().invoke(
        app, ["verify", "own_targets:bad", "--steps", "1", "--json", "--output", "receipt.json"]
    )
    assert result.exit_code == 1
    receipt = json.loads(result.stdout)
    assert receipt["faults"][0]["cause"] == "RANDOM_STATE"
    assert receipt["faults"][0]["region"] == "layers.2.1"
    shown = CliRunner().invoke(app, ["show", "receipt.json"])
    assert "preserve_rng_state=True" in shown.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--allow", "compress"], "--allow"), (["--plan", "plan.json", "--budget", "1GiB"], "--budget")],
)
def test_options_that_would_be_ignored_are_refused(here: Path, arguments: list[str], named: str):
    result = CliRunner().invoke(app, ["verify", "own_targets:good", *arguments])
    assert result.exit_code == 2
    assert f"{named} would have no effect" in result.output
