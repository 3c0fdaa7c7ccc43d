"""Verbs of the command line end to end, in words and as JSON: advise, explain, diagnose, fit, and verify without a plan."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import plimsoll
from analysis.diagnose.builders import recomputing_traces
from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.fit import Fit, FitChange
from plimsoll.artifacts.store import from_json, load_any
from plimsoll.units import KIB
from samples import make_plan
from ui.view_samples import make_fit


def test_the_verdict_is_the_first_line_and_the_command_names_the_target(run):
    out = run("advise", "targets:layers", "--allow", "recompute", "--optimizer", "none", "-o", "advice.json").out
    assert out.startswith("Advice for Sequential on cpu: if the step fits, do nothing")
    assert "plimsoll plan targets:layers --optimizer none --budget" in out
    for heading in ("Where the memory is", "Plans that were made", "torch.compile", "Checklist", "Failure modes"):
        assert heading in out
    assert "saved to advice.json" in out
    assert isinstance(load_any("advice.json"), Advice)
    assert run("show", "advice.json").out.splitlines()[0] == out.splitlines()[0]


def test_json_is_the_advice_and_nothing_else(run):
    fields = run("advise", "targets:layers", "--budget", "1GiB", "--compile-seconds", "0", "--json").json
    assert fields["plimsoll"] == "advice"
    assert fields["recommendation"]["kind"] == "do nothing"


def test_a_budget_that_nothing_keeps_to_ends_with_its_own_code(run):
    options = "--budget 10KiB --allow recompute --compile-seconds 0"
    assert "no plan keeps to 10.0 KiB" in run("advise", "targets:layers", *options.split(), code=3).words


def test_a_target_that_checkpoints_is_explained_shown_and_saved(run):
    text = run("explain", "targets:own", "--optimizer", "none", "--output", "explanation.json").words
    for part in ("Explanation of the peak of Own", "torch.utils.checkpoint (3 times a step)", "Recomputed in backward"):
        assert part in text
    assert "saved to explanation.json" in text
    assert isinstance(load_any("explanation.json"), Explanation)
    assert "What would lower the peak" in run("show", "explanation.json").out


def test_json_is_the_explanation(run):
    fields = run("explain", "targets:own", "--strategy", "every:2", "--optimizer", "none", "--json").json
    assert fields["plimsoll"] == "explanation"
    assert fields["setup"] == "strategy every:2, by Plimsoll"
    assert fields["peak"]["bytes"] > fields["resident_bytes"] > 0


def test_a_saved_plan_is_explained_from_its_file(run):
    make_plan().save("plan.json")
    shown = run("explain", "plan.json").out.split()
    assert [word for word in make_plan().explain().split() if word not in shown] == []


def test_two_traces_become_a_page(run, tmp_path: Path):
    shown = run("diagnose", *recomputing_traces(tmp_path)).words
    for part in ("the measured overhead is 40.0 µs", "RAISED", "Advice: recompute arithmetic", "Note:"):
        assert part in shown


def test_json_is_a_finding_that_show_understands(run, tmp_path: Path):
    found = run("diagnose", *recomputing_traces(tmp_path), "--json", "-o", "finding.json")
    assert json.loads(found.out)["plimsoll"] == "finding"
    saved = load_any("finding.json")
    assert isinstance(saved, Finding)
    assert saved.overhead_seconds == pytest.approx(40e-6)
    shown = run("show", "finding.json").words
    assert "Where the overhead goes" in shown
    assert str(saved).splitlines()[0] in shown


def test_a_target_is_profiled_with_and_without_its_plan(run):
    options = "--strategy full --steps 1 --keep-traces kept --json"
    fields = run("diagnose", "steps:stack", *options.split()).json
    assert (fields["origin"], fields["strategy"]) == ("profiled here", "full")
    assert sorted(path.name for path in Path("kept").iterdir()) == ["baseline.trace.json.gz", "plan.trace.json.gz"]


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
    for part in ("nothing fits", "no plan was made, so plan.json was not written", "1.0 KiB more memory"):
        assert part in shown


def test_checkpointing_that_is_right_passes(run):
    shown = run("verify", "targets:own", "--steps", "1", "--curve", "2", "--intermediate", "layers.0").out
    assert "torch.utils.checkpoint (3 times a step)" in shown
    assert "VERIFIED" in shown
    assert "layers.0" in shown


def test_checkpointing_that_is_wrong_fails_and_names_the_cause(run):
    options = "--steps 1 --json --output receipt.json"
    fault = run("verify", "targets:own_forgetful", *options.split(), code=1).json["faults"][0]
    assert (fault["cause"], fault["region"]) == ("RANDOM_STATE", "layers.2.1")
    assert "preserve_rng_state=True" in run("show", "receipt.json").words
