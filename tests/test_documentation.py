"""What the documentation shows runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import pytest
import typer.main
from typer.testing import CliRunner

import plimsoll.distributed
import snippets
from long_cases import all_but
from plimsoll.artifacts.store import Artifact
from plimsoll.tracing.torch_internals import TRIED
from plimsoll.ui.cli.app import app
from plimsoll.ui.cli.commands import EXIT_CODES

ROOT = Path(__file__).parent.parent
PAGES = list(snippets.PAGES.values())
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


QUICK = [page for page in snippets.PAGES if snippets.snippets_of(page) and page not in snippets.SLOW]


@pytest.mark.parametrize("page", all_but(QUICK, "README.md"))
def test_the_python_of_a_page_runs_as_it_stands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if page in snippets.NOT_HERE:
        pytest.skip(snippets.NOT_HERE[page])
    for module in ("transformers", "lightning", "trl", "accelerate", "jax", "keras", "tensorflow"):
        if module == "transformers" or module in page:
            pytest.importorskip(module, reason=f"{module} is an extra, and is not installed")
    monkeypatch.chdir(tmp_path)
    snippets.run_snippets(page)
    if page == "README.md":
        assert "RECOMPUTE" in capsys.readouterr().out  # its budget drops something


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = {target for target, _ in LINK.findall(text) if "://" not in target and not target.startswith("mailto:")}
    assert {target for target in targets if not (page.parent / target).exists()} == set()


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    listed = {target for target, _ in LINK.findall(index)}
    assert {page for page in pages - listed - {"README.md"} if not page.startswith("project/design/")} == set()


def test_what_a_release_names_is_one_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert newest is not None
    assert cited[1] == newest[1] == plimsoll.__version__


def test_pages_name_the_oldest_versions_that_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = " ".join([*project["dependencies"], *project["optional-dependencies"]["hf"]])
    oldest = {name: re.search(rf"\b{name}>=([\d.]+)", asked).group(1) for name in ("torch", "transformers")}
    readme, start = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/start.md"))
    assert f"PyTorch {oldest['torch']} or newer" in readme
    assert f"transformers {oldest['transformers']} or newer" in readme
    assert f"PyTorch ({oldest['torch']} or newer)" in start


def test_the_page_of_versions_has_those_that_the_code_takes_for_tried():
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8").partition("## Frameworks")[0]
    rows = re.findall(r"^\| (\d+\.\d+)[^|]*\|([^|]*)\|", page, re.MULTILINE)
    tried = [f"{major}.{minor}" for major, minor in reversed(TRIED)]
    assert [version for version, how in rows if not how.startswith((" not", " parts"))] == tried
    assert f"newer than {tried[0]}**" in page


BY_PAGE = {page: lines for page in [*snippets.PAGES, snippets.HELP] if (lines := snippets.commands_of(page))}
COMMANDS = sorted({line for lines in BY_PAGE.values() for line in lines})


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_on_a_page_is_one_that_plimsoll_takes(line: str):
    name, *typed = shlex.split(line.partition("plimsoll ")[2], comments=True)
    found = typer.main.get_command(app).commands[name]
    found.make_context(f"plimsoll {name}", typed)  # raises where an option is unknown or means nothing


Written = dict[str, bytes]


@pytest.fixture(scope="module")
def ran() -> dict[str, Written]:
    """What the commands that ran have written: one that stands on several pages, or elsewhere with more options, runs once."""
    return {}


def is_quick(line: str) -> bool:
    return not any(words in line for words in snippets.LATER)


def written(folder: Path) -> Written:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page, lines in BY_PAGE.items() if any(map(is_quick, lines))])
def test_the_commands_of_a_page_run_one_after_the_other_as_they_stand(
    page: str, ran: dict[str, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("transformers", reason="llama-tiny needs it")
    snippets.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLIMSOLL_CACHE_DIR", str(tmp_path / "cache"))
    for line in filter(is_quick, [*snippets.BEFORE.get(page, []), *BY_PAGE[page]]):
        done = next((other for other in ran if f"{other} ".startswith(f"{line} ")), None)
        if done is None:
            before = written(tmp_path)
            _, *words = shlex.split(line, comments=True)
            monkeypatch.setattr(sys, "argv", ["plimsoll", *words])
            with snippets.a_large_machine():
                result = CliRunner().invoke(app, words, prog_name="plimsoll")
            assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
            ran[line] = {name: content for name, content in written(tmp_path).items() if before.get(name) != content}
        for name, content in ran[done or line].items():
            (tmp_path / name).write_bytes(content)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my", "my_project")]:
        del sys.modules[name]


def test_every_reason_to_run_a_command_later_is_about_a_command():
    assert [words for words in snippets.LATER if not any(words in line for line in COMMANDS)] == []


@pytest.mark.long
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
    assert dead_links(tmp_path / "site") == set()
    assert undocumented(tmp_path / "site/reference") == []


def dead_links(site: Path) -> set[tuple[str, str]]:
    """Links of the site to pages, pictures and places on a page that are not there."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    places = {
        page: {html.unescape(name) for name in re.findall(r'\bid="([^"]+)"', text)} for page, text in pages.items()
    }
    dead = set()
    for page, text in pages.items():
        for link in map(html.unescape, re.findall(r'(?:href|src)="([^"]*)"', text)):
            target, _, anchor = link.partition("#")
            at = Path(os.path.normpath(page.parent / unquote(target))) if target else page
            is_here = not re.match(r"[a-z]+:", link) and page.name != "404.html"  # that page knows no place of its own
            if is_here and (not at.exists() or (anchor and at in places and unquote(anchor) not in places[at])):
                dead.add((str(page.relative_to(site)), link))
    return dead


def undocumented(reference: Path) -> list[str]:
    """Public names, commands, options, exit codes and kinds of files that the reference leaves out."""
    shown = {page.stem: html.unescape(page.read_text(encoding="utf-8")) for page in reference.glob("*.html")}
    names = [*plimsoll.__all__, *plimsoll.distributed.__all__]
    missing = [name for name in names if f">{name}<" not in shown["python"] and f'.{name}"' not in shown["python"]]
    for name, command in typer.main.get_command(app).commands.items():
        text = re.sub(
            r"<[^>]*>", "", shown["command-line"].partition(f"Usage: plimsoll {name} ")[2].partition("Usage: ")[0]
        )
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        missing += [f"{name} {option}" for option in sorted(options) if option not in text]
    missing += [f"exit code {code}" for code in EXIT_CODES if f"<td>{code}</td>" not in shown["command-line"]]
    kinds = [kind for group in get_args(Artifact) for kind in get_args(group) or (group,)]
    return missing + [kind.KIND for kind in kinds if f'id="{kind.KIND}"' not in shown["files"]]
