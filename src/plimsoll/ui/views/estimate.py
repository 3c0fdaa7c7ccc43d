"""Makes the document (the content to show) of an estimate: whether the job fits, the memory of the tightest pipeline stage by
item, all stages, and the speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.estimate import BudgetItem, Estimate, MeasuredFigure, StageEstimate, SwitchSetting
from plimsoll.artifacts.naming import plain_name
from plimsoll.artifacts.trace import runs_gpu_kernels
from plimsoll.ui.document import (
    UNKNOWN,
    BytesChart,
    Document,
    Element,
    Fold,
    Paragraph,
    Section,
    ShellCommand,
    Subject,
    Table,
    Tone,
    sentence,
)
from plimsoll.units import format_bytes, format_seconds, parse_bytes

_HOLDERS_SHOWN = 5
_ITEMS_HEADER = ("", "bytes", "±", "basis", "")
ESTIMATE_SOURCE = "Estimate"
_WORDS = {True: "fits", False: "does not fit", None: "too close to call"}
_SHORT_WORDS = {True: "yes", False: "no", None: "unsure"}
_TONES = {True: Tone.GOOD, False: Tone.BAD, None: Tone.NEUTRAL}


def view_estimate(estimate: Estimate) -> Document:
    """Make the document (the content to show) of an estimate of a training job's memory and speed."""
    ranks = estimate.layout.ranks
    changes = (
        [Section("What fits, fewest GPU-seconds per sample first, other trainings last", _changes(estimate))]
        if estimate.changes
        else []
    )
    sections = [
        *changes,
        Section(_tightest_title(estimate), _items(estimate.tightest)),
        Section(_peak_title(estimate), _peak(estimate)),
    ]
    if len(estimate.stages) > 1:
        shared = _shared_name(estimate)
        rows = [(f"stage {stage.stage}", stage.total_bytes, stage.error_bytes) for stage in estimate.stages]
        chart = BytesChart("memory of a rank", rows, estimate.device_bytes)
        elements: list[Element] = [chart, _stages(estimate, f"{shared}."), *_others(estimate)]
        sections.append(Section(f"Stages of {shared}" if shared else "Stages", elements))
    if estimate.switches:
        sections.append(Section(f"Switches of {estimate.framework}", _switches(estimate)))
    if estimate.layouts:
        sections.append(Section(f"The fastest layouts of {ranks:,} ranks", [_layouts(estimate)]))
    sections.append(Section("Speed", [Paragraph(line) for line in _speed(estimate)]))
    device, lines = f"{f'{ranks:,} x ' if ranks > 1 else ''}{estimate.device}", _setting(estimate)
    if estimate.measured:
        sections.append(Section(f"Compared with {estimate.measured_source}", _beside(estimate.measured)))
    return Document(
        source=ESTIMATE_SOURCE,
        subject=f"of {estimate.target} on {device}",
        word=_verdict(estimate),
        tone=_TONES[estimate.does_fit],
        about=Subject(
            model=estimate.target, device=device, budget_bytes=estimate.budget_bytes, label=str(estimate.layout)
        ),
        lines=lines,
        statement=" ".join(map(sentence, lines)),
        sections=sections,
        notes=estimate.notes,
    )


def view_estimates(estimates: Sequence[Estimate]) -> Document:
    """Make one document (the content of a saved result) that compares estimates of one job on several devices: one row per
    device.

    The table is narrow enough for 80 columns.
    """
    first = estimates[0]
    columns = ["device", "fits", "a rank needs", "of", "step", "tokens/s", name_hours(first), "price"]
    rows = [_beside_others(each) for each in estimates]
    is_known = [any(row[column] != UNKNOWN for row in rows) for column in range(len(columns))]
    shown = [column for column, known in enumerate(is_known) if known]
    run = [f"{format_count(first.run_tokens)} tokens"] if first.run_tokens else []
    if any(each.price is not None for each in estimates):
        run[0] += f"; price = {name_hours(first)} x the price of one device for an hour, in the currency of --price"
    ranks = [f"{first.layout.ranks:,} devices of one kind"] if first.layout.ranks > 1 else []
    table = Table(
        header=[columns[column] for column in shown],
        rows=[[row[column] for column in shown] for row in rows],
        numbers=[place for place, column in enumerate(shown) if column > 1],
        tones={_SHORT_WORDS[True]: Tone.GOOD, _SHORT_WORDS[False]: Tone.BAD},
    )
    fitting = sum(estimate.does_fit is True for estimate in estimates)
    return Document(
        source="Estimates",
        subject=f"of {first.target} on {len(estimates)} devices",
        word=f"{fitting} of {len(estimates)} fit",
        tone=Tone.GOOD if fitting else Tone.BAD,
        lines=[*_setting(first), *ranks, *run],
        sections=[Section("Device by device", [table])],
    )


def _beside_others(estimate: Estimate) -> list[str]:
    """Return the table cells about one device, to compare devices: verdict, memory, speed, hours and price of the run."""
    stage, speed = estimate.tightest, estimate.throughput
    return [
        estimate.device,
        _SHORT_WORDS[estimate.does_fit],
        _with_error(stage.total_bytes, stage.error_bytes),
        UNKNOWN if estimate.device_bytes is None else format_bytes(estimate.device_bytes),
        format_seconds(speed.step_seconds),
        UNKNOWN if speed.tokens_per_second is None else f"{speed.tokens_per_second:,.0f}",
        UNKNOWN if estimate.device_hours is None else _shorten(estimate.device_hours),
        UNKNOWN if estimate.price is None else _shorten(estimate.price),
    ]


def _shorten(amount: float) -> str:
    """Return a whole number as text: ``1,081``, and from a million on with a unit, ``1.1M``."""
    return format_count(round(amount)) if amount >= 1e6 else f"{amount:,.0f}"


def _with_error(total_bytes: int, error_bytes: int) -> str:
    """Return bytes with their error, such as ``51.4 ± 7.7 GiB``. The error has the unit of the bytes."""
    amount, unit = format_bytes(total_bytes).split()
    error = f"{error_bytes / parse_bytes(f'1{unit}'):.1f}"
    return f"{amount} ± {error} {unit}"


def name_hours(estimate: Estimate) -> str:
    """Return the unit of the device's hours: GPU-hours, or device-hours for other devices."""
    return "GPU-hours" if runs_gpu_kernels(estimate.device) else "device-hours"


def _changes(estimate: Estimate) -> list[Element]:
    """Return elements that show each suggested change that makes the job fit, with its memory and speed, and its command if it
    is known.
    """
    found: list[Element] = []
    for number, change in enumerate(estimate.changes, start=1):
        ranks = f" on {change.ranks:,} ranks" if change.ranks > 1 else ""
        tokens = "" if change.tokens_per_second is None else f", {change.tokens_per_second:,.0f} tokens/s{ranks}"
        memory = f"{format_bytes(change.total_bytes)} ± {format_bytes(change.error_bytes)}"
        found.append(
            Paragraph(f"{number}. {change.name}: {memory}, step {format_seconds(change.step_seconds)}{tokens}")
        )
        if change.command:
            found.append(ShellCommand(change.command))
    return found


def _switches(estimate: Estimate) -> list[Element]:
    """Return the best setting of a framework's switches as assignments, and a table that compares it with other settings."""
    best = estimate.switches[0]
    is_sending = any(each.host_bytes for each in estimate.switches)
    rows = [
        (
            _values(each),
            format_bytes(each.peak_bytes),
            *([format_bytes(each.host_bytes)] if is_sending else []),
            format_seconds(each.step_seconds),
        )
        for each in estimate.switches
    ]
    header = ("setting", "tensors at the peak", *(["on the host"] if is_sending else []), "step")
    table = Table(header=header, rows=rows, numbers=tuple(range(1, len(header))))
    return [*[Paragraph(f"{name} = {value!r}") for name, value in best.values.items()], table]


def _layouts(estimate: Estimate) -> Table:
    """Make a table of layouts (ways to divide the step over ranks), the fastest first."""
    rows = [
        (
            str(each.layout),
            str(each.batch),
            format_bytes(each.peak_bytes),
            format_seconds(each.step_seconds),
            ("planned" if each.strategy == "auto" else "keep all" if each.strategy == "none" else each.strategy)
            + (", too close to call" if each.is_too_close else ""),
        )
        for each in estimate.layouts
    ]
    return Table(header=("layout", "batch", "tensors at the peak", "step", ""), rows=rows, numbers=(1, 2, 3))


def _values(setting: SwitchSetting) -> str:
    """Return the values of a framework's switches in one setting as text, such as ``full, block, 3``.

    A boolean is the last word of its switch's name, with ``no`` before it if the switch is off.
    """
    parts = []
    for name, value in setting.values.items():
        if isinstance(value, list):
            parts += value
        elif isinstance(value, bool):
            word = name.rpartition("_")[2]
            parts.append(word if value else f"no {word}")
        else:
            parts.append("none" if value is None else str(value))
    return ", ".join(parts)


def _verdict(estimate: Estimate) -> str:
    """Return a text that says whether the job fits, with the numbers.

    If items are unsupported, the text names what the figure leaves out.
    """
    stage = estimate.tightest
    most = max(each.allocated_bytes for each in estimate.stages)
    if estimate.budget_bytes is not None and most > estimate.budget_bytes:
        return f"does not fit: its tensors need {format_bytes(most)}, and the budget is {format_bytes(estimate.budget_bytes)}"
    needed = f"{format_bytes(stage.total_bytes)} ± {format_bytes(stage.error_bytes)}"
    if stage.unsupported:
        needed += f" without {', '.join(item.name for item in stage.unsupported)},"
    if estimate.device_bytes is None:
        return f"needs {needed}"
    found = f"{_WORDS[estimate.does_fit]}, {needed} of {format_bytes(estimate.device_bytes)}"
    if estimate.budget_bytes is not None:
        found += f"; its tensors need {format_bytes(most)} of a budget of {format_bytes(estimate.budget_bytes)}"
    return found


def _setting(estimate: Estimate) -> list[str]:
    """Return two lines that describe an estimated job: model and batch sizes; precision, optimizer, layout and strategy."""
    facts = estimate.facts
    sizes = [estimate.model]
    if facts.parameters is not None:
        sizes.append(f"{format_count(facts.parameters)} parameters")
    cp = estimate.layout.cp
    on_rank = f" ({facts.sequence} on a rank)" if cp > 1 else ""
    tokens = f" x {facts.sequence * cp} tokens{on_rank}" if facts.sequence else ""
    sizes.append(f"micro-batch {facts.batch}{tokens}")
    managed = f"strategy {estimate.strategy}"
    if estimate.budget_bytes is not None:
        managed += f" under {format_bytes(estimate.budget_bytes)}"
    used = [str(estimate.techniques)] if str(estimate.techniques) else []
    return [
        ", ".join(sizes),
        ", ".join([estimate.precision, estimate.optimizer, f"layout {estimate.layout}", managed, *used]),
    ]


def format_count(count: int) -> str:
    """Return a number of parameters or tokens as text with a unit.

    Example:
        >>> format_count(70_553_706_496)
        '70.6B'
    """
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= scale:
            return f"{count / scale:.1f}{unit}"
    return f"{count:,}"


def _tightest_title(estimate: Estimate) -> str:
    """Return the title of the section on the tightest stage (the pipeline stage that takes the most memory). The title says
    which ranks the items belong to.
    """
    stage = estimate.tightest
    if len(estimate.stages) == 1:
        return "Every rank" if stage.ranks > 1 else "The device"
    ranks = "its rank" if stage.ranks == 1 else f"each of its {stage.ranks:,} ranks"
    return f"The tightest stage, {stage.stage} of 0 to {len(estimate.stages) - 1}: {ranks}"


def _items(stage: StageEstimate) -> list[Element]:
    """Return a chart and a table of one rank's memory, item by item with errors.

    Items refer to remarks by number, so that each remark is printed only once.
    """
    shown = [item for item in stage.items if item.bytes or item.basis is Basis.UNSUPPORTED]
    remarks = list(dict.fromkeys(item.note for item in shown if item.note))
    rows = [_item(item, f"[{remarks.index(item.note) + 1}]" if item.note else "") for item in shown]
    total = ("total", format_bytes(stage.total_bytes), format_bytes(stage.error_bytes), "", "")
    table = Table(
        header=_ITEMS_HEADER,
        rows=[*rows, total],
        numbers=(1, 2),
        bars=[(item.bytes or 0) / max(stage.total_bytes, 1) for item in shown],
        marked=None,
    )
    seen = [item for item in shown if (item.bytes or 0) > stage.total_bytes / 500]
    chart = BytesChart("memory of a rank", [(item.name, item.bytes or 0, item.error_bytes) for item in seen])
    return [chart, table, *(Paragraph(f"[{number}] {text}") for number, text in enumerate(remarks, start=1))]


def _others(estimate: Estimate) -> Iterator[Fold]:
    """Yield a fold (elements behind a title) with the items of each stage except the tightest. Consecutive stages with equal
    items share one fold.
    """
    for _, alike in itertools.groupby(estimate.stages, lambda stage: stage.items):
        stages = [stage for stage in alike if stage is not estimate.tightest]
        if stages:
            numbers = "-".join(dict.fromkeys([str(stages[0].stage), str(stages[-1].stage)]))
            yield Fold(f"Items of stage {numbers}", _items(stages[0]), is_detail=True)


def _item(item: BudgetItem, remark: str) -> tuple[str, ...]:
    if item.bytes is None:
        return item.name, Basis.UNSUPPORTED.value, "", "", remark
    error = format_bytes(item.error_bytes) if item.error_bytes else "0"
    return item.name, format_bytes(item.bytes), error, item.basis.value, remark


def _peak_title(estimate: Estimate) -> str:
    stage = estimate.tightest
    return f"Peak of live tensors: {format_bytes(stage.allocated_bytes)} in {stage.peak.moment}"


def _peak(estimate: Estimate) -> list[Element]:
    """Return a table of the tensors that hold the most bytes at the tightest stage's peak, and a line on what the allocator
    reserves.
    """
    stage = estimate.tightest
    holders = [(plain_name(holder.label), format_bytes(holder.bytes)) for holder in stage.peak.holders[:_HOLDERS_SHOWN]]
    elements: list[Element] = [Table(rows=holders, numbers=(1,))]
    if stage.reserved_bytes is not None and estimate.expandable_bytes is not None:
        elements.append(
            Paragraph(
                f"Reserved by the allocator: {format_bytes(stage.reserved_bytes)}; "
                f"{format_bytes(estimate.expandable_bytes)} with expandable segments"
            )
        )
    return elements


def _shared_name(estimate: Estimate) -> str:
    """Return the path of the module that contains all regions (managed modules) of all stages, or an empty text.

    So the path is printed only once.
    """
    paths = [name.split(".")[:-1] for stage in estimate.stages for name in stage.regions.split(", ")]
    alike = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(part for part, *_ in alike)


def _stages(estimate: Estimate, within: str) -> Table:
    """Make a table with one row per stage. Consecutive stages with equal figures share a row.

    The column for memory without a plan is shown only if at least one stage has a plan that changes its memory.
    """
    is_managed = any(stage.unmanaged_bytes != stage.allocated_bytes for stage in estimate.stages)
    unmanaged = ["no plan"] if is_managed else []
    header = [
        "stage",
        "regions",
        "in flight",
        "total",
        "allocated",
        *unmanaged,
        "all recomputed",
        "per micro-batch",
        "bubble",
    ]
    rows: list[list[str]] = []
    for stage in estimate.stages:
        cells = _stage(stage, within, is_managed=is_managed)
        if rows and rows[-1][2:] == cells[2:]:
            rows[-1][0] = f"{rows[-1][0].partition('-')[0]}-{stage.stage}"
            rows[-1][1] = f"{rows[-1][1].partition(' … ')[0]} … {cells[1]}"
        else:
            rows.append(cells)
    return Table(header=header, rows=rows, numbers=range(2, len(header)))


def _stage(stage: StageEstimate, within: str, *, is_managed: bool) -> list[str]:
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


def _beside(figures: Sequence[MeasuredFigure]) -> list[Element]:
    """Return a table of estimated and measured figures, then a note for each figure outside of its error bar."""
    rows = [(figure.name, *_three(figure), _difference(figure)) for figure in figures]
    notes = list(dict.fromkeys(f"{figure.name}: {figure.note}" for figure in figures if figure.note))
    inside = sum(figure.is_inside for figure in figures)
    table = Table(header=("", "estimated", "±", "measured", "measured is"), rows=rows, numbers=(1, 2, 3))
    said = f"{inside} of {len(figures)} measured figures lie inside the error bars" + (
        ". Possible reasons for the others:" if notes else ""
    )
    return [table, Paragraph(said), *(Paragraph(f"  {note}") for note in notes)]


def _three(figure: MeasuredFigure) -> list[str]:
    """Return three texts with the figure's unit: the estimate, its error, and the measurement."""
    write = {"bytes": lambda value: format_bytes(int(value)), "seconds": format_seconds}.get(
        figure.unit, lambda value: f"{value:,.0f}"
    )
    if figure.estimated is None:
        return ["-", "", write(figure.measured)]
    return [write(figure.estimated), write(figure.error), write(figure.measured)]


def _difference(figure: MeasuredFigure) -> str:
    if not figure.estimated:
        return "inside" if figure.is_inside else "not estimated"
    off = figure.measured / figure.estimated - 1
    return f"{abs(off):.1%} {'more' if off >= 0 else 'less'}, {'inside' if figure.is_inside else 'outside'}"


def _speed(estimate: Estimate) -> Sequence[str]:
    """Return a line with seconds of the step, tokens and samples per second and MFU (model FLOPS utilization), and a note if
    there is one.
    """
    speed = estimate.throughput
    facts = [f"step {format_seconds(speed.step_seconds)}"]
    if speed.tokens_per_second is not None:
        facts.append(f"{speed.tokens_per_second:,.0f} tokens/s")
    samples = speed.samples_per_second
    facts.append(f"{samples:,.0f} samples/s" if samples >= 1000 else f"{samples:.3g} samples/s")
    if speed.mfu is not None:
        published = (
            ""
            if speed.published_mfu is None
            else f" ({speed.published_mfu:.0%} by the convention of published figures)"
        )
        facts.append(f"MFU {speed.mfu:.0%}{published}")
    line = f"{', '.join(facts)}; ± {speed.relative_error:.0%}, {speed.basis.value}"
    return [line, *_run(estimate), *([speed.note] if speed.note else [])]


def _run(estimate: Estimate) -> list[str]:
    """Return a line with hours and price of the whole run, if its number of tokens was given."""
    hours = estimate.device_hours
    if hours is None or estimate.run_tokens is None:
        return []
    ranks = estimate.layout.ranks
    days = f", {hours / ranks / 24:,.1f} days on {ranks:,} {'rank' if ranks == 1 else 'ranks'}"
    price = (
        "" if estimate.price is None else f", price {estimate.price:,.0f} at {estimate.hourly_price:,.2f} a device-hour"
    )
    return [f"{format_count(estimate.run_tokens)} tokens: {hours:,.0f} {name_hours(estimate)}{days}{price}"]
