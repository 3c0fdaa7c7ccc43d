"""What the documentation shows runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
