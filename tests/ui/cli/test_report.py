"""``plimsoll report``: files in, a page and a timeline out; what cannot be done is said, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import plimsoll
from plimsoll.artifacts.store import load_any
from plimsoll.ui.cli.app import app
from samples import make_comparison, make_plan, make_receipt


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_plan().save(tmp_path / "plan.json")
    make_receipt().save(tmp_path / "receipt.json")
    make_comparison().save(tmp_path / "comparison.json")
    make_receipt(model="Other", fingerprint="e" * 16).save(tmp_path / "other.json")
    (tmp_path / "foreign.json").write_text('{"some": "thing"}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(runner: CliRunner, files: Path):
    def invoke(*arguments: str) -> Result:
        before = {path.name: path.read_bytes() for path in files.iterdir()}
        result = runner.invoke(app, ["report", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        if result.exit_code:
            assert {path.name: path.read_bytes() for path in files.iterdir()} == before, "something was lost or left"
        return result

    return invoke


def test_several_files_of_one_model_make_one_page(run, files: Path):
    result = run("plan.json", "receipt.json", "comparison.json", "-o", "page.html")
    assert result.exit_code == 0, result.output
    assert "written to page.html" in result.stdout
    page = (files / "page.html").read_text()
    for words in ("Plan: OPTIMAL", "Receipt: VERIFIED", "Comparison: MEASURED"):
        assert words in page


def test_a_place_needs_no_extension_and_an_existing_file_is_replaced(run, files: Path):
    (files / "page").write_text("old")
    assert run("plan.json", "-o", "page").exit_code == 0
    assert (files / "page").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in files.iterdir() if "page" in path.name) == ["page"]


def test_a_timeline_can_be_written_beside_a_page_or_alone(run, files: Path):
    assert run("plan.json", "-o", "page.html", "--timeline", "trace.json").exit_code == 0
    assert (files / "page.html").exists()
    alone = run("plan.json", "receipt.json", "--timeline", "alone.json")
    assert alone.exit_code == 0
    assert json.loads((files / "alone.json").read_text()) == json.loads((files / "trace.json").read_text())


def test_the_same_page_can_be_made_from_python(run, files: Path):
    run("plan.json", "receipt.json", "-o", "page.html")
    plimsoll.report([load_any("plan.json"), load_any("receipt.json")], "own.html")
    assert (files / "own.html").read_bytes() == (files / "page.html").read_bytes()
    plimsoll.report(make_plan(), files / "single.html")
    assert "Plan: OPTIMAL" in (files / "single.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["nowhere.json", "-o", "page.html"], "PlanFileError", "nowhere.json cannot be read"),
        (["foreign.json", "-o", "page.html"], "PlanFileError", "foreign.json is JSON, but no plan"),
        (
            ["plan.json", "other.json", "-o", "page.html"],
            "PlanMismatch",
            "plan.json and other.json are about different",
        ),
        (["plan.json", "-o", "nowhere/page.html"], "PlanFileError", "nowhere/page.html cannot be written"),
        (["plan.json"], "InvalidReport", "neither --output nor --timeline was given"),
        (["plan.json", "-o", "plan.json"], "InvalidReport", "plan.json would be lost"),
        (["plan.json", "--timeline", "./plan.json"], "InvalidReport", "plan.json would be lost"),
        (["plan.json", "-o", "same", "--timeline", "same"], "InvalidReport", "cannot both be same"),
        (["receipt.json", "--timeline", "trace.json"], "InvalidReport", "There is no timeline to write"),
        (["receipt.json", "-o", "page.html", "--timeline", "trace.json"], "InvalidReport", "no timeline"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], error: str, words: str, run):
    result = run(*arguments)
    assert result.exit_code == 2
    assert error in result.stderr
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_both_models_are_shown_where_they_differ(run):
    result = run("plan.json", "other.json", "-o", "page.html")
    assert "TinyModel, fingerprint ffffffffffffffff" in result.stderr
    assert "Other, fingerprint eeeeeeeeeeeeeeee" in result.stderr


def test_a_report_needs_no_torch(files: Path):
    script = (
        "import sys; from plimsoll.ui.cli.app import app; "
        "app(['report', 'plan.json', '-o', 'page.html'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert (files / "page.html").exists()
