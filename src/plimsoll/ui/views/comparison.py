"""Makes the document (the content to show) of a comparison: strategies side by side, with predicted and measured figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.ui.document import UNKNOWN, Document, FrontierChart, Place, Section, Tone, subject_of, tabulate
from plimsoll.units import format_bytes, format_seconds

_DIFFER = "DIFFER"


def view_comparison(comparison: Comparison) -> Document:
    """Make the document (the content to show) of a comparison: all strategies in a table and a chart, with the figures of the
    step without a plan above them.
    """
    seconds = comparison.measured_baseline_seconds
    time = "" if seconds is None else f", step {format_seconds(seconds)}"
    table = tabulate(
        comparison.rows,
        _COLUMNS,
        title=f"Predicted and measured peaks; unmanaged: peak {format_bytes(comparison.baseline_peak_bytes)}{time}",
        numbers=(2, 3, 4),
        tones={_gradients(row): Tone.BAD for row in comparison.rows if row.is_wrong},
    )
    wrong = [row.strategy for row in comparison.rows if row.is_wrong]
    return Document(
        source="Comparison",
        subject=f"of strategies on {comparison.model}, {comparison.device}, {comparison.steps} steps each",
        word=_DIFFER if wrong else "MEASURED",
        tone=Tone.BAD if wrong else Tone.GOOD,
        about=subject_of(comparison),
        statement=_statement(comparison, wrong),
        sections=[Section("Time against memory", [FrontierChart(comparisons=[comparison]), table], Place.PICTURE)],
        notes=[*(f"{row.strategy}: {row.note}" for row in comparison.rows if row.note), *comparison.notes],
    )


def _statement(comparison: Comparison, wrong: list[str]) -> str:
    measured = [row for row in comparison.rows if row.measured_peak_bytes is not None]
    text = f"{len(measured)} of {len(comparison.rows)} strategies were measured side by side, {comparison.steps} steps each. "
    if wrong:
        return f"{text}Gradients differ under {', '.join(wrong)}: do not train with these."
    return f"{text}No strategy that should be exact changes the gradients."


def _bytes(bytes_: int | None) -> str:
    return UNKNOWN if bytes_ is None else format_bytes(bytes_)


def _gradients(row: ComparisonRow) -> str:
    """Return a text that says whether the strategy's gradients equal those without a plan.

    For a lossy strategy, the text is the error of its gradients.
    """
    if row.is_bit_equal is None:
        return UNKNOWN
    if row.is_bit_equal:
        return "equal"
    if row.is_rounding:
        return f"equal except for rounding, {row.gradient_error:.0e}"
    if row.is_lossless:
        return _DIFFER if row.gradient_error is None else f"{_DIFFER}, {row.gradient_error:.2%}"
    return "not finite" if row.gradient_error is None else f"error {row.gradient_error:.2%}"


def _ratio(row: ComparisonRow) -> str:
    """Return the step time as a multiple of the step without a plan, with the confidence interval if it is known."""
    if row.measured_ratio is None:
        return UNKNOWN
    if row.measured_ratio_low is None or row.measured_ratio_high is None:
        return f"{row.measured_ratio:.3f}"
    return f"{row.measured_ratio:.3f} [{row.measured_ratio_low:.3f}, {row.measured_ratio_high:.3f}]"


_COLUMNS: Mapping[str, Callable[[ComparisonRow], str]] = {
    "strategy": lambda row: row.strategy,
    "status": lambda row: row.status or UNKNOWN,
    "predicted": lambda row: _bytes(row.predicted_peak_bytes),
    "measured": lambda row: _bytes(row.measured_peak_bytes),
    "step time ×": _ratio,
    "gradients": _gradients,
}
