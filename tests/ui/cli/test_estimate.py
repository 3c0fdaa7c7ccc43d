"""``plimsoll estimate``: from the words on the command line to the table, the file and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.artifacts.store import load_plan

TINY = ["estimate", "llama-tiny", "--batch", "1", "--seq", "256", "--device", "H100"]


def test_an_estimate_is_a_verdict_a_table_and_a_file(run):
    shown = run(*TINY, "--layout", "dp=2,zero=2", "-o", "estimate.json").out
    for part in ("fits,", "optimizer state", "CUDA context", "Reserved by the allocator", "tokens/s"):
        assert part in shown, part
    assert "llama-tiny on 2 x H100-SXM" in run("show", "estimate.json").out


def test_what_does_not_fit_ends_with_the_code_of_a_budget_below_the_floor(run):
    assert "does not fit" in run(*TINY, "--budget", "1MiB", code=3).out


def test_a_headline_in_a_pipe_is_one_line(run):
    shown = run(*TINY, "--budget", "300MiB", "--layout", "dp=2,zero=2").out
    assert "of a budget of 300.0 MiB" in shown.partition("\n")[0]


def test_plans_of_all_stages_are_saved(run):
    layout = ["--layout", "pp=2,micro-batches=4", "--optimizer", "none"]
    free = run(*TINY, *layout, "--json").json
    budget = str(int(free["stages"][0]["allocated_bytes"] * 0.8)) + "B"
    run(*TINY, *layout, "--budget", budget, "--plans", "plans")
    assert load_plan("plans/rank-0-stage-0.json").in_flight == 2


def test_switches_of_a_framework_are_shown_as_they_are_written_down(run):
    shown = run(*TINY, "--budget", "60MiB", "--optimizer", "none", "--export", "megatron", "-o", "estimate.json").out
    for part in ("Switches of megatron", "recompute_granularity = ", "full, "):
        assert part in shown, part
        assert part in run("show", "estimate.json").out


def test_a_run_is_set_beside_and_the_device_saved_as_it_measured_it(run):
    Path("run.json").write_text('{"step_seconds": 0.003, "reserved": "300MiB"}')
    shown = run(*TINY, "--compare-with", "run.json", "--save-device", "mine.json").out
    assert "Compared with run.json" in shown
    assert "peak reserved" in shown
    assert (
        "device figures: NVIDIA"
        in run("estimate", "llama-tiny", "--batch", "1", "--seq", "256", "--device", "mine.json").out
    )


def test_a_device_is_not_corrected_by_nothing(run):
    assert "--save-device was given without --compare-with" in run(*TINY, "--save-device", "mine.json", code=2).err


def test_three_figures_stand_for_any_gpu(run):
    sizes = ["estimate", "llama-tiny", "--batch", "1", "--seq", "256"]
    card = ["--device-memory", "12GiB", "--device-flops", "58", "--device-bandwidth", "504"]
    shown = run(*sizes, *card).out
    assert "of 12.0 GiB" in shown
    assert "the rest is assumed" in shown
    assert "CUDA context" in shown
    assert "--device-bandwidth: missing" in run(*sizes, *card[:4], code=2).err
    assert "were both given" in run(*TINY, *card, code=2).err


@pytest.mark.long
def test_fit_takes_precision_strategy_and_every_optimizer_of_an_estimate(run):
    sizes = ["fit", "llama-tiny", "--budget", "auto", "--device-profile", "RTX-4070", "--global-batch", "2"]
    how = ["--seq", "64", "--precision", "bf16-mixed", "--strategy", "full", "--optimizer", "lion"]
    shown = run(*sizes, *how).out
    for part in ("on RTX-4070: fits", "bf16-mixed", "lion", "strategy full"):
        assert part in shown, part
    assert "--longest-sequence" in run(*sizes, *how, "--longest-sequence", code=2).err
