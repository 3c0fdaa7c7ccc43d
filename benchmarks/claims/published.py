"""Runs that others published, beside what ``plimsoll estimate`` says of them: how far off it is, and how often its bars hold.

    python -m benchmarks published [NAME-OF-A-TABLE ...]

The runs are in ``published.toml``, with their sources and the rule that parts them into a half to tune on and a half that is
held out. Of the held-out half only sums are printed.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims.published_runs import Gpt
from benchmarks.page import format_table
from plimsoll.artifacts.estimate import Estimate, StageEstimate
from plimsoll.errors import PlimsollError
from plimsoll.estimator.catalogue.models import known_models
from plimsoll.estimator.estimate import estimate
from plimsoll.units import GIB

_DATA = Path(__file__).with_name("published.toml")
_CONTEXT = ("CUDA context", "kernels")
_OUTSIDE = (*_CONTEXT, "NCCL")
"""Items that torch's allocator does not know of, by how their names begin."""
_CACHED = ("allocator rounding", "fragmentation")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One run as published. ``seconds`` are of a step; those and ``memory_bytes`` are ``None`` where nothing was published.

    ``memory`` says whose figure it is: ``allocated`` or ``reserved`` by torch, or of the whole ``process``, less what an
    empty one takes, which the source says.
    """

    table: str
    name: str
    model: str
    sequence: int
    batch: int
    layout: str
    strategy: str
    device: str
    precision: str
    optimizer: str
    has_master_weights: bool
    techniques: str
    tokens_per_second: float | None
    seconds: float | None
    memory_bytes: float | None
    memory: str

    @property
    def is_held_out(self) -> bool:
        """By the rule of ``published.toml``."""
        return int(hashlib.sha256(self.name.encode()).hexdigest()[0], 16) % 2 == 1


def read_runs() -> tuple[PublishedRun, ...]:
    """Every run of the data file."""
    return tuple(run for table in _data()["tables"] for run in _runs(table))


def _data() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text(encoding="utf-8"))


def _runs(table: dict[str, Any]) -> Iterator[PublishedRun]:
    for row in table["rows"]:
        cells = dict(zip(table["columns"], row, strict=True))
        words = [str(cells[key]) for key in ("model", "sequence", "batch", "layout", "strategy")]
        memory_bytes = cells.get("gib", -1) * GIB if "gb" not in cells else cells["gb"] * 1e9
        yield PublishedRun(
            table=table["name"],
            name=" ".join([table["name"], *words]),
            **{key: cells[key] for key in ("model", "sequence", "batch", "layout", "strategy")},
            device=table["device"],
            precision=table["precision"],
            optimizer=cells.get("optimizer", table.get("optimizer", "adamw")),
            has_master_weights=table.get("master_weights", False),
            techniques=cells.get("techniques", table.get("techniques", "")),
            tokens_per_second=cells.get("tokens"),
            seconds=cells.get("seconds"),
            memory_bytes=memory_bytes - table.get("context_gib", 0) * GIB if memory_bytes > 0 else None,
            memory=table.get("memory", ""),
        )


def estimate_run(run: PublishedRun) -> Estimate:
    """What Plimsoll says of it."""
    with tempfile.TemporaryDirectory() as folder:
        return estimate(
            _target(run, Path(folder)),
            run.batch,
            device=run.device,
            sequence=run.sequence,
            precision=run.precision,
            optimizer=run.optimizer,
            has_master_weights=run.has_master_weights,
            layout=run.layout,
            techniques=run.techniques,
            strategy=run.strategy,
        )


def _target(run: PublishedRun, folder: Path) -> str:
    """The name of a model of the catalogue, or the path of a configuration that is written for it."""
    fields = _data()["models"].get(run.model)
    if fields is None:
        return run.model
    if "base" in fields:
        config = {**known_models()[fields.pop("base")].config, **fields}
        place = folder / f"{run.model}.json"
        place.write_text(json.dumps(config), encoding="utf-8")
        return str(place)
    return str(Gpt(**fields, sequence=run.sequence).write_config(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one run beside ours; ``bar`` is half the width of the range that we give, as a share of our figure."""

    run: PublishedRun
    what: str
    published: float
    ours: float
    bar: float

    @property
    def error(self) -> float:
        """As a share of what was published."""
        return self.ours / self.published - 1

    @property
    def is_within(self) -> bool:
        """Whether what was published lies in our range."""
        return abs(self.published - self.ours) <= self.bar * self.ours


def compare(run: PublishedRun, found: Estimate) -> Iterator[Compared]:
    """Memory of the fullest rank and throughput, where they were published."""
    if run.memory_bytes is not None:
        stage = found.tightest
        ours, bar = _memory(run, stage)
        yield Compared(run=run, what="memory", published=run.memory_bytes, ours=ours, bar=bar / ours)
    speed = found.throughput
    if run.tokens_per_second is not None and speed.tokens_per_second is not None:
        ours = speed.tokens_per_second
        yield Compared(run=run, what="speed", published=run.tokens_per_second, ours=ours, bar=speed.relative_error)
    if run.seconds is not None:
        ours = 1 / speed.step_seconds
        yield Compared(run=run, what="speed", published=1 / run.seconds, ours=ours, bar=speed.relative_error)


def _memory(run: PublishedRun, stage: StageEstimate) -> tuple[float, float]:
    """The figure that was published, and half the width of its range."""
    outside = [item for item in stage.items if item.name.startswith(_OUTSIDE if run.memory != "process" else _CONTEXT)]
    if run.memory == "allocated":
        outside += [item for item in stage.items if item.name in _CACHED]
    inside = stage.total_bytes - sum(item.bytes or 0 for item in outside)
    if stage.whole_error is not None:
        return inside, stage.whole_error * inside
    return inside, stage.error_bytes - sum(item.error_bytes for item in outside)


def _summary(name: str, compared: Sequence[Compared]) -> list[str]:
    errors = [abs(each.error) for each in compared]
    inside = sum(each.is_within for each in compared)
    width = statistics.median(2 * each.bar for each in compared)
    return [
        name,
        str(len(compared)),
        f"{statistics.median(errors):.1%}",
        f"{statistics.median(each.error for each in compared):+.1%}",
        f"{max(errors):.0%}",
        f"{inside} ({inside / len(compared):.0%})",
        f"± {width / 2:.0%}",
    ]


def lines(compared: Sequence[Compared], refused: Iterable[str]) -> Iterator[str]:
    """The page: sums of both halves and of each table, then the runs of the half to tune on."""
    halves: tuple[tuple[str, Callable[[Compared], bool]], ...] = (
        ("tuning", lambda each: not each.run.is_held_out),
        ("held out", lambda each: each.run.is_held_out),
    )
    rows = []
    for half, belongs in halves:
        for what in ("memory", "speed"):
            mine = [each for each in compared if belongs(each) and each.what == what]
            tables = dict.fromkeys(each.run.table for each in mine)
            if mine:
                rows.append(_summary(f"{half}: {what}", mine))
            rows += [_summary(f"· {table}", [each for each in mine if each.run.table == table]) for table in tables]
    head = ("", "figures", "median of errors' sizes", "median error", "largest", "inside our bar", "median bar")
    yield from format_table(head, rows)
    yield ""
    cells = [_cells(each) for each in compared if not each.run.is_held_out]
    yield from format_table(("run of the tuning half", "", "published", "ours", "error", "bar"), cells)
    yield from (f"\nsaid not to fit, though it ran: {name}" for name in refused)


def _cells(each: Compared) -> list[str]:
    unit = GIB if each.what == "memory" else 1
    return [
        each.run.name,
        each.what,
        f"{each.published / unit:.4g}",
        f"{each.ours / unit:.4g}",
        f"{each.error:+.1%}",
        f"± {each.bar:.0%}",
    ]


def main(tables: Sequence[str]) -> int:
    """Print all runs, or those of the named tables; 1 where one of them could not be estimated."""
    compared: list[Compared] = []
    refused = []
    failed = []
    for run in read_runs():
        if tables and run.table not in tables:
            continue
        try:
            found = estimate_run(run)
        except PlimsollError as error:
            failed.append(f"{run.name}: {error}")
            continue
        print(f"{run.name}: {found.total_seconds:.1f} s", file=sys.stderr, flush=True)
        compared += compare(run, found)
        if found.does_fit is False:
            refused.append(run.name if not run.is_held_out else "a run that is held out")
    print("\n".join(lines(compared, refused)))
    for failure in failed:
        print(f"\nnot estimated: {failure}")
    return 1 if failed else 0
