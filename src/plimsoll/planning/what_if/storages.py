"""What a step would be if some of its storages were smaller, or lived less long."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from plimsoll.artifacts.trace import Category, Trace

EIGHT_BIT_SHARE = (1 + 4 / 256) / 4
"""Of float32 state: eight bits a number, and one float32 scale for 256 of them."""
_LEAST_STATE_BYTES = 4096 * 4
"""Optimizers of eight bits leave smaller tensors alone."""


def with_eight_bit_state(trace: Trace) -> Trace:
    """The optimizer's state in eight bits per number instead of 32, as 8-bit optimizers hold it."""
    return msgspec.structs.replace(
        trace,
        storages=tuple(
            msgspec.structs.replace(storage, bytes=int(storage.bytes * EIGHT_BIT_SHARE))
            if storage.category is Category.OPTIMIZER_STATE and storage.bytes >= _LEAST_STATE_BYTES
            else storage
            for storage in trace.storages
        ),
    )


def with_earlier_ends(trace: Trace, ends: Mapping[int, int]) -> Trace:
    """The step in which storages die earlier: by id, the tick at which they are gone."""
    return msgspec.structs.replace(
        trace,
        storages=tuple(
            msgspec.structs.replace(storage, dies=min(storage.dies, ends[storage.id]))
            if storage.id in ends
            else storage
            for storage in trace.storages
        ),
    )


def with_later_births(trace: Trace, births: Mapping[int, int]) -> Trace:
    """The step in which storages are made later: by id, the tick of the op that makes them."""
    return msgspec.structs.replace(
        trace,
        storages=tuple(
            msgspec.structs.replace(storage, born=max(storage.born, births[storage.id]))
            if storage.id in births
            else storage
            for storage in trace.storages
        ),
    )
