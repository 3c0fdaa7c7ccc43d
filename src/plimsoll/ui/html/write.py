"""Artifacts in, one HTML text out: charts, style and scripts inside, nothing fetched from anywhere.

The page forbids itself the network, and every script but its own two, by a Content-Security-Policy: even a name that slipped
through all escaping could neither load nor run anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from plimsoll.artifacts.store import Artifact, Reportable
from plimsoll.errors import InvalidReport
from plimsoll.ui.html.content import Chart, Element, Fold, Page
from plimsoll.ui.html.identity import common_subject
from plimsoll.ui.html.page import compose_page


def build_html(artifacts: Sequence[Artifact], names: Sequence[str] = ()) -> str:
    """The page as text.

    Args:
        artifacts: one or several about one model and batch.
        names: what to call them in messages, such as their files; by default their kinds.

    Raises:
        PlanMismatch: they are about different models or batches.
        InvalidReport: there are none, or one is not about one step of one model.
    """
    reportable = _reportable(artifacts)
    return render_html(compose_page(reportable, common_subject(reportable, names)))


def _reportable(artifacts: Sequence[Artifact]) -> list[Reportable]:
    found: list[Reportable] = []
    for artifact in artifacts:
        if not isinstance(artifact, Reportable):
            raise InvalidReport(
                f"There is no page for an artifact of kind {artifact.KIND!r}.",
                why="a page is about one step of one model on one device",
                next="`plimsoll show FILE` displays it",
            )
        found.append(artifact)
    return found


def render_html(page: Page) -> str:
    """HTML from content. Everything in it is text: it is escaped here, and nowhere before."""
    environment = Environment(
        loader=PackageLoader("plimsoll.ui.html", "templates"), autoescape=True, undefined=StrictUndefined
    )
    has_charts = any(_charts(element for section in page.sections for element in section.elements))
    library = _library() if has_charts else ""
    script = _source("page.js")
    return environment.get_template("page.html").render(
        page=page,
        policy=_policy((library, script) if has_charts else ()),
        style=Markup(_source("page.css")),
        library=Markup(library),
        script=Markup(script),
    )


def _charts(elements: Iterable[Element]) -> Iterable[Chart]:
    for element in elements:
        if isinstance(element, Chart):
            yield element
        elif isinstance(element, Fold):
            yield from _charts(element.elements)


def _source(name: str) -> str:
    """A file that ships beside the template."""
    return Path(__file__).with_name("templates").joinpath(name).read_text(encoding="utf-8")


def _library() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _policy(scripts: Sequence[str]) -> str:
    """Nothing from anywhere, but for these scripts and what the page itself contains."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    allowed = f"script-src {hashes}; " if hashes else ""
    return f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data: blob:"
