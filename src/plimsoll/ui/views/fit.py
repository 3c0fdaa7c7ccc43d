"""Makes the document (the content to show) of a fit, which is a search for the batch size and plan with the highest throughput
under a budget.

The document shows the best point (a batch size with its plan), all evaluated points, measurements, or changes that would make
the model fit.
"""

from __future__ import annotations

from plimsoll.artifacts.fit import Fit, FitChange, FitPoint
from plimsoll.ui.document import Document, NamedFigures, Section, Table, Tone
from plimsoll.units import format_bytes, format_seconds, format_share

_FRONTIER_HEADER = ("batch", "seq", "accum", "per s", "peak", "unmanaged", "plan", "")
_CHANGES_HEADER = ("change", "peak", "fits", "per s", "")
_NOTHING = "-"


def view_fit(fit: Fit) -> Document:
    """Make the document (the content to show) of a fit, the search for the fastest batch size and plan: the answer, its
    figures, and all evaluated points.
    """
    best = fit.best_point
    frontier = Table(
        header=_FRONTIER_HEADER,
        rows=[_point(fit, place, point) for place, point in enumerate(fit.points)],
        numbers=range(6),
        marked=fit.best,
    )
    sections = [
        Section("Figures", [NamedFigures(_figures(fit))]),
        Section(f"Frontier ({fit.items_name} per second; share of the saved bytes that is recomputed)", [frontier]),
    ]
    if fit.changes:
        rows = [_change(change) for change in fit.changes]
        sections.append(Section("One change at a time", [Table(header=_CHANGES_HEADER, rows=rows, numbers=(1, 3))]))
    return Document(
        source="Fit",
        subject=f"of {fit.model} on {fit.device} within {format_bytes(fit.budget_bytes)}",
        word="nothing fits" if best is None else f"{_sizes(best)}, {_plan(best)}",
        tone=Tone.BAD if best is None else Tone.GOOD,
        sections=sections,
        notes=fit.notes,
    )


def _figures(fit: Fit) -> list[tuple[str, str]]:
    rows = []
    best, unmanaged = fit.best_point, fit.best_unmanaged
    if best is not None:
        error = f"± {fit.seconds_error:.0%}, {fit.seconds_basis}"
        peak = f"predicted {format_bytes(best.predicted_peak_bytes)} of {format_bytes(fit.budget_bytes)}"
        rows.append(("throughput", f"{best.items_per_second:,.0f} {fit.items_name}/s predicted ({error})"))
        rows += [("step", _step(best)), ("peak", peak)]
        if unmanaged is None:
            rows.append(("without a plan", "no micro-batch fits"))
        elif fit.gain is not None:
            speed = f"{unmanaged.items_per_second:,.0f} {fit.items_name}/s"
            rows.append(("without a plan", f"{_sizes(unmanaged)}, {speed}: the plan gives {format_share(fit.gain)}"))
    if fit.measured is not None:
        claim = fit.measured
        text = (
            f"peak {format_bytes(claim.measured_peak_bytes)} ({format_share(claim.peak_error)}), forward and backward "
            f"{format_seconds(claim.measured_seconds)} ± {format_seconds(claim.measured_spread_seconds)} "
            f"(predicted {format_seconds(claim.predicted_seconds)})"
        )
        rows.append(("measured", text))
    work = f"{_count(fit.traces, 'trace')} and {_count(fit.solves, 'solve')} in {format_seconds(fit.total_seconds)}"
    rows.append(("costs", f"{fit.cost_source} on {fit.cost_device}"))
    rows.append(("searched", f"{_count(len(fit.points), 'point')} from {work}"))
    return rows


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _step(point: FitPoint) -> str:
    """Return a text that shows the seconds of a step as the sum of its micro-batches and the optimizer."""
    count = "" if point.accumulation == 1 else f"{point.accumulation} × "
    return (
        f"{format_seconds(point.step_seconds)} = {count}{format_seconds(point.micro_seconds)} forward and backward + "
        f"{format_seconds(point.optimizer_seconds)} optimizer"
    )


def _plan(point: FitPoint) -> str:
    """Return a few words on the best plan for a point (a batch size and sequence), such as ``recompute 40%, +12% time``."""
    if not point.does_fit:
        return str(point.status)
    if point.is_unmanaged:
        return "keep all"
    overhead = point.micro_seconds / point.unmanaged_seconds - 1 if point.unmanaged_seconds else 0.0
    return f"recompute {point.rebuilt_share:.0%}, {format_share(overhead)} time"


def _point(fit: Fit, place: int, point: FitPoint) -> tuple[str, ...]:
    """Return the table cells for one evaluated point: a batch size with its plan."""
    excess = f"{format_bytes(point.predicted_peak_bytes - fit.budget_bytes)} over budget"
    return (
        str(point.micro_batch),
        str(point.sequence) if point.sequence > 1 else _NOTHING,
        str(point.accumulation),
        f"{point.items_per_second:,.0f}" if point.does_fit else _NOTHING,
        format_bytes(point.predicted_peak_bytes),
        format_bytes(point.unmanaged_peak_bytes),
        _plan(point) if point.does_fit else excess,
        "best" if place == fit.best else "" if point.is_traced else "predicted",
    )


def _change(change: FitChange) -> tuple[str, ...]:
    """Return the table cells for one change that could make the model fit: its result, or why the result is unknown."""
    fits = {True: "yes", False: "no", None: "unsupported"}[change.does_fit]
    peak = _NOTHING if change.predicted_peak_bytes is None else format_bytes(change.predicted_peak_bytes)
    speed = _NOTHING if change.items_per_second is None else f"{change.items_per_second:,.0f}"
    return change.name, peak, fits, speed, change.note


def _sizes(point: FitPoint) -> str:
    return f"micro-batch {point.micro_batch}{f' × {point.sequence} tokens' if point.sequence > 1 else ''}"
