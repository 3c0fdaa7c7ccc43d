"""A case in; peers inside of torch.compile, and Plimsoll at each one's own measured peak, out: bytes, seconds, gradients."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import plimsoll
from benchmarks.measure import Variant, gradient_distance, prepare, run_step
from benchmarks.models import Case
from benchmarks.page import format_mib, format_table
from benchmarks.peers import compiled, none
from benchmarks.progress import say
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import PlimsollError
from plimsoll.session.compiled import CompiledPlanner, planned_parts, trace_compiled
from plimsoll.session.options import PlanOptions
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.meters.timing import Timing, paired_ratio, time_in_turns

Apply = Callable[[nn.Module], AbstractContextManager[nn.Module]]
_HEAD = (
    "", "time × compiled", "time × eager", "peak MiB", "gradients", "ours × compiled", "ours / peer (95%)", "our peak MiB",
    "predicted / measured", "our gradients",
)  # fmt: skip
_UNMANAGED, _AGAIN, _EAGER = "unmanaged", "unmanaged, once more", "eager"


@dataclass(kw_only=True)
class Row:
    """One peer, and ours at its peak (or why there is none)."""

    peer: Variant
    plan: Plan | None = None
    ours: Variant | None = None
    note: str = ""


@dataclass(kw_only=True)
class Table:
    """All that was measured of one model compiled in one way. The first row is the unmanaged compiled model."""

    how: str
    rows: list[Row]
    eager: Variant
    eager_distance: float
    failures: list[str]


class Subject:
    """One model compiled in one way: the steps that others are held against, and plans, for which it is traced once.

    All of it stays compiled until ``close``.
    """

    def __init__(self, case: Case, how: str, plans: Path | None = None) -> None:
        """``plans``: a folder in which plans are kept, so that a run that was cut short goes on where it was."""
        self.case, self.how, self._plans = case, how, plans
        self._stack = contextlib.ExitStack()
        self.eager = self.prepared(self._stack, _EAGER, none.apply, None)
        self.unmanaged = self.prepared(self._stack, _UNMANAGED, partial(compiled.apply, how=how), None)

    @functools.cached_property
    def _traced(self) -> tuple[TrainingTask, PlanOptions, Trace, Costs]:
        self._stack.enter_context(compiled.apply(self.case.model, self.how))
        task = TrainingTask.read(self.case.model, self.case.batch, loss=self.case.loss)
        options = PlanOptions.read(strategies="auto", allow=("recompute",))
        start = time.process_time()
        traced, costs = trace_compiled(task, options)
        say(f"{self.case.name}: traced in {time.process_time() - start:.0f} CPU seconds")
        return task, options, traced, costs

    def planner(self, budget: int | None) -> CompiledPlanner:
        """What `plimsoll.plan` makes plans with."""
        task, options, traced, costs = self._traced
        return CompiledPlanner(planned_parts(task, options.regions), traced, costs, options, budget)

    def plan(self, budget: int) -> Plan:
        """As `plimsoll.plan`: run by torch's default partition, solved, run, and solved again where it took more."""
        kept = self._plans and self._plans / f"{self.case.name}-{self.case.size}-{self.how}-{budget}.json"
        if kept and kept.exists():
            return plimsoll.load(kept)
        plan = self.planner(budget).plan("auto", self._traced[0].step)
        if kept:
            plan.save(kept)
        return plan

    @functools.cached_property
    def floor_bytes(self) -> int:
        """The lowest peak that is predicted."""
        return self.planner(None).solve(None, "none").floor_bytes

    def prepared(self, stack: contextlib.ExitStack, name: str, apply: Apply, baseline: Variant | None) -> Variant:
        """As `measure.prepare`, after a step in which all is compiled."""
        case = self.case

        @contextlib.contextmanager
        def warm(model: nn.Module) -> Iterator[nn.Module]:
            with apply(model):
                run_step(case, model)
                model.zero_grad(set_to_none=True)
                yield model

        variant = prepare(stack, name, case, warm, baseline)
        peak = format_mib(variant.steady.total_peak_bytes)
        say(f"{case.name}, {self.how}: {name}: {peak} MiB, off by {variant.gradient_error:.1e}")
        return variant

    def prepared_plan(self, stack: contextlib.ExitStack, name: str, budget: int) -> tuple[Plan, Variant]:
        """Ours under a budget, on a copy of the model."""
        plan = self.plan(budget)

        @contextlib.contextmanager
        def apply(model: nn.Module) -> Iterator[nn.Module]:
            with compiled.apply(model, self.how), plimsoll.apply(model, plan):
                yield model

        return plan, self.prepared(stack, name, apply, self.unmanaged)

    def close(self) -> None:
        """Let go of all that is compiled."""
        self._stack.close()
        torch._dynamo.reset()


def measure(subject: Subject, *, rounds: int) -> list[str]:
    """Everything about one model compiled in one way, timed in turns, as lines of a page."""
    with contextlib.ExitStack() as stack:
        table = _prepared_table(stack, subject)
        variants = [table.eager, *(each for row in table.rows for each in (row.peer, row.ours) if each is not None)]
        say(f"{subject.case.name}, {subject.how}: {rounds} rounds of {len(variants)} steps")
        timings = time_in_turns({each.name: each.step for each in variants}, device=subject.case.device, rounds=rounds)
        return _lines(table, timings)


def _prepared_table(stack: contextlib.ExitStack, subject: Subject) -> Table:
    baseline, how = subject.unmanaged, subject.how
    again = subject.prepared(stack, _AGAIN, partial(compiled.apply, how=how), baseline)
    rows = [Row(peer=baseline), Row(peer=again)]
    failures: list[str] = []
    for name, peer in compiled.PEERS[how].items():
        try:
            rows.append(Row(peer=subject.prepared(stack, name, peer, baseline)))
        except Exception as error:  # noqa: BLE001 - a peer that fails is named on the page, and the others are measured
            failures.append(f"{name}: {_told(error)}")
            subject.case.model.zero_grad(set_to_none=True)
            continue
        row = rows[-1]
        try:
            row.plan, row.ours = subject.prepared_plan(stack, f"ours at {name}", row.peer.steady.total_peak_bytes)
        except Exception as error:  # noqa: BLE001 - a defect of ours belongs on the page
            row.note = _told(error)
            say(f"{subject.case.name}: ours at {name}: {row.note}")
            subject.case.model.zero_grad(set_to_none=True)
    distance = gradient_distance(subject.eager, baseline)
    return Table(how=how, rows=rows, eager=subject.eager, eager_distance=distance, failures=failures)


def _told(error: Exception) -> str:
    if isinstance(error, PlimsollError):
        return f"{type(error).__name__}: {error.found}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _lines(table: Table, timings: dict[str, Timing]) -> list[str]:
    unmanaged = table.rows[0].peer
    step, eager = timings[unmanaged.name], timings[table.eager.name]
    ratio = paired_ratio(eager, step).median
    rows = [[_EAGER, f"{ratio:.3f}", "1", format_mib(table.eager.steady.total_peak_bytes), "", *[""] * 5]]
    rows += [_cells(row, unmanaged, timings, eager) for row in table.rows]
    ours = [
        paired_ratio(timings[row.ours.name], timings[row.peer.name]).median
        for row in table.rows
        if row.ours is not None
    ]
    lines = [
        "",
        f"Compiled {'as a whole' if table.how == compiled.WHOLE else 'block by block'}; the unmanaged step takes "
        f"{step.median_seconds * 1e3:.0f} ± {step.spread_seconds * 1e3:.0f} ms; its gradients are {table.eager_distance:.1e} "
        "from those of eager training:",
        "",
        *format_table(_HEAD, rows),
        "",
        *(f"- not measured: {failure}" for failure in table.failures),
    ]
    if ours:
        lines.append(
            f"- ours / peer: median {statistics.median(ours):.3f}, highest {max(ours):.3f}, over {len(ours)} peers"
        )
    return lines


def _cells(row: Row, unmanaged: Variant, timings: dict[str, Timing], eager: Timing) -> list[str]:
    step, peer = timings[unmanaged.name], timings[row.peer.name]
    cells = [
        row.peer.name,
        f"{paired_ratio(peer, step).median:.3f}",
        f"{paired_ratio(peer, eager).median:.3f}",
        format_mib(row.peer.steady.total_peak_bytes),
        "" if row.peer is unmanaged else told_gradients(row.peer),
    ]
    if row.ours is None or row.plan is None:
        return [*cells, row.note, "", "", "", ""]
    ours, by_peer = timings[row.ours.name], paired_ratio(timings[row.ours.name], peer)
    peak_bytes = row.ours.steady.total_peak_bytes
    is_over = peak_bytes > row.peer.steady.total_peak_bytes
    return [
        *cells,
        f"{paired_ratio(ours, step).median:.3f}",
        f"{by_peer.median:.3f} ({by_peer.low:.3f}–{by_peer.high:.3f})",
        f"**{format_mib(peak_bytes)}**" if is_over else format_mib(peak_bytes),
        f"{row.plan.predicted_peak_bytes / peak_bytes:.4f}",
        told_gradients(row.ours),
    ]


def told_gradients(variant: Variant) -> str:
    """Whether gradients are those of the unmanaged compiled model, or how far from them."""
    return "equal" if variant.is_bit_equal else f"{variant.gradient_error:.1e} off"
