"""Makes the document (the content to show) of an explanation of a step's peak: the answer, the tensors that hold memory, and
the changes that would lower the peak.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.explained import Change, Explanation, MemoryPart
from plimsoll.artifacts.naming import group_holders, with_rest
from plimsoll.artifacts.plan import Holder
from plimsoll.ui.document import Document, Element, MemoryChart, NamedFigures, Paragraph, Section, Table, Tone
from plimsoll.units import format_bytes

_SHOWN = 6
_CHANGES_HEADER = ("change", "new peak", "lower by", "basis")


def view_explanation(explanation: Explanation) -> Document:
    """Make the document (the content to show) of an explanation of a step's peak."""
    peak = explanation.peak
    sections = [
        Section("Figures", [NamedFigures(_figures(explanation))]),
        Section(f"At the peak ({peak.moment})", [tabulate_parts(explanation.parts), _holders(peak.holders)]),
        Section("Resident after forward", [_holders(explanation.resident)]),
    ]
    if explanation.recomputed:
        sections.append(Section("Recomputed in backward", [_recomputed(explanation)]))
    sections.append(Section("What would lower the peak", _changes(explanation)))
    if explanation.timeline:
        sections.append(Section("Memory over the step", [MemoryChart(explanation.timeline)]))
    return Document(
        source="Explanation",
        subject=f"of the peak of {explanation.model} on {explanation.device}",
        word=format_bytes(peak.bytes),
        tone=Tone.NEUTRAL,
        lines=[explanation.verdict],
        sections=sections,
        notes=explanation.notes,
    )


def _figures(explanation: Explanation) -> list[tuple[str, str]]:
    """Return table rows about a step's peak: what saves memory, the optimizer, the peak, the bytes held after forward, and how
    the bytes were counted.

    If they are known, the figures of the same step with everything kept are shown next to the peak and the bytes.
    """
    plain, resident = explanation.plain_peak, explanation.plain_resident_bytes
    beside = "" if plain is None else f" (everything kept: {format_bytes(plain.bytes)}, {plain.moment})"
    beside_resident = "" if resident is None else f" (everything kept: {format_bytes(resident)})"
    if explanation.is_fake:
        how = "fake tensors, counted op by op"
        basis = f"{how}; workspaces inside kernels are not counted (those of convolutions are large)"
    else:
        how = "one real step, counted op by op"
        basis = f"{how} (allocated bytes, without the caching allocator's rounding and fragmentation)"
    return [
        ("set-up", explanation.setup or "keeps everything"),
        ("optimizer", explanation.optimizer or "none given, so optimizer state and step are not counted"),
        ("peak", f"{format_bytes(explanation.peak.bytes)}, {explanation.peak.moment}{beside}"),
        ("resident after forward", f"{format_bytes(explanation.resident_bytes)}{beside_resident}"),
        ("basis", basis),
    ]


def tabulate_parts(parts: Sequence[MemoryPart], title: str = "") -> Table:
    """Make a table of the memory categories that hold bytes: name, bytes, share of the peak, and the largest tensor."""
    shown = [part for part in parts if part.bytes]
    return Table(
        title=title,
        rows=[(part.name, format_bytes(part.bytes), f"{part.share:.0%}", part.largest) for part in shown],
        numbers=(1, 2),
        bars=[part.share for part in shown],
    )


def _holders(holders: Sequence[Holder]) -> Table:
    """Make a table of the tensors that hold the most bytes, with a sum of the rest.

    Tensors whose labels differ only in numbers share a row.
    """
    rows = [(label, format_bytes(size)) for label, size in with_rest(group_holders(holders), _SHOWN)]
    return Table(rows=rows, numbers=(1,))


def _recomputed(explanation: Explanation) -> Table:
    """Make a table of the modules whose forward runs again in backward: name, the most bytes held at once, and the number of
    ops.
    """
    parts = sorted(explanation.recomputed, key=lambda part: -part.most_bytes)
    rows = [(part.place, format_bytes(part.most_bytes), f"{part.ops} ops") for part in parts[:_SHOWN]]
    rest = parts[_SHOWN:]
    if rest:
        rows.append((f"{len(rest)} others", f"≤ {format_bytes(rest[0].most_bytes)}", f"{sum(p.ops for p in rest)} ops"))
    return Table(rows=rows, numbers=(1, 2))


def _changes(explanation: Explanation) -> list[Element]:
    """Return the elements about changes: first those that lower the peak, the best one first, each with the code to write.

    After them come the names of the changes that do not lower the peak, and those that are unsupported with the reason.
    """
    helpful = explanation.helpful
    elements: list[Element] = []
    if helpful:
        rows = [_change(change, explanation.peak.bytes) for change in helpful]
        elements = [
            Table(header=_CHANGES_HEADER, rows=rows, numbers=(1, 2), marked=0),
            NamedFigures([(change.name, change.how) for change in helpful]),
        ]
    else:
        elements = [Paragraph("none of the changes that were tried lowers the peak")]
    others = [change.name for change in explanation.changes if change not in helpful]
    elements += [Paragraph(f"do not lower the peak: {', '.join(others)}")] if others else []
    return elements + [Paragraph(f"unsupported: {entry.name}: {entry.why}") for entry in explanation.unsupported]


def _change(change: Change, peak_bytes: int) -> tuple[str, ...]:
    return (
        change.name,
        format_bytes(change.predicted_peak_bytes),
        f"{format_bytes(change.lowers_bytes)} ({change.lowers_bytes / peak_bytes:.0%})",
        change.basis,
    )
