"""``plimsoll advise`` end to end on a real model, in words and as JSON."""

from __future__ import annotations

from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.store import load_any


def test_the_verdict_is_the_first_line_and_the_command_names_the_target(run):
    out = run("advise", "targets:layers", "--allow", "recompute", "--optimizer", "none", "-o", "advice.json").out
    assert out.startswith("Advice for Sequential on cpu: if the step fits, do nothing")
    assert "plimsoll plan targets:layers --optimizer none --budget" in out
    for heading in ("Where the memory is", "Plans that were made", "torch.compile", "Checklist", "Failure modes"):
        assert heading in out
    assert "saved to advice.json" in out
    assert isinstance(load_any("advice.json"), Advice)
    assert run("show", "advice.json").out.splitlines()[0] == out.splitlines()[0]


def test_json_is_the_artifact_and_nothing_else(run):
    fields = run("advise", "targets:layers", "--budget", "1GiB", "--compile-seconds", "0", "--json").json
    assert fields["plimsoll"] == "advice"
    assert fields["recommendation"]["kind"] == "do nothing"


def test_a_budget_that_nothing_keeps_to_ends_with_its_own_code(run):
    options = "--budget 10KiB --allow recompute --compile-seconds 0"
    assert "no plan keeps to 10.0 KiB" in run("advise", "targets:layers", *options.split(), code=3).words
