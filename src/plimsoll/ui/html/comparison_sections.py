"""A comparison in, its parts of a page out: what it comes to, and every strategy in a table."""

from __future__ import annotations

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.comparison_summary import COMPARISON_HEADER, comparison_cells, describe_baseline
from plimsoll.ui.html.content import Statement, Table, Tone


def comparison_statement(comparison: Comparison) -> Statement:
    """How many strategies were measured, and whether one of them changes the gradients."""
    measured = [row for row in comparison.rows if row.measured_peak_bytes is not None]
    wrong = [row.strategy for row in comparison.rows if row.is_wrong]
    text = f"{len(measured)} of {len(comparison.rows)} strategies were measured side by side, {comparison.steps} steps each. "
    if wrong:
        text += f"Gradients differ under {', '.join(wrong)}: do not train with these."
    else:
        text += "None that should be exact changes the gradients."
    return Statement(Tone.BAD if wrong else Tone.GOOD, "Comparison", "DIFFER" if wrong else "MEASURED", text)


def comparison_table(comparison: Comparison) -> Table:
    """Predicted beside measured, strategy by strategy."""
    rows = tuple(tuple(comparison_cells(row)) for row in comparison.rows)
    return Table(COMPARISON_HEADER, rows, (2, 3, 4), f"Strategies: {describe_baseline(comparison)}")
