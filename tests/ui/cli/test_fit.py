"""``plimsoll fit``: from the target to the frontier, the plan's file and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import plimsoll
from plimsoll.artifacts.costs import Basis, CostSource
from plimsoll.artifacts.fit import Fit, FitChange
from plimsoll.artifacts.store import from_json, load_any
from plimsoll.ui.cli.app import app
from plimsoll.units import KIB

ARGUMENTS = ["fit", "steps:stack", "--device-profile", "H100-SXM", "--most-batch", "16", "--optimizer", "none"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_fit_shows_the_frontier_and_saves_the_fit_and_the_plan(runner: CliRunner):
    found = runner.invoke(app, [*ARGUMENTS, "--budget", "250KiB", "-o", "fit.json", "--save-plan", "plan.json"])
    assert found.exit_code == 0, found.output
    assert "Frontier" in found.stdout
    assert "plan saved to plan.json" in found.stdout
    saved = load_any("fit.json")
    assert isinstance(saved, Fit)
    assert plimsoll.load("plan.json") == saved.plan
    shown = runner.invoke(app, ["show", "fit.json"])
    assert shown.exit_code == 0
    assert "Frontier" in shown.stdout


def test_json_is_the_fit_and_nothing_fits_has_the_floors_exit_code(runner: CliRunner, monkeypatch: pytest.MonkeyPatch):
    nothing = Fit(
        model="Stack",
        fingerprint="f",
        device="H100-SXM",
        cost_source=CostSource.ROOFLINE,
        cost_device="H100-SXM",
        budget_bytes=60 * KIB,
        items_name="examples",
        global_batch=None,
        points=(),
        changes=(FitChange(name="1.0 KiB more memory", does_fit=True, predicted_peak_bytes=61 * KIB),),
        seconds_basis=Basis.MODELLED,
        seconds_error=0.3,
    )
    monkeypatch.setattr("plimsoll.fit", lambda *given, **how: nothing, raising=False)
    found = runner.invoke(app, [*ARGUMENTS, "--budget", "60KiB", "--json", "--save-plan", "plan.json"])
    assert found.exit_code == 3, found.output
    assert from_json(found.stdout) == nothing
    assert not Path("plan.json").exists()
    shown = runner.invoke(app, [*ARGUMENTS, "--budget", "60KiB", "--save-plan", "plan.json"])
    assert "nothing fits" in shown.stdout
    assert "there is no plan: plan.json was not written" in shown.stdout
    assert "1.0 KiB more memory" in shown.stdout


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        (["--budget", "24G"], "two readings"),
        (["--budget", "1MiB", "--seq", "8"], "no effect"),
        (["--budget", "1MiB", "--global-batch", "4", "--accumulation", "2"], "contradict"),
    ],
)
def test_bad_input_is_told_without_a_traceback(runner: CliRunner, extra: list[str], part: str):
    found = runner.invoke(app, [*ARGUMENTS, *extra])
    assert found.exit_code == 2
    assert part in found.output
    assert "Traceback" not in found.output
