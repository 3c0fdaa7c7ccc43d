"""Store the data that classes hold in attributes (a counter, a list), and restore it later.

Methods, properties and other descriptors are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

from plimsoll.tracing.recorder.contents import is_of_user


class KeptClasses:
    """Remembers the data attributes of the classes of these objects and of their bases, as far as a user has defined the
    classes.

    `put_back` restores the attributes.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        classes = {base: None for kind in dict.fromkeys(map(type, objects)) for base in kind.__mro__}
        self._tables = [(each, _data_of(each)) for each in classes if is_of_user(each)]

    @property
    def values(self) -> list[Any]:
        """The values of the attributes at the time when this object was made, and the methods, for their default values."""
        methods = (
            value for kind, _ in self._tables for value in vars(kind).values() if isinstance(value, FunctionType)
        )
        return [*(value for _, table in self._tables for value in table.values()), *methods]

    def put_back(self) -> None:
        """Restore the same values under the same names, and remove names that were added."""
        for kind, table in self._tables:
            now = _data_of(kind)
            for name in now.keys() - table.keys():
                type.__delattr__(kind, name)
            for name, value in table.items():
                if name not in now or now[name] is not value:
                    type.__setattr__(kind, name, value)


def _data_of(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith(("__", "_abc_")) or callable(value) or hasattr(type(value), "__get__"))
    }
