"""Data: the seconds of each distinct op of a traced step on one machine, and words for how reliable a figure is."""

from __future__ import annotations

import enum

import msgspec

SCHEMA_VERSION = 1


class CostSource(enum.StrEnum):
    """Where seconds of ops come from: measured on the device, or computed with a roofline."""

    MEASURED = "measured"
    ROOFLINE = "roofline"


class OpCost(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the time of one op, in seconds.

    ``seconds`` is the median, ``spread_seconds`` half the distance between the quartiles.
    """

    seconds: float
    spread_seconds: float = 0.0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the time of each distinct op of a traced step on ``device``. ``ops`` maps cost keys to costs.

    A cost key is an op's name with its shapes. Carrying out a plan has costs of its own: ``region_seconds`` for each call of a
    region (a module that the plan decides about) if the region drops something, ``slot_seconds`` for each tensor that autograd
    saves in that region (including parameters), and ``replay_seconds`` for each recomputed op, in addition to the seconds of
    the op itself.
    """

    schema_version: int = SCHEMA_VERSION
    device: str
    source: CostSource
    ops: dict[str, OpCost]
    region_seconds: float = 0.0
    slot_seconds: float = 0.0
    replay_seconds: float = 0.0
    memory_bytes: int | None = None
    """The device's memory in bytes; ``None`` if it is not known."""

    def seconds_of(self, cost_key: str) -> float:
        """Return the seconds of the op with this cost key; 0 if ``ops`` does not contain the key."""
        cost = self.ops.get(cost_key)
        return 0.0 if cost is None else cost.seconds


class Basis(enum.StrEnum):
    """Names for how reliable a figure is. A figure of each basis except ``UNSUPPORTED`` comes with a relative error.

    An ``EXACT`` figure was counted and compared with torch. A ``MODELLED`` figure was computed with a model whose parts are
    known, such as a simulated allocator or a roofline. An ``ASSUMED`` figure was measured by others, or is a convention.
    ``UNSUPPORTED`` means that a figure cannot be given.
    """

    EXACT = "exact"
    MODELLED = "modelled"
    ASSUMED = "assumed"
    UNSUPPORTED = "unsupported"
