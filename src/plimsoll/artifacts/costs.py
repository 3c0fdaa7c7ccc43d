"""Cost of each distinct op of a trace on one machine, and how reliable a figure is."""

from __future__ import annotations

import enum

import msgspec

SCHEMA_VERSION = 1


class CostSource(enum.StrEnum):
    MEASURED = "measured"
    ROOFLINE = "roofline"


class OpCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one op: the median; its spread is half the distance between the quartiles."""

    seconds: float
    spread_seconds: float = 0.0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per ``cost_key`` of a trace on ``device``.

    The engine adds costs of its own: ``region_seconds`` per call of a region that it changes, ``slot_seconds`` per tensor
    that autograd saves in that region (including parameters), ``replay_seconds`` per recomputed op, in addition to the op.
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
        """Seconds of one op; 0 if the op does not have a cost."""
        cost = self.ops.get(cost_key)
        return 0.0 if cost is None else cost.seconds


class Basis(enum.StrEnum):
    """How reliable a figure is; every basis except ``UNSUPPORTED`` comes with a relative error.

    ``EXACT``: counted, and compared with torch. ``MODELLED``: computed with a model whose parts are known, such as a simulated
    allocator or a roofline. ``ASSUMED``: a figure that others measured, or a convention. ``UNSUPPORTED``: no figure at all.
    """

    EXACT = "exact"
    MODELLED = "modelled"
    ASSUMED = "assumed"
    UNSUPPORTED = "unsupported"
