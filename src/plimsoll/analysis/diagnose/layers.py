"""Module paths in, the layers that they belong to out; then the work of two ledgers by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from plimsoll.analysis.diagnose.ledger import Ledger, Work
from plimsoll.artifacts.finding import Layer, WorkPhase

_MOST_OPERATIONS = 12
_DIGITS = "0123456789"


def find_layers(modules: Iterable[str]) -> dict[str, str]:
    """The layer of each module path: its first part that is one of several numbered ones.

    Example:
        >>> find_layers(["model.norm", "model.layers.0.mlp", "model.layers.1"])
        {'model.norm': '', 'model.layers.0.mlp': 'model.layers.0', 'model.layers.1': 'model.layers.1'}
    """
    paths = list(dict.fromkeys(modules))
    members: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        for prefix in _prefixes(path):
            if prefix[-1:].isdigit():
                members[prefix.rstrip(_DIGITS)].add(prefix)
    return {
        path: next((p for p in _prefixes(path) if len(members.get(p.rstrip(_DIGITS), ())) > 1), "") for path in paths
    }


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def tabulate_layers(baseline: Ledger, plan: Ledger) -> tuple[tuple[Layer, ...], bool]:
    """Both sides by layer, and whether these are modules; by operation where the traces do not know modules."""
    are_modules = baseline.has_modules and plan.has_modules
    layer_of = find_layers(work.module for each in (baseline, plan) for work in each.work) if are_modules else {}

    def name_of(work: Work) -> str:
        if not are_modules:
            return work.operation or work.name
        return layer_of[work.module] or work.module or "(outside modules)"

    names = dict.fromkeys(name_of(work) for each in (baseline, plan) for work in each.work)
    before, after = _Sums(baseline), _Sums(plan)
    for sums, ledger in ((before, baseline), (after, plan)):
        for work in ledger.work:
            sums.add(name_of(work), work)
    rows = [
        Layer(
            name=name,
            baseline_count=before.counts[name] / baseline.steps,
            plan_count=after.counts[name] / plan.steps,
            baseline_seconds=before.busy_ns[name] / baseline.steps * 1e-9,
            plan_seconds=after.busy_ns[name] / plan.steps * 1e-9,
            recompute_seconds=after.recompute_ns[name] / plan.steps * 1e-9,
        )
        for name in names
    ]
    if not are_modules:
        rows = sorted(rows, key=lambda row: -max(row.plan_seconds, row.baseline_seconds))[:_MOST_OPERATIONS]
    return tuple(rows), are_modules


class _Sums:
    def __init__(self, ledger: Ledger) -> None:
        self.counts: Counter[str] = Counter()
        self.busy_ns: Counter[str] = Counter()
        self.recompute_ns: Counter[str] = Counter()

    def add(self, name: str, work: Work) -> None:
        self.counts[name] += work.is_counted
        self.busy_ns[name] += work.own_ns
        if work.phase is WorkPhase.RECOMPUTE:
            self.recompute_ns[name] += work.own_ns


def repeated_layers(rows: Iterable[Layer]) -> list[Layer]:
    """The rows that are numbered layers."""
    return [row for row in rows if row.name[-1:].isdigit()]
