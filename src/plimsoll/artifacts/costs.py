"""What each distinct op of a trace costs on one machine, and how far a figure can be relied on."""

from __future__ import annotations

import enum

import msgspec

SCHEMA_VERSION = 1


class CostSource(enum.StrEnum):
    MEASURED = "measured"
    ROOFLINE = "roofline"


class OpCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one op: the median, and half the distance between the quartiles as its spread."""

    seconds: float
    spread_seconds: float = 0.0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per ``cost_key`` of a trace on ``device``.

    What the engine itself adds: ``region_seconds`` per call of a region that it touches, ``slot_seconds`` per tensor that
    autograd saves in there (parameters too), ``replay_seconds`` per op that runs again, on top of the op.
    """

    schema_version: int = SCHEMA_VERSION
    device: str
    source: CostSource
    ops: dict[str, OpCost]
    region_seconds: float = 0.0
    slot_seconds: float = 0.0
    replay_seconds: float = 0.0
    memory_bytes: int | None = None
    """The device's memory, when known."""

    def seconds_of(self, cost_key: str) -> float:
        """Seconds of one op; none for an op that has no cost."""
        cost = self.ops.get(cost_key)
        return 0.0 if cost is None else cost.seconds


class Basis(enum.StrEnum):
    """How much a figure can be relied on; all but ``UNSUPPORTED`` carry a relative error.

    ``EXACT``: counted, and compared with torch. ``MODELLED``: computed with a model whose parts are known, such as a simulated
    allocator or a roofline. ``ASSUMED``: a figure that others measured, or a convention. ``UNSUPPORTED``: no figure at all.
    """

    EXACT = "exact"
    MODELLED = "modelled"
    ASSUMED = "assumed"
    UNSUPPORTED = "unsupported"
