"""A peak's holders in, few rows that people can read out: all that regions of one kind hold is one row. No torch in here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from plimsoll.artifacts.grouping import compress_names, name_call
from plimsoll.artifacts.plan import Holder, Peak, Plan
from plimsoll.units import format_bytes

_SHOWN = 5
_OUTPUT = re.compile(r"#\d+(\.\d+)?$")
"""``#3.1`` in ``mm#3.1``: which of several calls, and which of its outputs."""
_REBUILT = " rebuilt "
"""What planning writes between a region and a value that backward has brought back."""


def holder_rows(plan: Plan, peak: Peak) -> list[list[str]]:
    """The largest holders of a peak, the rest summed: label, bytes."""
    rows = _grouped(peak.holders, [region.name for region in plan.regions if region.name])
    shown = [[label, format_bytes(size)] for label, size in rows[:_SHOWN]]
    rest = rows[_SHOWN:]
    if rest:
        shown.append([f"{len(rest)} others", format_bytes(sum(size for _, size in rest))])
    return shown


def group_holders(holders: Sequence[Holder]) -> list[tuple[str, int]]:
    """Holders whose labels differ in numbers only as one row with their sum; largest first.

    Example:
        >>> group_holders([Holder(label="layers.0::mm#1", bytes=2), Holder(label="layers.1::mm#1", bytes=2)])
        [('layers.0::mm#1 (2 alike)', 4)]
    """
    groups: dict[str, list[Holder]] = {}
    for holder in holders:
        groups.setdefault(_kind_of(holder.label), []).append(holder)
    rows = []
    for members in groups.values():
        label = members[0].label if len(members) == 1 else f"{members[0].label} ({len(members)} alike)"
        rows.append((label, sum(member.bytes for member in members)))
    return sorted(rows, key=lambda row: -row[1])


def _grouped(holders: Sequence[Holder], regions: Sequence[str]) -> list[tuple[str, int]]:
    """Values of regions together, and calls of one op outside of them; largest first."""
    groups: dict[tuple[str, str], list[Holder]] = {}
    owners: dict[tuple[str, str], list[str]] = {}
    for holder in holders:
        region = _region_of(holder.label, regions)
        if region:
            key = ("rebuilt in" if _REBUILT in holder.label else "saved in", _kind_of(region))
            owners.setdefault(key, []).append(region)
        else:
            key = ("", _OUTPUT.sub("", holder.label))
        groups.setdefault(key, []).append(holder)
    rows = []
    for key, members in groups.items():
        verb, label = key
        if verb:
            named = compress_names([name_call(name, 0) for name in dict.fromkeys(owners[key])])
            label = f"{verb} {named} ({len(members)} values)" if len(members) > 1 else members[0].label
        elif len(members) > 1:
            label = f"{label} ({len(members)} times)"
        else:
            label = members[0].label
        rows.append((label, sum(member.bytes for member in members)))
    return sorted(rows, key=lambda row: -row[1])


def _region_of(label: str, regions: Sequence[str]) -> str:
    """The region that a label belongs to: ``layers.1`` for ``layers.1.mlp::mul#0``, nothing for ``layers.10::add#0``."""
    inside = (
        name for name in regions if label.startswith(name) and label[len(name) : len(name) + 1] in (".", ":", " ")
    )
    return max(inside, key=len, default="")


def _kind_of(region: str) -> str:
    """Names that differ in numbers only are of one kind."""
    return re.sub(r"\d+", "*", region)
