"""The base class of all artifacts (plans, receipts and other results). It saves an artifact as JSON and prints it as text.

Artifacts are the lowest layer and may not import the views. The package's ``__init__`` may import every layer and runs before
any artifact is imported, so it stores here the functions that show artifacts. Files carry a schema version and the kind of
artifact as a tag; ``files`` writes them, ``store`` reads them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from plimsoll.artifacts.files import write_whole

TAG = "plimsoll"
"""The first field of every file; its value is the artifact's kind."""
NUMBER = "plimsoll.number"
"""A key of a JSON object. In a file, an object with this key means infinity or NaN, because JSON does not have such
numbers."""


class AdvisedEnum(enum.StrEnum):
    """An enum whose members also carry help text: advice for the user, and optionally what the member means.

    Files contain only the member's word.

    An enum's members are, for example, the possible ends of a search.
    """

    advice: str
    """One sentence that says what the user should do if this member applies."""
    meaning: str
    """One line that says when this member applies."""

    def __new__(cls, word: str, advice: str, meaning: str = "") -> Self:
        member = str.__new__(cls, word)
        member._value_, member.advice, member.meaning = word, advice, meaning
        return member


class TextRenderer(Protocol):
    """A function that returns an artifact as text; ``with_details`` adds the reason of each decision."""

    def __call__(self, artifact: object, *, with_details: bool = False) -> str: ...


class HtmlRenderer(Protocol):
    """A function that returns an artifact as HTML for a notebook. ``text`` is shown above it, and alone if it is ``None``."""

    def __call__(self, artifact: object | None, *, text: str = "") -> str: ...


class ArtifactBase:
    """Base class of artifacts: results that can be saved and shown, such as plans and receipts.

    Artifacts are immutable data; a file names their schema and kind.
    """

    __slots__ = ()

    KIND: ClassVar[str]
    """The kind of artifact, written as the file's tag."""
    SCHEMA_VERSION: ClassVar[int]
    """Number of the schema that this version of Plimsoll writes. It is also the newest schema that this version reads."""
    render: ClassVar[TextRenderer]
    """The function that returns an artifact as text. The package's ``__init__`` sets it; its first call imports the views."""
    summarize: ClassVar[Callable[[object], str]]
    """The function that returns an artifact as text of a few lines. The package's ``__init__`` sets it."""
    to_html: ClassVar[HtmlRenderer]
    """The function that returns an artifact as HTML for a notebook. The package's ``__init__`` sets it."""
    policy_text: ClassVar[Callable[[], str]]
    """A function that returns the source of the selective-checkpointing policy: ``Plan.export`` writes decisions into this
    text. The package's ``__init__`` sets this function too."""

    def save(self, path: str | Path) -> None:
        """Write the artifact as JSON, whole or not at all; ``plimsoll.load`` reads a plan back exactly.

        Args:
            path: where to write; an existing file is replaced, a link, device or pipe is written through.

        Raises:
            PlanFileError: the place cannot be written.

        Example:
            >>> plan.save("plan.json")  # doctest: +SKIP
        """
        write_whole(to_json(self) + "\n", path)

    def __str__(self) -> str:
        return ArtifactBase.render(self)

    def __repr__(self) -> str:
        return ArtifactBase.summarize(self)

    def _repr_html_(self) -> str:
        """Return the artifact as HTML, for notebooks."""
        return ArtifactBase.to_html(self)


def to_json(artifact: ArtifactBase) -> str:
    """Return the artifact as indented JSON with its tag first.

    Example:
        >>> to_json(plan).splitlines()[1]  # doctest: +SKIP
        '  "plimsoll": "plan",'
    """
    import msgspec

    fields: dict[str, Any] = _wrap_odd_numbers(msgspec.to_builtins(artifact))
    encoded = msgspec.json.encode({TAG: artifact.KIND} | fields)
    return msgspec.json.format(encoded, indent=2).decode()


def _wrap_odd_numbers(node: Any) -> Any:
    """Return the same data with infinity and NaN, which JSON lacks, replaced by objects such as ``{"plimsoll.number": "inf"}``.

    ``store`` replaces these objects by numbers again.
    """
    if isinstance(node, float) and not math.isfinite(node):
        return {NUMBER: repr(node)}
    if isinstance(node, dict):
        return {key: _wrap_odd_numbers(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_wrap_odd_numbers(value) for value in node]
    return node
