"""What mkdocs adds to the pages: the reference, made from the code itself, the notebook, and the results, examples and pages
outside of docs/.

mkdocs calls the functions that begin with ``on_`` (its hooks); nothing is fetched, and nothing is written outside the site.
"""

from __future__ import annotations

import inspect
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any, get_args

from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

import plimsoll
import plimsoll.distributed
from plimsoll.artifacts.store import Artifact
from plimsoll.ui.cli.app import app
from plimsoll.ui.cli.commands import EXIT_CODES

ROOT = Path(__file__).parents[2]
BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
"""Files at the root that pages link to."""
FOLDERS = ("benchmarks/results", "benchmarks/stack_setups", "examples")
WORKER = "assets/worker.js"
STYLE = "assets/plimsoll.css"
FETCHED = "https://unpkg.com/iframe-worker/shim"
"""What the theme would fetch for a search from disk; ours stands in its place."""
OUTWARD = re.compile(r"(\]\()((?:\.\./)+)([^)]*\))")
LISTED = {".md": "{}", ".py": "# `{1}`\n\n```python\n{0}\n```\n"}
"""How a file beside docs/ becomes a page."""


def on_files(files: Files, config: Any) -> Files:
    """Add the reference, and what pages link to beside docs/."""
    pages = {
        "reference/python.md": python(),
        "reference/command-line.md": command_line(),
        "reference/files.md": saved_files(),
        "tutorial.md": notebook(ROOT / "examples/tutorial.ipynb"),
    }
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).iterdir()):
            at = path.relative_to(ROOT).as_posix()
            if path.suffix in LISTED:
                pages[page_of(at)] = LISTED[path.suffix].format(path.read_text(encoding="utf-8"), at)
            elif path.suffix in (".png", ".ipynb"):
                files.append(File.generated(config, f"beside/{at}", abs_src_path=str(path)))
    for name in BESIDE:
        text = (ROOT / name).read_text(encoding="utf-8")
        pages[page_of(name)] = text if name.endswith(".md") else f"# {name}\n\n```\n{text}\n```\n"
    files.append(File.generated(config, WORKER, abs_src_path=str(ROOT / "docs/site/worker.js")))
    files.append(File.generated(config, STYLE, abs_src_path=str(ROOT / "docs/site/plimsoll.css")))
    for at, text in pages.items():
        files.append(File.generated(config, at, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the page that stands for the file."""
    here = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri.startswith("beside/"):
        return re.sub(r"\]\((?!#|https?:)([^)#\s]+)", lambda link: "](" + _inward(link[1], here), markdown)

    def led(link: re.Match[str]) -> str:
        target, _, anchor = link[3][:-1].partition("#")
        place = posixpath.normpath(posixpath.join("docs", here, link[2] + target))
        if place.startswith("docs/"):
            return link[0]
        return f"{link[1]}{posixpath.relpath(page_of(place), here or '.')}{'#' + anchor if anchor else ''})"

    return OUTWARD.sub(led, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """No page fetches anything."""
    return output.replace(FETCHED, posixpath.relpath(WORKER, posixpath.dirname(page.url) or "."))


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """Nor does the page for an address that is not there."""
    return output.replace(FETCHED, WORKER) if template_name.endswith(".html") else output


def _inward(target: str, here: str) -> str:
    """A link of a file beside docs/, from the page that stands for it."""
    place = posixpath.normpath(posixpath.join(here.removeprefix("beside").lstrip("/"), target))
    at = place.removeprefix("docs/") if place.startswith("docs/") else page_of(place)
    return posixpath.relpath(at, here)


def page_of(at: str) -> str:
    """Where a file beside docs/ stands on the site."""
    return f"beside/{at}" if at.endswith((".md", ".png", ".ipynb")) else f"beside/{at}.md"


def notebook(path: Path) -> str:
    """The cells of a notebook, with the text that they printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [
            f"```\n{''.join(output['text']).rstrip()}\n```" for output in cell.get("outputs", []) if "text" in output
        ]
    return "\n\n".join(parts) + "\n"


def python() -> str:
    """Every public name, from its docstring."""
    lines = ["# Python", ""]
    for module in (plimsoll, plimsoll.distributed):
        lines += [f"## `{module.__name__}`", "", inspect.cleandoc(module.__doc__ or "").split("\n\n")[0], ""]
        for name in module.__all__:
            home = getattr(module, name).__module__
            if home == "plimsoll.errors":
                continue
            is_saved = home.startswith("plimsoll.artifacts.")
            lines += [f"`{name}` is a [saved file](files.md)." if is_saved else f"::: {home}.{name}", ""]
    for path in sorted((ROOT / "src/plimsoll/integrations").glob("[a-z]*.py")):
        lines += [f"## `plimsoll.integrations.{path.stem}`", "", f"::: plimsoll.integrations.{path.stem}", ""]
    return "\n".join([*lines, "## Errors", "", "::: plimsoll.errors", ""])


def command_line() -> str:
    """The help of every command, and what exit codes mean."""
    lines = ["# Command line", "", "| exit code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    names = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    for name in names:
        lines += ["", f"## {name}", "", "```", _help(name), "```"]
    return "\n".join(lines)


def _help(name: str) -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        return CliRunner().invoke(app, [name, "--help"], prog_name="plimsoll").stdout.rstrip()
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def saved_files() -> str:
    """Every kind of file that is saved, field by field."""
    lines = ["# Saved files", "", "JSON, one object each. `plimsoll` names the kind, `schema_version` its form.", ""]
    for kind in (one for group in get_args(Artifact) for one in (get_args(group) or (group,))):
        lines += [f"## {kind.KIND}", "", f"::: {kind.__module__}.{kind.__name__}", ""]
    return "\n".join(lines)
