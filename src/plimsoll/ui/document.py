"""The content of an artifact, independent of its rendering: a headline, and sections of text, tables and charts.

A view (``ui/views``) makes a document from an artifact; ``ui/terminal``, ``ui/plain`` and ``ui/html`` render documents. A
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
"""The text of a cell with an unknown value."""
_MOST_ROOM = 2.0
"""A budget above this multiple of the peak is not drawn."""


class Tone(enum.StrEnum):
    """How a word is highlighted: a success, a failure, or neither."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"


class Place(enum.IntEnum):
    """The order of sections on a page of several artifacts: all pictures first, then evidence, then details."""

    PICTURE = 0
    EVIDENCE = 1
    DETAIL = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of text."""

    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True, slots=True)
class NamedFigures:
    """Pairs of name and value."""

    kind: ClassVar[str] = "figures"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text. A table without a header has names in its first column.

    ``numbers`` are the columns that are aligned right. ``bars`` has a share for every row, for renderers that draw bars.
    ``marked`` is the highlighted row, and ``tones`` maps the text of a cell to its tone. Renderers with little room show only
    the first ``most_rows`` rows and the number of the others.
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
        """The rows to show. A long table ends with a row that counts the rows left out.

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
    """Make a table, and leave out the columns that are unknown in every row."""
    known = [place for place in range(len(header)) if any(row[place] != UNKNOWN for row in rows)]
    return Table(
        header=[header[place] for place in known],
        rows=[[row[place] for place in known] for row in rows],
        numbers=[column for column, place in enumerate(known) if place in numbers],
        tones=tones or {},
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a checklist; ``next`` is the next step for the user, or empty."""

    tone: Tone
    mark: str
    title: str
    detail: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class Checks:
    """A checklist."""

    kind: ClassVar[str] = "checks"
    checks: Sequence[Check]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Elements that a page hides until a click on their title. Paper and terminals show them.

    Text output skips a fold with ``is_detail`` unless details are requested.
    """

    kind: ClassVar[str] = "fold"
    title: str
    elements: Sequence[Element]
    is_detail: bool = False


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """Bytes alive over the step."""

    name: ClassVar[str] = "memory"
    points: Sequence[TimelinePoint]
    budget_bytes: int | None = None

    @property
    def drawn_budget_bytes(self) -> int | None:
        """The budget; ``None`` if it is so far above the peak that its line would shrink the rest of the chart."""
        highest_bytes = max((point.bytes for point in self.points), default=0)
        return self.budget_bytes if (self.budget_bytes or 0) <= _MOST_ROOM * highest_bytes else None


@dataclass(frozen=True, slots=True)
class DecisionMap:
    """The decision for every saved value of every region."""

    name: ClassVar[str] = "map"
    regions: Sequence[RegionPlan]


@dataclass(frozen=True, slots=True)
class FrontierChart:
    """Step time against peak memory, predicted by plans and measured. A page draws all its frontier charts as one."""

    name: ClassVar[str] = "frontier"
    plans: Sequence[Plan] = ()
    comparisons: Sequence[Comparison] = ()


@dataclass(frozen=True, slots=True)
class CurvesChart:
    """A number per step, for the unmanaged run and for the run with the plan; ``None`` if it is not finite."""

    name: ClassVar[str] = "curves"
    title: str
    baseline: Sequence[float | None]
    plan: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class NormsChart:
    """Distributions of the gradient's norm, per block."""

    name: ClassVar[str] = "norms"
    comparisons: Sequence[NormComparison]


@dataclass(frozen=True, slots=True)
class PartsChart:
    """The parts of a step's extra time."""

    name: ClassVar[str] = "overhead"
    parts: Sequence[OverheadPart]


@dataclass(frozen=True, slots=True)
class BytesChart:
    """Bytes by name, each with half the width of its error bar, and the device's memory as the limit."""

    name: ClassVar[str] = "bytes"
    title: str
    rows: Sequence[tuple[str, int, int]]
    limit_bytes: int | None = None


Chart = MemoryChart | DecisionMap | FrontierChart | CurvesChart | NormsChart | PartsChart | BytesChart
Element = Paragraph | NamedFigures | Table | Checks | Fold | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """Elements under a heading."""

    title: str
    elements: Sequence[Element]
    place: Place = Place.EVIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, batch and device of a document, if its artifact names them. A page combines documents of one subject."""

    model: str = ""
    fingerprint: str = ""
    signature: str = ""
    device: str = ""
    budget_bytes: int | None = None
    label: str = ""
    """A label that distinguishes the document from others of the same kind."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """The sources of its figures: versions, costs."""


_OF_SUBJECTS = ("model", "fingerprint", "signature", "device", "budget_bytes")


def subject_of(artifact: Reportable, *, label: str = "", origins: Mapping[str, str] | None = None) -> Subject:
    """Read an artifact's subject. The sources of its figures are ``origins``, or else the artifact's versions."""
    said = msgspec.structs.asdict(artifact)
    about = {name: said[name] for name in _OF_SUBJECTS if name in said}
    return Subject(**about, label=label, origins=said["versions"] if origins is None else origins)


def tabulate(entries: Iterable[T], columns: Mapping[str, Callable[[T], str]], **table: Any) -> Table:
    """Make a table with one row per entry. ``columns`` maps a header to a function that makes the cell of an entry.

    ``table`` are further fields of the table.
    """
    return Table(header=tuple(columns), rows=[[cell(each) for cell in columns.values()] for each in entries], **table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The whole content of one artifact, in order.

    ``source``, ``subject`` and ``word`` make the headline: ``Plan 'auto' for Net on cpu: OPTIMAL``. Text output prints
    ``lines`` below it. ``statement`` sums up the result in sentences; a page begins with it.
    """

    source: str
    subject: str
    word: str
    tone: Tone
    about: Subject = field(default_factory=Subject)
    """Used by pages only."""
    lines: Sequence[str] = ()
    statement: str = ""
    sections: Sequence[Section]
    notes: Sequence[str] = ()

    @property
    def headline(self) -> str:
        """Kind of artifact, subject and result in one line."""
        return f"{self.source} {self.subject}: {self.word}"


def opened(elements: Sequence[Element], *, with_details: bool) -> Iterator[Element]:
    """The elements for text output: folds with details are either skipped or shown like the rest."""
    for element in elements:
        if with_details or not (isinstance(element, Fold) and element.is_detail):
            yield element


def name_budget(budget_bytes: int | None) -> str:
    """``budget 90.0 MiB``, or ``no budget``."""
    return "no budget" if budget_bytes is None else f"budget {format_bytes(budget_bytes)}"


def format_budget(budget_bytes: int | None, without: str = "none") -> str:
    """``90.0 MiB``, or the text ``without``."""
    return without if budget_bytes is None else format_bytes(budget_bytes)


def sentence(text: str) -> str:
    """A text with a capital letter and a full stop.

    Example:
        >>> sentence("every rule is clear")
        'Every rule is clear.'
    """
    stop = "" if text.endswith((".", "!", "?")) else "."
    return f"{text[:1].upper()}{text[1:]}{stop}" if text else ""
