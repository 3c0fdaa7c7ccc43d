"""The content of an artifact (a saved result, such as a plan), independent of how it is shown: a headline, and sections of
text, tables and charts.

A view (``ui/views``) makes a document from an artifact. ``ui/terminal``, ``ui/plain`` and ``ui/html`` render documents. A
document is plain text and plain data. Renderers do the escaping, colours and columns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.finding import OverheadPart
from plimsoll.artifacts.plan import Plan, RegionPlan, TimelinePoint
from plimsoll.artifacts.store import Reportable
from plimsoll.artifacts.verdict import NormComparison
from plimsoll.units import format_bytes

T = TypeVar("T")
UNKNOWN = "–"
"""The text that a table cell shows if its figure is unknown."""
_MOST_ROOM = 2.0
"""A factor. If the budget is more than this many times the peak memory, a memory chart does not draw the budget."""


class Tone(enum.StrEnum):
    """How a renderer highlights a word: as a success, as a failure, or as neither of them."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"


class Place(enum.IntEnum):
    """The position of a section on a page that shows several artifacts: first all pictures, then all evidence, then all
    details.
    """

    PICTURE = 0
    EVIDENCE = 1
    DETAIL = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A document element: one paragraph of text."""

    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A document element: one command that the reader can paste into a shell."""

    kind: ClassVar[str] = "command"
    text: str


@dataclass(frozen=True, slots=True)
class NamedFigures:
    """A document element: a list of figures, each as a pair of its name and its text."""

    kind: ClassVar[str] = "figures"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A document element: rows of text. A table without a header has names in its first column.

    ``numbers`` has the indices of the columns that are aligned right. ``bars`` has a share (0 to 1, negative for a saving) for
    each row, for renderers that draw bars. ``marked`` is the index of the highlighted row, and ``tones`` maps the text of a
    cell to its tone. Renderers with little room show only the first ``most_rows`` rows and the number of the other rows.
    """

    kind: ClassVar[str] = "table"
    title: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    bars: Sequence[float] = ()
    marked: int | None = None
    tones: Mapping[str, Tone] = field(default_factory=dict)
    most_rows: int | None = None

    def shown_rows(self, times: int = 1) -> Sequence[Sequence[str]]:
        """Return the rows to show. If the table is longer than allowed, the last returned row says how many rows are left out.

        Args:
            times: show up to this multiple of ``most_rows``.
        """
        most = len(self.rows) if self.most_rows is None else self.most_rows * times
        if len(self.rows) <= most:
            return self.rows
        rest = [f"and {len(self.rows) - most} more", *[""] * (len(self.rows[0]) - 1)]
        return [*self.rows[:most], rest]


def table_of_known(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Sequence[int],
    tones: Mapping[str, Tone] | None = None,
) -> Table:
    """Make a table, and leave out each column that is unknown (``UNKNOWN``) in all rows."""
    known = [place for place in range(len(header)) if any(row[place] != UNKNOWN for row in rows)]
    return Table(
        header=[header[place] for place in known],
        rows=[[row[place] for place in known] for row in rows],
        numbers=[column for column, place in enumerate(known) if place in numbers],
        tones=tones or {},
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a checklist.

    ``mark`` is its outcome in a word, ``next`` the next step for the user; an empty ``next`` means that nothing is left to do.
    """

    tone: Tone
    mark: str
    title: str
    detail: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class Checks:
    """A document element: a checklist."""

    kind: ClassVar[str] = "checks"
    checks: Sequence[Check]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """A document element that groups further elements under a title. A web page hides them until the reader clicks on the
    title.

    A printed page and a terminal show the elements. Text output skips a fold with ``is_detail`` unless details are requested.
    """

    kind: ClassVar[str] = "fold"
    title: str
    elements: Sequence[Element]
    is_detail: bool = False


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """A document element: a chart of the bytes in use at each operation of a training step."""

    name: ClassVar[str] = "memory"
    points: Sequence[TimelinePoint]
    budget_bytes: int | None = None

    @property
    def drawn_budget_bytes(self) -> int | None:
        """The budget in bytes if the chart shows its line, else ``None``.

        The line is left out if the budget is so far above the peak that the line would shrink the rest of the chart.
        """
        highest_bytes = max((point.bytes for point in self.points), default=0)
        return self.budget_bytes if (self.budget_bytes or 0) <= _MOST_ROOM * highest_bytes else None


def seconds_of(points: Sequence[TimelinePoint]) -> list[float] | None:
    """Return the second at which the operation of each point starts in the step without a plan, or ``None`` for plans without
    times.
    """
    seconds = [point.unmanaged_seconds for point in points if point.unmanaged_seconds is not None]
    return seconds if len(seconds) == len(points) else None


def starts_of(points: Sequence[TimelinePoint]) -> tuple[list[float], str]:
    """Return where each point lies on the axis of a chart, and the axis' title: milliseconds, or the numbers of the operations
    in plans without times.

    By number of operations, the optimizer's many short operations took half of a chart.
    """
    seconds = seconds_of(points)
    if seconds and seconds[-1] > seconds[0]:
        return [1000 * each for each in seconds], "time in the step without a plan, ms"
    return [float(point.tick) for point in points], "operation of the training step"


@dataclass(frozen=True, slots=True)
class DecisionMap:
    """A document element: a grid with the decision (keep, recompute, compress or offload) for each saved value of each region.

    A region is one call of a module whose saved tensors Plimsoll manages, usually of a block.
    """

    name: ClassVar[str] = "map"
    regions: Sequence[RegionPlan]


@dataclass(frozen=True, slots=True)
class FrontierChart:
    """A document element: a chart of step time against peak memory, as plans predict it and as comparisons measured it.

    A page draws all its frontier charts as one chart.
    """

    name: ClassVar[str] = "frontier"
    plans: Sequence[Plan] = ()
    comparisons: Sequence[Comparison] = ()


@dataclass(frozen=True, slots=True)
class CurvesChart:
    """A document element: two curves with one number per step, for the run without a plan and for the run with the plan.

    A number that is not finite is ``None``.
    """

    name: ClassVar[str] = "curves"
    title: str
    baseline: Sequence[float | None]
    plan: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class NormsChart:
    """A document element: for each block of the model, the distribution of its gradient's norm, without and with the plan."""

    name: ClassVar[str] = "norms"
    comparisons: Sequence[NormComparison]


@dataclass(frozen=True, slots=True)
class PartsChart:
    """A document element: a chart of the causes that make a step with a plan slower, each with its extra time."""

    name: ClassVar[str] = "overhead"
    parts: Sequence[OverheadPart]


@dataclass(frozen=True, slots=True)
class BytesChart:
    """A document element: a bar chart of bytes. ``limit_bytes`` is the device's memory.

    Each row is a name, its bytes, and half the width of its error bar in bytes.
    """

    name: ClassVar[str] = "bytes"
    title: str
    rows: Sequence[tuple[str, int, int]]
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LengthsChart:
    """A document element: a bar chart of sequence lengths in tokens.

    Each row is a name, its length, and half the width of its error bar.
    """

    name: ClassVar[str] = "lengths"
    rows: Sequence[tuple[str, int, int]]


Chart = MemoryChart | DecisionMap | FrontierChart | CurvesChart | NormsChart | PartsChart | BytesChart | LengthsChart
Element = Paragraph | ShellCommand | NamedFigures | Table | Checks | Fold | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """The elements of a document under one heading, and the position of the section on a page."""

    title: str
    elements: Sequence[Element]
    place: Place = Place.EVIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Data: the model, batch and device that a document (the content of one saved result) is about, as far as the result names
    them. Unknown texts are empty.

    A page combines only documents about the same model and batch. ``fingerprint`` is a digest of the model's structure, and
    ``signature`` names the shapes and dtypes of the batch.
    """

    model: str = ""
    fingerprint: str = ""
    signature: str = ""
    device: str = ""
    budget_bytes: int | None = None
    label: str = ""
    """A label that distinguishes the document from other documents of the same kind."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where the document's figures come from, as names and texts: versions of libraries, and the source of costs."""


_OF_SUBJECTS = ("model", "fingerprint", "signature", "device", "budget_bytes")


def subject_of(artifact: Reportable, *, label: str = "", origins: Mapping[str, str] | None = None) -> Subject:
    """Read from an artifact (a saved result) which model, batch and device it is about.

    ``origins`` says where the artifact's figures come from; by default, these are the versions that the artifact stores.
    """
    said = msgspec.structs.asdict(artifact)
    about = {name: said[name] for name in _OF_SUBJECTS if name in said}
    return Subject(**about, label=label, origins=said["versions"] if origins is None else origins)


def tabulate(entries: Iterable[T], columns: Mapping[str, Callable[[T], str]], **table: Any) -> Table:
    """Make a table with one row per entry. ``columns`` maps a header to a function that makes the cell of an entry.

    ``table`` contains further fields of ``Table``, such as its title.
    """
    return Table(header=tuple(columns), rows=[[cell(each) for cell in columns.values()] for each in entries], **table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The whole content of one artifact. Renderers show it in this order.

    ``source``, ``subject`` and ``word`` make the headline: ``Plan 'auto' for Net on cpu: OPTIMAL``. ``tone`` is the colour of
    ``word``. Text output prints ``lines`` below the headline. ``statement`` sums up the result in sentences; a page begins with
    it.
    """

    source: str
    subject: str
    word: str
    tone: Tone
    about: Subject = field(default_factory=Subject)
    """The model, batch and device that the shown result (a plan, a receipt) is about. Only HTML pages use this field."""
    lines: Sequence[str] = ()
    statement: str = ""
    sections: Sequence[Section]
    notes: Sequence[str] = ()

    @property
    def headline(self) -> str:
        """The kind of artifact, its subject and its result in one line."""
        return f"{self.source} {self.subject}: {self.word}"


def opened(elements: Sequence[Element], *, with_details: bool) -> Iterator[Element]:
    """Yield the elements of a document that text output shows.

    Folds (groups of elements under a title) with ``is_detail`` are left out unless ``with_details`` is set.
    """
    for element in elements:
        if with_details or not (isinstance(element, Fold) and element.is_detail):
            yield element


def name_budget(budget_bytes: int | None) -> str:
    """Return the budget as words, such as ``budget 90.0 MiB``, or ``no budget``."""
    return "no budget" if budget_bytes is None else f"budget {format_bytes(budget_bytes)}"


def format_budget(budget_bytes: int | None, without: str = "none") -> str:
    """Return the budget as text, such as ``90.0 MiB``. Without a budget, return the text ``without``."""
    return without if budget_bytes is None else format_bytes(budget_bytes)


def sentence(text: str) -> str:
    """Return the text with a capital letter at its start and a full stop at its end.

    Example:
        >>> sentence("every rule is clear")
        'Every rule is clear.'
    """
    stop = "" if text.endswith((".", "!", "?")) else "."
    return f"{text[:1].upper()}{text[1:]}{stop}" if text else ""
