"""Makes one self-contained HTML page from documents (the contents of saved results) about one model. Charts, style and a script
are inside the page.

A Content-Security-Policy in the page blocks the network, and all scripts except the page's own. So even a name that was not
escaped could not load or run anything.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.files import write_whole
from plimsoll.artifacts.lengths import SequenceLengths
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt, ReceiptVerdict
from plimsoll.artifacts.store import Artifact, Reportable
from plimsoll.errors import InvalidReport, PlanMismatch
from plimsoll.ui.document import (
    BytesChart,
    Chart,
    CurvesChart,
    DecisionMap,
    Document,
    Element,
    Fold,
    FrontierChart,
    LengthsChart,
    MemoryChart,
    NamedFigures,
    NormsChart,
    Paragraph,
    PartsChart,
    Place,
    Section,
    Subject,
    Tone,
    format_budget,
    name_budget,
)
from plimsoll.ui.html.drawing import Drawing
from plimsoll.ui.html.evidence_charts import draw_bytes, draw_curves, draw_lengths, draw_norms, draw_parts
from plimsoll.ui.html.frontier_chart import draw_frontier
from plimsoll.ui.html.map_chart import draw_map
from plimsoll.ui.html.memory_chart import draw_memory
from plimsoll.ui.html.svg import draw_svg, legend
from plimsoll.ui.views import view
from plimsoll.ui.views.estimate import ESTIMATE_SOURCE, format_count, name_hours
from plimsoll.units import format_bytes, format_more, format_seconds

_DRAW: Mapping[type, Callable[[Any], Drawing]] = {
    MemoryChart: draw_memory,
    DecisionMap: draw_map,
    FrontierChart: draw_frontier,
    CurvesChart: draw_curves,
    NormsChart: draw_norms,
    PartsChart: draw_parts,
    BytesChart: draw_bytes,
    LengthsChart: draw_lengths,
}
_MOST_TIMES = 20
"""A factor. A page shows up to this many times as many rows of a table as a terminal shows."""
_COLUMNS = {
    "regions": "calls of the model's blocks that have the same decisions",
    "held until backward": "bytes that stay on the device from forward to backward",
    "replay": "seconds that backward spends on recomputing operations",
    "held as": "the codec or the link of a compressed or offloaded value",
    "held bytes": "bytes of a compressed or offloaded value that stay on the device",
    "seconds a step": "time to recompute, decode or transfer the value in each step",
    "why": "the reason, compared with the price of memory",
    "engine": "how the region ran: recipe recomputes single operations, keep holds everything",
    "step time ×": "as a multiple of the unmanaged step",
    "extra time": "as a share of the unmanaged step",
    "largest change": "the largest group of values that this row drops or packs and the row above does not",
    "kurtosis": "how heavy the tails of the norm's distribution are",
    "spikes": "steps with a norm far above the median",
    "shift": "mean change of the norm, compared with the baseline",
    "cosine": "cosine of the angle between the two gradients",
    "gain": "length of the plan's gradient along the baseline's, as a share of the baseline's length",
    "basis": "origin of the figure: exact (counted), modelled, or assumed from measurements of others",
    "in flight": "micro-batches whose forward has run and whose backward has not",
    "all recomputed": "live tensors if everything were recomputed",
    "per micro-batch": "time of forward, backward and recomputation of one micro-batch",
    "bubble": "share of the step in which the rank is idle",
    "busy": "time in which the device worked",
    "of peak": "share of the device's peak bandwidth",
    "freed per ms": "bytes freed per millisecond of recomputation",
    "grad. error": "relative error of the gradient",
}
"""Explanations of the table columns whose name is not clear by itself, by the column's name."""


def report(artifacts: Artifact | Sequence[Artifact], path: str | Path) -> None:
    """Write one HTML page about one model: memory over time, decisions, time against peak, evidence.

    The page works without a network, a server or scripts: charts are pictures inside the page. Its size is some hundred KiB.

    Args:
        artifacts: a plan, receipt, comparison, verdict, finding or advice, or several of these about one model and batch. Or
            one or several estimates and longest sequences.
        path: the file to write. An existing file is replaced as a whole, or left unchanged after an error.

    Raises:
        PlanMismatch: the artifacts are about different models or batches.
        InvalidReport: no artifact was given, or estimates are mixed with other artifacts, or an artifact is not about one step
            of one model.
        PlanFileError: the file cannot be written.

    Example:
        >>> plimsoll.report([plan, receipt], "page.html")  # doctest: +SKIP
    """
    several: Sequence[Any] = artifacts if isinstance(artifacts, list | tuple) else [artifacts]
    write_whole(build_html(several), path)


def build_html(artifacts: Sequence[Artifact], names: Sequence[str] = ()) -> str:
    """Make the page and return it as HTML text.

    Args:
        artifacts: one or several artifacts about one model and batch.
        names: the artifacts' names in error messages, such as their files; by default their kinds.

    Raises:
        PlanMismatch: the artifacts are about different models or batches.
        InvalidReport: no artifact was given, or estimates are mixed with other artifacts, or an artifact is not about one step
            of one model.
    """
    for artifact in artifacts:
        if isinstance(artifact, str | Path):
            raise InvalidReport(
                f"{str(artifact)!r} is the name of a file, but report needs what the file holds.",
                why="report shows artifacts, such as the plan that plimsoll.plan returned",
                next=f'pass plimsoll.load("{artifact}") for a saved plan; for files of any kind run '
                f"`plimsoll report {artifact} -o page.html`",
            )
        if not isinstance(artifact, Reportable):
            raise InvalidReport(
                f"No page can be made from {getattr(artifact, 'KIND', f'an object of type {type(artifact).__name__}')!r}.",
                why="a page shows one step of one model on one device",
                next="run `plimsoll show FILE` to print it instead",
            )
    if not artifacts:
        raise InvalidReport(
            "There is nothing to report.",
            why="the list of artifacts is empty",
            next="give a plan, a receipt or a comparison: `plimsoll report plan.json -o page.html`",
        )
    estimates = [artifact for artifact in artifacts if isinstance(artifact, Estimate | SequenceLengths)]
    if 0 < len(estimates) < len(artifacts):
        raise InvalidReport(
            "An estimate cannot share a page with other artifacts.",
            why="an estimate is about ranks that are not present, and the other files are about a step on this machine",
            next="make two pages: one for the estimates, and one for the other files",
        )
    documents = [view(artifact) for artifact in artifacts]
    sources = names or [f"the {artifact.KIND}" for artifact in artifacts]
    for one, other in itertools.combinations(zip(sources, documents, strict=True), 2):
        _refuse_other(one[0], one[1].about, other[0], other[1].about)
    return _render(_Page(_set_apart(artifacts, documents), _numbers(artifacts, documents)))


def _is_about(receipt: Receipt, plan: Plan) -> bool:
    """Return whether the receipt (the evidence for one plan) seems to belong to this plan. It does if strategy, budget and
    predicted peak are equal in both.
    """
    same = receipt.strategy == plan.strategy and receipt.budget_bytes == plan.budget_bytes
    return same and receipt.predicted_peak_bytes in (None, plan.predicted_peak_bytes)


def _set_apart(artifacts: Sequence[Artifact], documents: Sequence[Document]) -> list[Document]:
    """Find receipts (evidence for one plan) whose plan is not on the page, move their documents to the end, and return all
    documents.

    A moved document gets a neutral colour and the name of its plan.
    """
    plans = [artifact for artifact in artifacts if isinstance(artifact, Plan)]
    own: list[Document] = []
    others: list[Document] = []
    for artifact, document in zip(artifacts, documents, strict=True):
        if not plans or not isinstance(artifact, Receipt) or any(_is_about(artifact, plan) for plan in plans):
            own.append(document)
            continue
        mark = f" of another plan ({artifact.strategy}, {name_budget(artifact.budget_bytes)})"
        moved = [dataclasses.replace(part, title=part.title + mark, place=Place.DETAIL) for part in document.sections]
        source = f"{document.source}{mark}"
        # The page's facts list all budgets of its documents, and this one belongs to a plan that is not on the page.
        about = dataclasses.replace(document.about, budget_bytes=None)
        others.append(dataclasses.replace(document, source=source, about=about, tone=Tone.NEUTRAL, sections=moved))
    return [*own, *others]


def _numbers(artifacts: Sequence[Artifact], documents: Sequence[Document]) -> list[tuple[str, str, str]]:
    """Return the figures at the top of a page about a plan or an estimate, each as name, figure, and source of the figure.

    The list is empty if the page is about neither.
    """
    estimates = [artifact for artifact in artifacts if isinstance(artifact, Estimate)]
    if len(estimates) > 1:
        return list(map(_card_of_device, estimates))
    if isinstance(artifacts[0], Estimate):
        return _numbers_of_estimate(artifacts[0])
    plan = next((artifact for artifact in artifacts if isinstance(artifact, Plan)), None)
    if plan is None:
        return []
    about = [(a, d) for a, d in zip(artifacts, documents, strict=True) if isinstance(a, Receipt) and _is_about(a, plan)]
    receipt, words = about[0] if about else (None, None)
    peak, before, cost, is_measured = (
        plan.predicted_peak_bytes,
        plan.baseline_peak_bytes,
        plan.predicted_overhead,
        False,
    )
    if receipt is not None and receipt.measured_peak_bytes and receipt.measured_baseline_peak_bytes:
        peak, before, is_measured = receipt.measured_peak_bytes, receipt.measured_baseline_peak_bytes, True
    source = "predicted"
    if receipt is not None and receipt.measured_seconds and receipt.measured_baseline_seconds:
        before_seconds = receipt.measured_baseline_seconds
        cost = receipt.measured_seconds / before_seconds - 1
        spread = math.hypot(receipt.measured_spread_seconds, receipt.measured_baseline_spread_seconds) / before_seconds
        source = f"measured, ± {spread:.1%}; {format_more(plan.predicted_overhead)} predicted"
    exact = ""
    if receipt is not None and receipt.is_bit_equal and receipt.tile_rounding is None:
        exact = "" if receipt.verdict is ReceiptVerdict.GRADIENTS_DIFFER else "equal bit for bit"
    gradients = "not verified" if words is None else exact or str(words.word).replace("_", " ").lower()
    return [
        ("peak", f"{format_bytes(before)} → {format_bytes(peak)}", "measured" if is_measured else "predicted"),
        ("cost", f"{format_more(cost)} time", source),
        ("gradients", gradients, "from the receipt" if words else "run plimsoll verify to compare them"),
        ("budget", format_budget(plan.budget_bytes), f"plan {plan.strategy}, {plan.status}"),
    ]


_FITS = {True: "fits", False: "does not fit", None: "may or may not fit, given the error bars"}


def _card_of_device(estimate: Estimate) -> tuple[str, str, str]:
    """Return the card of one estimate on a page that compares several devices: device, verdict, memory, speed and price."""
    stage, speed = estimate.tightest, estimate.throughput
    room = "" if estimate.device_bytes is None else f" of {format_bytes(estimate.device_bytes)}"
    parts = [f"{format_bytes(stage.total_bytes)} ± {format_bytes(stage.error_bytes)}{room}"]
    parts += [f"{speed.tokens_per_second:,.0f} tokens/s"] if speed.tokens_per_second else []
    parts += [] if estimate.price is None else [f"price {estimate.price:,.0f}"]
    ranks = f"{estimate.layout.ranks:,} × " if estimate.layout.ranks > 1 else ""
    return f"{ranks}{estimate.device}", _FITS[estimate.does_fit], ", ".join(parts)


def _numbers_of_estimate(estimate: Estimate) -> list[tuple[str, str, str]]:
    stage, speed = estimate.tightest, estimate.throughput
    room = "an unknown device" if estimate.device_bytes is None else format_bytes(estimate.device_bytes)
    fits = _FITS[estimate.does_fit]
    return [
        *_price_of_run(estimate),
        (
            "tightest rank",
            f"{format_bytes(stage.total_bytes)} ± {format_bytes(stage.error_bytes)}",
            f"of {room}: {fits}",
        ),
        ("live tensors", format_bytes(stage.allocated_bytes), f"at the peak, {stage.peak.moment}"),
        ("step", format_seconds(speed.step_seconds), f"± {speed.relative_error:.0%}, {speed.basis.value}"),
        ("ranks", f"{estimate.layout.ranks:,}", str(estimate.layout)),
    ]


def _price_of_run(estimate: Estimate) -> list[tuple[str, str, str]]:
    """Return the card with the price of the whole run, or with its hours if no price was given."""
    if estimate.device_hours is None or estimate.run_tokens is None:
        return []
    hours = f"{estimate.device_hours:,.0f} {name_hours(estimate)}"
    run = f"for {format_count(estimate.run_tokens)} tokens, ± {estimate.throughput.relative_error:.0%}"
    which = "if it fitted" if estimate.does_fit is False else "of the run"
    if estimate.price is None:
        return [(f"time {which}", hours, run)]
    return [(f"price {which}", f"{estimate.price:,.0f}", f"{hours} at {estimate.hourly_price:,.2f}, {run}")]


def _refuse_other(source: str, about: Subject, other_source: str, other: Subject) -> None:
    """Raise an error if two documents name different models or batches. ``source`` and ``other_source`` name the documents in
    the error.
    """
    advice = "make a separate page for each: `plimsoll report FILE -o page.html`"
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
    """Data for the page's template: the documents, and the figures at the top."""

    documents: Sequence[Document]
    numbers: Sequence[tuple[str, str, str]]

    @property
    def title(self) -> str:
        return self._first("model") or "A model without a name"

    @property
    def verdicts(self) -> list[tuple[Tone, str, str]]:
        """The verdicts of estimates, which begin the page: for each its colour, its subject and its words."""
        return [
            (document.tone, f"{document.about.device}, {document.about.label}", document.word)
            for document in self.documents
            if document.source == ESTIMATE_SOURCE
        ]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The device, budget, batch and fingerprint (a digest of the model's structure) that the page is about, as pairs of
        name and text.
        """
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
        """The sections of all documents in order: pictures, evidence, details, notes, and at last versions."""
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
        """Return a field of the subject from the first document that fills the field, or an empty text."""
        return next((text for d in self.documents if (text := getattr(d.about, field))), "")


def _marked(section: Section, mark: str) -> Section:
    """Add a mark to a section's title, so that a reader can tell apart documents of one kind.

    The section with the frontier chart gets no mark, because all documents share it.
    """
    if any(isinstance(element, FrontierChart) for element in section.elements):
        return section
    return dataclasses.replace(section, title=f"{section.title}{mark}")


def _with_one_frontier(sections: Sequence[Section]) -> Iterator[Section]:
    """Yield the sections of a page, with all frontier charts (step time against peak memory) merged into one section.

    That section is left out if its chart would show only one point.
    """
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
    """Data for the template: a drawn chart, with a name that is unique on the page."""

    kind: ClassVar[str] = "chart"
    name: str
    drawing: Drawing

    @property
    def pictures(self) -> Markup:
        """The chart as two SVG pictures, one for wide and one for narrow windows."""
        return Markup(draw_svg(self.drawing))

    @property
    def key(self) -> Sequence[tuple[str, str, str, str]]:
        """The entries that explain the chart's colours: for each a colour, a letter, a name and a remark."""
        return self.drawing.key or legend(self.drawing)


def _render(page: _Page) -> str:
    """Render the template and return the page. The template escapes all text, so earlier code must not escape it."""
    names: Counter[str] = Counter()
    sections = [(section.title, list(_drawn(section.elements, names))) for section in page.sections]
    script = _source("page.js") if names else ""
    environment = Environment(
        loader=PackageLoader("plimsoll.ui.html", "templates"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        page=page,
        sections=sections,
        most_times=_MOST_TIMES,
        policy=_policy([script] if names else []),
        style=Markup(_source("page.css")),
        columns=_COLUMNS,
        script=Markup(script),
    )


def _drawn(elements: Iterable[Element], names: Counter[str]) -> Iterator[object]:
    """Yield a document's elements with each chart replaced by its drawing, also inside folds (elements behind a title)."""
    for element in elements:
        if isinstance(element, Chart):
            yield _Drawn(f"{element.name}-{names[element.name]}", _DRAW[type(element)](element))
            names[element.name] += 1
        elif isinstance(element, Fold):
            yield {"kind": element.kind, "title": element.title, "elements": list(_drawn(element.elements, names))}
        else:
            yield element


def _source(name: str) -> str:
    """Read a file from the folder of the template and return its text."""
    return Path(__file__).with_name("templates").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy. It allows these scripts, and styles and images inside the page, and nothing else."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    allowed = f"script-src {hashes}; " if hashes else ""
    return f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data: blob:"
