"""Stands in for a method of one object, and puts the object back as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Wrapped:
    """Stands in for the method ``owner.name`` on this very object, whose class is left alone, until ``remove``.

    ``run`` is called with what was there before, then the arguments.
    """

    def __init__(self, owner: object, name: str, run: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._run: Callable[..., Any] | None = run
        self._own = vars(owner).get(name)
        self._original: Callable[..., Any] = getattr(owner, name)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:  # somebody has wrapped this one and still calls it
            return self._original(*args, **kwargs)
        return self._run(self._original, *args, **kwargs)

    def remove(self) -> None:
        """Put back what was there; where somebody has wrapped ours, only step aside. Harmless when called twice."""
        self._run = None
        if vars(self._owner).get(self._name) is not self:
            return
        if self._own is None:
            del vars(self._owner)[self._name]
        else:
            vars(self._owner)[self._name] = self._own


def is_wrapped(owner: object, name: str) -> bool:
    """Whether a function of ours stands in for the method."""
    return isinstance(vars(owner).get(name), Wrapped)
