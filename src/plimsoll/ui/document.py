"""What an artifact has to say, before any terminal or page: a headline, sections of text, tables and charts.

A view (``ui/views``) makes a document of an artifact; ``ui/terminal``, ``ui/plain`` and ``ui/html`` render documents. All of
it is plain text and plain data: escaping, colours and columns are the renderers' work.
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
"""What stands in a cell of which nothing is known."""
_MOST_ROOM = 2.0
"""A budget that is more than so many times the peak is not drawn."""


class Tone(enum.StrEnum):
    """How a word is set: what holds, what does not, what is in between."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"


class Place(enum.IntEnum):
    """Where a section stands on a page of several artifacts: pictures of all come first, then evidence, then details."""

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

    ``numbers`` are the columns that are flush right. ``bars`` has a share for every row, for renderers that draw bars.
    ``marked`` is the row to look at, and ``tones`` says which cells are good or bad. Of ``most_rows`` rows renderers with
    little room show no more, and count the rest.
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
        """The rows that are shown, of a long table the first ones and how many are left out.

        Args:
            times: how many times ``most_rows`` there is room for.
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
    """A table without the columns of which nothing is known in any row."""
    known = [place for place in range(len(header)) if any(row[place] != UNKNOWN for row in rows)]
    return Table(
        header=[header[place] for place in known],
        rows=[[row[place] for place in known] for row in rows],
        numbers=[column for column, place in enumerate(known) if place in numbers],
        tones=tones or {},
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a checklist; ``next`` is what to do about it, if anything."""

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
    """Elements that a page hides behind their title until it is clicked; on paper and in terminals they are open.

    ``is_detail`` is for what text leaves out unless an explanation is asked for.
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
        """The budget, unless it lies so far above the peak that a line for it would leave no room for the rest."""
        highest_bytes = max((point.bytes for point in self.points), default=0)
        return self.budget_bytes if (self.budget_bytes or 0) <= _MOST_ROOM * highest_bytes else None


@dataclass(frozen=True, slots=True)
class DecisionMap:
    """What happens to every saved value of every region."""

    name: ClassVar[str] = "map"
    regions: Sequence[RegionPlan]


@dataclass(frozen=True, slots=True)
class FrontierChart:
    """Step time against peak memory, as predicted by plans and as measured. All of a page are drawn as one."""

    name: ClassVar[str] = "frontier"
    plans: Sequence[Plan] = ()
    comparisons: Sequence[Comparison] = ()


@dataclass(frozen=True, slots=True)
class CurvesChart:
    """A number step by step, of the unmanaged run and of the plan's; ``None`` where it is not finite."""

    name: ClassVar[str] = "curves"
    title: str
    baseline: Sequence[float | None]
    plan: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class NormsChart:
    """Distributions of the gradient's norm, block by block."""

    name: ClassVar[str] = "norms"
    comparisons: Sequence[NormComparison]


@dataclass(frozen=True, slots=True)
class PartsChart:
    """What the extra time of a step is made of."""

    name: ClassVar[str] = "overhead"
    parts: Sequence[OverheadPart]


@dataclass(frozen=True, slots=True)
class BytesChart:
    """Bytes by name, each with half the width of its error bar, beside what the device has."""

    name: ClassVar[str] = "bytes"
    title: str
    rows: Sequence[tuple[str, int, int]]
    limit_bytes: int | None = None


Chart = MemoryChart | DecisionMap | FrontierChart | CurvesChart | NormsChart | PartsChart | BytesChart
Element = Paragraph | NamedFigures | Table | Checks | Fold | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """A part under a heading."""

    title: str
    elements: Sequence[Element]
    place: Place = Place.EVIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a document is about, as far as its artifact says; it goes with documents about the same."""

    model: str = ""
    fingerprint: str = ""
    signature: str = ""
    device: str = ""
    budget_bytes: int | None = None
    label: str = ""
    """What tells it apart from others of its kind."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where its figures come from: versions, costs."""


_OF_SUBJECTS = ("model", "fingerprint", "signature", "device", "budget_bytes")


def subject_of(artifact: Reportable, *, label: str = "", origins: Mapping[str, str] | None = None) -> Subject:
    """What an artifact says that it is about; its figures come from the versions that it names, or from ``origins``."""
    said = msgspec.structs.asdict(artifact)
    about = {name: said[name] for name in _OF_SUBJECTS if name in said}
    return Subject(**about, label=label, origins=said["versions"] if origins is None else origins)


def tabulate(entries: Iterable[T], columns: Mapping[str, Callable[[T], str]], **table: Any) -> Table:
    """A table with a row for each entry, from what stands in every column; ``table`` are other fields of the table."""
    return Table(header=tuple(columns), rows=[[cell(each) for cell in columns.values()] for each in entries], **table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Everything that one artifact says, in order.

    ``source``, ``subject`` and ``word`` are the headline: ``Plan 'auto' for Net on cpu: OPTIMAL``. ``lines`` stand below it
    in text. ``statement`` says in sentences what it comes to, for those who read nothing else; a page begins with it.
    """

    source: str
    subject: str
    word: str
    tone: Tone
    about: Subject = field(default_factory=Subject)
    """Asked for by pages alone."""
    lines: Sequence[str] = ()
    statement: str = ""
    sections: Sequence[Section]
    notes: Sequence[str] = ()

    @property
    def headline(self) -> str:
        """What it is, what it is about, and what came of it."""
        return f"{self.source} {self.subject}: {self.word}"


def opened(elements: Sequence[Element], *, with_details: bool) -> Iterator[Element]:
    """The elements of a text that is read from top to bottom: details are left out or opened with the rest."""
    for element in elements:
        if with_details or not (isinstance(element, Fold) and element.is_detail):
            yield element


def name_budget(budget_bytes: int | None) -> str:
    """``budget 90.0 MiB``, or that there is none."""
    return "no budget" if budget_bytes is None else f"budget {format_bytes(budget_bytes)}"


def format_budget(budget_bytes: int | None, without: str = "none") -> str:
    """``90.0 MiB``, or the word for none."""
    return without if budget_bytes is None else format_bytes(budget_bytes)


def sentence(text: str) -> str:
    """A text with the capital and the full stop of a sentence.

    Example:
        >>> sentence("every rule is clear")
        'Every rule is clear.'
    """
    stop = "" if text.endswith((".", "!", "?")) else "."
    return f"{text[:1].upper()}{text[1:]}{stop}" if text else ""
