"""``plimsoll diagnose``: targets, two traces, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.diagnose.builders import recomputing_traces
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.store import load_any


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
