"""A fit in, plain text out: the best point, the frontier, what was measured, or what would make it fit. No torch, no rich."""

from __future__ import annotations

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.fit import Fit, FitChange, FitPoint
from plimsoll.units import format_bytes, format_seconds, format_share

FRONTIER_HEADER = ("batch", "seq", "accum", "per s", "peak", "unmanaged", "plan", "")
CHANGE_HEADER = ("change", "peak", "fits", "per s", "")


def summarise_fit(fit: Fit) -> str:
    """Everything that a fit says."""
    lines = [describe_fit(fit), "", *align([list(row) for row in fit_figures(fit)])]
    lines += ["", frontier_title(fit)]
    lines += align([list(FRONTIER_HEADER), *map(list, frontier_rows(fit))], right=range(6))
    if fit.changes:
        lines += ["", "One change at a time"]
        lines += align([list(CHANGE_HEADER), *(list(change_cells(change)) for change in fit.changes)], right=[1, 3])
    lines += [f"\nNote: {note}" for note in fit.notes]
    return "\n".join(lines)


def describe_fit(fit: Fit) -> str:
    """One line: the answer."""
    best = fit.best_point
    where = f"{fit.model} on {fit.device} within {format_bytes(fit.budget_bytes)}"
    if best is None:
        return f"Fit of {where}: nothing fits"
    return f"Fit of {where}: micro-batch {best.micro_batch}{_of_sequence(best)}, {describe_plan(best)}"


def fit_figures(fit: Fit) -> tuple[tuple[str, str], ...]:
    """The figures as pairs of name and text."""
    rows = []
    best, unmanaged = fit.best_point, fit.best_unmanaged
    if best is not None:
        error = f"± {fit.seconds_error:.0%}, {fit.seconds_basis}"
        rows.append(("throughput", f"{best.items_per_second:,.0f} {fit.items_name}/s predicted ({error})"))
        rows.append(("step", describe_step(best)))
        rows.append(
            ("peak", f"predicted {format_bytes(best.predicted_peak_bytes)} of {format_bytes(fit.budget_bytes)}")
        )
        if unmanaged is None:
            rows.append(("without a plan", "no micro-batch fits"))
        elif fit.gain is not None:
            rows.append(
                (
                    "without a plan",
                    f"micro-batch {unmanaged.micro_batch}{_of_sequence(unmanaged)}, {unmanaged.items_per_second:,.0f} "
                    f"{fit.items_name}/s: the plan gives {format_share(fit.gain)}",
                )
            )
    if fit.measured is not None:
        claim = fit.measured
        rows.append(
            (
                "measured",
                f"peak {format_bytes(claim.measured_peak_bytes)} ({format_share(claim.peak_error)}), forward and backward "
                f"{format_seconds(claim.measured_seconds)} ± {format_seconds(claim.measured_spread_seconds)} "
                f"(predicted {format_seconds(claim.predicted_seconds)})",
            )
        )
    work = f"{_count(fit.traces, 'trace')} and {_count(fit.solves, 'solve')} in {format_seconds(fit.total_seconds)}"
    rows += [
        ("costs", f"{fit.cost_source} on {fit.cost_device}"),
        ("searched", f"{_count(len(fit.points), 'point')} from {work}"),
    ]
    return tuple(rows)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_step(point: FitPoint) -> str:
    """How the seconds of a step come about."""
    count = "" if point.accumulation == 1 else f"{point.accumulation} × "
    return (
        f"{format_seconds(point.step_seconds)} = {count}{format_seconds(point.micro_seconds)} forward and backward + "
        f"{format_seconds(point.optimizer_seconds)} optimizer"
    )


def describe_plan(point: FitPoint) -> str:
    """What the best plan of a point does."""
    if not point.does_fit:
        return str(point.status)
    if point.is_unmanaged:
        return "keep all"
    overhead = point.micro_seconds / point.unmanaged_seconds - 1 if point.unmanaged_seconds else 0.0
    return f"recompute {point.rebuilt_share:.0%}, {format_share(overhead)} time"


def frontier_title(fit: Fit) -> str:
    """What the table below it shows."""
    return f"Frontier ({fit.items_name} per second; share of the saved bytes that is recomputed)"


def frontier_rows(fit: Fit) -> list[tuple[str, ...]]:
    """One row per evaluated point, by sequence and micro-batch."""
    return [_row(fit, place, point) for place, point in enumerate(fit.points)]


def _row(fit: Fit, place: int, point: FitPoint) -> tuple[str, ...]:
    speed = f"{point.items_per_second:,.0f}" if point.does_fit else "-"
    mark = "best" if place == fit.best else "" if point.is_traced else "predicted"
    return (
        str(point.micro_batch),
        str(point.sequence) if point.sequence > 1 else "-",
        str(point.accumulation),
        speed,
        format_bytes(point.predicted_peak_bytes),
        format_bytes(point.unmanaged_peak_bytes),
        describe_plan(point)
        if point.does_fit
        else f"{format_bytes(point.predicted_peak_bytes - fit.budget_bytes)} too much",
        mark,
    )


def change_cells(change: FitChange) -> tuple[str, ...]:
    """One change: what it leads to, or why that is not known."""
    fits = {True: "yes", False: "no", None: "unsupported"}[change.does_fit]
    peak = "-" if change.predicted_peak_bytes is None else format_bytes(change.predicted_peak_bytes)
    speed = "-" if change.items_per_second is None else f"{change.items_per_second:,.0f}"
    return (change.name, peak, fits, speed, change.note)


def _of_sequence(point: FitPoint) -> str:
    return f" × {point.sequence} tokens" if point.sequence > 1 else ""
