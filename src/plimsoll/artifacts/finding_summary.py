"""A finding in, rows of words out, and all of them as plain text. No torch, no rich in here."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.finding import Finding, Layer, OverheadCause, OverheadPart, Side, WorkPhase
from plimsoll.units import format_bytes, format_seconds, format_share

PARTS_HEADER = ("cause", "per step", "of the baseline", "what it is")
PHASES_HEADER = ("phase", "baseline", "with the plan", "bytes read at least", "of peak")
LAYERS_HEADER = ("", "baseline", "plan", "busy", "with the plan", "recompute")
_MOST_LAYERS = 12
_NEGLIGIBLE_SHARE = 0.0005
_UNDER_PROFILER = 1.2
"""Profiled steps this much longer than plain ones make small parts doubtful."""


def summarise_finding(finding: Finding) -> str:
    """The finding as people read it first: figures, the overhead's parts, phases, signs, advice, notes."""
    lines = [finding_title(finding), ""]
    lines += align([list(row) for row in finding_figures(finding)])
    lines += ["", "Where the overhead goes"]
    lines += align([list(PARTS_HEADER), *map(list, part_rows(finding))], right=[1, 2])
    lines += ["", "Busy time by phase"]
    lines += align([list(PHASES_HEADER), *map(list, phase_rows(finding))], right=[1, 2, 3, 4])
    lines += ["", "Signs"]
    lines += align([list(row) for row in sign_rows(finding)])
    lines += ["", layers_title(finding)]
    lines += align([list(LAYERS_HEADER), *map(list, layer_rows(finding))], right=[1, 2, 3, 4, 5])
    lines += [f"\nAdvice: {text}" for text in advice_lines(finding)]
    lines += [f"\nNote: {note}" for note in finding.notes]
    return "\n".join(lines)


def finding_title(finding: Finding) -> str:
    """What was compared."""
    what = f"plan {finding.strategy!r} for {finding.model}" if finding.model else finding.plan.source
    return f"Diagnosis of {what}: {format_share(finding.overhead_share)} per step"


def finding_figures(finding: Finding) -> tuple[tuple[str, str], ...]:
    """Pairs of name and text."""
    rows = [
        ("from", f"{finding.origin}, {finding.baseline.steps} and {finding.plan.steps} steps, {_place(finding)}"),
        ("step", _both(finding, lambda side: format_seconds(side.step_seconds))),
        ("busy", _both(finding, lambda side: _with_share(side.busy_seconds, side))),
        ("idle", _both(finding, _idle)),
        (str(finding.unit), _both(finding, lambda side: f"{side.count:.0f}") + f", {finding.kernel_ratio:.2f} ×"),
        ("attributed", _both(finding, _attribution)),
    ]
    if finding.baseline.copied_bytes or finding.plan.copied_bytes:
        rows.append(("copied and filled", _both(finding, _copied)))
    if finding.measured_overhead_share is not None:
        rows.insert(2, ("without a profiler", _plain_figures(finding)))
    return tuple(rows)


def _place(finding: Finding) -> str:
    return f"{finding.unit} on {finding.device or 'a device without a name'}"


def _both(finding: Finding, describe: Callable[[Side], str]) -> str:
    return f"{describe(finding.baseline)} → {describe(finding.plan)}"


def _with_share(seconds: float, side: Side) -> str:
    share = seconds / side.step_seconds if side.step_seconds else 0.0
    return f"{format_seconds(seconds)} ({share:.0%})"


def _idle(side: Side) -> str:
    waiting = f", {format_seconds(side.waiting_seconds)} of it waiting" if side.waiting_seconds else ""
    return _with_share(side.idle_seconds, side) + waiting


def _copied(side: Side) -> str:
    return "not known" if side.copied_bytes is None else format_bytes(side.copied_bytes)


def _attribution(side: Side) -> str:
    return (
        f"{side.attributed_share:.1%} to an op, {side.phased_share:.1%} to a phase, {side.module_share:.1%} to a module"
    )


def _plain_figures(finding: Finding) -> str:
    before, after = finding.measured_baseline_seconds or 0.0, finding.measured_plan_seconds or 0.0
    text = f"{format_seconds(before)} → {format_seconds(after)}, {format_share(finding.measured_overhead_share or 0.0)}"
    if finding.baseline.step_seconds > _UNDER_PROFILER * before:
        text += f"; the profiler makes the baseline {finding.baseline.step_seconds / before:.2f} × as long"
    return text


def notable_parts(finding: Finding) -> list[OverheadPart]:
    """The parts that can be seen beside the step."""
    least_seconds = _NEGLIGIBLE_SHARE * finding.baseline.step_seconds
    return [
        part for part in finding.parts if abs(part.seconds) >= least_seconds or part.cause is OverheadCause.UNEXPLAINED
    ]


def part_rows(finding: Finding) -> list[tuple[str, str, str, str]]:
    """One row per notable part, and their sum."""
    step_seconds = finding.baseline.step_seconds or 1.0
    rows = [
        (str(part.cause), _with_spread(part), format_share(part.seconds / step_seconds), part.cause.meaning)
        for part in notable_parts(finding)
    ]
    sum_seconds = sum(part.seconds for part in finding.parts)
    rows.append(
        (
            "sum",
            f"{format_seconds(sum_seconds)}",
            format_share(sum_seconds / step_seconds),
            f"the measured overhead is {format_seconds(finding.overhead_seconds)}",
        )
    )
    return rows


def _with_spread(part: OverheadPart) -> str:
    spread = "" if part.spread_seconds is None else f" ± {format_seconds(part.spread_seconds)}"
    return f"{format_seconds(part.seconds)}{spread}"


def phase_rows(finding: Finding) -> list[tuple[str, str, str, str, str]]:
    """One row per phase that either side has."""
    before = {use.phase: use for use in finding.baseline.phases}
    after = {use.phase: use for use in finding.plan.phases}
    rows = []
    for phase in WorkPhase:
        if phase not in before and phase not in after:
            continue
        one, other = before.get(phase), after.get(phase)
        shown = other or one
        assert shown is not None
        rows.append(
            (
                str(phase),
                format_seconds(one.busy_seconds) if one else "–",
                format_seconds(other.busy_seconds) if other else "–",
                "–" if shown.read_bytes is None else format_bytes(shown.read_bytes),
                "–" if shown.bandwidth_share is None else f"{shown.bandwidth_share:.0%}",
            )
        )
    return rows


def sign_rows(finding: Finding) -> list[tuple[str, str, str]]:
    """Raised or not, by name."""
    words = {True: "RAISED", False: "ok", None: "not known"}
    return [(sign.name, words[sign.is_raised], sign.text) for sign in finding.signs]


def layers_title(finding: Finding) -> str:
    """What the table of layers shows."""
    return f"{finding.unit} by {'layer' if finding.are_layers_modules else 'operation'}, per step"


def layer_rows(finding: Finding) -> list[tuple[str, ...]]:
    """The layers that take most, in the model's order."""
    heavy = sorted(finding.layers, key=lambda row: -max(row.plan_seconds, row.baseline_seconds))[:_MOST_LAYERS]
    rows = [_layer_row(row) for row in finding.layers if row in heavy]
    if len(finding.layers) > len(heavy):
        rows.append((f"and {len(finding.layers) - len(heavy)} more", "", "", "", "", ""))
    return rows


def _layer_row(row: Layer) -> tuple[str, ...]:
    return (
        row.name[:60],
        f"{row.baseline_count:.0f}",
        f"{row.plan_count:.0f}",
        format_seconds(row.baseline_seconds),
        format_seconds(row.plan_seconds),
        format_seconds(row.recompute_seconds) if row.recompute_seconds else "–",
    )


def advice_lines(finding: Finding) -> list[str]:
    """What to do about the parts that cost most, most first; nothing where the plan costs nothing."""
    costly = [p for p in notable_parts(finding) if p.seconds > max(2 * (p.spread_seconds or 0.0), 0.0)]
    largest = sorted(costly, key=lambda part: -part.seconds)
    total_seconds = sum(part.seconds for part in costly)
    lines = []
    for part in largest:
        if part.seconds >= 0.1 * total_seconds:
            what = f" ({'; '.join(part.details)})" if part.details else ""
            lines.append(f"{part.cause}: {part.cause.advice}{what}")
    return lines
