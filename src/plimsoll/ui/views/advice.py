"""Makes the document (the content to show) of advice about a step's memory: the recommendation first, then its numbers, and the
checklist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plimsoll.artifacts.advice import (
    Advice,
    Candidate,
    CheckItem,
    CheckOutcome,
    CompilerCoverage,
    GraphBreak,
    Kind,
    LayerUse,
)
from plimsoll.artifacts.naming import compress_names, kind_of, name_call
from plimsoll.ui.document import (
    Check,
    Checks,
    Document,
    Element,
    Fold,
    Paragraph,
    Section,
    ShellCommand,
    Table,
    Tone,
    sentence,
    subject_of,
    tabulate,
)
from plimsoll.ui.views.explanation import tabulate_parts
from plimsoll.units import format_bytes, format_seconds, format_share

_KINDS = {Kind.DOES_NOT_FIT: Tone.BAD, Kind.LOOK_ELSEWHERE: Tone.NEUTRAL}
_WORDS = {
    CheckOutcome.PASS: Tone.GOOD,
    CheckOutcome.FAIL: Tone.BAD,
    CheckOutcome.FOUND: Tone.BAD,
    CheckOutcome.NOT_FOUND: Tone.GOOD,
}
_LAYERS_HEADER = ("layer", "saved", "forward", "backward", "freed per ms")
_CANDIDATES: Mapping[str, Callable[[Candidate], str]] = {
    "plan": lambda each: f"{'→ ' if each.is_chosen else '  '}{each.name}",
    "peak": lambda each: format_bytes(each.predicted_peak_bytes),
    "step": lambda each: format_share(each.predicted_overhead),
    "grad. error": lambda each: "0" if each.is_lossless else f"{each.predicted_error:.2%}",
    "": lambda each: each.reason,
}
_BREAKS_SHOWN = 8
_UNSEEN_HAZARDS = (
    "a step's ops do not show copies between host and device, pinned memory, streams and collectives; torch.cuda.graph on the "
    "device itself is the test"
)


def view_advice(advice: Advice) -> Document:
    """Make the document (the content to show) of advice about a step's memory: the recommendation with its reasons, and the
    checklist.
    """
    passed = sum(item.outcome is CheckOutcome.PASS for item in advice.checklist)
    return Document(
        source="Advice",
        subject=f"for {advice.model} on {advice.device}",
        word=advice.recommendation.headline,
        tone=_KINDS.get(advice.recommendation.kind, Tone.GOOD),
        about=subject_of(advice),
        statement=(
            f"{sentence(advice.recommendation.kind)} {passed} of {len(advice.checklist)} items of the checklist pass."
        ),
        sections=[
            Section("What to do", _reasons(advice)),
            Section(
                "Checklist",
                [_checks(advice.checklist), Fold("Failure modes", [_checks(advice.failure_modes)])],
            ),
        ],
        notes=advice.notes,
    )


def _reasons(advice: Advice) -> list[Element]:
    recommendation, bottleneck = advice.recommendation, advice.bottleneck
    reasons = dict.fromkeys([*recommendation.reasons, bottleneck.summary])
    elements: list[Element] = [Paragraph(sentence(reason)) for reason in reasons]
    if recommendation.command:
        elements.append(ShellCommand(recommendation.command))
    elements.append(tabulate_parts(bottleneck.parts, f"Where the memory is ({bottleneck.moment})"))
    elements += [Paragraph(sentence(remedy)) for remedy in bottleneck.remedies if remedy not in recommendation.reasons]
    elements.append(
        tabulate(
            advice.candidates,
            _CANDIDATES,
            title="Plans that were made, predicted",
            numbers=(1, 2, 3),
            marked=next((at for at, candidate in enumerate(advice.candidates) if candidate.is_chosen), None),
        )
    )
    layers = Table(header=_LAYERS_HEADER, rows=_layers(advice.layers), numbers=(1, 2, 3, 4))
    return [
        *elements,
        Fold("Layers: what autograd saves in each", [layers]),
        Fold("torch.compile", [Paragraph(line) for line in _compiler(advice.compiler)]),
        Fold("CUDA graphs", [Paragraph(line) for line in _hazards(advice)]),
    ]


def _layers(layers: Sequence[LayerUse]) -> list[tuple[str, ...]]:
    """Return one table row per group of similar layers that save the same bytes. The seconds in a row are the group's mean."""
    groups: dict[tuple[str, str], list[LayerUse]] = {}
    for layer in layers:
        groups.setdefault((kind_of(layer.name), format_bytes(layer.saved_bytes)), []).append(layer)
    rows: list[tuple[str, ...]] = []
    for members in groups.values():
        count = len(members)
        forward = sum(member.forward_seconds for member in members) / count
        backward = sum(member.backward_seconds for member in members) / count
        rate = members[0].saved_bytes / (forward * 1e3) if forward else 0.0
        rows.append(
            (
                compress_names([name_call(member.name, member.call) for member in members]),
                format_bytes(members[0].saved_bytes) + (" each" if count > 1 else ""),
                format_seconds(forward),
                format_seconds(backward),
                format_bytes(rate),
            )
        )
    return rows


def _compiler(found: CompilerCoverage) -> list[str]:
    """Return lines on torch.compile: what it captured, where the graph broke, and the advice that follows."""
    if not found.is_measured:
        return [f"not checked: {found.note}"]
    graphs = f"{found.graphs} graph{'' if found.graphs == 1 else 's'}"
    lines = [
        f"captured {found.op_share:.0%} of the ops ({found.captured_ops} of {found.ops}) and {found.time_share:.0%} of "
        f"their time, in {graphs}"
    ]
    lines += [found.note] if found.note else []
    lines += [_break(entry) for entry in found.breaks[:_BREAKS_SHOWN]]
    if len(found.breaks) > _BREAKS_SHOWN:
        lines.append(f"and {len(found.breaks) - _BREAKS_SHOWN} more breaks")
    if found.uncaptured:
        lines.append(f"missed in {', '.join(found.uncaptured)}")
    return [*lines, *found.advice]


def _break(entry: GraphBreak) -> str:
    """Return one line about a graph break: ``break at model.py:12, 3 times: if x.sum() > 0 (Data-dependent branching)``."""
    place = f" at {entry.file}:{entry.line}" if entry.file else ""
    times = f", {entry.count} times" if entry.count > 1 else ""
    code = f": {entry.code}" if entry.code else ""
    return f"break{place}{times}{code} ({entry.reason})"


def _hazards(advice: Advice) -> list[str]:
    """Return lines on the ops that prevent a CUDA graph of the step, and a note on hazards that the ops do not show."""
    lines = [
        f"{hazard.what} in {hazard.where}{f', {hazard.count} times' if hazard.count > 1 else ''}"
        for hazard in advice.hazards
    ]
    return [*(lines or ["nothing found that would stop a capture"]), _UNSEEN_HAZARDS]


def _checks(items: Sequence[CheckItem]) -> Checks:
    """Make a checklist of the items with their next steps.

    If an earlier item has the same next step, the item says ``as above``.
    """
    checks: list[Check] = []
    shown: set[str] = set()
    for item in items:
        step = "as above" if item.next in shown else item.next
        checks.append(Check(_WORDS.get(item.outcome, Tone.NEUTRAL), item.outcome, item.title, item.evidence, step))
        shown |= {item.next} if item.next else set()
    return Checks(checks)
