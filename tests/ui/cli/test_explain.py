"""``plimsoll explain``: targets, strategies, saved plans."""

from __future__ import annotations

from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.store import load_any
from samples import make_plan


def test_a_target_that_checkpoints_is_explained_shown_and_saved(run):
    text = run("explain", "targets:own", "--optimizer", "none", "--output", "explanation.json").words
    for part in ("Explanation of the peak of Own", "torch.utils.checkpoint (3 times a step)", "Made again in backward"):
        assert part in text
    assert "saved to explanation.json" in text
    assert isinstance(load_any("explanation.json"), Explanation)
    assert "What would lower it" in run("show", "explanation.json").out


def test_json_holds_the_same_numbers(run):
    fields = run("explain", "targets:own", "--strategy", "every:2", "--optimizer", "none", "--json").json
    assert fields["plimsoll"] == "explanation"
    assert fields["setup"] == "strategy every:2, by Plimsoll"
    assert fields["peak"]["bytes"] > fields["resident_bytes"] > 0


def test_a_saved_plan_is_explained_from_its_file(run):
    make_plan().save("plan.json")
    shown = run("explain", "plan.json").out.split()
    assert [word for word in make_plan().explain().split() if word not in shown] == []
