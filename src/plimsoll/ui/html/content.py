"""What a page is made of, before any HTML: sections of text, figures, tables, folds, charts and checks.

Elements hold plain text. Escaping is the template's work; only texts inside a chart's ``figure`` are escaped by the chart,
because plotly reads tags in them (see ``labels``).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar


class Tone(enum.StrEnum):
    """How a statement is set: what holds, what does not, what is in between."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of text."""

    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Pairs of name and value."""

    kind: ClassVar[str] = "figures"
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header; ``numbers`` are the indices of columns that are flush right."""

    kind: ClassVar[str] = "table"
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Elements behind a title that opens them; all of them are open on paper."""

    kind: ClassVar[str] = "fold"
    title: str
    elements: tuple[Element, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """The meaning of colours: colour, letter, name and a remark."""

    kind: ClassVar[str] = "key"
    entries: tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A plotly figure as plain data; ``description`` says in words what it shows."""

    kind: ClassVar[str] = "chart"
    name: str
    figure: dict[str, Any]
    description: str


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
    checks: tuple[Check, ...]


Element = Paragraph | Figures | Table | Fold | Key | Chart | Checks


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under a heading."""

    title: str
    elements: tuple[Element, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """What one artifact comes to: a status word and sentences that need no other knowledge."""

    tone: Tone
    source: str
    word: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """Everything on a page, in order."""

    title: str
    facts: tuple[tuple[str, str], ...]
    statements: tuple[Statement, ...]
    sections: tuple[Section, ...]
