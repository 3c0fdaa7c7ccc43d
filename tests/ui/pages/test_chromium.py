"""A page in a real browser, off the network: nothing on the console, every chart drawn, readable wide and narrow."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plimsoll.ui.html.page import build_html
from ui.pages.page_samples import HOSTILE, full_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = Path(__file__).with_name("probe.js").read_text(encoding="utf-8")
DARK = "--blink-settings=preferredColorScheme=0"
VIEWS = {"light": (1280, []), "middle": (820, []), "dark and narrow": (500, [DARK])}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")


def browse(path: Path, profile: Path, *options: str, width: int = 1280) -> tuple[str, list[str]]:
    """The DOM of a page after its scripts have run, and what was written to the console."""
    assert CHROMIUM is not None
    flags = (
        "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
        "--hide-scrollbars --enable-logging=stderr --virtual-time-budget=10000"
    )
    own = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", f"--window-size={width},1000"]
    command = [CHROMIUM, *flags.split(), *own, *options, "--dump-dom", path.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def html() -> str:
    return build_html(full_page())


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module", params=VIEWS)
def view(
    request: pytest.FixtureRequest, html: str, profile: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the probe saw in one view of the page."""
    width, options = VIEWS[request.param]
    allowed = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    watched = html.replace("script-src ", f"script-src &#39;sha256-{allowed}&#39; ", 1)
    watched = watched.replace("</body>", f"<script>{PROBE}</script></body>")
    path = tmp_path_factory.mktemp("pages") / "page.html"
    path.write_text(watched, encoding="utf-8")
    dom, console = browse(path, profile, *options, width=width)
    assert console == []
    found = re.search(r'<script type="application/json" id="seen">(.*?)</script>', dom, re.DOTALL)
    assert found, "the probe did not come to its end"
    return {"name": request.param, "width": width, **json.loads(found.group(1))}


def test_the_page_itself_writes_nothing_to_the_console_and_runs_no_foreign_script(
    html: str, profile: Path, tmp_path: Path
):
    path = tmp_path / "page.html"
    path.write_text(html, encoding="utf-8")
    dom, console = browse(path, profile)
    assert console == []
    assert dom.count("<svg ") == 16
    assert dom.count("<script>") == 1
    assert "<img" not in dom


def test_every_chart_is_drawn_once(view: dict[str, Any]):
    charts = view["charts"]
    assert charts["memory-0"]["shapes"] >= 6
    assert charts["map-0"]["cells"] == 48
    assert charts["overhead-0"]["cells"] == 3
    assert charts["norms-0"]["cells"] == 8
    assert all(chart["pictures"] == 1 and 300 < chart["width"] <= view["width"] for chart in charts.values())


def test_nothing_is_fetched_and_nothing_fails(view: dict[str, Any]):
    assert view["resources"] == []
    assert view["errors"] == []


def test_text_can_be_read_on_its_ground(view: dict[str, Any]):
    assert view["isDark"] == view["name"].startswith("dark")
    assert view["lowestTextContrast"] >= 4.5
    for chart in view["charts"].values():
        assert chart["lowestContrast"] >= 4.5
        assert chart["smallestWords"] >= 11


def test_no_word_of_a_chart_is_cut_or_lies_on_another(view: dict[str, Any]):
    assert {name: chart["cutWords"] for name, chart in view["charts"].items() if chart["cutWords"]} == {}
    assert {name: chart["overprinted"] for name, chart in view["charts"].items() if chart["overprinted"]} == {}


def test_the_page_is_no_wider_than_its_window(view: dict[str, Any]):
    assert view["overflow"] <= 0


def test_hostile_names_are_shown_letter_by_letter(view: dict[str, Any]):
    assert HOSTILE[:11] in "".join(view["charts"]["map-0"]["words"])  # as much as an axis has room for
    if view["width"] > 700:
        assert "in blocks.</script><img src=x onerror=alert(2)>.0" in view["hints"]


def test_pulling_the_budget_changes_the_words_and_the_marked_point(view: dict[str, Any]):
    first, last = view["pulled"]
    assert first["words"].startswith("A budget of ")
    assert first["words"] != last["words"]
    assert first["chosen"] != last["chosen"]
