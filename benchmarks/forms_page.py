"""Measured tables of forms in, a Markdown page and a plot per model out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import page_head
from benchmarks.measure import Variant
from benchmarks.page import MIB, format_interval, format_mib, format_table
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.tracing.meters.timing import Interval, Timing

_HEAD = (
    "", "time × (95%)", "predicted ×", "activation peak MiB", "total peak MiB", "predicted MiB", "gradient error",
    "expected", "on the link MiB", "decisions",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FormRow:
    """One way to train: a peer (``plan`` is ``None``), a named strategy, or a budget under an allowance (``group``)."""

    group: str
    variant: Variant
    plan: Plan | None
    ratio: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class FormTable:
    """What was measured on one model."""

    name: str
    baseline: Variant
    timing: Timing
    rows: tuple[FormRow, ...]
    failures: tuple[str, ...]
    max_error: float


def write_page(
    tables: Sequence[FormTable], folder: Path, stem: str, *, device: str, command: str, versions: Mapping[str, str]
) -> Path:
    """Write ``<stem>.md`` and one plot per model beside it; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        *page_head("Compression and offloading beside recomputation", command, device=device, versions=versions),
        "One step is forward and backward from empty gradients. *Time ×*: paired median of the process's CPU seconds, with "
        "torch on one thread, over the unmanaged step of the same round, with its 95% bootstrap interval; the threads that "
        "copy to a disk count, although another core may run them. *Activation peak* leaves out parameters, buffers, batch "
        "and gradients; *total peak* counts everything, and is what a budget bounds. *Gradient error* is ‖Δg‖ / ‖g‖ over all "
        "parameters, the larger of the first two steps; *expected* is the plan's. The disk is read and written through the "
        "system's page cache.",
    ]
    for table in tables:
        plot = f"{stem}-{table.name}.png"
        _plot(table, folder / plot)
        seconds = f"{table.timing.median_seconds:.3f} s ± {table.timing.spread_seconds:.3f}"
        lines += ["", f"## {table.name}", "", f"![time against peak]({plot})", ""]
        lines += [
            f"Lossy plans may err by {table.max_error:.1%} (named strategies by any amount). Unmanaged: {seconds}.",
            "",
        ]
        lines += format_table(_HEAD, [_baseline_cells(table.baseline), *map(_cells, table.rows)])
        lines += ["", *(f"- not measured: {failure}" for failure in table.failures)]
    page = folder / f"{stem}.md"
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return page


def _baseline_cells(baseline: Variant) -> list[str]:
    steady = baseline.steady
    return ["unmanaged", "1.00", "", format_mib(steady.activation_peak_bytes), format_mib(steady.total_peak_bytes)] + [
        ""
    ] * 5


def _cells(row: FormRow) -> list[str]:
    variant, plan = row.variant, row.plan
    peak = max(variant.first.total_peak_bytes, variant.steady.total_peak_bytes)
    error = "0" if variant.is_bit_equal else f"{variant.gradient_error:.2%}"
    cells = [variant.name, format_interval(row.ratio)]
    measured = [format_mib(variant.steady.activation_peak_bytes), format_mib(peak)]
    if plan is None:
        return [*cells, "", *measured, "", error, "", "", ""]
    predicted = f"{plan.predicted_seconds / plan.baseline_seconds:.3f}"
    expected = "0" if plan.is_lossless else f"{plan.predicted_error:.2%}"
    offloaded = format_mib(plan.offloaded_bytes) if plan.offloaded_bytes else ""
    counts = Counter(
        d.form or str(d.decision) for r in plan.regions for d in r.decisions if d.decision is not Decision.KEEP
    )
    decisions = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return [*cells, predicted, *measured, format_mib(plan.predicted_peak_bytes), error, expected, offloaded, decisions]


def _plot(table: FormTable, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    axes.scatter([_peak(table.baseline)], [1.0], color="black", marker="s", label="unmanaged")
    for i, group in enumerate(dict.fromkeys(row.group for row in table.rows)):
        rows = sorted((row for row in table.rows if row.group == group), key=lambda row: _peak(row.variant))
        peaks, ratios = [_peak(row.variant) for row in rows], [row.ratio.median for row in rows]
        error = [
            [row.ratio.median - row.ratio.low for row in rows],
            [row.ratio.high - row.ratio.median for row in rows],
        ]
        is_plan = group not in ("peer", "strategy")
        axes.errorbar(
            peaks, ratios, yerr=error, color=f"C{i}", capsize=2, marker="*" if is_plan else "o",
            linestyle="-" if is_plan else "none", label=f"Plimsoll, {group}" if is_plan else group,
        )  # fmt: skip
        if not is_plan:
            for row in rows:
                axes.annotate(row.variant.name, (_peak(row.variant), row.ratio.median), fontsize=7)
    axes.set(
        xlabel="measured peak of the step, everything included, MiB",
        ylabel="CPU time × unmanaged step",
        title=f"{table.name}: lossy plans within {table.max_error:.0%} gradient error",
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _peak(variant: Variant) -> float:
    return variant.steady.total_peak_bytes / MIB
