"""What every artifact can do without knowing how it is presented: ``print(plan)`` writes what the installed renderer says.

Artifacts are the lowest layer and may not import the views. The package's ``__init__`` knows every layer; it installs the
renderer, and is always imported before any artifact.
"""

from __future__ import annotations

from typing import ClassVar, Protocol


class TextRenderer(Protocol):
    """Makes text of an artifact, with every reason where details are asked for."""

    def __call__(self, artifact: object, *, with_details: bool = False) -> str: ...


class Printable:
    """An artifact whose ``str`` is what people read."""

    __slots__ = ()

    render: ClassVar[TextRenderer]
    """Installed by the package's ``__init__``; it imports the views when text is first asked for."""

    def __str__(self) -> str:
        return Printable.render(self)
