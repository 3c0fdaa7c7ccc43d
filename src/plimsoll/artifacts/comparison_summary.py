"""A comparison in, an aligned plain-text table out. No torch, no rich in here."""

from __future__ import annotations

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.units import format_bytes, format_seconds

COMPARISON_HEADER = ("strategy", "status", "predicted", "measured", "step time ×", "gradients")


def summarise_comparison(comparison: Comparison) -> str:
    """The comparison as a table, the unmanaged figures above it."""
    lines = [f"Strategies on {comparison.model}, {comparison.device}, {comparison.steps} steps each"]
    lines.append(f"  {describe_baseline(comparison)}")
    lines.append("")
    lines += align([list(COMPARISON_HEADER), *(comparison_cells(row) for row in comparison.rows)], right=[2, 3, 4])
    lines += [f"\nNote: {note}" for note in comparison_notes(comparison)]
    return "\n".join(lines)


def describe_baseline(comparison: Comparison) -> str:
    """The unmanaged step's peak and time in words."""
    seconds = comparison.measured_baseline_seconds
    time = "" if seconds is None else f", step {format_seconds(seconds)}"
    return f"peaks predicted and measured; unmanaged: peak {format_bytes(comparison.baseline_peak_bytes)}{time}"


def comparison_cells(row: ComparisonRow) -> list[str]:
    """One strategy as the cells of ``COMPARISON_HEADER``."""
    measured = "–" if row.measured_peak_bytes is None else format_bytes(row.measured_peak_bytes)
    return [
        row.strategy,
        str(row.status),
        format_bytes(row.predicted_peak_bytes),
        measured,
        describe_ratio(row),
        _describe_gradients(row),
    ]


def _describe_gradients(row: ComparisonRow) -> str:
    """Equal or not; for lossy forms by how much not."""
    if row.is_bit_equal is None or row.is_bit_equal:
        return "–" if row.is_bit_equal is None else "equal"
    if row.is_lossless:
        return "DIFFER"
    return "not finite" if row.gradient_error is None else f"error {row.gradient_error:.2%}"


def comparison_notes(comparison: Comparison) -> list[str]:
    """What there is to say about single strategies, and about all."""
    return [*(f"{row.strategy}: {row.note}" for row in comparison.rows if row.note), *comparison.notes]


def describe_ratio(row: ComparisonRow) -> str:
    """The step-time ratio with its interval."""
    if row.measured_ratio is None:
        return "–"
    if row.measured_ratio_low is None or row.measured_ratio_high is None:
        return f"{row.measured_ratio:.3f}"
    return f"{row.measured_ratio:.3f} [{row.measured_ratio_low:.3f}, {row.measured_ratio_high:.3f}]"
