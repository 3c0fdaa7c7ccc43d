"""What a step would be if some of its storages were smaller, or lived less long."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from plimsoll.artifacts.trace import Category, Storage, Trace

EIGHT_BIT_SHARE = (1 + 4 / 256) / 4
"""Of float32 state: eight bits a number, and one float32 scale for 256 of them."""
_LEAST_STATE_BYTES = 4096 * 4
"""Optimizers of eight bits leave smaller tensors alone."""


def with_storages(trace: Trace, change: Callable[[Storage], Storage]) -> Trace:
    """The step with every storage changed by a function."""
    return msgspec.structs.replace(trace, storages=tuple(map(change, trace.storages)))


def with_eight_bit_state(trace: Trace) -> Trace:
    """The optimizer's state in eight bits per number instead of 32, as 8-bit optimizers hold it."""

    def change(storage: Storage) -> Storage:
        if storage.category is not Category.OPTIMIZER_STATE or storage.bytes < _LEAST_STATE_BYTES:
            return storage
        return msgspec.structs.replace(storage, bytes=int(storage.bytes * EIGHT_BIT_SHARE))

    return with_storages(trace, change)


def with_earlier_ends(trace: Trace, ends: Mapping[int, int]) -> Trace:
    """The step in which storages die earlier: by id, the tick at which they are gone."""
    return with_storages(trace, lambda s: msgspec.structs.replace(s, dies=min(s.dies, ends.get(s.id, s.dies))))


def with_later_births(trace: Trace, births: Mapping[int, int]) -> Trace:
    """The step in which storages are made later: by id, the tick of the op that makes them."""
    return with_storages(trace, lambda s: msgspec.structs.replace(s, born=max(s.born, births.get(s.id, s.born))))
