"""Makes one HTML page of documents about one model: charts, style and scripts inside, nothing fetched from anywhere.

The page forbids itself the network, and every script but its own two, by a Content-Security-Policy: even a name that slipped
through all escaping could neither load nor run anything.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from plimsoll.artifacts.files import write_whole
from plimsoll.artifacts.store import Artifact, Reportable
from plimsoll.errors import InvalidReport, PlanMismatch
from plimsoll.ui.document import (
    Chart,
    CurvesChart,
    DecisionMap,
    Document,
    Element,
    Fold,
    FrontierChart,
    MemoryChart,
    NamedFigures,
    NormsChart,
    Paragraph,
    PartsChart,
    Section,
    Subject,
)
from plimsoll.ui.html.drawing import Drawing
from plimsoll.ui.html.evidence_charts import draw_curves, draw_norms, draw_parts
from plimsoll.ui.html.frontier_chart import draw_frontier
from plimsoll.ui.html.map_chart import draw_map
from plimsoll.ui.html.memory_chart import draw_memory
from plimsoll.ui.views import view
from plimsoll.units import format_bytes

_DRAW: Mapping[type, Callable[[Any], Drawing]] = {
    MemoryChart: draw_memory,
    DecisionMap: draw_map,
    FrontierChart: draw_frontier,
    CurvesChart: draw_curves,
    NormsChart: draw_norms,
    PartsChart: draw_parts,
}
_MOST_TIMES = 20
"""A page has room for so many times the rows that a terminal shows."""


def report(artifacts: Artifact | Sequence[Artifact], path: str | Path) -> None:
    """Write one HTML page about one model: memory over time, decisions, time against peak, evidence.

    The page needs no network and no server; it weighs about 5 MiB, nearly all of it the drawing library.

    Args:
        artifacts: a plan, receipt, comparison, verdict, finding or advice, or several about one model and batch.
        path: where to; an existing file is replaced, whole or not at all.

    Raises:
        PlanMismatch: the artifacts are about different models or batches.
        InvalidReport: there are no artifacts.
        PlanFileError: the place cannot be written.

    Example:
        >>> plimsoll.report([plan, receipt], "page.html")  # doctest: +SKIP
    """
    several = list(artifacts) if isinstance(artifacts, Sequence) else [artifacts]
    write_whole(build_html(several), path)


def build_html(artifacts: Sequence[Artifact], names: Sequence[str] = ()) -> str:
    """The page as text.

    Args:
        artifacts: one or several about one model and batch.
        names: what to call them in messages, such as their files; by default their kinds.

    Raises:
        PlanMismatch: they are about different models or batches.
        InvalidReport: there are none, or one is not about one step of one model.
    """
    for artifact in artifacts:
        if not isinstance(artifact, Reportable):
            raise InvalidReport(
                f"There is no page for an artifact of kind {artifact.KIND!r}.",
                why="a page is about one step of one model on one device",
                next="`plimsoll show FILE` displays it",
            )
    if not artifacts:
        raise InvalidReport(
            "There is nothing to report.",
            why="no artifact was given",
            next="give a plan, a receipt or a comparison: `plimsoll report plan.json -o page.html`",
        )
    documents = [view(artifact) for artifact in artifacts]
    sources = names or [f"the {artifact.KIND}" for artifact in artifacts]
    for one, other in itertools.combinations(zip(sources, documents, strict=True), 2):
        _refuse_other(one[0], one[1].about, other[0], other[1].about)
    return _render(_Page(documents))


def _refuse_other(source: str, about: Subject, other_source: str, other: Subject) -> None:
    """Both are about the same model and batch, as far as they say."""
    advice = "make one page for each: `plimsoll report FILE -o page.html`"
    if _differ(about.model, other.model) or _differ(about.fingerprint, other.fingerprint):
        raise PlanMismatch(
            f"{source} and {other_source} are about different models.",
            why=f"{source}: {_model(about)}; {other_source}: {_model(other)}",
            next=advice,
        )
    if _differ(about.signature, other.signature):
        raise PlanMismatch(
            f"{source} and {other_source} are about different batches of {about.model}.",
            why=f"{source}: {about.signature}; {other_source}: {other.signature}",
            next=advice,
        )


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)


def _model(about: Subject) -> str:
    mark = f", fingerprint {about.fingerprint}" if about.fingerprint else ""
    return f"{about.model or 'a model without a name'}{mark}"


@dataclass(frozen=True, slots=True)
class _Page:
    """What the template asks for."""

    documents: Sequence[Document]

    @property
    def title(self) -> str:
        return self._first("model") or "A model without a name"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What the page is about."""
        about = [document.about for document in self.documents]
        budgets = [format_bytes(each.budget_bytes) for each in about if each.budget_bytes is not None]
        rows = [
            ("device", ", ".join(dict.fromkeys(each.device for each in about if each.device))),
            ("budget", ", ".join(dict.fromkeys(budgets))),
            ("batch", self._first("signature")),
            ("model's fingerprint", self._first("fingerprint")),
        ]
        return [(name, text) for name, text in rows if text]

    @property
    def sections(self) -> list[Section]:
        """Pictures of all documents, then evidence, then details, then what all have in common."""
        kinds = Counter(document.source for document in self.documents)
        seen: Counter[str] = Counter()
        found = []
        for document in self.documents:
            seen[document.source] += 1
            mark = f", {seen[document.source]} of {kinds[document.source]}" if kinds[document.source] > 1 else ""
            label = f" ({document.about.label})" if mark and document.about.label else ""
            found += [_marked(section, f"{mark}{label}") for section in document.sections]
        ordered = sorted(_with_one_frontier(found), key=lambda section: section.place)
        notes = dict.fromkeys(note for document in self.documents for note in document.notes)
        remarks = [Section("Notes", [Paragraph(note) for note in notes])] if notes else []
        return [*ordered, *remarks, Section("Machine and versions", [NamedFigures(self._origins)])]

    @property
    def _origins(self) -> list[tuple[str, str]]:
        rows: dict[str, str] = {}
        for document in self.documents:
            rows |= document.about.origins
        devices = {f"device of the {d.source.lower()}": d.about.device for d in self.documents if d.about.device}
        return list((rows | devices).items())

    def _first(self, field: str) -> str:
        """What the first document says that says anything of it."""
        return next((text for d in self.documents if (text := getattr(d.about, field))), "")


def _marked(section: Section, mark: str) -> Section:
    """Told apart from others of its kind, but for the one section that all of a page have in common."""
    if any(isinstance(element, FrontierChart) for element in section.elements):
        return section
    return dataclasses.replace(section, title=f"{section.title}{mark}")


def _with_one_frontier(sections: Sequence[Section]) -> Iterator[Section]:
    """The sections, with all that is known of time against memory in one, if that is more than one point."""
    shared = [section for section in sections if any(isinstance(e, FrontierChart) for e in section.elements)]
    yield from (section for section in sections if section not in shared)
    elements = [element for section in shared for element in section.elements]
    charts = [element for element in elements if isinstance(element, FrontierChart)]
    plans = [plan for chart in charts for plan in chart.plans]
    comparisons = [comparison for chart in charts for comparison in chart.comparisons]
    if comparisons or any(len(plan.frontier) > 1 for plan in plans):
        others = [element for element in elements if not isinstance(element, FrontierChart)]
        yield dataclasses.replace(shared[0], elements=[FrontierChart(plans, comparisons), *others])


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A chart where it stands; its name is unique on the page."""

    kind: ClassVar[str] = "chart"
    name: str
    drawing: Drawing


def _render(page: _Page) -> str:
    """Everything on a page is text: it is escaped by the template, and nowhere before."""
    names: Counter[str] = Counter()
    sections = [(section.title, list(_drawn(section.elements, names))) for section in page.sections]
    library, script = (_library(), _source("page.js")) if names else ("", "")
    environment = Environment(
        loader=PackageLoader("plimsoll.ui.html", "templates"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        page=page,
        sections=sections,
        most_times=_MOST_TIMES,
        policy=_policy((library, script) if names else ()),
        style=Markup(_source("page.css")),
        library=Markup(library),
        script=Markup(script),
    )


def _drawn(elements: Iterable[Element], names: Counter[str]) -> Iterator[object]:
    """The elements with their charts drawn."""
    for element in elements:
        if isinstance(element, Chart):
            yield _Drawn(f"{element.name}-{names[element.name]}", _DRAW[type(element)](element))
            names[element.name] += 1
        elif isinstance(element, Fold):
            yield {"kind": element.kind, "title": element.title, "elements": list(_drawn(element.elements, names))}
        else:
            yield element


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
