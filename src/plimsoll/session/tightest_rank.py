"""Translates what one rank measures into what a plan that all ranks share must fit into.

The tightest rank has the least room: its budget minus its unmanaged peak is the smallest. It solves for all ranks, so a plan
has one budget, the tightest rank's. The overshoot of another rank over its own budget is translated into the same overshoot
over the plan's budget. Ranks may have batches of different shapes: each simulates the plan on its own step, and if one exceeds
its budget, the tightest rank solves again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from plimsoll.artifacts.plan import Plan
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.agreement import Agreement
from plimsoll.session.trial import TrialRun
from plimsoll.units import budget_text, format_bytes, format_bytes_up

T = TypeVar("T")


class _Room(msgspec.Struct, frozen=True, kw_only=True):
    """The room of one rank: its budget minus its unmanaged peak."""

    room_bytes: int
    budget_bytes: int | None


class _Taken(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's measurement, with its budget."""

    peak_bytes: int
    recording_bytes: int
    """How much lower the peak is if the plan is recorded before the optimizer has state."""
    budget_bytes: int | None
    error: float | None

    @property
    def over_bytes(self) -> int:
        return self.peak_bytes - (self.budget_bytes or 0)


class TightestRank:
    """The rank with the least room, among the ranks that plan together. A process that plans alone is the tightest."""

    def __init__(self, agreement: Agreement, own_budget_bytes: int | None, unmanaged_bytes: int) -> None:
        self._agreement = agreement
        self._own_budget_bytes = own_budget_bytes
        self.own_excess_bytes = 0
        """By how much this rank's step was measured to exceed its prediction."""
        room_bytes = 0 if own_budget_bytes is None else own_budget_bytes - unmanaged_bytes
        rooms = agreement.all_of("room", _Room(room_bytes=room_bytes, budget_bytes=own_budget_bytes), _Room)
        by_rank = dict(zip(agreement.ranks, rooms, strict=True))
        # without budgets all rooms are 0, so this is the first rank
        self._rank = min(by_rank, key=lambda rank: by_rank[rank].room_bytes)
        self.budget_bytes = by_rank[self._rank].budget_bytes
        """The tightest rank's budget, which is the plan's."""
        budgets = {str(rank): room.budget_bytes for rank, room in by_rank.items() if room.budget_bytes is not None}
        self._uneven_budget_bytes = budgets if len(set(budgets.values())) > 1 else {}

    def made(self, what: str, make: Callable[[], Plan]) -> Plan:
        """Let the tightest rank make a plan and return it on all ranks. See `Agreement.made_by`."""
        return self._agreement.made_by(self._rank, what, make)

    def of_tightest(self, what: str, value: T, kind: Any) -> T:
        """Return the tightest rank's value on all ranks."""
        values: list[T] = self._agreement.all_of(what, value, kind)
        return values[self._agreement.ranks.index(self._rank)]

    def excess_bytes(self, own_excess_bytes: int) -> int:
        """Return the tightest rank's excess to subtract from its budget. From now on each rank counts its own excess."""
        self.own_excess_bytes = own_excess_bytes
        return self.of_tightest("excess", own_excess_bytes, int)

    def worst_bytes(self, own_bytes: int) -> int:
        """Translate this rank's peak: return the plan's budget plus the largest overshoot of any rank over its own budget.

        For a process alone that is ``own_bytes``.
        """
        over_bytes = own_bytes - (self._own_budget_bytes or 0)
        return (self.budget_bytes or 0) + max(self._agreement.all_of("worst", over_bytes, int))

    def worst_trial(self, own: TrialRun) -> TrialRun:
        """Translate this rank's trial: return the largest error, and the plan's budget plus the largest overshoot."""
        if self._agreement.size == 1:
            return own
        taken = _Taken(
            peak_bytes=own.peak_bytes,
            recording_bytes=own.peak_bytes - own.fresh_bytes,
            budget_bytes=self._own_budget_bytes,
            error=own.error,
        )
        everyone = self._agreement.all_of("measured peaks", taken, _Taken)
        rank, worst = max(zip(self._agreement.ranks, everyone, strict=True), key=lambda entry: entry[1].over_bytes)
        of = "" if worst.budget_bytes is None else f" of {format_bytes(worst.budget_bytes)}"
        return TrialRun(
            (self.budget_bytes or 0) + worst.over_bytes,
            (self.budget_bytes or 0) + max(each.over_bytes - each.recording_bytes for each in everyone),
            max((each.error for each in everyone if each.error is not None), default=None),
            note=f"run once on {self._agreement.size} ranks: the measured peak of the tightest, rank {rank}, was "
            f"{format_bytes(worst.peak_bytes)}{of}",
        )

    def refused(self, error: BudgetBelowFloor, floor_bytes: int) -> BudgetBelowFloor:
        """Return the error that all ranks raise. If budgets differ, every rank must raise its own by the largest overshoot."""
        if self._uneven_budget_bytes:
            more = format_bytes_up(floor_bytes - (self.budget_bytes or 0))
            error = BudgetBelowFloor(
                error.found,
                why=f"of {self._agreement.size} ranks one lacks {more} of its budget; on rank {self._rank} {error.why}",
                next=f"{budget_text(floor_bytes)} on rank {self._rank} and {more} more on every other one",
            )
        return self._agreement.refused_by(self._rank, error)

    def noted(self, plan: Plan) -> Plan:
        """Return a plan that this rank made, with a note of it and the budgets of the ranks."""
        if self._agreement.size == 1:
            return plan
        note = f"planned by rank {self._rank}, which has the least room of {self._agreement.size} ranks"
        budgets = self._uneven_budget_bytes
        return msgspec.structs.replace(plan, notes=(*plan.notes, note), budget_bytes_of_ranks=budgets)
