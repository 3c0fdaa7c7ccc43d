"""A case in; peers inside of torch.compile, and Plimsoll at each one's own measured peak, out: bytes, seconds, gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.measure import Variant, gradient_distance, prepare, run_step
from benchmarks.models import Case
from benchmarks.page import format_mib, format_table
from benchmarks.peers import compiled, none
from benchmarks.progress import say
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import PlimsollError
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


@contextlib.contextmanager
def planned(model: nn.Module, case: Case, how: str, budget: int) -> Iterator[Plan]:
    """A model compiled, planned for a budget and under that plan."""
    import plimsoll

    with compiled.apply(model, how):
        plan = plimsoll.plan(model, case.batch, budget=budget, loss=case.loss)
        with plimsoll.apply(model, plan):
            yield plan


def prepared(stack: contextlib.ExitStack, name: str, case: Case, apply: Apply, baseline: Variant | None) -> Variant:
    """As `measure.prepare`, after a step in which all is compiled."""

    @contextlib.contextmanager
    def warm(model: nn.Module) -> Iterator[nn.Module]:
        with apply(model):
            run_step(case, model)
            model.zero_grad(set_to_none=True)
            yield model

    variant = prepare(stack, name, case, warm, baseline)
    say(f"{case.name}: {name}: {format_mib(variant.steady.total_peak_bytes)} MiB, off by {variant.gradient_error:.1e}")
    return variant


def prepared_plan(
    stack: contextlib.ExitStack, name: str, case: Case, how: str, budget: int, baseline: Variant
) -> tuple[Plan, Variant]:
    """Ours under a budget."""
    made: list[Plan] = []

    @contextlib.contextmanager
    def apply(model: nn.Module) -> Iterator[nn.Module]:
        with planned(model, case, how, budget) as plan:
            made.append(plan)
            yield model

    variant = prepared(stack, name, case, apply, baseline)
    return made[0], variant


def measure(case: Case, how: str, *, rounds: int) -> list[str]:
    """Everything about one model compiled in one way, timed in turns, as lines of a page."""
    with contextlib.ExitStack() as stack:
        table = _prepared_table(stack, case, how)
        variants = [table.eager, *(each for row in table.rows for each in (row.peer, row.ours) if each is not None)]
        say(f"{case.name}, {how}: {rounds} rounds of {len(variants)} steps")
        timings = time_in_turns({each.name: each.step for each in variants}, device=case.device, rounds=rounds)
        return _lines(table, timings)


def _prepared_table(stack: contextlib.ExitStack, case: Case, how: str) -> Table:
    eager = prepared(stack, _EAGER, case, none.apply, None)
    apply = partial(compiled.apply, how=how)
    baseline = prepared(stack, _UNMANAGED, case, apply, None)
    rows = [Row(peer=baseline), Row(peer=prepared(stack, _AGAIN, case, apply, baseline))]
    failures: list[str] = []
    for name, peer in compiled.PEERS[how].items():
        try:
            rows.append(Row(peer=prepared(stack, name, case, peer, baseline)))
        except Exception as error:  # noqa: BLE001 - a peer that fails is named on the page, and the others are measured
            failures.append(f"{name}: {_told(error)}")
            case.model.zero_grad(set_to_none=True)
            continue
        row = rows[-1]
        try:
            row.plan, row.ours = prepared_plan(
                stack, f"ours at {name}", case, how, row.peer.steady.total_peak_bytes, baseline
            )
        except Exception as error:  # noqa: BLE001 - a defect of ours belongs on the page
            row.note = _told(error)
            say(f"{case.name}: ours at {name}: {row.note}")
            case.model.zero_grad(set_to_none=True)
    return Table(how=how, rows=rows, eager=eager, eager_distance=gradient_distance(eager, baseline), failures=failures)


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
            f"- ours / peer: median {torch.tensor(ours).median():.3f}, highest {max(ours):.3f}, over {len(ours)} peers"
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
