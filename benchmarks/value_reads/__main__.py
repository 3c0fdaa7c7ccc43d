"""Compares plans that recompute everything with torch's checkpointing, on models whose code reads values of tensors.

    PYTHONPATH=src python -m benchmarks.value_reads
    PYTHONPATH=src python -m benchmarks.value_reads --steps 30 --only routed Mixtral
    PYTHONPATH=src python -m benchmarks.value_reads --rows rows.jsonl > page.md

With ``--rows`` each finished kind is appended to a file, and kinds in the file are not run again. So a
long run may be interrupted and continued. ``--print-only`` makes a page of the rows that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.progress import say
from benchmarks.value_reads import architectures, branching, routing, transformers_models
from benchmarks.value_reads.compare import Row, compare
from benchmarks.value_reads.stack import kind_of
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

KINDS = {
    kind.name: kind
    for kind in (
        *map(kind_of, (*branching.BLOCKS, *routing.BLOCKS)),
        *(*architectures.KINDS, *transformers_models.KINDS),
    )
}
_HEAD = (
    "model", "unmanaged MiB", "checkpoint MiB", "plan MiB", "plan / checkpoint", "checkpoint time", "plan time",
    "plan / checkpoint time", "first step", "recorded", "streams", "last recorded", "run again", "warnings",
    "checkpoint equal", "plan equal",
)  # fmt: skip
_LEGEND = (
    "Three twins train in turns with the same seeds and data. Times are medians of the second half of the steps, as shares of "
    "the unmanaged twin's processor time; other work ran on the machine, so they repeat within some percent only. Peaks are "
    "the highest of the last five steps, without parameters. *Recorded*: the most recordings of one block, "
    "and *streams* the ways through its code that have a recipe then. *Last recorded*: the last step that recorded a block. "
    "*Run again*: calls without a recipe. Backward ran their forward again. *Equal*: in every step, gradients and buffers have "
    "the bits of the unmanaged twin's; a number counts the steps with other bits."
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.value_reads", description=__doc__)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps of each training (default 30)")
    parser.add_argument("--only", choices=tuple(KINDS), nargs="+", metavar="KIND", help="some models alone")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append rows as JSON; what is there is not run again")
    parser.add_argument(
        "--print-only", action="store_true", help="print the page of the rows that are there, and run nothing"
    )
    options = parser.parse_args()
    known = {} if options.rows is None else {row.kind: row for row in read_rows(options.rows)}
    rows = []
    gc.freeze()  # each step collects garbage, which takes ten times as long with all objects of transformers
    with one_thread():
        for kind in [kind for kind in options.only or KINDS if kind in known or not options.print_only]:
            row = known.get(kind) or compare(KINDS[kind], options.steps)
            rows.append(row)
            say(" | ".join(_cells(row)))
            if options.rows is not None and kind not in known:
                write_row(options.rows, row)
    command = f"PYTHONPATH=src python -m benchmarks.value_reads --steps {options.steps}"
    title = "Models that read values of tensors"
    print("\n".join(page_head(title, command, device=device_name(torch.device("cpu")), versions=versions())))
    print(
        "\n".join(
            [*_summary(rows, options.steps), "", *format_table(_HEAD, map(_cells, rows)), "", _LEGEND, *_said(rows)]
        )
    )
    return 0


def write_row(path: Path, row: Row) -> None:
    """Append a row to a file, as a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")


def read_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a file, which need not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        fields = json.loads(line)
        yield Row(**{**fields, "warnings": tuple(fields["warnings"])})


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.kind,
        *(f"{peak / MIB:.1f}" if peak else "" for peak in (row.unmanaged_bytes, row.checkpoint_bytes, row.plan_bytes)),
        f"{row.peak_share:.2f}" if row.peak_share else "",
        f"{row.checkpoint_ratio:.2f} ×" if row.checkpoint_ratio else "",
        f"{row.plan_ratio:.2f} ×" if row.plan_ratio else "",
        f"{row.time_share:.2f}" if row.time_share else "",
        f"{row.first_step_ratio:.1f} ×",
        *map(str, (row.recordings, row.streams, row.last_recorded, row.reruns, len(row.warnings))),
        _equality(row.checkpoint_error, row.checkpoint_unequal),
        _equality(row.plan_error, row.plan_unequal),
    )


def _equality(error: str, unequal_steps: int) -> str:
    if error:
        return f"**{error.split(': ')[1]}**"
    return f"**no, {unequal_steps}**" if unequal_steps else "yes"


def _summary(rows: Sequence[Row], steps: int) -> list[str]:
    peaks = {row.kind: row.peak_share for row in rows if row.peak_share}
    times = {row.kind: row.time_share for row in rows if row.time_share}
    lines = []
    for name, shares in (("peak", peaks), ("time", times)):
        if shares:
            worst = max(shares, key=lambda kind: shares[kind])
            lines.append(
                f"- Plan / checkpoint, {name}: median {statistics.median(shares.values()):.2f}, "
                f"highest {shares[worst]:.2f} ({worst}), of {len(shares)} kinds."
            )
    lists = {
        "Peak above 1.10 times checkpoint's": [kind for kind, share in peaks.items() if share > 1.1],
        "Time above 1.05 times checkpoint's": [kind for kind, share in times.items() if share > 1.05],
        "Bits of the plan differ": [row.kind for row in rows if row.plan_unequal and not row.plan_error],
        "Bits of checkpoint differ": [row.kind for row in rows if row.checkpoint_unequal and not row.checkpoint_error],
        "The plan fails": [row.kind for row in rows if row.plan_error],
        "Checkpoint fails": [row.kind for row in rows if row.checkpoint_error],
        "More than three recordings per stream": [row.kind for row in rows if row.recordings > 3 * max(row.streams, 1)],
        f"Recorded in the last five of {steps} steps": [row.kind for row in rows if row.last_recorded >= steps - 5],
        "Warned": [row.kind for row in rows if row.warnings],
    }
    run = {row.kind for row in rows}
    lists["Not run"] = [kind for kind in KINDS if kind not in run]
    return lines + [f"- {name}: {', '.join(kinds) or 'none'}." for name, kinds in lists.items()]


def _said(rows: Sequence[Row]) -> list[str]:
    """Return the first warning of each kind, and the errors."""
    lines = []
    for row in rows:
        for what, text in (
            ("warning", "".join(row.warnings[:1])),
            ("error", row.plan_error),
            ("checkpoint", row.checkpoint_error),
        ):
            if text:
                first = " ".join(text.split())
                lines.append(f"- {row.kind}, {what}: {first[:300]}{' …' if len(first) > 300 else ''}")
    return ["", "Warnings (the first of each kind) and errors:", "", *lines] if lines else []


if __name__ == "__main__":
    raise SystemExit(main())
