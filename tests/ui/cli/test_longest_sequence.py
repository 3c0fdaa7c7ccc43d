"""``--longest-sequence`` of estimate and fit: what they pass on, what they print and save, and what they refuse at once."""

from __future__ import annotations

import json
import time

import pytest
from typer.testing import CliRunner

import plimsoll.estimator.longest_sequence
from plimsoll.artifacts.lengths import SequenceLengths
from plimsoll.artifacts.store import of_kind
from plimsoll.planning.costing.host import host_memory_bytes
from plimsoll.ui.cli.app import app
from ui.view_samples import make_lengths

ESTIMATE = ["estimate", "llama-tiny", "--longest-sequence"]
FIT = ["fit", "llama-tiny", "-b", "1GiB", "--longest-sequence"]


@pytest.fixture
def asked(monkeypatch):
    """What the command asks for. The answer is a sample."""
    calls = []

    def answer(target, progress, **options):
        calls.append((target, options))
        return make_lengths(tokens=None if options["budget"] == "1B" else 4096)

    monkeypatch.setattr(plimsoll.estimator.longest_sequence, "longest_sequence", answer)
    return calls


def run(*words):
    return CliRunner().invoke(app, list(words), prog_name="plimsoll")


def test_estimate_and_fit_ask_the_same_question(asked):
    run(*ESTIMATE, "--lora", "16", "--precision", "bf16", "--batch", "2", "--budget", "70GiB", "--device", "H200")
    run(
        *FIT[:2],
        "-b",
        "70GiB",
        "--longest-sequence",
        "--techniques",
        "lora=16",
        "--precision",
        "bf16",
        "--device-profile",
        "H200",
    )
    [(target, of_estimate), (same, of_fit)] = asked
    assert target == same == "llama-tiny"
    assert of_estimate["batch"] == 2
    assert of_estimate["precision"] == "bf16"
    assert {name: of_estimate[name] for name in of_fit} == of_fit
    assert of_fit == {
        "device": "H200", "budget": "70GiB", "layout": "", "techniques": "lora=16", "optimizer": "adamw", "precision": "bf16",
    }  # fmt: skip


def test_without_a_device_profile_fit_asks_for_this_machine(asked):
    run("fit", "llama-tiny", "-b", "auto", "--longest-sequence")
    [(_, options)] = asked
    assert options["device"] == "CPU"
    assert options["budget"] < host_memory_bytes()


def test_the_lengths_are_printed_saved_and_shown_as_a_page_with_bars(asked, tmp_path):
    file, page = tmp_path / "lengths.json", tmp_path / "lengths.html"
    printed = run(*ESTIMATE, "-o", str(file))
    as_json = run(*ESTIMATE, "--json")
    report = run("report", str(file), "-o", str(page))
    assert printed.exit_code == as_json.exit_code == report.exit_code == 0, report.stderr
    assert "8,192 or more" in printed.stdout
    assert json.loads(as_json.stdout)["rows"][0]["tokens"] == 4096
    assert of_kind(file, SequenceLengths) == make_lengths()
    assert "longest sequence, tokens" in page.read_text(encoding="utf-8")


def test_the_exit_code_says_that_nothing_fits(asked):
    assert run(*ESTIMATE, "--budget", "1B").exit_code == 3


@pytest.mark.parametrize(
    "words",
    [
        [*ESTIMATE, "--seq", "4k"],
        [*ESTIMATE, "--strategy", "full"],
        [*ESTIMATE, "--export", "megatron"],
        [*ESTIMATE, "--tokens", "10B"],
        [*ESTIMATE, "--launch", "sbatch"],
        [*ESTIMATE, "--plans", "plans"],
        [*ESTIMATE, "--device", "H100,H200"],
        [*ESTIMATE, "--layout", "tp=2"],
        [*ESTIMATE, "--layout", "ranks=8"],
        [*ESTIMATE, "--techniques", "offload=activations"],
        [*FIT, "--seq", "4k"],
        [*FIT, "--global-batch", "8"],
        [*FIT, "--accumulation", "2"],
        [*FIT, "--most-batch", "8"],
        [*FIT, "--solves", "2"],
        [*FIT, "--regions", "model.layers.*"],
        [*FIT, "--save-plan", "plan.json"],
        [*FIT, "--device", "cuda"],
        [*FIT, "--layout", "tp=2"],
        [*FIT, "--techniques", "loss=foo"],
    ],
)
def test_options_without_an_effect_are_refused_before_anything_is_built(words, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = time.process_time()
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert "next" in result.stderr
    assert not asked
    assert time.process_time() - begun < 2
