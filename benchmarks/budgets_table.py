"""A case in; for budgets between the floor and the unmanaged peak, predicted beside measured, out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from benchmarks import peers
from benchmarks.measure import Variant, paired_difference_seconds, prepare
from benchmarks.models import Case
from benchmarks.peers_table import apply_plan
from benchmarks.progress import say
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import PlimsollError
from plimsoll.tracing.meters.timing import Interval, paired_ratio, time_in_turns

SHARES = (0.10, 0.25, 0.50, 0.75, 0.90)


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRow:
    """One budget, ``share`` of the way from the floor to the unmanaged peak."""

    share: float
    budget_bytes: int
    plan: Plan
    variant: Variant
    measured_ratio: Interval
    measured_extra_seconds: Interval

    @property
    def measured_peak_bytes(self) -> int:
        """The highest of both steps: the first one, which records, and the second."""
        return max(self.variant.first.total_peak_bytes, self.variant.steady.total_peak_bytes)

    @property
    def is_within_budget(self) -> bool:
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def peak_error(self) -> float:
        """Predicted by measured peak of the steady step, less one."""
        return self.plan.predicted_peak_bytes / self.variant.steady.total_peak_bytes - 1

    @property
    def predicted_extra_seconds(self) -> float:
        return self.plan.predicted_seconds - self.plan.baseline_seconds

    @property
    def is_extra_predicted(self) -> bool:
        """Within 15% of the predicted extra seconds or 1% of the step, whichever is more."""
        allowed = max(0.15 * self.predicted_extra_seconds, 0.01 * self.plan.baseline_seconds)
        return abs(self.predicted_extra_seconds - self.measured_extra_seconds.median) <= allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetTable:
    """The rows that could be measured, and a sentence for each budget that could not."""

    floor_bytes: int
    peak_bytes: int
    rows: tuple[BudgetRow, ...]
    failures: tuple[str, ...]


def budget_table(case: Case, *, rounds: int, shares: tuple[float, ...] = SHARES) -> BudgetTable:
    """Plan, apply, measure and time one budget per share."""
    import plimsoll

    with contextlib.ExitStack() as stack:
        baseline = prepare(stack, peers.NONE.name, case, peers.NONE.apply)
        peak_bytes = baseline.steady.total_peak_bytes
        floor_bytes = plimsoll.plan(case.model, case.batch, budget=peak_bytes, loss=case.loss).floor_bytes
        made: list[tuple[float, int, Plan, Variant]] = []
        failures: list[str] = []
        for share in shares:
            budget_bytes = int(floor_bytes + share * (peak_bytes - floor_bytes))
            say(f"{case.name}: budget {share:.0%}, {budget_bytes / 2**20:.1f} MiB")
            try:
                plan = plimsoll.plan(case.model, case.batch, budget=budget_bytes, loss=case.loss)
                variant = prepare(stack, f"{share:.0%}", case, apply_plan(plan), baseline)
            except PlimsollError as error:
                failures.append(f"{share:.0%}: {type(error).__name__}: {error.found}")
            else:
                made.append((share, budget_bytes, plan, variant))
        steps = {each.name: each.step for each in (baseline, *(variant for *_, variant in made))}
        say(f"{case.name}: {rounds} rounds of {len(steps)} steps")
        timings = time_in_turns(steps, device=case.device, rounds=rounds)
        rows = tuple(
            BudgetRow(
                share=share,
                budget_bytes=budget_bytes,
                plan=plan,
                variant=variant,
                measured_ratio=paired_ratio(timings[variant.name], timings[baseline.name]),
                measured_extra_seconds=paired_difference_seconds(timings[variant.name], timings[baseline.name]),
            )
            for share, budget_bytes, plan, variant in made
        )
    return BudgetTable(floor_bytes=floor_bytes, peak_bytes=peak_bytes, rows=rows, failures=tuple(failures))
