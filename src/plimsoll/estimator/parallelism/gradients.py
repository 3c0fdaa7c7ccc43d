"""A traced backward and units in; where each unit's gradients come from and when they are whole out. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.artifacts.trace import Category, Storage, Trace
from plimsoll.estimator.parallelism.units import ROOT, Unit


@dataclass(frozen=True, slots=True)
class Gradients:
    """What backward makes for one unit, and the tick before which all of it is there."""

    unit: Unit
    storages: tuple[Storage, ...]
    whole: int

    @property
    def label(self) -> str:
        """The unit's name for people."""
        return self.unit.label


def gradients_of(trace: Trace, units: Sequence[Unit]) -> tuple[Gradients, ...]:
    """Every unit's gradients, in the order in which backward completes them.

    A block's gradients are whole when its backward ends, those outside of blocks when backward ends. A block's experts are
    told from the rest of it by their sizes.

    Args:
        trace: of one stage.
        units: all of its units.
    """
    pools: dict[str, list[Storage]] = {}
    for storage in trace.storages:
        if storage.category is Category.GRADIENT and storage.born >= 0:
            region = trace.ops[storage.born].region
            pools.setdefault(trace.regions[region].name if region >= 0 else ROOT, []).append(storage)
    found = []
    for unit in sorted(units, key=lambda unit: not unit.is_expert):
        mine = _take(pools.get(unit.name, []), unit)
        ends = [call.backward[1] for call in unit.calls if call.backward[0] >= 0]
        if mine:
            found.append(Gradients(unit, tuple(mine), max(ends, default=len(trace.ops))))
    return tuple(sorted(found, key=lambda each: each.whole))


def _take(pool: list[Storage], unit: Unit) -> list[Storage]:
    """Take the gradients that have the sizes of the unit's parameters out of its block's."""
    left = Counter(parameter.bytes for parameter in unit.parameters if parameter.is_trainable)
    mine = []
    for storage in tuple(pool):
        if left[storage.bytes] > 0:
            left[storage.bytes] -= 1
            mine.append(storage)
            pool.remove(storage)
    return mine
