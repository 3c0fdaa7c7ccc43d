"""Sums up who holds memory by place, and says in one paragraph where a peak lies and why it did or did not move."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plimsoll.artifacts.explained import LEAST_SHARE, Change, RecomputedPart
from plimsoll.artifacts.naming import group_holders, region_in_label
from plimsoll.artifacts.plan import Holder, Peak, TimelinePoint
from plimsoll.artifacts.trace import Storage, WatchedStep
from plimsoll.units import format_bytes, format_share

_BETWEEN = "::"
"""Separates module and op in a label."""
_NOWHERE = "outside of modules"
_MOVED = 0.5
"""A peak that falls by less than this share of what the set-up frees after forward has hardly moved."""
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakView:
    """One way to run the step: its peak, and what stays resident between forward and backward."""

    peak: Peak
    classes: dict[str, int]
    resident_bytes: int
    resident: tuple[Holder, ...]
    timeline: tuple[TimelinePoint, ...]


def place_of(label: str, regions: Sequence[str]) -> str:
    """The region that a label lies in, else its module, else the label itself.

    Example:
        >>> place_of("model.layers.0.mlp::mul#0", ["model.layers.0"])
        'model.layers.0'
        >>> place_of("lm_head::mm#0", ["model.layers.0"]), place_of("parameters", [])
        ('lm_head', 'parameters')
    """
    return region_in_label(label, regions) or label.partition(_BETWEEN)[0]


def by_place(holders: Iterable[Holder], regions: Sequence[str]) -> tuple[Holder, ...]:
    """The bytes of holders summed by place, largest first."""
    bytes_of: Counter[str] = Counter()
    for holder in holders:
        bytes_of[place_of(holder.label, regions)] += holder.bytes
    largest = sorted(bytes_of.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Holder(label=label, bytes=size) for label, size in largest)


def recomputed_by_place(step: WatchedStep) -> tuple[RecomputedPart, ...]:
    """Memory and ops of forward work that ran again in backward, by place: the most that was alive at once."""
    again = set(step.recomputed)
    ops: Counter[str] = Counter()
    for tick in step.recomputed:
        module = step.trace.ops[tick].module
        ops[place_of(f"{module}{_BETWEEN}", step.regions) if module else _NOWHERE] += 1
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
    changes: Counter[int] = Counter()
    for storage in storages:
        changes[storage.born] += storage.bytes
        changes[storage.dies] -= storage.bytes
    return max(itertools.accumulate(changes[tick] for tick in sorted(changes)), default=0)


def judge(setup: str, seen: PeakView, plain: PeakView | None, changes: Sequence[Change]) -> str:
    """What the set-up does to the peak, where the peak lies, and the change that lowers it most."""
    peak = seen.peak
    sentences = []
    if not setup:
        sentences.append(f"Nothing saves memory in this step; its peak lies in {peak.moment}: {_holders(peak)}.")
    elif plain is None:
        sentences.append(f"The peak lies in {peak.moment}: {_holders(peak)}.")
    else:
        sentences.append(_effect(seen, plain))
    helpful = [change for change in changes if change.lowers_bytes > LEAST_SHARE * peak.bytes]
    if helpful:
        best = helpful[0]
        sentences.append(
            f"What lowers it most is {best.name}: to {format_bytes(best.predicted_peak_bytes)}, "
            f"{format_share(-best.lowers_bytes / peak.bytes)}."
        )
    else:
        sentences.append("Nothing of what was tried lowers it.")
    return " ".join(sentences)


def _effect(seen: PeakView, plain: PeakView) -> str:
    peak, plain_peak = seen.peak, plain.peak
    freed_bytes, lowered_bytes = plain.resident_bytes - seen.resident_bytes, plain_peak.bytes - peak.bytes
    after = f"from {format_bytes(plain.resident_bytes)} to {format_bytes(seen.resident_bytes)}"
    share = format_share(peak.bytes / plain_peak.bytes - 1)
    then = f"from {format_bytes(plain_peak.bytes)} to {format_bytes(peak.bytes)} ({share})"
    if freed_bytes <= 0:
        return (
            f"The set-up does not lower what is resident after forward ({after}); the peak goes {then}, in "
            f"{peak.moment}: {_holders(peak)}."
        )
    if lowered_bytes < _MOVED * freed_bytes:
        return (
            f"The set-up lowers what is resident after forward {after}, but the peak only {then}: it lies in "
            f"{peak.moment}, where these are alive together: {_holders(peak)}."
        )
    return (
        f"The set-up lowers what is resident after forward {after}, and the peak {then}; it lies in {peak.moment}: "
        f"{_holders(peak)}."
    )


def _holders(peak: Peak) -> str:
    groups = group_holders(peak.holders)
    named = [f"{format_bytes(size)} {label}" for label, size in groups[:_NAMED]]
    rest = sum(size for _, size in groups[_NAMED:])
    return "; ".join([*named, f"{format_bytes(rest)} others"] if rest else named)
