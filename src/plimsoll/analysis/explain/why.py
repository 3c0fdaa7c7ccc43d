"""What was seen of a step in, the one paragraph that answers "why did my peak not move?" out."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.explained import LEAST_SHARE, Change
from plimsoll.artifacts.naming import group_holders
from plimsoll.artifacts.plan import Peak
from plimsoll.units import format_bytes, format_share

_MOVED = 0.5
"""A peak that falls by less than this share of what the set-up frees after forward has hardly moved."""
_NAMED = 3


def judge(
    *,
    setup: str,
    peak: Peak,
    resident_bytes: int,
    plain_peak: Peak | None,
    plain_resident_bytes: int | None,
    changes: Sequence[Change],
) -> str:
    """What the set-up does to the peak, where the peak lies, and the change that lowers it most."""
    sentences = []
    if not setup:
        sentences.append(f"Nothing saves memory in this step; its peak lies in {peak.moment}: {_holders(peak)}.")
    elif plain_peak is None or plain_resident_bytes is None:
        sentences.append(f"The peak lies in {peak.moment}: {_holders(peak)}.")
    else:
        sentences.append(_effect(peak, resident_bytes, plain_peak, plain_resident_bytes))
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


def _effect(peak: Peak, resident_bytes: int, plain_peak: Peak, plain_resident_bytes: int) -> str:
    freed_bytes, lowered_bytes = plain_resident_bytes - resident_bytes, plain_peak.bytes - peak.bytes
    after = f"from {format_bytes(plain_resident_bytes)} to {format_bytes(resident_bytes)}"
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
