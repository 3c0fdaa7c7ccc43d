"""An explanation in, its tables in plain text out. No torch, no rich in here."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.explained import Change, Explanation
from plimsoll.artifacts.holder_summary import group_holders
from plimsoll.artifacts.plan import Holder, Peak
from plimsoll.units import format_bytes

_SHOWN = 6
CHANGE_HEADER = ("change", "peak then", "lowers by", "basis", "how")


def summarise_explanation(explanation: Explanation) -> str:
    """What the explanation says, as people read it."""
    lines = [title_of(explanation), f"  {explanation.verdict}", "", *align(figure_rows(explanation))]
    lines += ["", f"At the peak ({explanation.peak.moment})"]
    lines += align(peak_rows(explanation.peak), right=[1])
    lines += ["", "Resident after forward"]
    lines += align(place_rows(explanation.resident), right=[1])
    if explanation.recomputed:
        lines += ["", "Made again in backward"]
        lines += align(recomputed_rows(explanation), right=[1, 2])
    lines += ["", "What would lower it"]
    lines += align([list(CHANGE_HEADER), *change_rows(explanation.helpful, explanation.peak.bytes)], right=[1, 2])
    lines += [f"  {line}" for line in useless_lines(explanation)]
    lines += [f"\nNote: {note}" for note in explanation.notes]
    return "\n".join(lines)


def title_of(explanation: Explanation) -> str:
    """What is explained."""
    return f"Why the peak of {explanation.model} on {explanation.device} is {format_bytes(explanation.peak.bytes)}"


def figure_rows(explanation: Explanation) -> list[list[str]]:
    """Set-up, peak and what is resident, with and without the set-up."""
    plain, resident = explanation.plain_peak, explanation.plain_resident_bytes
    beside = "" if plain is None else f" (everything kept: {format_bytes(plain.bytes)}, {plain.moment})"
    beside_resident = "" if resident is None else f" (everything kept: {format_bytes(resident)})"
    return [
        ["set-up", explanation.setup or "keeps everything"],
        ["optimizer", explanation.optimizer or "none given: its state and its step are not counted"],
        ["peak", f"{format_bytes(explanation.peak.bytes)}, {explanation.peak.moment}{beside}"],
        ["resident after forward", f"{format_bytes(explanation.resident_bytes)}{beside_resident}"],
        ["basis", _basis(explanation)],
    ]


def _basis(explanation: Explanation) -> str:
    if explanation.is_fake:
        return (
            "fake tensors, counted op by op: workspaces inside of kernels are not in it (convolutions have large ones)"
        )
    return (
        "one real step, counted op by op (allocated bytes; a caching allocator's rounding and fragments are not in it)"
    )


def peak_rows(peak: Peak) -> list[list[str]]:
    """The largest holders of the peak, the rest summed."""
    return _rows(group_holders(peak.holders))


def place_rows(holders: Sequence[Holder]) -> list[list[str]]:
    """The places that hold most, the rest summed; places that differ in numbers only are one row."""
    return _rows(group_holders(holders))


def _rows(groups: Sequence[tuple[str, int]]) -> list[list[str]]:
    rows = [[label, format_bytes(size)] for label, size in groups[:_SHOWN]]
    rest = groups[_SHOWN:]
    return [*rows, [f"{len(rest)} others", format_bytes(sum(size for _, size in rest))]] if rest else rows


def recomputed_rows(explanation: Explanation) -> list[list[str]]:
    """Places whose forward runs again: name, most bytes at once, ops."""
    parts = sorted(explanation.recomputed, key=lambda part: -part.most_bytes)
    rows = [[part.place, format_bytes(part.most_bytes), f"{part.ops} ops"] for part in parts[:_SHOWN]]
    rest = parts[_SHOWN:]
    if rest:
        rows.append([f"{len(rest)} others", f"≤ {format_bytes(rest[0].most_bytes)}", f"{sum(p.ops for p in rest)} ops"])
    return rows


def change_rows(changes: Sequence[Change], peak_bytes: int) -> list[list[str]]:
    """One row per change: name, the peak then, what it lowers, how the figure was found, what to write."""
    return [
        [
            change.name,
            format_bytes(change.predicted_peak_bytes),
            f"{format_bytes(change.lowers_bytes)} ({change.lowers_bytes / peak_bytes:.0%})",
            change.basis,
            change.how,
        ]
        for change in changes
    ]


def useless_lines(explanation: Explanation) -> list[str]:
    """What does not move the peak, and what could not be told."""
    helpful = explanation.helpful
    others = [change.name for change in explanation.changes if change not in helpful]
    lines = [] if helpful else ["nothing of what was tried moves it"]
    if others:
        lines.append(f"does not lower it: {', '.join(others)}")
    return lines + [f"unsupported: {entry.name}: {entry.why}" for entry in explanation.unsupported]
