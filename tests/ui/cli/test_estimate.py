"""``plimsoll estimate``: from the words on the command line to the table, the file and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll.artifacts.store import load_plan
from plimsoll.ui.cli.app import app

TINY = ["estimate", "llama-tiny", "--batch", "1", "--seq", "256", "--device", "H100"]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIMSOLL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def test_an_estimate_is_a_verdict_a_table_and_a_file(runner: CliRunner, tmp_path: Path):
    result = runner.invoke(app, [*TINY, "--layout", "dp=2,zero=2", "-o", str(tmp_path / "estimate.json")])
    assert result.exit_code == 0, result.output
    for part in ("fits,", "optimizer state", "CUDA context", "Reserved by the allocator", "tokens/s"):
        assert part in result.stdout, part
    shown = runner.invoke(app, ["show", str(tmp_path / "estimate.json")])
    assert shown.exit_code == 0
    assert "llama-tiny on 2 x H100-SXM" in shown.stdout


def test_what_does_not_fit_ends_with_the_code_of_a_budget_below_the_floor(runner: CliRunner):
    result = runner.invoke(app, [*TINY, "--budget", "1MiB"])
    assert result.exit_code == 3
    assert "does not fit" in result.stdout


def test_plans_of_all_stages_are_saved(runner: CliRunner, tmp_path: Path):
    layout = ["--layout", "pp=2,micro-batches=4", "--optimizer", "none"]
    free = json.loads(runner.invoke(app, [*TINY, *layout, "--json"]).stdout)
    budget = str(int(free["stages"][0]["allocated_bytes"] * 0.8)) + "B"
    result = runner.invoke(app, [*TINY, *layout, "--budget", budget, "--plans", str(tmp_path / "plans")])
    assert result.exit_code == 0, result.output
    plan = load_plan(tmp_path / "plans" / "rank-0-stage-0.json")
    assert plan.in_flight == 2


def test_plans_that_are_not_there_cannot_be_saved(runner: CliRunner, tmp_path: Path):
    result = runner.invoke(app, [*TINY, "--plans", str(tmp_path / "plans")])
    assert result.exit_code == 2
    assert "There are no plans to save." in result.stderr
    assert not (tmp_path / "plans").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--layout", "tp=3"], "attention heads"),
        (["--layout", "pp=9,micro-batches=9"], "4 blocks"),
        (["--device", "H1000"], "try 'H100"),
        (["--optimizer", "adamv"], "adamw"),
        (["--precision", "fp8"], "unsupported"),
        (["--budget", "24G"], "two readings"),
        (["--strategy", "everything"], "everything"),
    ],
)
def test_wrong_words_are_refused_with_what_would_do(runner: CliRunner, words: list[str], part: str):
    result = runner.invoke(app, [*TINY, *words])
    assert result.exit_code == 2, result.output
    assert part in result.stderr
    assert "  why   " in result.stderr
    assert "  next  " in result.stderr


def test_errors_are_json_where_json_was_asked_for(runner: CliRunner):
    result = runner.invoke(app, [*TINY, "--layout", "sp", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"] == "InvalidLayout"
