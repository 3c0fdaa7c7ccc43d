"""Splits the time that a plan adds to a step into causes, by comparing two ledgers (records of where the time went). The parts
add up to the added time exactly.

Every nanosecond of either side is assigned to one cause. A part is the difference between the two sides' sums per step. Let m
be the baseline's median time of the same work (same name and, if both traces have shapes, same shape) in the same phase:

- recomputed work adds the m of its forward to RECOMPUTE, and its time minus m to MEMORY;
- other work that both sides have adds m to ADDED (so the part is the change in its count times m), and its time minus m to
  MEMORY; work that only one side has adds its whole time to ADDED;
- copies and fills outside the recomputation go to COPIES;
- if the plan runs fewer fused kernels than the baseline, the fused kernels and the element-wise work that replaces them go to
  FUSION;
- idle time goes to SYNCHRONISATION while the host waits, to LAUNCH while the host has not launched the next work, and to
  UNEXPLAINED if the next work was launched long before it ran;
- for communication, the time minus m goes to SYNCHRONISATION, because ranks wait for each other inside collectives;
- whole CUDA graphs, whose kernels were not recorded, go to UNEXPLAINED.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable

from plimsoll.analysis.diagnose.ledger import Ledger, WorkKind, WorkPiece
from plimsoll.artifacts.finding import OverheadCause, OverheadPart, WorkPhase
from plimsoll.units import format_seconds

_NS = 1e-9
_DETAILS = 3
_LEAST_DETAIL_NS = 1000.0
_MORE_WORK = 1.02
"""A factor. Recomputation is inferred only if the plan's step has more than this many times as many pieces of work as the
baseline's step."""

Key = tuple[str, str]


def split_overhead(baseline: Ledger, plan: Ledger) -> tuple[OverheadPart, ...]:
    """Split the time that a plan adds to a step into causes, and return one part for each cause.

    The order is that of ``OverheadCause``. The arguments are the ledgers (records of where the time went) without and with the
    plan.
    """
    rules = _Rules(baseline, plan)
    before, after = _Account(baseline, rules), _Account(plan, rules)
    return tuple(_part(cause, before, after) for cause in OverheadCause)


def repeats_are_inferred(baseline: Ledger, plan: Ledger) -> bool:
    """Return True if recomputation has to be inferred, because the traces do not mark it.

    It then only shows as forward work that the plan's step runs more often than the baseline's step.
    """
    if baseline.has_nodes and plan.has_nodes:
        return False
    if any(work.phase is WorkPhase.RECOMPUTE for work in plan.work):
        return False
    return len(plan.work) / plan.steps > _MORE_WORK * len(baseline.work) / baseline.steps


class _Rules:
    """The rules that assign work to causes. They use the baseline's median times and the facts that both profiles record."""

    def __init__(self, baseline: Ledger, plan: Ledger) -> None:
        self._has_shapes = baseline.has_shapes == plan.has_shapes
        self._medians = self._median_ns(baseline.work)
        self._plan_keys = {self.key(work) for work in plan.work}
        fused = [sum(work.is_fused for work in each.work) / each.steps for each in (baseline, plan)]
        self._is_fusion_lost = fused[1] < fused[0]
        self._repeated = self._repeats(baseline, plan) if repeats_are_inferred(baseline, plan) else frozenset()

    def key(self, work: WorkPiece) -> Key:
        """Return a key for a piece of work. Work with an equal key is the same work in both profiles."""
        return (work.name, work.shape if self._has_shapes else "")

    def causes(self, work: WorkPiece) -> Iterable[tuple[OverheadCause, float]]:
        """Return the causes of overhead that a piece of work contributes to, each with its nanoseconds."""
        key = self.key(work)
        is_recomputed = work.phase is WorkPhase.RECOMPUTE
        if work.kind is WorkKind.GRAPH:
            return ((OverheadCause.UNEXPLAINED, work.own_ns),)
        if work.kind in (WorkKind.COPY, WorkKind.SET) and not is_recomputed:
            return ((OverheadCause.COPIES, work.own_ns),)
        phase = WorkPhase.FORWARD if is_recomputed else work.phase
        reference = self._medians.get((key, phase), self._medians.get((key, None)))
        if reference is None or key not in self._plan_keys:
            return ((self._cause_of(work, is_recomputed=False), work.own_ns),)
        slower = OverheadCause.SYNCHRONISATION if work.kind is WorkKind.COMMUNICATION else OverheadCause.MEMORY
        is_again = is_recomputed or key in self._repeated
        return ((self._cause_of(work, is_recomputed=is_again), reference), (slower, work.own_ns - reference))

    def _cause_of(self, work: WorkPiece, *, is_recomputed: bool) -> OverheadCause:
        """Return the cause of overhead for the time that a piece of work takes because it runs at all.

        Recomputed work that the baseline does not have may be a part of a kernel that is fused in the baseline.
        """
        if is_recomputed:
            return OverheadCause.RECOMPUTE
        if self._is_fusion_lost and (work.is_fused or work.is_element_wise):
            return OverheadCause.FUSION
        return OverheadCause.RECOMPUTE if work.phase is WorkPhase.RECOMPUTE else OverheadCause.ADDED

    def _median_ns(self, works: Iterable[WorkPiece]) -> dict[tuple[Key, WorkPhase | None], float]:
        times: dict[tuple[Key, WorkPhase | None], list[int]] = defaultdict(list)
        for work in works:
            times[self.key(work), work.phase].append(work.own_ns)
            times[self.key(work), None].append(work.own_ns)
        return {place: statistics.median(each) for place, each in times.items()}

    def _repeats(self, baseline: Ledger, plan: Ledger) -> frozenset[Key]:
        """Return the keys of the forward work that the plan's step runs more often than the baseline's step.

        If the baseline's phases are unknown, all its work is compared.
        """
        has_forward = any(work.phase is WorkPhase.FORWARD for work in baseline.work)
        ours = Counter(self.key(work) for work in baseline.work if not has_forward or work.phase is WorkPhase.FORWARD)
        before = Counter(self.key(work) for work in baseline.work)
        after = Counter(self.key(work) for work in plan.work)
        return frozenset(key for key in ours if after[key] / plan.steps > before[key] / baseline.steps)


class _Account:
    """Data: the nanoseconds of one profile (without or with the plan), by cause and step, and by cause and name of the work."""

    def __init__(self, ledger: Ledger, rules: _Rules) -> None:
        self.steps = ledger.steps
        self.by_step: dict[OverheadCause, list[float]] = {cause: [0.0] * ledger.steps for cause in OverheadCause}
        self.by_name: dict[OverheadCause, Counter[str]] = {cause: Counter() for cause in OverheadCause}
        for work in ledger.work:
            for cause, nanoseconds in rules.causes(work):
                self.by_step[cause][min(work.step, self.steps - 1)] += nanoseconds
                self.by_name[cause][work.name] += nanoseconds / self.steps  # type: ignore[assignment]  # shares are floats
        for gap in ledger.idle:
            step = min(gap.step, self.steps - 1)
            self.by_step[OverheadCause.SYNCHRONISATION][step] += gap.waiting_ns
            self.by_step[OverheadCause.LAUNCH][step] += gap.launching_ns
            self.by_step[OverheadCause.UNEXPLAINED][step] += gap.stalled_ns

    def mean_ns(self, cause: OverheadCause) -> float:
        """Return the nanoseconds that count for a cause, as the mean over the profile's steps."""
        return math.fsum(self.by_step[cause]) / self.steps

    def error_ns(self, cause: OverheadCause) -> float:
        """Return the standard error, in nanoseconds, of the mean time per step that counts for a cause; 0 for a single step."""
        return statistics.stdev(self.by_step[cause]) / math.sqrt(self.steps) if self.steps > 1 else 0.0


def _part(cause: OverheadCause, before: _Account, after: _Account) -> OverheadPart:
    has_spread = before.steps > 1 and after.steps > 1
    return OverheadPart(
        cause=cause,
        seconds=(after.mean_ns(cause) - before.mean_ns(cause)) * _NS,
        spread_seconds=math.hypot(before.error_ns(cause), after.error_ns(cause)) * _NS if has_spread else None,
        details=_details(before.by_name[cause], after.by_name[cause]),
    )


def _details(before: Counter[str], after: Counter[str]) -> tuple[str, ...]:
    """Return texts that name the work whose time changed most from ``before`` to ``after``, each with the change."""
    changes = {name: after[name] - before[name] for name in {*before, *after}}
    largest = sorted(changes.items(), key=lambda item: (-abs(item[1]), item[0]))[:_DETAILS]
    return tuple(
        f"{name[:70]} {'+' if change > 0 else ''}{format_seconds(change * _NS)}"
        for name, change in largest
        if abs(change) >= _LEAST_DETAIL_NS
    )
