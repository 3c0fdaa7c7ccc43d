"""Holders by storage in, holders by place out: regions, modules outside of them, and what stays for the whole step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plimsoll.artifacts.explained import RecomputedPart
from plimsoll.artifacts.plan import Holder
from plimsoll.artifacts.trace import Storage
from plimsoll.artifacts.watched import WatchedStep

_BETWEEN = "::"
"""What stands between a module and an op in a label."""
_NOWHERE = "outside of modules"


def place_of(label: str, regions: Sequence[str]) -> str:
    """The region that a label lies in, else its module, else the label itself.

    Example:
        >>> place_of("model.layers.0.mlp::mul#0", ["model.layers.0"])
        'model.layers.0'
        >>> place_of("lm_head::mm#0", ["model.layers.0"]), place_of("parameters", [])
        ('lm_head', 'parameters')
    """
    inside = [
        name for name in regions if label.startswith(name) and label[len(name) : len(name) + 1] in (".", ":", " ")
    ]
    if inside:
        return max(inside, key=len)
    return label.partition(_BETWEEN)[0] if _BETWEEN in label else label


def by_place(holders: Iterable[Holder], regions: Sequence[str]) -> tuple[Holder, ...]:
    """The bytes of holders summed by place, largest first."""
    bytes_of: dict[str, int] = {}
    for holder in holders:
        place = place_of(holder.label, regions)
        bytes_of[place] = bytes_of.get(place, 0) + holder.bytes
    return tuple(
        Holder(label=label, bytes=size)
        for label, size in sorted(bytes_of.items(), key=lambda item: (-item[1], item[0]))
    )


def recomputed_by_place(step: WatchedStep) -> tuple[RecomputedPart, ...]:
    """What forward that ran again in backward made, by place: the most that was alive at once, and the ops."""
    again = set(step.recomputed)
    ops: dict[str, int] = {}
    for tick in step.recomputed:
        module = step.trace.ops[tick].module
        place = place_of(f"{module}{_BETWEEN}", step.regions) if module else _NOWHERE
        ops[place] = ops.get(place, 0) + 1
    made: dict[str, list[Storage]] = {}
    for storage in step.trace.storages:
        if storage.born in again:
            place = place_of(storage.label, step.regions) if _BETWEEN in storage.label else _NOWHERE
            made.setdefault(place, []).append(storage)
    return tuple(
        RecomputedPart(place=place, most_bytes=_most_at_once(made[place]), ops=count)
        for place, count in ops.items()
        if place in made
    )


def _most_at_once(storages: Iterable[Storage]) -> int:
    changes: dict[int, int] = {}
    for storage in storages:
        changes[storage.born] = changes.get(storage.born, 0) + storage.bytes
        changes[storage.dies] = changes.get(storage.dies, 0) - storage.bytes
    alive = most = 0
    for tick in sorted(changes):
        alive += changes[tick]
        most = max(most, alive)
    return most
