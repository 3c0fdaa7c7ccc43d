"""What the documentation shows runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import plimsoll.distributed
from plimsoll.ui.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def test_the_first_snippet_of_the_readme_runs_as_pasted(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    [snippet, *_] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "RECOMPUTE" in shown  # its budget drops something


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = {target for target, _ in LINK.findall(text) if "://" not in target and not target.startswith("mailto:")}
    assert {target for target in targets if not (page.parent / target).exists()} == set()


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    listed = {target for target, _ in LINK.findall(index)}
    assert {page for page in pages - listed - {"README.md"} if not page.startswith("design/")} == set()


def commands() -> list[str]:
    """Every command that a page shows, one line each."""
    blocks = [block for page in PAGES for block in FENCED.findall(page.read_text(encoding="utf-8"))]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line.startswith("plimsoll ") and "…" not in line})


@pytest.mark.parametrize("line", commands())
def test_a_command_on_a_page_is_one_that_plimsoll_takes(line: str):
    name, *typed = shlex.split(line, comments=True)[1:]
    found = typer.main.get_command(app).commands[name]
    found.make_context(f"plimsoll {name}", typed)  # raises where an option is unknown or means nothing


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path):
    pytest.importorskip("mkdocstrings")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(
        build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "site").rglob("*.html")]
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]*src=\"https?:|<link[^>]*rel=\"(?:stylesheet|preload)\"[^>]*href=\"https?:"
    )
    assert [page[:80] for page in pages if fetched.search(page)] == []
    reference = (tmp_path / "site/reference/python.html").read_text(encoding="utf-8")
    names = [*plimsoll.__all__, *plimsoll.distributed.__all__]
    assert [name for name in names if f">{name}<" not in reference and f'.{name}"' not in reference] == []
