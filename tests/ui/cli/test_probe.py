"""``plimsoll probe`` on small targets: what it prints, and its exit codes."""

from __future__ import annotations

import pytest
import torch

import plimsoll
from plimsoll.artifacts.store import load_any
from plimsoll.artifacts.verdict import Ruling, Verdict
from plimsoll.estimator.targets.target import TargetOptions, load_target
from plimsoll.ui.cli.work import data_for

STREAM = ["probe", "targets:stream", "--strategy", "full"]


def test_a_good_plan_exits_with_0_and_its_verdict_is_saved_and_shown(run):
    shown = run(*STREAM, "--steps", "24", "--held-out", "4", "--output", "verdict.json").out
    assert "IDENTICAL" in shown
    verdict = load_any("verdict.json")
    assert isinstance(verdict, Verdict)
    assert verdict.baseline.held_out_loss is not None
    assert shown == f"{run('show', 'verdict.json').out}\nsaved to verdict.json\n"


@pytest.mark.parametrize(
    ("function", "ruling", "code"),
    [("loader", Ruling.IDENTICAL, 0), ("fixed", Ruling.IDENTICAL, 0), ("diverging", Ruling.BASELINE_DIVERGED, 1)],
)
def test_a_loader_and_one_batch_are_data_too_and_a_baseline_that_goes_to_nan_is_named(
    function: str, ruling: Ruling, code: int, run
):
    options = "--strategy full --steps 8 --json"
    assert run("probe", f"targets:{function}", *options.split(), code=code).json["ruling"] == ruling


def test_an_undecided_probe_exits_with_1_and_says_what_is_missing(run):
    shown = run("probe", "targets:noisy", "--strategy", "full", "--steps", "6", code=1).words
    for part in ("UNDECIDED", "Missing: shift: more steps", "not deterministic"):
        assert part in shown


def test_a_stream_is_planned_as_its_first_batch(run):
    run("plan", "targets:stream", "--strategy", "full")


def test_a_run_directory_of_another_probe_shows_what_differs(run):
    kept = [*STREAM, "--steps", "4", "--run", "kept"]
    run(*kept)
    run(*kept)
    assert "differs in settings" in run(*kept, "--seed", "1", code=2).err


def test_an_interruption_exits_with_130_and_says_how_to_go_on(run, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plimsoll, "probe", interrupted)
    assert "the same command resumes from kept" in run(*STREAM, "--run", "kept", code=130).err


def test_a_configured_language_model_is_probed_on_text_that_does_not_overlap():
    pytest.importorskip("transformers")
    target = load_target("llama-tiny", TargetOptions(batch=2, sequence=32))
    data = data_for(target)
    assert "standard library" in data.description
    assert len(data.batches) > 1000
    first, second = data.batches[0], data.batches[-1]
    assert first.keys() == target.batch.keys()
    assert first["input_ids"].shape == target.batch["input_ids"].shape
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert bytes(first["input_ids"][0].tolist()).isascii()


def test_a_configured_image_classifier_is_probed_on_digits():
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    target = load_target("vit-tiny", TargetOptions(batch=2))
    data = data_for(target)
    assert "handwritten digits" in data.description
    batch = data.batches[0]
    assert batch["pixel_values"].shape == target.batch["pixel_values"].shape
    assert int(batch["labels"].max()) < target.model.config.num_labels
