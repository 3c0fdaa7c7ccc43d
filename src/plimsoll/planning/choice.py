"""What one region does with its saved values: which it keeps, which it holds in another form, which it rebuilds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Packed = frozenset[tuple[int, str]]
"""Values (ids of the region's graph), each with the name of its form."""


@dataclass(frozen=True)
class Choice:
    """``kept`` values are held as they are, ``packed`` ones in another form; all others that may be rebuilt, are.

    With ``is_boundary_dropped`` the region's input is not held: the region before rebuilds it.
    """

    kept: frozenset[int]
    packed: Packed = frozenset()
    is_boundary_dropped: bool = False

    @cached_property
    def forms(self) -> dict[int, str]:
        """The form of every packed value."""
        return dict(self.packed)

    def without(self, values: frozenset[int]) -> Choice:
        """The same choice, but nothing is held of these values."""
        if not values:
            return self
        packed = frozenset((value, form) for value, form in self.packed if value not in values)
        return Choice(self.kept - values, packed, self.is_boundary_dropped)

    def as_is(self, values: frozenset[int]) -> Choice:
        """The same choice, but these values, if they are packed, are kept."""
        packed = frozenset((value, form) for value, form in self.packed if value not in values)
        if len(packed) == len(self.packed):
            return self
        return Choice(self.kept | (self.forms.keys() & values), packed, self.is_boundary_dropped)
