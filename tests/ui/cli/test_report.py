"""``plimsoll report``: files in, a page and a timeline out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import plimsoll
from plimsoll.artifacts.store import load_any
from samples import make_comparison, make_plan, make_receipt


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    make_plan().save(tmp_path / "plan.json")
    make_receipt().save(tmp_path / "receipt.json")
    make_comparison().save(tmp_path / "comparison.json")


def test_several_files_of_one_model_make_one_page(run):
    shown = run("report", "plan.json", "receipt.json", "comparison.json", "-o", "page.html").out
    assert "saved to page.html" in shown
    page = Path("page.html").read_text()
    for words in ("Plan: OPTIMAL", "Receipt: VERIFIED", "Comparison: MEASURED"):
        assert words in page


def test_a_place_needs_no_extension_and_an_existing_file_is_replaced(run, tmp_path: Path):
    (tmp_path / "page").write_text("old")
    run("report", "plan.json", "-o", "page")
    assert (tmp_path / "page").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir() if "page" in path.name) == ["page"]


def test_a_timeline_can_be_written_beside_a_page_or_alone(run):
    run("report", "plan.json", "-o", "page.html", "--timeline", "trace.json")
    assert Path("page.html").exists()
    run("report", "plan.json", "receipt.json", "--timeline", "alone.json")
    assert json.loads(Path("alone.json").read_text()) == json.loads(Path("trace.json").read_text())


def test_the_same_page_can_be_made_from_python(run, tmp_path: Path):
    run("report", "plan.json", "receipt.json", "-o", "page.html")
    plimsoll.report([load_any("plan.json"), load_any("receipt.json")], "own.html")
    assert Path("own.html").read_bytes() == Path("page.html").read_bytes()
    plimsoll.report(make_plan(), tmp_path / "single.html")
    assert "Plan: OPTIMAL" in Path("single.html").read_text()


def test_a_report_needs_no_torch(tmp_path: Path):
    script = (
        "import sys; from plimsoll.ui.cli.app import app; "
        "app(['report', 'plan.json', '-o', 'page.html'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=tmp_path)
    assert (tmp_path / "page.html").exists()
