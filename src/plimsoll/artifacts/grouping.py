"""A plan's region decisions in, groups of identical ones out: ``layers.0–31`` instead of 32 lines. No torch in here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plimsoll.artifacts.plan import RegionPlan

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class RegionGroup:
    """Regions of one kind that share their decisions; ``label`` names them all."""

    label: str
    regions: tuple[RegionPlan, ...]

    @property
    def first(self) -> RegionPlan:
        """The one whose decisions stand for all."""
        return self.regions[0]

    @property
    def retained_bytes(self) -> int:
        """Bytes that all of them hold between forward and backward."""
        return sum(region.retained_bytes for region in self.regions)

    @property
    def saved_bytes(self) -> int:
        """Bytes that all of them would hold without a plan."""
        return sum(decision.bytes for region in self.regions for decision in region.decisions)

    @property
    def replay_seconds(self) -> float:
        """Seconds that all of them spend on running ops again."""
        return sum(region.replay_seconds for region in self.regions)


def group_regions(regions: Iterable[RegionPlan]) -> tuple[RegionGroup, ...]:
    """Group region calls that are of one kind and share all decisions, in the order of first appearance."""
    groups: dict[tuple[object, ...], list[RegionPlan]] = {}
    for region in regions:
        packed = tuple(sorted(region.packed.items()))
        key = (region.kind, region.dropped, packed, region.is_boundary_dropped, len(region.decisions))
        groups.setdefault(key, []).append(region)
    return tuple(
        RegionGroup(
            label=compress_names([name_call(member.name, member.call) for member in members]),
            regions=tuple(members),
        )
        for members in groups.values()
    )


def name_call(name: str, call: int) -> str:
    """The name of a region call: the module's, and from the second call on its position."""
    shown = name or "(the model)"
    return shown if call == 0 else f"{shown} (call {call + 1})"


def compress_names(names: Sequence[str]) -> str:
    """Names that differ in one number, written as ranges.

    Example:
        >>> compress_names(["layers.0", "layers.1", "layers.2", "layers.5", "head"])
        'layers.0–2,5, head'
    """
    runs: dict[tuple[str, str], list[int]] = {}
    places: dict[tuple[str, str], str] = {}
    for name in names:
        found = _varying_number(name, names)
        if found is None:
            places[name, ""] = name
            continue
        key = (name[: found.start()], name[found.end() :])
        runs.setdefault(key, []).append(int(found.group()))
        places.setdefault(key, "")
    return ", ".join(f"{key[0]}{_ranges(runs[key])}{key[1]}" if key in runs else alone for key, alone in places.items())


def _varying_number(name: str, names: Sequence[str]) -> re.Match[str] | None:
    """The first number in ``name`` whose replacement gives another of the names."""
    for found in _NUMBER.finditer(name):
        before, after = name[: found.start()], name[found.end() :]
        pattern = re.compile(re.escape(before) + r"\d+" + re.escape(after))
        if any(other != name and pattern.fullmatch(other) for other in names):
            return found
    return None


def _ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0–2,5``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)
