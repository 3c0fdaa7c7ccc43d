"""``plimsoll verify`` of a model that checkpoints itself, and of what it compares besides."""

from __future__ import annotations


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
