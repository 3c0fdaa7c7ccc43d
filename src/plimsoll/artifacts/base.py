"""What every artifact can do: print itself, without knowing how it is presented, and save itself.

Artifacts are the lowest layer and may not import the views. The package's ``__init__`` knows every layer; it installs the
renderer, and is always imported before any artifact.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol


class TextRenderer(Protocol):
    """Makes text of an artifact, with every reason where details are asked for."""

    def __call__(self, artifact: object, *, with_details: bool = False) -> str: ...


class ArtifactBase:
    """Whatever is saved and shown: frozen, versioned, tagged with its kind."""

    __slots__ = ()

    KIND: ClassVar[str]
    """What its file says that it is."""
    render: ClassVar[TextRenderer]
    """Installed by the package's ``__init__``; it imports the views when text is first asked for."""

    def save(self, path: str | Path) -> None:
        """Write the artifact as JSON, whole or not at all; ``plimsoll.load`` reads a plan back exactly.

        Args:
            path: where to; an existing file is replaced.

        Raises:
            PlanFileError: the place cannot be written.

        Example:
            >>> plan.save("plan.json")  # doctest: +SKIP
        """
        from plimsoll.artifacts.writing import to_json, write_whole

        write_whole(to_json(self) + "\n", path)

    def __str__(self) -> str:
        return ArtifactBase.render(self)
