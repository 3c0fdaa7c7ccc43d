"""Translates the bytes of each rank into the one budget of a plan that all ranks share.

The tightest rank is the rank with the smallest difference between budget and unmanaged (without a plan) peak. It solves for all
ranks, so the plan has the tightest rank's budget. If another rank exceeds its own budget by some bytes, this counts as if the
plan exceeded the plan's budget by the same bytes.

Ranks may have batches of different shapes. So each rank simulates the plan on its own step. If a rank exceeds its budget in the
simulation, the tightest rank solves again.
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
    """What a rank sends to find the tightest rank (the rank with the least memory to spare), as data: its room (its budget
    minus its peak without a plan), and its budget.
    """

    room_bytes: int
    budget_bytes: int | None


class _Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank sends after a trial (measured run of a plan), as data: its measurement and its budget."""

    peak_bytes: int
    recording_bytes: int
    """The peak of this rank's measured run with all optimizer state, minus the peak of a training that starts with this plan,
    before its optimizer has state.
    """
    budget_bytes: int | None
    error: float | None

    @property
    def over_bytes(self) -> int:
        return self.peak_bytes - (self.budget_bytes or 0)


class TightestRank:
    """Finds the tightest of the ranks that plan together (the rank whose budget is lowest compared with its peak without a
    plan), and translates bytes of other ranks into its budget.

    A process that plans alone is the tightest rank, and its bytes do not change.
    """

    def __init__(self, agreement: Agreement, own_budget_bytes: int | None, unmanaged_bytes: int) -> None:
        self._agreement = agreement
        self._own_budget_bytes = own_budget_bytes
        self.own_excess_bytes = 0
        """How many bytes more than predicted this rank's measured step needed."""
        room_bytes = 0 if own_budget_bytes is None else own_budget_bytes - unmanaged_bytes
        rooms = agreement.all_of("room", _Room(room_bytes=room_bytes, budget_bytes=own_budget_bytes), _Room)
        by_rank = dict(zip(agreement.ranks, rooms, strict=True))
        # Without budgets all rooms are 0, so the first rank solves.
        self._rank = min(by_rank, key=lambda rank: by_rank[rank].room_bytes)
        self.budget_bytes = by_rank[self._rank].budget_bytes
        """The budget of the tightest rank, which is the budget of the plan."""
        budgets = {str(rank): room.budget_bytes for rank, room in by_rank.items() if room.budget_bytes is not None}
        self._uneven_budget_bytes = budgets if len(set(budgets.values())) > 1 else {}

    def made(self, what: str, make: Callable[[], Plan]) -> Plan:
        """Let the tightest rank make a plan, and return that plan on all ranks. See `Agreement.made_by`."""
        return self._agreement.made_by(self._rank, what, make)

    def of_tightest(self, what: str, value: T, kind: Any) -> T:
        """Exchange a value with all ranks, and return the tightest rank's value on each of them. ``what`` names the
        exchange.
        """
        values: list[T] = self._agreement.all_of(what, value, kind)
        return values[self._agreement.ranks.index(self._rank)]

    def excess_bytes(self, own_excess_bytes: int) -> int:
        """Return, on all ranks, the measured minus the predicted bytes of the tightest rank. They are subtracted from the
        plan's budget. Remember this rank's own difference.
        """
        self.own_excess_bytes = own_excess_bytes
        return self.of_tightest("excess", own_excess_bytes, int)

    def worst_bytes(self, own_bytes: int) -> int:
        """Exchange the bytes that each rank's step takes. Return the plan's budget plus the largest overshoot of any rank over
        its own budget.

        A single process gets its ``own_bytes`` back unchanged.
        """
        over_bytes = own_bytes - (self._own_budget_bytes or 0)
        return (self.budget_bytes or 0) + max(self._agreement.all_of("worst", over_bytes, int))

    def worst_trial(self, own: TrialRun) -> TrialRun:
        """Combine the trials (measured runs of a plan) of all ranks into one and return it. Its error is the largest error, and
        its peak is the plan's budget plus the largest overshoot of a rank over its own budget.
        """
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
        """Return the error that all ranks raise if no plan fits. ``floor_bytes`` is a budget of the tightest rank that would be
        enough.

        If budgets differ between ranks, the error asks to raise every rank's own budget by the largest overshoot.
        """
        if self._uneven_budget_bytes:
            more = format_bytes_up(floor_bytes - (self.budget_bytes or 0))
            error = BudgetBelowFloor(
                error.found,
                why=f"one of {self._agreement.size} ranks needs {more} more than its budget; on rank {self._rank}: {error.why}",
                next=f"{budget_text(floor_bytes)} on rank {self._rank}, and a budget {more} larger on every other rank",
            )
        return self._agreement.refused_by(self._rank, error)

    def noted(self, plan: Plan) -> Plan:
        """Return a plan that this rank made, with a note that names this rank. If the ranks have different budgets, write all
        of them into the plan.
        """
        if self._agreement.size == 1:
            return plan
        note = f"planned by rank {self._rank}, which has the least room of {self._agreement.size} ranks"
        budgets = self._uneven_budget_bytes
        return msgspec.structs.replace(plan, notes=(*plan.notes, note), budget_bytes_of_ranks=budgets)
