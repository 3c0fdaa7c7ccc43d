"""A case in; every peer's memory and time, and Plimsoll's at the same memory, out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks import peers
from benchmarks.measure import Variant, prepare
from benchmarks.models import Case
from benchmarks.progress import say
from plimsoll.artifacts.plan import Plan
from plimsoll.tracing.meters.timing import Interval, Timing, paired_ratio, time_in_turns


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRow:
    """One peer against the unmanaged model, and ours (where there is one) at the peer's own measured peak."""

    peer: Variant
    overhead: Interval
    plan: Plan | None = None
    ours: Variant | None = None
    ours_overhead: Interval | None = None
    ours_by_peer: Interval | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTable:
    baseline: Variant
    timing: Timing
    rows: tuple[PeerRow, ...]
    failures: tuple[str, ...] = ()
    """A sentence for each peer that could not be measured."""


def apply_plan(plan: Plan) -> Callable[[nn.Module], AbstractContextManager[nn.Module]]:
    """A plan as something that can be applied to a model like a peer."""

    @contextlib.contextmanager
    def apply(model: nn.Module) -> Iterator[nn.Module]:
        import plimsoll

        with plimsoll.apply(model, plan):
            yield model

    return apply


def eager_peers(
    case: Case,
    *,
    rounds: int,
    with_ours: bool,
    chosen: Sequence[peers.Peer] = peers.EAGER,
    has_time: Callable[[], bool] = lambda: True,
) -> PeerTable:
    """The unmanaged model, every peer chosen, and ours given each peer's measured peak as its budget.

    A peer that lacks a package or memory, or for which there is no time left, is named in ``failures``.
    """
    with contextlib.ExitStack() as stack:
        baseline = prepare(stack, peers.NONE.name, case, peers.NONE.apply)
        theirs: list[Variant] = []
        ours: dict[str, tuple[Plan | None, Variant | None, str]] = {}
        failures: list[str] = []
        for peer in chosen:
            if lack := peer.missing(case.device) or ("" if has_time() else "more time"):
                failures.append(f"{peer.name}: it needs {lack}")
                continue
            try:
                theirs.append(_prepared(stack, peer.name, case, peer.apply, baseline))
            except Exception as error:  # noqa: BLE001 - out of memory, a compiler, a library: others are to be measured
                failures.append(f"{peer.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                case.model.zero_grad(set_to_none=True)
                continue
            if with_ours and has_time():
                ours[peer.name] = _ours(stack, case, theirs[-1], baseline)
        variants = [baseline, *theirs, *(mine for _, mine, _ in ours.values() if mine is not None)]
        timings = _timings(variants, rounds)
        rows = [_row(each, baseline, timings, ours.get(each.name, (None, None, ""))) for each in theirs]
        return PeerTable(baseline=baseline, timing=timings[baseline.name], rows=tuple(rows), failures=tuple(failures))


def _prepared(stack: contextlib.ExitStack, name: str, case: Case, apply: Any, baseline: Variant | None) -> Variant:
    say(f"{case.name}: {name}")
    return prepare(stack, name, case, apply, baseline)


def _ours(
    stack: contextlib.ExitStack, case: Case, peer: Variant, baseline: Variant
) -> tuple[Plan | None, Variant | None, str]:
    import plimsoll

    name = f"plimsoll at {peer.name}"
    try:
        plan = plimsoll.plan(case.model, case.batch, budget=peer.steady.total_peak_bytes, loss=case.loss)
        return plan, _prepared(stack, name, case, apply_plan(plan), baseline), ""
    except Exception as error:  # noqa: BLE001 - a defect of ours belongs on the page, beside the other peers
        case.model.zero_grad(set_to_none=True)
        return None, None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _timings(variants: list[Variant], rounds: int) -> dict[str, Timing]:
    say(f"{variants[0].case.name}: {rounds} rounds of {len(variants)} steps")
    return time_in_turns({each.name: each.step for each in variants}, device=variants[0].case.device, rounds=rounds)


def _row(
    peer: Variant, baseline: Variant, timings: dict[str, Timing], ours: tuple[Plan | None, Variant | None, str]
) -> PeerRow:
    plan, mine, note = ours
    seconds, peer_seconds = timings[baseline.name], timings[peer.name]
    shared = {
        "peer": peer,
        "overhead": paired_ratio(peer_seconds, seconds),
        "note": note,
    }
    if mine is None:
        return PeerRow(**shared)
    return PeerRow(
        **shared,
        plan=plan,
        ours=mine,
        ours_overhead=paired_ratio(timings[mine.name], seconds),
        ours_by_peer=paired_ratio(timings[mine.name], peer_seconds),
    )
