"""Remember what the attributes of a region's modules hold before a call, so that a second run of forward (see ``rerun``) starts
from it. A region is a module that the plan decides about.

Forward may count, append to a list, replace a tensor (a running mean, the memory of a recurrent block) or set new attributes.
The second run must read what the first one has read. So the objects in attributes are noted before forward, and the contents of
containers and of objects of the user's classes, to any depth. Tensors are not copied here: their owner compares versions.

Known weakness: to stay cheap, the search ends after a thousand values, and it does not look into arrays of more than 64 KiB,
modules that are not submodules, classes, or global variables. If forward reads and writes there, the checksums of the second
run differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import nn

from plimsoll.tracing.recorder.contents import KeptValues, is_holder, kind_of, parts_of
from plimsoll.tracing.recorder.kept_modules import attributes_of
from plimsoll.tracing.recorder.storages import is_plain

_MOST_VALUES = 1000
_MOST_ITEMS = 10_000
"""A container with more items is not copied before a call. If forward changes its length, the call must not run again."""
_MOST_ARRAY_BYTES = 1 << 16
_SCALARS = frozenset((bool, int, float, complex, str))
_WITHOUT_PARTS = _SCALARS | {type(None), bytes, torch.dtype, torch.device, torch.Size}
_NOT_OF_THE_USER = "_non_persistent_buffers_set"
"""An attribute of every module, which only changes when a buffer is registered or removed."""
_ABSENT = object()


class AttributesBefore:
    """What the attributes of these modules hold before a call.

    ``tensors`` are the tensors among it, without parameters. `keep_changed` is called after forward.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [(inner, attributes_of(inner)) for inner in modules]
        found = _found_in(
            value for _, held in self._modules for name, value in held.items() if name != _NOT_OF_THE_USER
        )
        self.tensors = [value for value in found if _may_be_written(value)]
        self._values = [value for value in found if _is_kept(value)]
        self._kept = KeptValues(self._values)
        self._lengths = [(value, len(value)) for value in found if _has_many_items(value)]
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        """Places of attributes (a module's ``__dict__`` and a name), each with the value for a second run."""

    def replaced(self, held: Iterable[int]) -> list[torch.Tensor]:
        """Return the tensors that forward has removed from the attributes. ``held`` are the ids of the values that attributes
        hold now.
        """
        now = set(held)
        return [tensor for tensor in self.tensors if id(tensor) not in now]

    def has_written_large(self) -> bool:
        """Return whether forward has changed the length of a container that was too large to copy."""
        return any(len(value) != length for value, length in self._lengths)

    def keep_changed(self) -> None:
        """Keep what a second run needs, and free the rest: attributes that forward has changed, and numbers and texts.

        A second run does not change other attributes. FSDP, for example, replaces views of parameters between
        forward and backward.
        """
        for inner, before in self._modules:
            now = attributes_of(inner)
            for name in before.keys() | now.keys():
                value = before.get(name, _ABSENT)
                if type(value) in _SCALARS or now.get(name, _ABSENT) is not value:
                    self._entries.append((vars(inner), name, value))
        self._modules, self.tensors, self._lengths = [], [], []

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Return a context manager. Inside, attributes hold what they held before forward. At its end, the contents of
        containers and objects are restored. The caller restores the attributes of the modules.
        """
        now = KeptValues(self._values)  # the module may hold other containers by now
        try:
            for table, name, value in self._entries:
                if value is _ABSENT:
                    table.pop(name, None)
                else:
                    table[name] = value
            self._kept.put_back()
            yield
        finally:
            now.put_back()


def _found_in(values: Iterable[Any]) -> list[Any]:
    """Return the values and what is inside of them, each once. Numbers and texts are left out."""
    found: dict[int, Any] = {}
    pending = [value for value in values if type(value) not in _WITHOUT_PARTS]
    for value in pending:  # the list grows: what lies deeper comes later
        if len(found) >= _MOST_VALUES:
            break
        if id(value) in found:
            continue
        found[id(value)] = value
        if not _has_many_items(value):
            pending += [part for part in parts_of(value) if type(part) not in _WITHOUT_PARTS]
    return list(found.values())


def _has_many_items(value: Any) -> bool:
    is_container = isinstance(value, Sized) and kind_of(value) is not None and not isinstance(value, np.ndarray)
    return is_container and len(value) > _MOST_ITEMS


def _is_kept(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_ARRAY_BYTES
    return (is_holder(value) or kind_of(value) is not None) and not _has_many_items(value)


def _may_be_written(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor and is_plain(value) and not value.is_inference()  # inference tensors do not count writes
