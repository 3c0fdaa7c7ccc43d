"""The page of a session: tables of its measurements, and a reason for each measurement that is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.devices import PEAKS
from benchmarks.gpu_session.lines import CONTRACTS, RESULTS, read_lines
from benchmarks.gpu_session.stages import STAGES
from benchmarks.gpu_session.stages.published import PUBLISHED
from benchmarks.page import format_interval, format_table
from plimsoll.tracing.meters.timing import Timing, paired_ratio
from plimsoll.units import format_bytes

Line = dict[str, Any]
Ways = dict[str, Line]

_HOW = """\
One step is forward and backward from empty gradients, in 16 bits on a GPU. Peak, gradients and seconds are measured apart.

*Peak*: the highest bytes of one step, everything included. *Allocated*: blocks of the allocator that hold tensors. *Requested*:
what the tensors asked for. *Reserved*: what the allocator holds of the device, which other processes see. A budget bounds what
is allocated.

*Gradients*: compared bit for bit with the first way's gradients, in steps of their own under
`torch.use_deterministic_algorithms(True)` (with `fill_uninitialized_memory` off). The first way is compared with itself.

*Seconds*: the median between two events around each step, **without** deterministic algorithms. *× first*: the paired median,
with its 95% interval, over steps of the first way taken in turns with these.

The settings above hold for gradients and for seconds. TORCH_CUDNN_SDPA_DEPRIORITIZED keeps attention from cuDNN, which torch
would choose on an H100: cuDNN's backward does not repeat itself."""


@dataclass
class Results:
    """The lines of the last run of each stage, sorted."""

    runs: list[Line] = field(default_factory=list)
    stages: dict[str, list[Line]] = field(default_factory=dict)
    contracts: dict[str, Line] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> Results:
        """A stage that was run again replaces what was there of it; a run that did not reach it leaves it."""
        found = Results()
        current: dict[str, list[Line]] = {}
        for line in read_lines(folder / RESULTS):
            if "run" in line:
                found.runs.append(line)
                current = {}
            elif "stage" in line:
                of_stage = current.setdefault(line["stage"], [])
                of_stage.append(line)
                if "began" in line or line["stage"] not in found.stages:
                    found.stages[line["stage"]] = of_stage
        found.contracts = {line["test"]: line for line in read_lines(folder / CONTRACTS) if "test" in line}
        return found

    @property
    def is_dry(self) -> bool:
        return any(run["device"] == "cpu" for run in self.runs)

    @property
    def failed_contracts(self) -> list[Line]:
        return [line for line in self.contracts.values() if line["outcome"] == "failed"]

    def tables(self, stage: str) -> dict[str, Ways]:
        """What is known of each way, by table."""
        tables: dict[str, Ways] = {}
        for line in self.stages.get(stage, ()):
            if "way" in line:
                tables.setdefault(line.get("table", ""), {}).setdefault(line["way"], {}).update(line)
        return tables

    def together(self, stage: str, table: str) -> dict[str, list[float]]:
        """Seconds of all ways of a table that were timed in one series."""
        lines = [line["together"] for line in self.stages.get(stage, ()) if "together" in line]
        return next((each for each in lines if set(each) <= set(self.tables(stage).get(table, {}))), {})

    def gaps(self) -> list[str]:
        """What was not measured, and why."""
        gaps = []
        for stage in STAGES:
            lines = self.stages.get(stage.name, [])
            if not lines:
                gaps.append(f"{stage.name}: not asked for, or the session ended before it")
            ended = {line["part"] for line in lines if "part" in line and ("ended" in line or "skipped" in line)}
            gaps += [
                f"{_name(stage.name, line['part'])}: the session ended while it ran"
                for line in lines
                if "began" in line and line["part"] not in ended
            ]
            gaps += [gap for line in lines if (gap := _gap(line))]
        return gaps


def write(results: Results) -> list[str]:
    """The lines of the page."""
    facts = results.tables("environment").get("", {})
    device = facts.get("device", {}).get("device", "unknown device")
    lines = [f"# One session on a GPU, {results.runs[-1]['run'][:10]}, {device}", ""]
    if results.is_dry:
        lines += [
            "**A dry run on a CPU at tiny sizes: it shows that every stage works, and its figures mean nothing.**",
            "",
        ]
    lines += [f"Command: `{run['command']}` ({run['run']})" for run in results.runs]
    for way in ("versions", "settings", "device", "ceilings"):
        lines += ["", f"{way.capitalize()}: {_facts(facts.get(way, {}))}"]
    lines += ["", _HOW, ""]
    for title, stage, section in _SECTIONS:
        if body := section(results, stage):
            lines += [f"## {title}", "", *body, ""]
    gaps = results.gaps()
    lines += ["## Not measured", "", *([f"- {gap}" for gap in gaps] or ["Everything was measured."])]
    return lines


def _facts(found: Line) -> str:
    own = {name: each for name, each in found.items() if name not in ("stage", "way", "elapsed_seconds", "table")}
    return ", ".join(f"{name} {_fact(name, each)}" for name, each in own.items()) or "not known"


def _fact(name: str, value: Any) -> str:
    if name.endswith("flops_per_second"):
        return f"{value / 1e12:.4g} TFLOP/s"
    if name.endswith("bytes_per_second"):
        return f"{value / 1e9:.4g} GB/s"
    if isinstance(value, float):
        return f"{value * 1e6:.1f} µs"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return str(value)


def _smoke(results: Results, stage: str) -> list[str]:
    rows = [
        [name, way["verdict"], "equal" if way["is_bit_equal"] else "**differ**", format_bytes(way["budget_bytes"]),
         format_bytes(way["peak_bytes"]["allocated"]), format_bytes(way["predicted_peak_bytes"]), ", ".join(way["engines"])]
        for name, way in results.tables(stage).get("", {}).items() if "verdict" in way
    ]  # fmt: skip
    return (
        format_table(("", "verdict", "gradients", "budget", "peak", "predicted peak", "engines"), rows) if rows else []
    )


def _compared(results: Results, stage: str) -> list[str]:
    """A table of ways for every table of a stage."""
    lines: list[str] = []
    for name, ways in results.tables(stage).items():
        rows = [row for row in _way_rows(ways, results.together(stage, name)) if any(row[1:])]
        if rows:
            head, *rows = _without_empty_columns([_WAY_HEAD, *rows])
            lines += [*([f"{name}:", ""] if name else []), *format_table(head, rows), ""]
    return lines[:-1]


_WAY_HEAD = (
    "", "seconds", "× first (95%)", "predicted ×", *PEAKS, "budget", "within", "predicted peak", "offloaded", "gradients",
)  # fmt: skip


def _way_rows(ways: Ways, together: dict[str, list[float]]) -> Iterable[Sequence[str]]:
    for name, way in ways.items():
        seconds = together if name in together else way.get("seconds", {})
        peaks, budget_bytes = way.get("peak_bytes", {}), way.get("budget_bytes")
        allocated = peaks.get("allocated")
        is_within = (
            "" if budget_bytes is None or allocated is None else "yes" if allocated <= budget_bytes else "**no**"
        )
        yield (
            name,
            *_timed(name, seconds),
            f"{way['predicted_ratio']:.3f}" if "predicted_ratio" in way else "",
            *(_amount(peaks.get(kind)) for kind in PEAKS),
            _amount(budget_bytes),
            is_within,
            _amount(way.get("predicted_peak_bytes")),
            _amount(way.get("offloaded_bytes") or None),
            _bits(way.get("bits"), name),
        )


def _timed(name: str, seconds: dict[str, list[float]]) -> tuple[str, str]:
    if name not in seconds:
        return "", ""
    mine = Timing(name, tuple(seconds[name]))
    first = next(iter(seconds))
    ratio = format_interval(paired_ratio(mine, Timing(first, tuple(seconds[first])))) if first != name else "1"
    return f"{mine.median_seconds:.4f}", ratio


def _bits(bits: Line | None, name: str) -> str:
    if bits is None:
        return ""
    itself = " to itself" if bits["compared_with"] == name else ""
    if not bits["differing_tensors"]:
        return f"equal{itself}"
    return f"**{bits['differing_tensors']} of {bits['tensors']} differ**{itself}, by {bits['relative_error']:.1e}"


def _binding(results: Results, stage: str) -> list[str]:
    tables = results.tables(stage)
    budget = tables.pop("", {}).get("budget")
    if budget is None:
        return []
    rows = [
        [name, margin.removeprefix("margin "), format_bytes(way["cap_bytes"]), f"{way['steps_done']} of {way['steps_wanted']}",
         way["out_of_memory"]]
        for margin, ways in tables.items() for name, way in ways.items()
    ]  # fmt: skip
    return [
        f"Without a plan the step takes {format_bytes(budget['unmanaged_peak_bytes'])}. The process may reserve the budget of "
        f"{format_bytes(budget['budget_bytes'])}, "
        f"{format_bytes(budget['workspace_bytes'])} for workspaces of libraries, and a margin:",
        "",
        *format_table(("", "margin", "cap", "steps", "ended by"), rows),
    ]


def _longest(results: Results, stage: str) -> list[str]:
    rows = [
        [name, str(way["longest_tokens"]), format_bytes(way["cap_bytes"]),
         f"yes, to {way['step_tokens']}" if way["is_search_done"] else "**no**, its time was over"]
        for name, way in results.tables(stage).get("", {}).items() if "longest_tokens" in way
    ]  # fmt: skip
    tried = [
        f"- {name}, {way['tokens']} tokens: {way['error_text'] or 'trained'}"
        for ways in results.tables(stage).values()
        for name, way in ways.items()
        if "tokens" in way
    ]
    table = format_table(("", "longest sequence, tokens", "cap", "searched to the end"), rows) if rows else []
    return [*table, *([""] if table and tried else []), *tried]


def _contracts(results: Results, stage: str) -> list[str]:
    del stage
    if not results.contracts:
        return []
    counts = Counter(line["outcome"] for line in results.contracts.values())
    files: dict[str, Counter[str]] = {}
    for line in results.contracts.values():
        files.setdefault(line["test"].partition("::")[0], Counter())[line["outcome"]] += 1
    outcomes = ("passed", "failed", "skipped")
    return [
        ", ".join(f"{counts[outcome]} {outcome}" for outcome in outcomes) + ".",
        "",
        *format_table(
            ("", *outcomes), [[name, *(str(each[outcome]) for outcome in outcomes)] for name, each in files.items()]
        ),
        "",
        *(f"- failed: `{line['test']}`" for line in results.failed_contracts),
    ]


def _published(results: Results, stage: str) -> list[str]:
    body = _compared(results, stage)
    if not body or results.is_dry:
        return body
    ways = results.tables(stage).get("", {})
    rows = [
        [
            name,
            f"{peak / 1e9:.2f}",
            f"{seconds:.2f}",
            f"{ways.get(name, {}).get('peak_bytes', {}).get('allocated', 0) / 1e9:.2f}",
        ]
        for name, (peak, seconds) in PUBLISHED.items()
    ]
    return [*body, "", *format_table(("", "published GB", "published seconds", "here GB"), rows)]


_SECTIONS: tuple[tuple[str, str, Callable[[Results, str], list[str]]], ...] = (
    ("Smoke: small models under a plan, verified", "smoke", _smoke),
    ("Headline: Llama of 1.1 billion parameters, 2 × 8,192 tokens", "headline", _compared),
    ("Budgets between floor and peak", "sweep", _compared),
    ("Offload", "offload", _compared),
    ("A budget that binds", "binding", _binding),
    ("The longest sequence", "longest", _longest),
    ("Under torch.compile, block by block", "compiled", _compared),
    ("Contracts", "contracts", _contracts),
    ("Where Plimsoll loses", "losing", _compared),
    ("A published table: huggingface/accelerate#4175", "published", _published),
)


def _amount(bytes_: int | None) -> str:
    return "" if bytes_ is None else format_bytes(bytes_)


def _without_empty_columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Drop columns that are empty in every row; the first row is the head, the first column stays."""
    kept = [at for at in range(len(rows[0])) if at == 0 or any(row[at] for row in rows[1:])]
    return [[row[at] for at in kept] for row in rows]


def _gap(line: Line) -> str:
    name = _name(line["stage"], line.get("table", ""), line.get("way") or line.get("part", ""))
    if "skipped" in line:
        return f"{name}: {line['skipped']}"
    if "error" in line:
        return f"{name}: {line['error']} ({line['at'].splitlines()[-1] if line['at'] else ''})"
    if line.get("was_stopped"):
        return f"{name}: stopped at its limit"
    if line.get("ended"):
        return f"{name}: its process ended with {line['ended']}"
    return ""


def _name(*parts: str) -> str:
    return ", ".join(filter(None, parts))
