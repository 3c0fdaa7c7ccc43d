"""Makes the document (the content to show) of a diagnosis: the causes of a plan's extra time, advice, phases, warning signs and
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plimsoll.artifacts.finding import Finding, Layer, OverheadCause, OverheadPart, PhaseUse, Side, WorkPhase
from plimsoll.ui.document import (
    UNKNOWN,
    Check,
    Checks,
    Document,
    Element,
    Fold,
    NamedFigures,
    Paragraph,
    PartsChart,
    Section,
    Subject,
    Table,
    Tone,
    tabulate,
)
from plimsoll.units import format_bytes, format_more, format_seconds, format_share

_MOST_LETTERS = 60
_PARTS_HEADER = ("cause", "per step", "of the baseline", "meaning")
_PHASES_HEADER = ("phase", "baseline", "with the plan", "bytes read, at least", "of peak")
_LAYERS: Mapping[str, Callable[[Layer], str]] = {
    "": lambda row: row.name[:_MOST_LETTERS],
    "baseline": lambda row: f"{row.baseline_count:.0f}",
    "plan": lambda row: f"{row.plan_count:.0f}",
    "busy": lambda row: format_seconds(row.baseline_seconds),
    "with the plan": lambda row: format_seconds(row.plan_seconds),
    "recompute": lambda row: format_seconds(row.recompute_seconds) if row.recompute_seconds else UNKNOWN,
}
_MOST_LAYERS = 12
_NEGLIGIBLE_SHARE = 0.0005
_NOTABLE_SHARE = 0.1
"""A share of the seconds that all costly parts of the overhead take together. A part gets advice only if it takes at least this
share.
"""
_UNDER_PROFILER = 1.2
"""A factor. If the step without a plan takes more than this many times as long under the profiler, the text says so, because
small parts are then doubtful.
"""
_SIGNS = {True: (Tone.BAD, "RAISED"), False: (Tone.GOOD, "ok"), None: (Tone.NEUTRAL, "not known")}


def view_finding(finding: Finding) -> Document:
    """Make the document (the content to show) of a diagnosis: figures, the parts of the overhead, advice, phases, warning signs
    and layers.
    """
    what = f"plan {finding.strategy!r} for {finding.model}" if finding.model else finding.plan.source
    measured, profiled = finding.measured_overhead_share, format_share(finding.overhead_share)
    return Document(
        source="Diagnosis",
        subject=f"of {what}",
        word=f"{profiled if measured is None else format_share(measured)} per step",
        tone=Tone.NEUTRAL,
        lines=[]
        if measured is None
        else [f"Measured without a profiler. Under the profiler it is {profiled}; the parts below add up to that."],
        about=Subject(model=finding.model, device=finding.device, origins=finding.versions),
        statement=_statement(finding),
        sections=[Section("Where the overhead goes", _overhead(finding))],
        notes=finding.notes,
    )


def _statement(finding: Finding) -> str:
    """Return sentences that name the overhead of a plan and the largest part of it."""
    text = f"{format_more(finding.overhead_share)} time ({format_seconds(finding.overhead_seconds)})"
    if finding.measured_overhead_share is None:
        text = f"Under the profiler, a step with the plan takes {text}."
    else:
        without = format_more(finding.measured_overhead_share)
        text = f"A step with the plan takes {without} time; under the profiler, {text}."
    largest = max(_notable_parts(finding), key=lambda part: part.seconds, default=None)
    if largest is not None and largest.seconds > 0:
        text += f" The largest part is {largest.cause}: {largest.cause.meaning}."
    return text


def _overhead(finding: Finding) -> list[Element]:
    parts = _notable_parts(finding)
    elements: list[Element] = [NamedFigures(_figures(finding)), *([PartsChart(parts)] if parts else [])]
    elements += [_parts_table(finding, parts), *(Paragraph(f"Advice: {text}") for text in _advice(parts))]
    phases = Table(title="Busy time by phase", header=_PHASES_HEADER, rows=_phases(finding), numbers=(1, 2, 3, 4))
    signs = [Check(*_SIGNS[sign.is_raised], sign.name, sign.text) for sign in finding.signs]
    by = "layer" if finding.are_layers_modules else "operation"
    heavy = sorted(finding.layers, key=lambda row: -max(row.plan_seconds, row.baseline_seconds))[:_MOST_LAYERS]
    layers = tabulate([row for row in finding.layers if row in heavy], _LAYERS, numbers=(1, 2, 3, 4, 5))
    light = len(finding.layers) - len(heavy)
    more = [Paragraph(f"and {light} more")] if light else []
    return [*elements, phases, Checks(signs, "Signs"), Fold(f"{finding.unit} by {by}, per step", [layers, *more])]


def _figures(finding: Finding) -> list[tuple[str, str]]:
    """Return the rows of figures, each for the step without the plan and for the step with the plan."""
    place = f"{finding.unit} on {finding.device or 'an unnamed device'}"
    rows = [
        ("from", f"{finding.origin}, {finding.baseline.steps} and {finding.plan.steps} steps, {place}"),
        ("step", _both(finding, lambda side: format_seconds(side.step_seconds))),
        ("busy", _both(finding, lambda side: _with_share(side.busy_seconds, side))),
        ("idle", _both(finding, _idle)),
        (str(finding.unit), _both(finding, lambda side: f"{side.count:.0f}") + f", {finding.kernel_ratio:.2f} ×"),
        ("attributed", _both(finding, _attribution)),
    ]
    if finding.baseline.copied_bytes or finding.plan.copied_bytes:
        rows.append(("copied and filled", _both(finding, _copied)))
    if finding.measured_overhead_share is not None:
        before, after = finding.measured_baseline_seconds or 0.0, finding.measured_plan_seconds or 0.0
        text = f"{format_seconds(before)} → {format_seconds(after)}, {format_share(finding.measured_overhead_share)}"
        if finding.baseline.step_seconds > _UNDER_PROFILER * before:
            ratio = finding.baseline.step_seconds / before
            text += f"; under the profiler the baseline takes {ratio:.2f} × as long"
        rows.insert(1, ("without a profiler", text))
    return rows


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
    return f"{side.attributed_share:.1%} to ops, {side.phased_share:.1%} to phases, {side.module_share:.1%} to modules"


def _notable_parts(finding: Finding) -> list[OverheadPart]:
    """Return the parts of the overhead that are not negligible compared with the step. ``UNEXPLAINED`` is always among them."""
    least_seconds = _NEGLIGIBLE_SHARE * finding.baseline.step_seconds
    return [
        part for part in finding.parts if abs(part.seconds) >= least_seconds or part.cause is OverheadCause.UNEXPLAINED
    ]


def _parts_table(finding: Finding, parts: list[OverheadPart]) -> Table:
    """Make a table with one row per notable part of the overhead, and the sum of all parts.

    A bar shows a part's seconds as a share of the largest part's.
    """
    step_seconds = finding.baseline.step_seconds or 1.0
    rows = []
    for part in parts:
        spread = "" if part.spread_seconds is None else f" ± {format_seconds(part.spread_seconds)}"
        seconds = f"{format_seconds(part.seconds)}{spread}"
        rows.append((str(part.cause), seconds, format_share(part.seconds / step_seconds), part.cause.meaning))
    sum_seconds = sum(part.seconds for part in finding.parts)
    overhead = f"the measured overhead is {format_seconds(finding.overhead_seconds)}"
    rows.append(("sum", format_seconds(sum_seconds), format_share(sum_seconds / step_seconds), overhead))
    largest = max((abs(part.seconds) for part in parts), default=0.0)
    bars = [part.seconds / largest for part in parts] if largest else []
    return Table(title="By cause", header=_PARTS_HEADER, rows=rows, numbers=(1, 2), bars=bars)


def _advice(parts: list[OverheadPart]) -> list[str]:
    """Return advice for the parts that cost the most time, the costliest first.

    The list is empty if no part clearly costs time.
    """
    costly = [part for part in parts if part.seconds > max(2 * (part.spread_seconds or 0.0), 0.0)]
    total_seconds = sum(part.seconds for part in costly)
    details = {part.cause: f" ({'; '.join(part.details)})" if part.details else "" for part in costly}
    return [
        f"{part.cause}: {part.cause.advice}{details[part.cause]}"
        for part in sorted(costly, key=lambda part: -part.seconds)
        if part.seconds >= _NOTABLE_SHARE * total_seconds
    ]


def _phases(finding: Finding) -> list[tuple[str, ...]]:
    """Return one table row per phase that the step without the plan or the step with it has."""
    before = {use.phase: use for use in finding.baseline.phases}
    after = {use.phase: use for use in finding.plan.phases}
    return [_phase(before.get(phase), after.get(phase)) for phase in WorkPhase if phase in before or phase in after]


def _phase(one: PhaseUse | None, other: PhaseUse | None) -> tuple[str, ...]:
    shown = other or one
    assert shown is not None
    return (
        str(shown.phase),
        format_seconds(one.busy_seconds) if one else UNKNOWN,
        format_seconds(other.busy_seconds) if other else UNKNOWN,
        UNKNOWN if shown.read_bytes is None else format_bytes(shown.read_bytes),
        UNKNOWN if shown.bandwidth_share is None else f"{shown.bandwidth_share:.0%}",
    )
