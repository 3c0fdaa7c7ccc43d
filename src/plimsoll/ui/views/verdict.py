"""Makes the document (the content to show) of a probe's verdict (does a plan harm training?): the ruling in a word, the rules
that led to it, both runs side by side, and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plimsoll.artifacts.verdict import (
    WHOLE_MODEL,
    ArmSummary,
    GradientComparison,
    IntervalEstimate,
    NormComparison,
    Outcome,
    Ruling,
    Verdict,
)
from plimsoll.ui.document import (
    UNKNOWN,
    CurvesChart,
    Document,
    Element,
    Fold,
    NormsChart,
    Paragraph,
    Section,
    Table,
    Tone,
    sentence,
    subject_of,
    tabulate,
)
from plimsoll.units import format_bytes, format_seconds

OUTCOMES: dict[str, Tone] = {Outcome.CLEAR: Tone.GOOD, Outcome.BROKEN: Tone.BAD, Outcome.OPEN: Tone.NEUTRAL}
_NORMS_HEADER = ("gradient norm", "median", "95%", "spikes", "kurtosis", "shift", "same?")
_BLOCKS_SHOWN = 6


def view_verdict(verdict: Verdict) -> Document:
    """Make the document (the content to show) of a probe's verdict, which says whether a plan harms training."""
    tone = Tone.GOOD if verdict.ruling.is_pass else Tone.BAD
    return Document(
        source="Probe",
        subject=f"of plan {verdict.strategy!r}, {verdict.model} on {verdict.device}",
        word=verdict.ruling,
        tone=Tone.NEUTRAL if verdict.ruling is Ruling.UNDECIDED else tone,
        about=subject_of(verdict),
        lines=[verdict.ruling.advice, verdict.reason],
        statement=f"{verdict.ruling.advice} {sentence(verdict.reason)}",
        sections=[Section("Training with and without the plan", _findings(verdict))],
        notes=verdict.notes,
    )


def _findings(verdict: Verdict) -> list[Element]:
    steps = f"{verdict.steps} of {verdict.planned_steps}" if verdict.is_early else f"{verdict.steps}"
    run = f"{steps} steps each, {verdict.optimizer}, seed {verdict.seed}; data: {verdict.data}"
    rules = [(rule.name, rule.outcome, rule.found, rule.allowed) for rule in verdict.rules]
    elements: list[Element] = [
        Paragraph(run),
        *(Paragraph(f"Missing: {missing}") for missing in verdict.missing),
        Table(title="Rules", header=("rule", "outcome", "found", "allowed"), rows=rules, tones=OUTCOMES),
        Table(title="Both runs", header=("", "baseline", "plan"), rows=_arms(verdict), numbers=(1, 2)),
    ]
    curves = verdict.curves
    if curves.baseline_losses:
        elements.append(CurvesChart("loss", curves.baseline_losses, curves.plan_losses))
    if curves.baseline_norms:
        elements.append(CurvesChart("norm of the whole gradient", curves.baseline_norms, curves.plan_norms))
    if verdict.comparisons:
        norms = sorted(verdict.comparisons, key=_shift)
        rows = [_norm_cells(entry) for entry in norms]
        table = Table(header=_NORMS_HEADER, rows=rows, numbers=(1, 2, 3, 4), most_rows=_BLOCKS_SHOWN)
        elements += [NormsChart(verdict.comparisons), Fold("Gradient norms, largest change first", [table])]
    if verdict.gradients:
        gradients = sorted(verdict.gradients, key=lambda entry: (entry.block != WHOLE_MODEL, -entry.relative_error))
        table = tabulate(gradients, _GRADIENTS, numbers=(1, 2), most_rows=_BLOCKS_SHOWN)
        elements.append(Fold("Gradients at equal parameters, largest error first", [table]))
    return elements


def _arms(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return the rows of a table that shows the figures of both trainings (without and with the plan) side by side."""
    target = _number(verdict.target_loss)
    names = (
        f"loss, mean of {verdict.window} steps",
        "held-out loss",
        "perplexity",
        f"steps to loss {target}",
        f"time to loss {target}",
        "step",
        f"{verdict.items}/s",
        "peak",
    )
    return list(zip(names, _arm_cells(verdict.baseline), _arm_cells(verdict.plan), strict=True))


def _arm_cells(arm: ArmSummary) -> tuple[str, ...]:
    return (
        _number(arm.final_loss),
        _number(arm.held_out_loss),
        _number(arm.perplexity),
        UNKNOWN if arm.steps_to_target is None else str(arm.steps_to_target),
        UNKNOWN if arm.seconds_to_target is None else format_seconds(arm.seconds_to_target),
        UNKNOWN if arm.measured_step_seconds is None else format_seconds(arm.measured_step_seconds),
        UNKNOWN if arm.items_per_second is None else f"{arm.items_per_second:,.0f}",
        UNKNOWN if arm.measured_peak_bytes is None else format_bytes(arm.measured_peak_bytes),
    )


def _number(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.4f}"


def _shift(entry: NormComparison) -> tuple[bool, float]:
    """Return the key for sorting the rows of blocks. The whole model comes first, then blocks by the size of their shift (how
    much the norm of their gradient changed), the largest first.
    """
    return entry.block != WHOLE_MODEL, 0.0 if entry.shift is None else -abs(entry.shift.value)


def _norm_cells(entry: NormComparison) -> tuple[str, ...]:
    """Return the table cells about the gradient norms of one block of the model.

    A cell with two numbers shows the training without the plan, then the training with it.
    """
    one, other = entry.baseline, entry.plan
    kurtosis = (UNKNOWN if each.kurtosis is None else f"{each.kurtosis:.1f}" for each in (one, other))
    shift, p_value = entry.shift, entry.adjusted_p_value
    return (
        entry.block,
        f"{one.median:.3g} / {other.median:.3g}",
        f"{one.percentile_95:.3g} / {other.percentile_95:.3g}",
        f"{one.spikes} / {other.spikes}",
        " / ".join(kurtosis),
        UNKNOWN if shift is None else f"{shift.value:+.1%} ({shift.low:+.1%} to {shift.high:+.1%})",
        UNKNOWN if p_value is None else f"p = {p_value:.2g}",
    )


def _interval(estimate: IntervalEstimate | None) -> str:
    """Return an estimate with its interval as text, such as ``1.012 (0.997 to 1.027)``."""
    return UNKNOWN if estimate is None else f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


_GRADIENTS: Mapping[str, Callable[[GradientComparison], str]] = {
    "at equal parameters": lambda entry: entry.block,
    "error": lambda entry: f"{entry.relative_error:.2%}",
    "largest": lambda entry: f"{entry.largest_error:.2%}",
    "cosine": lambda entry: _interval(entry.cosine),
    "gain": lambda entry: _interval(entry.gain),
}
