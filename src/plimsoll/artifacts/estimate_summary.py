"""An estimate in, plain text out: the verdict first, then the tightest stage item by item, then all stages. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from plimsoll.artifacts.basis import Basis
from plimsoll.artifacts.columns import align
from plimsoll.artifacts.estimate import BudgetItem, Estimate, StageEstimate
from plimsoll.units import format_bytes, format_seconds

_HOLDERS_SHOWN = 5
_UNSUPPORTED = "unsupported"
ITEM_HEADER = ("", "bytes", "±", "basis", "")


def summarise_estimate(estimate: Estimate) -> str:
    """Everything that the estimate says, as text."""
    lines = [f"Estimate of {title(estimate)}: {verdict(estimate)}", *setting_lines(estimate), ""]
    lines += [tightest_heading(estimate), *align([list(ITEM_HEADER), *item_rows(estimate.tightest)], right=[1, 2])]
    lines += [f"  {line}" for line in remark_lines(estimate.tightest)]
    lines += ["", *peak_lines(estimate)]
    if len(estimate.stages) > 1:
        rows = stage_rows(estimate)
        lines += ["", stages_heading(estimate), *align(rows, right=range(2, len(rows[0])))]
    lines += ["", *speed_lines(estimate)]
    lines += [f"\nNote: {note}" for note in estimate.notes]
    return "\n".join(lines)


def title(estimate: Estimate) -> str:
    """``llama-3-70b on 64 x H100-SXM``."""
    ranks = estimate.layout.ranks
    return f"{estimate.target} on {f'{ranks:,} x ' if ranks > 1 else ''}{estimate.device}"


def verdict(estimate: Estimate) -> str:
    """Whether it fits, with the numbers that say so; a figure that leaves something out says that it does."""
    stage = estimate.tightest
    most = max(each.allocated_bytes for each in estimate.stages)
    if estimate.budget_bytes is not None and most > estimate.budget_bytes:
        return (
            f"does not fit, its tensors take {format_bytes(most)} of a budget of {format_bytes(estimate.budget_bytes)}"
        )
    needed = f"{format_bytes(stage.total_bytes)} ± {format_bytes(stage.error_bytes)}"
    if stage.unsupported:
        needed += f" without {', '.join(item.name for item in stage.unsupported)},"
    if estimate.device_bytes is None:
        return f"needs {needed}"
    room = format_bytes(estimate.device_bytes)
    if estimate.does_fit is None:
        return f"too close to call, {needed} of {room}"
    return f"fits, {needed} of {room}" if estimate.does_fit else f"does not fit, {needed} of {room}"


def setting_lines(estimate: Estimate) -> list[str]:
    """What was asked: sizes, precision, optimizer, layout, plan."""
    facts = estimate.facts
    sizes = [estimate.model]
    if facts.parameters is not None:
        sizes.append(f"{format_count(facts.parameters)} parameters")
    cp = estimate.layout.cp
    on_rank = f" ({facts.sequence} on a rank)" if cp > 1 else ""
    tokens = f" x {facts.sequence * cp} tokens{on_rank}" if facts.sequence else ""
    sizes.append(f"micro-batch {facts.batch}{tokens}")
    how = [estimate.precision, estimate.optimizer, f"layout {estimate.layout}"]
    managed = f"strategy {estimate.strategy}"
    if estimate.budget_bytes is not None:
        managed += f" under {format_bytes(estimate.budget_bytes)}"
    return ["  " + ", ".join(sizes), "  " + ", ".join([*how, managed])]


def format_count(count: int) -> str:
    """A number of parameters as people write it.

    Example:
        >>> format_count(70_553_706_496)
        '70.6B'
    """
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= scale:
            return f"{count / scale:.1f}{unit}"
    return f"{count:,}"


def tightest_heading(estimate: Estimate) -> str:
    """Which ranks the items are of."""
    stage = estimate.tightest
    if len(estimate.stages) == 1:
        return "Every rank" if stage.ranks > 1 else "The device"
    ranks = "its rank with" if stage.ranks == 1 else f"each of its {stage.ranks:,} ranks with"
    return f"The tightest stage, {stage.stage} of 0 to {len(estimate.stages) - 1}: {ranks}"


def shown_items(stage: StageEstimate) -> list[BudgetItem]:
    """Items with bytes, and those that no figure is given for."""
    return [item for item in stage.items if item.bytes or item.basis is Basis.UNSUPPORTED]


def remarks(stage: StageEstimate) -> list[str]:
    """What is noted beside the shown items, each text once, in order; items refer to them by number."""
    return list(dict.fromkeys(item.note for item in shown_items(stage) if item.note))


def remark_lines(stage: StageEstimate) -> list[str]:
    """The same with their numbers."""
    return [f"[{number}] {text}" for number, text in enumerate(remarks(stage), start=1)]


def remark_of(item: BudgetItem, texts: Sequence[str]) -> str:
    """``[2]`` for an item whose note is the second one, nothing for one without a note."""
    return f"[{texts.index(item.note) + 1}]" if item.note else ""


def item_rows(stage: StageEstimate) -> list[list[str]]:
    """One row per item with bytes or reason, and the total."""
    texts = remarks(stage)
    rows = [[*_cells(item), remark_of(item, texts)] for item in shown_items(stage)]
    return [*rows, ["total", format_bytes(stage.total_bytes), format_bytes(stage.error_bytes), "", ""]]


def _cells(item: BudgetItem) -> list[str]:
    if item.bytes is None:
        return [item.name, _UNSUPPORTED, "", ""]
    error = format_bytes(item.error_bytes) if item.error_bytes else "0"
    return [item.name, format_bytes(item.bytes), error, item.basis.value]


def peak_lines(estimate: Estimate) -> list[str]:
    """The moment of the tightest stage's peak, who holds it, and what the allocator reserves."""
    stage = estimate.tightest
    lines = [f"Peak of live tensors: {format_bytes(stage.allocated_bytes)} in {stage.peak.moment}"]
    holders = [[format_bytes(h.bytes), h.label] for h in stage.peak.holders[:_HOLDERS_SHOWN]]
    lines += [f"  {line}" for line in align(holders, right=[0])]
    if stage.reserved_bytes is not None and estimate.expandable_bytes is not None:
        lines.append(
            f"Reserved by the allocator: {format_bytes(stage.reserved_bytes)}; "
            f"{format_bytes(estimate.expandable_bytes)} with expandable segments"
        )
    return lines


def stages_heading(estimate: Estimate) -> str:
    """``Stages of model.layers``: what the names of all regions begin with is said once."""
    shared = _shared_name(estimate)
    return f"Stages of {shared}" if shared else "Stages"


def _shared_name(estimate: Estimate) -> str:
    """The module that all regions of all stages lie in, if it has a name."""
    paths = [name.split(".")[:-1] for stage in estimate.stages for name in stage.regions.split(", ")]
    alike = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(part for part, *_ in alike)


def stage_rows(estimate: Estimate) -> list[list[str]]:
    """A header and one row per stage; neighbours that show the same are one row.

    What the stages would hold without a plan is a column only where they do not run like that.
    """
    is_managed = any(stage.unmanaged_bytes != stage.allocated_bytes for stage in estimate.stages)
    header = ["stage", "regions", "in flight", "total", "allocated", *(["no plan"] if is_managed else [])]
    rows: list[list[str]] = []
    within = f"{_shared_name(estimate)}."
    for stage in estimate.stages:
        cells = _stage_cells(stage, within, is_managed=is_managed)
        if rows and rows[-1][2:] == cells[2:]:
            rows[-1][0] = f"{rows[-1][0].partition('-')[0]}-{stage.stage}"
            rows[-1][1] = f"{rows[-1][1].partition(' … ')[0]} … {cells[1]}"
        else:
            rows.append(cells)
    return [[*header, "all recomputed", "busy", "bubble"], *rows]


def _stage_cells(stage: StageEstimate, within: str, *, is_managed: bool) -> list[str]:
    seconds = stage.seconds
    return [
        str(stage.stage),
        ", ".join(name.removeprefix(within) for name in stage.regions.split(", ")),
        str(stage.in_flight),
        format_bytes(stage.total_bytes),
        format_bytes(stage.allocated_bytes),
        *([format_bytes(stage.unmanaged_bytes)] if is_managed else []),
        format_bytes(stage.recomputed_bytes),
        format_seconds(seconds.forward_seconds + seconds.backward_seconds + seconds.recompute_seconds),
        f"{stage.bubble_share:.0%}",
    ]


def speed_lines(estimate: Estimate) -> list[str]:
    """Seconds of the step, tokens per second, MFU, and what takes the time."""
    speed = estimate.throughput
    facts = [f"step {format_seconds(speed.step_seconds)}"]
    if speed.tokens_per_second is not None:
        facts.append(f"{speed.tokens_per_second:,.0f} tokens/s")
    samples = speed.samples_per_second
    facts.append(f"{samples:,.0f} samples/s" if samples >= 1000 else f"{samples:.3g} samples/s")
    if speed.mfu is not None:
        facts.append(f"MFU {speed.mfu:.0%}")
    lines = [f"Speed: {', '.join(facts)}; ± {speed.relative_error:.0%}, {speed.basis.value}"]
    return [*lines, f"  {speed.note}"] if speed.note else lines
