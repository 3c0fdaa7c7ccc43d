"""Records the data that classes hold in attributes (a counter, a list), and puts it back.

Methods, properties and other descriptors are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plimsoll.tracing.recorder.contents import is_of_user


class KeptClasses:
    """The data attributes of the users' classes among those of these objects, and among the bases of them."""

    def __init__(self, objects: Iterable[Any]) -> None:
        classes = {base: None for kind in dict.fromkeys(map(type, objects)) for base in kind.__mro__}
        self._tables = [(each, _data_of(each)) for each in classes if is_of_user(each)]

    @property
    def values(self) -> list[Any]:
        """What the attributes were when this was made."""
        return [value for _, table in self._tables for value in table.values()]

    def put_back(self) -> None:
        """The same objects under the same names, and no names more."""
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
