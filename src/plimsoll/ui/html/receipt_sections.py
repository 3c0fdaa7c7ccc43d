"""A receipt in, its parts of a page out: the verdict, gradients and losses compared, peaks claimed and measured."""

from __future__ import annotations

from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.receipt_summary import engine_rows, intermediate_row, mismatch_row, receipt_figures
from plimsoll.ui.html.content import Element, Figures, Paragraph, Section, Statement, Table, Tone
from plimsoll.ui.html.curve_chart import draw_curves
from plimsoll.units import format_bytes

_SHOWN = 50


def receipt_statement(receipt: Receipt) -> Statement:
    """What was measured, in sentences."""
    text = f"{receipt.verdict.advice} {receipt.compared_gradients} gradients were compared, {receipt.compared_buffers} buffers."
    if not receipt.is_lossless:
        error = "not finite" if receipt.gradient_error is None else f"{receipt.gradient_error:.2%}"
        text += f" The gradient's measured error is {error}."
    if receipt.measured_peak_bytes is not None:
        text += f" The measured peak is {format_bytes(receipt.measured_peak_bytes)}"
        predicted_bytes = receipt.predicted_peak_bytes
        text += "." if predicted_bytes is None else f"; {format_bytes(predicted_bytes)} were predicted."
    return Statement(Tone.GOOD if receipt.verdict.is_pass else Tone.BAD, "Receipt", receipt.verdict, text)


def receipt_section(receipt: Receipt, name: str, title: str) -> Section:
    """Claim beside evidence; ``name`` is the chart's."""
    elements: list[Element] = [Figures(receipt_figures(receipt))]
    rows: tuple[tuple[str, ...], ...]
    mismatches = (*receipt.gradient_mismatches, *receipt.buffer_mismatches)
    if mismatches:
        rows = tuple(tuple(mismatch_row(mismatch)) for mismatch in mismatches[:_SHOWN])
        header = ("tensor", "largest difference", "", "")
        elements.append(Table(header, rows, caption="Not equal bit for bit"))
        elements += _more(len(mismatches))
    if receipt.faults:
        rows = tuple((str(fault),) for fault in receipt.faults[:_SHOWN])
        elements += [Table(("fault",), rows, caption="Saved tensors that came back as something else")]
        elements += _more(len(receipt.faults))
    if receipt.intermediates:
        rows = tuple(tuple(intermediate_row(intermediate)) for intermediate in receipt.intermediates)
        elements.append(Table(("tensor", "difference", ""), rows, caption="Intermediates"))
    if receipt.plan_curve:
        elements.append(draw_curves(name, "loss", receipt.baseline_curve, receipt.plan_curve))
    elif len(receipt.baseline_losses) > 1:
        elements.append(draw_curves(name, "loss", receipt.baseline_losses, receipt.plan_losses))
    if receipt.regions:
        rows = tuple(tuple(row) for row in engine_rows(receipt))
        elements.append(Table(("engine", "regions", "memory", "why"), rows, caption="How regions were served"))
    return Section(title, tuple(elements))


def _more(count: int) -> list[Element]:
    """How many a table leaves out."""
    return [Paragraph(f"and {count - _SHOWN} more")] if count > _SHOWN else []
