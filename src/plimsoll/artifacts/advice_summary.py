"""Advice in, plain text out: the verdict first, the numbers after. No torch, no rich in here."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.advice import Advice, Candidate, CheckItem, CompilerCoverage, FailureMode, GraphBreak, LayerUse
from plimsoll.artifacts.columns import align
from plimsoll.artifacts.grouping import compress_names, name_call
from plimsoll.units import format_bytes, format_seconds, format_share

_BREAKS_SHOWN = 8


def summarise_advice(advice: Advice) -> str:
    """Everything that the advice says, as text."""
    recommendation = advice.recommendation
    lines = [f"Advice for {advice.model} on {advice.device}: {recommendation.headline}"]
    lines += [f"  - {reason}" for reason in recommendation.reasons]
    if recommendation.command:
        lines += ["", f"  {recommendation.command}"]
    lines += ["", f"Where the memory is ({advice.bottleneck.moment})"]
    lines += align(part_rows(advice), right=[1, 2])
    lines += [f"  - {line}" for line in untold(advice)]
    lines += ["", "Layers: what autograd saves in each"]
    lines += align([list(LAYER_HEADER), *layer_rows(advice.layers)], right=[1, 2, 3, 4])
    lines += ["", "Plans that were made"]
    lines += align([list(CANDIDATE_HEADER), *map(candidate_cells, advice.candidates)], right=[1, 2, 3])
    lines += ["", "torch.compile", *(f"  {line}" for line in compiler_lines(advice.compiler))]
    lines += ["", "CUDA graphs", *(f"  {line}" for line in hazard_lines(advice))]
    lines += ["", "Checklist"]
    lines += entry_lines([(item.outcome, item) for item in advice.checklist])
    lines += ["", "Failure modes"]
    lines += entry_lines([(mode.sign, mode) for mode in advice.failure_modes])
    lines += [f"\nNote: {note}" for note in advice.notes]
    return "\n".join(lines)


def part_rows(advice: Advice) -> list[list[str]]:
    """One row per part of the peak: name, bytes, share, who holds most of it."""
    return [[p.name, format_bytes(p.bytes), f"{p.share:.0%}", p.largest] for p in advice.bottleneck.parts if p.bytes]


def untold(advice: Advice) -> list[str]:
    """What is to be said about the memory beyond the reasons of the recommendation."""
    lines = (advice.bottleneck.summary, *advice.bottleneck.remedies)
    return [line for line in lines if line not in advice.recommendation.reasons]


LAYER_HEADER = ("layer", "saved", "forward", "backward", "freed per ms")


def layer_rows(layers: Sequence[LayerUse]) -> list[list[str]]:
    """One row per group of layers that save the same bytes, seconds being the mean of the group."""
    groups: dict[tuple[str, str], list[LayerUse]] = {}
    for layer in layers:
        kind = ".".join("*" if part.isdigit() else part for part in layer.name.split("."))
        groups.setdefault((kind, format_bytes(layer.saved_bytes)), []).append(layer)
    rows = []
    for members in groups.values():
        count = len(members)
        forward = sum(member.forward_seconds for member in members) / count
        backward = sum(member.backward_seconds for member in members) / count
        rate = members[0].saved_bytes / (forward * 1e3) if forward else 0.0
        each = " each" if count > 1 else ""
        rows.append(
            [
                compress_names([name_call(member.name, member.call) for member in members]),
                format_bytes(members[0].saved_bytes) + each,
                format_seconds(forward),
                format_seconds(backward),
                format_bytes(rate),
            ]
        )
    return rows


CANDIDATE_HEADER = ("plan", "peak", "step", "grad. error", "")


def candidate_cells(candidate: Candidate) -> list[str]:
    """One candidate: name, predicted peak, predicted overhead, expected error, why."""
    return [
        f"{'→ ' if candidate.is_chosen else '  '}{candidate.name}",
        format_bytes(candidate.predicted_peak_bytes),
        format_share(candidate.predicted_overhead),
        "0" if candidate.is_lossless else f"{candidate.predicted_error:.2%}",
        candidate.reason,
    ]


def compiler_lines(found: CompilerCoverage) -> list[str]:
    """What was captured, where it broke, what follows."""
    if not found.is_measured:
        return [f"not checked: {found.note}"]
    graphs = f"{found.graphs} graph{'' if found.graphs == 1 else 's'}"
    lines = [
        f"captured {found.op_share:.0%} of the ops ({found.captured_ops} of {found.ops}) and {found.time_share:.0%} of "
        f"their time, in {graphs}"
    ]
    if found.note:
        lines.append(found.note)
    lines += [describe_break(entry) for entry in found.breaks[:_BREAKS_SHOWN]]
    if len(found.breaks) > _BREAKS_SHOWN:
        lines.append(f"and {len(found.breaks) - _BREAKS_SHOWN} more breaks")
    if found.uncaptured:
        lines.append(f"missed in {', '.join(found.uncaptured)}")
    return [*lines, *found.advice]


def describe_break(entry: GraphBreak) -> str:
    """``break at model.py:12, 3 times: Data-dependent branching (if x.sum() > 0)``."""
    place = f" at {entry.file}:{entry.line}" if entry.file else ""
    times = f", {entry.count} times" if entry.count > 1 else ""
    code = f": {entry.code}" if entry.code else ""
    return f"break{place}{times}{code} ({entry.reason})"


def hazard_lines(advice: Advice) -> list[str]:
    """What would keep the step from being captured as a CUDA graph, and what cannot be told."""
    lines = [
        f"{hazard.what} in {hazard.where}{f', {hazard.count} times' if hazard.count > 1 else ''}"
        for hazard in advice.hazards
    ]
    return [*(lines or ["nothing found that would stop a capture"]), advice.hazards_note]


def entry_lines(entries: Sequence[tuple[str, CheckItem | FailureMode]]) -> list[str]:
    """Items of the checklist or failure modes, each with its next step below; a step is written out once."""
    lines: list[str] = []
    for (word, entry), step in zip(entries, next_steps([entry for _, entry in entries]), strict=True):
        lines.append(f"  {word:<12}{entry.title}: {entry.evidence}")
        lines += [f"  {'':<12}next: {step}"] if step else []
    return lines


def next_steps(entries: Sequence[CheckItem | FailureMode]) -> list[str]:
    """The next step of every entry; one that an entry before has already is ``as above``."""
    return [
        "as above" if entry.next and entry.next in [e.next for e in entries[:position]] else entry.next
        for position, entry in enumerate(entries)
    ]
