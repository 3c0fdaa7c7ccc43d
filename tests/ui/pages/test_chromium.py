"""A page in a real browser, off the network: nothing on the console, every chart drawn, readable wide and narrow."""

from __future__ import annotations

import base64
import hashlib
import html as html_text
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plimsoll.ui.html.page import build_html
from ui.pages.page_samples import HOSTILE, full_page, make_full_comparison, make_full_plan, make_full_receipt
from ui.view_samples import make_estimate

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = Path(__file__).with_name("probe.js").read_text(encoding="utf-8")
DARK = "--blink-settings=preferredColorScheme=0"
WIDTHS = {"wide": 1400, "middle": 820, "narrow": 390, "paper": 700}
LOOKS = ("light", "dark", "without a script")
PAGES = {"everything": full_page, "an estimate": lambda: [make_estimate()]}
FRAME = '<iframe width="{width}" height="1000" srcdoc="{page}"></iframe>'
"""A window cannot be as narrow as a telephone, a frame in it can; media queries ask for the frame's width."""
COLLECT = """<script>addEventListener("load", () => {
const frames = [...document.querySelectorAll("iframe")].map((frame) => frame.contentDocument.querySelector("#seen"));
document.body.append(...frames.map((seen) => document.importNode(seen, true)));
});</script>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")


def run_browser(path: Path, profile: Path, *options: str, width: int = 1280) -> subprocess.CompletedProcess[str]:
    """Open a page without a network, and do with it what the options say."""
    assert CHROMIUM is not None
    flags = (
        "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
        "--hide-scrollbars --enable-logging=stderr --virtual-time-budget=10000"
    )
    own = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", f"--window-size={width},1000"]
    command = [CHROMIUM, *flags.split(), *own, *options, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


def browse(path: Path, profile: Path, *options: str, width: int = 1280) -> tuple[str, list[str]]:
    """The DOM of a page after its scripts have run, and what was written to the console."""
    result = run_browser(path, profile, *options, "--dump-dom", width=width)
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def html() -> str:
    return build_html(full_page())


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


def watched(page: str, look: str, window: str) -> str:
    """A page in a frame that looks at itself."""
    shown = build_html(PAGES[page]())
    if look == "without a script":
        shown = re.sub(r"<script>.*</script>", "", shown, flags=re.DOTALL)
    if window == "paper":
        shown = shown.replace("@media print", "@media all")
    allowed = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    shown = shown.replace("script-src ", f"script-src &#39;sha256-{allowed}&#39; ", 1)
    shown = shown.replace("</body>", f"<script>{PROBE}</script></body>")
    return FRAME.format(width=WIDTHS[window], page=html_text.escape(shown))


@pytest.fixture(scope="module", params=LOOKS)
def views(request: pytest.FixtureRequest, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What the probe saw of every page at every width in one look: one browser for all of them."""
    look, path = request.param, tmp_path_factory.mktemp("pages") / "page.html"
    shown = list(itertools.product(PAGES, WIDTHS))
    frames = [watched(page, look, window) for page, window in shown]
    path.write_text("<!doctype html>" + COLLECT + "".join(frames), encoding="utf-8")
    dom, console = browse(path, profile, *([DARK] if look == "dark" else []), width=1500)
    assert console == []
    found = re.findall(r'<script type="application/json" id="seen">(.*?)</script>', dom, re.DOTALL)
    assert len(found) == len(shown), "a probe did not come to its end"
    about = [{"page": page, "window": window, "look": look, "width": WIDTHS[window]} for page, window in shown]
    return {named: names | json.loads(seen) for named, names, seen in zip(shown, about, found, strict=True)}


@pytest.fixture(params=itertools.product(PAGES, WIDTHS), ids=" ".join)
def view(request: pytest.FixtureRequest, views: dict[Any, Any]) -> dict[str, Any]:
    """What the probe saw of one page."""
    return views[request.param]


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


def test_a_plan_a_receipt_and_a_comparison_print_on_three_pages(profile: Path, tmp_path: Path):
    path, printed = tmp_path / "page.html", tmp_path / "page.pdf"
    path.write_text(build_html([make_full_plan(), make_full_receipt(), make_full_comparison()]), encoding="utf-8")
    run_browser(path, profile, "--no-pdf-header-footer", f"--print-to-pdf={printed}")
    assert len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) <= 3


def test_every_chart_is_drawn_once(view: dict[str, Any]):
    charts = view["charts"]
    if view["page"] == "everything":
        assert charts["memory-0"]["shapes"] >= 6
        assert {"map": 48, "overhead": 3, "norms": 8}.items() <= {n[:-2]: c["cells"] for n, c in charts.items()}.items()
    else:
        assert [charts[f"bytes-{number}"]["cells"] for number in range(3)] == [2, 4, 2]
    drawn = [chart for chart in charts.values() if not chart["isFolded"]]
    assert all(chart["pictures"] == 1 and 290 < chart["width"] <= view["width"] for chart in drawn)


def test_nothing_is_fetched_and_nothing_fails(view: dict[str, Any]):
    assert view["resources"] == []
    assert view["errors"] == []


def test_text_can_be_read_on_its_ground(view: dict[str, Any]):
    assert view["isDark"] == (view["look"] == "dark" and view["window"] != "paper")
    assert view["lowestTextContrast"] >= 4.5
    for chart in view["charts"].values():
        if not chart["isFolded"]:
            assert chart["lowestContrast"] >= 4.5
            assert chart["smallestWords"] >= (6.7 if view["window"] == "paper" else 11)  # 6.7 px are 5 pt


def test_no_word_is_cut_or_lies_on_another(view: dict[str, Any]):
    shown = {name: chart for name, chart in view["charts"].items() if not chart["isFolded"]}
    assert {name: chart["cutWords"] for name, chart in shown.items() if chart["cutWords"]} == {}
    assert {name: chart["overprinted"] for name, chart in shown.items() if chart["overprinted"]} == {}
    assert view["lines"] > 20
    assert view["overlaps"] == []


def test_the_page_is_no_wider_than_its_window(view: dict[str, Any]):
    assert view["overflow"] <= 0
    assert view["beyond"] == []


def test_hostile_names_are_shown_letter_by_letter(view: dict[str, Any]):
    if view["page"] == "everything":
        assert HOSTILE[:11] in "".join(view["charts"]["map-0"]["words"])  # as much as an axis has room for
        if view["width"] > 640:
            assert "in blocks.</script><img src=x onerror=alert(2)>.0" in view["hints"]


def test_pulling_the_budget_changes_the_words_and_the_marked_point(view: dict[str, Any]):
    has_slider = view["page"] == "everything" and view["look"] != "without a script" and view["window"] != "paper"
    assert view["isPulled"] == has_slider
    if has_slider:
        first, last = view["pulled"]
        assert first["words"].startswith(f"A budget of {first['value']}: ")
        assert first["words"] != last["words"]
        assert first["chosen"] != last["chosen"]
