"""Base class of every artifact: saves it as a JSON file and prints it through a renderer that the package installs.

Artifacts are the lowest layer and may not import the views. The package's ``__init__`` knows every layer and is always
imported before any artifact, so it installs the renderer and the text of a policy here. Files carry a schema version and
the kind of artifact as a tag; ``files`` writes them, ``store`` reads them.
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


class AdvisedEnum(enum.StrEnum):
    """A word with its own help text: each member has a word, advice and an optional meaning, and is saved as the word."""

    advice: str
    """One sentence: what the user should do."""
    meaning: str
    """One line that says which cases this member covers."""

    def __new__(cls, word: str, advice: str, meaning: str = "") -> Self:
        member = str.__new__(cls, word)
        member._value_, member.advice, member.meaning = word, advice, meaning
        return member


class TextRenderer(Protocol):
    """Renders an artifact as text; ``with_details`` adds every reason."""

    def __call__(self, artifact: object, *, with_details: bool = False) -> str: ...


class ArtifactBase:
    """Base of everything that is saved and shown: frozen, versioned, tagged with its kind."""

    __slots__ = ()

    KIND: ClassVar[str]
    """The kind of artifact, written as the file's tag."""
    SCHEMA_VERSION: ClassVar[int]
    """The schema that this version writes, and the newest one that it reads."""
    render: ClassVar[TextRenderer]
    """Installed by the package's ``__init__``; it imports the views when text is first asked for."""
    policy_text: ClassVar[Callable[[], str]]
    """Installed by the package's ``__init__`` too: source text of the selective-checkpointing policy that ``Plan.export`` fills
    in."""

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
    """Replace infinity and NaN, which JSON lacks, by ``{"plimsoll.number": "inf"}``; ``store`` turns them back."""
    if isinstance(node, float) and not math.isfinite(node):
        return {NUMBER: repr(node)}
    if isinstance(node, dict):
        return {key: _wrap_odd_numbers(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_wrap_odd_numbers(value) for value in node]
    return node
