"""``plimsoll fit``: from the target to the frontier, the plan's file and the exit code."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import plimsoll
from plimsoll.artifacts.fit import Fit, FitChange
from plimsoll.artifacts.store import from_json, load_any
from plimsoll.units import KIB
from ui.view_samples import make_fit

ARGUMENTS = ["fit", "steps:stack", "--device-profile", "H100-SXM", "--most-batch", "16", "--optimizer", "none"]


def test_fit_shows_the_frontier_and_saves_the_fit_and_the_plan(run):
    shown = run(*ARGUMENTS, "--budget", "250KiB", "-o", "fit.json", "--save-plan", "plan.json").out
    assert "Frontier" in shown
    assert "plan saved to plan.json" in shown
    saved = load_any("fit.json")
    assert isinstance(saved, Fit)
    assert plimsoll.load("plan.json") == saved.plan
    assert "Frontier" in run("show", "fit.json").out


def test_json_is_the_fit_and_nothing_fits_has_the_floors_exit_code(run, monkeypatch: pytest.MonkeyPatch):
    change = FitChange(name="1.0 KiB more memory", does_fit=True, predicted_peak_bytes=61 * KIB)
    nothing = msgspec.structs.replace(make_fit(fits=False), points=(), changes=(change,))
    monkeypatch.setattr("plimsoll.fit", lambda *given, **how: nothing, raising=False)
    options = [*ARGUMENTS, "--budget", "60KiB", "--save-plan", "plan.json"]
    assert from_json(run(*options, "--json", code=3).out) == nothing
    assert not Path("plan.json").exists()
    shown = run(*options, code=3).out
    for part in ("nothing fits", "there is no plan: plan.json was not written", "1.0 KiB more memory"):
        assert part in shown
