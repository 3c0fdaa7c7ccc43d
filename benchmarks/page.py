"""Measured tables in, a Markdown page and a plot out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.budgets_table import BudgetTable
from benchmarks.machine import page_head
from benchmarks.measure import StepMemory, Variant
from benchmarks.peers_table import PeerRow, PeerTable
from plimsoll.tracing.meters.timing import Interval

MIB = 2**20
_PEER_HEAD = (
    "", "time × (95%)", "resident MiB", "peak MiB", "total peak MiB", "gradients", "buffers",
    "ours ×", "ours / peer (95%)", "our total peak MiB", "ours equal",
)  # fmt: skip
_BUDGET_HEAD = (
    "budget", "MiB", "status", "first step MiB", "steady MiB", "within", "predicted MiB", "error", "bit-equal",
    "time × (95%)", "predicted extra", "measured extra", "predicted well", "gap of step",
)  # fmt: skip


@dataclass(kw_only=True)
class Section:
    """What was measured on one model."""

    name: str
    eager: PeerTable
    budgets: BudgetTable | None = None


def write_page(
    sections: Sequence[Section],
    folder: Path,
    stem: str,
    *,
    device: str,
    command: str,
    versions: Mapping[str, str],
    before: Sequence[str] = (),
) -> Path:
    """Write ``<stem>.md`` and, where there is matplotlib, one plot per model beside it; the path of the page.

    ``before`` are lines that stand before the tables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        *page_head("Time against memory", command, device=device, versions=versions),
        *before,
        "One step is forward and backward from empty gradients. *Time ×*: paired median of CPU seconds on one thread (CUDA: "
        "seconds between events) over the unmanaged step of the same round, with its 95% bootstrap interval. *Resident*: "
        "alive between forward and backward. *Peak*: highest during the step. Both leave out parameters, buffers, batch and, "
        "on the CPU, gradients; *total peak* counts everything, and is what a budget bounds. *Ours* is Plimsoll given the "
        "peer's own total peak as its budget.",
    ]
    for section in sections:
        plot = f"{stem}-{section.name}.png"
        image = [f"![time against peak]({plot})", ""] if _plot(section, folder / plot) else []
        lines += ["", f"## {section.name}", "", *image, *_peer_table(section.eager)]
        lines += ["", *(f"- not measured: {failure}" for failure in section.eager.failures)]
        if section.budgets is not None:
            lines += ["", *_budget_lines(section.budgets)]
    page = folder / f"{stem}.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _peer_table(table: PeerTable) -> list[str]:
    seconds = f"1.00 ({table.timing.median_seconds:.3f} s ± {table.timing.spread_seconds:.3f})"
    first = [table.baseline.name, seconds, *_memory(table.baseline.steady), "", "", "", "", "", ""]
    return format_table(_PEER_HEAD, [first, *map(_peer_cells, table.rows)])


def _peer_cells(row: PeerRow) -> list[str]:
    cells = [
        row.peer.name, format_interval(row.overhead), *_memory(row.peer.steady),
        _gradients(row.peer), _equal(row.peer.buffers_equal),
    ]  # fmt: skip
    if row.ours is None or row.ours_overhead is None or row.ours_by_peer is None:
        return [*cells, row.note, "", "", ""]
    peak = format_mib(max(row.ours.first.total_peak_bytes, row.ours.steady.total_peak_bytes))
    return [
        *cells,
        f"{row.ours_overhead.median:.3f}",
        format_interval(row.ours_by_peer),
        peak,
        _gradients(row.ours) if row.ours.buffers_equal else "**buffers differ**",
    ]


def _budget_lines(table: BudgetTable) -> list[str]:
    floor, peak = format_mib(table.floor_bytes), format_mib(table.peak_bytes)
    lines = [f"Budgets between the floor, {floor} MiB, and the unmanaged peak, {peak} MiB:", ""]
    lines += format_table(
        _BUDGET_HEAD,
        [
            [
                f"{row.share:.0%}", format_mib(row.budget_bytes), row.plan.status,
                format_mib(row.variant.first.total_peak_bytes),
                format_mib(row.variant.steady.total_peak_bytes), "yes" if row.is_within_budget else "**no**",
                format_mib(row.plan.predicted_peak_bytes), f"{row.peak_error:+.1%}", _equal(row.variant.is_bit_equal),
                format_interval(row.measured_ratio), f"{row.predicted_extra_seconds * 1e3:.1f} ms",
                f"{row.measured_extra_seconds.median * 1e3:.1f} ms", "yes" if row.is_extra_predicted else "**no**",
                f"{row.plan.gap_of_step:.2%}",
            ]
            for row in table.rows
        ],
    )  # fmt: skip
    return [*lines, "", *(f"- not measured: {failure}" for failure in table.failures)]


def _memory(memory: StepMemory) -> list[str]:
    return [
        format_mib(memory.activation_resident_bytes),
        format_mib(memory.activation_peak_bytes),
        format_mib(memory.total_peak_bytes),
    ]


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table: the first column is text, the others are numbers."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def format_mib(bytes_: int) -> str:
    """Bytes in MiB, one decimal."""
    return f"{bytes_ / MIB:.1f}"


def format_interval(interval: Interval) -> str:
    """A median and its 95% interval."""
    return f"{interval.median:.3f} ({interval.low:.3f}–{interval.high:.3f})"


def _gradients(variant: Variant) -> str:
    return "equal" if variant.gradients_equal else f"**differ** by {variant.gradient_error:.1e}"


def _equal(answer: bool) -> str:  # noqa: FBT001 - one cell
    return "equal" if answer else "**differ**"


def _plot(section: Section, path: Path) -> bool:
    """Draw it; whether that could be done."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.scatter([_peak(section.eager.baseline)], [1.0], color="black", marker="s", label="unmanaged")
    for i, row in enumerate(section.eager.rows):
        _point(axes, _peak(row.peer), row.overhead, f"C{i}", "o", row.peer.name)
    budgets = section.budgets.rows if section.budgets is not None else ()
    ours = [(_peak(row.variant), row.measured_ratio) for row in budgets]
    ours += [(_peak(r.ours), r.ours_overhead) for r in section.eager.rows if r.ours and r.ours_overhead]
    for i, (peak, ratio) in enumerate(sorted(ours, key=lambda each: each[0])):
        _point(axes, peak, ratio, "black", "*", "Plimsoll" if not i else None)
    if ours:
        axes.plot(*zip(*sorted((peak, ratio.median) for peak, ratio in ours), strict=True), color="black", lw=0.8)
    axes.set(
        xlabel="measured peak of the step, everything included, MiB",
        ylabel="time × unmanaged step",
        title=section.name,
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _peak(variant: Variant) -> float:
    return variant.steady.total_peak_bytes / MIB


def _point(axes: object, peak: float, ratio: Interval, color: str, marker: str, label: str | None) -> None:
    error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
    axes.errorbar([peak], [ratio.median], yerr=error, fmt=marker, color=color, label=label, capsize=2)  # type: ignore[attr-defined]
