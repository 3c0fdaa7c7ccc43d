"""Budgets and measurements of several ranks in, those of the rank that plans for all out.

The tightest rank plans: the one whose budget lies lowest beside what its step takes without a plan. A plan knows one budget,
its own. What another rank takes beyond its own budget is therefore said as so many bytes beyond that one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.plan import Plan
from plimsoll.session.agreement import Agreement
from plimsoll.session.confirm import Measured, Trial
from plimsoll.units import format_bytes


class _Room(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's budget leaves beside its unmanaged step."""

    room_bytes: int
    budget_bytes: int | None


class _Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured, beside its budget."""

    peak_bytes: int
    budget_bytes: int | None
    error: float | None

    @property
    def over_bytes(self) -> int:
        return self.peak_bytes - (self.budget_bytes or 0)


@dataclass(frozen=True, slots=True)
class Frame:
    """The rank that plans (``planner``), its budget, and this rank's own."""

    agreement: Agreement
    planner: int
    budget_bytes: int | None
    own_budget_bytes: int | None
    uneven_budget_bytes: dict[str, int]
    """By rank, where they are not the same."""

    def written_into(self, plan: Plan) -> Plan:
        """The plan with who made it and for whom; as it is where this process is alone."""
        if self.agreement.size == 1:
            return plan
        note = f"planned by rank {self.planner}, which has the least room of {self.agreement.size} ranks"
        return msgspec.structs.replace(plan, notes=(*plan.notes, note), budget_bytes_of_ranks=self.uneven_budget_bytes)

    def excess_bytes(self, own_excess_bytes: int) -> int:
        """What has to be taken off the planning rank's budget, so that every rank's excess fits under its own."""
        spare_bytes = self.own_budget_bytes or 0
        most_bytes = max(self.agreement.all_of("excess", own_excess_bytes - spare_bytes, int))
        return (self.budget_bytes or 0) + most_bytes

    def merged(self, own: Measured) -> Measured:
        """Measurements of all ranks as one: the largest error, and a peak as far over the budget as the worst one is."""
        if self.agreement.size == 1:
            return own
        taken = _Taken(peak_bytes=own.peak_bytes, budget_bytes=self.own_budget_bytes, error=own.error)
        told = self.agreement.all_of("measured peaks", taken, _Taken)
        rank, tightest = max(zip(self.agreement.ranks, told, strict=True), key=lambda entry: entry[1].over_bytes)
        of = "" if tightest.budget_bytes is None else f" of {format_bytes(tightest.budget_bytes)}"
        return Measured(
            (self.budget_bytes or 0) + tightest.over_bytes,
            max((each.error for each in told if each.error is not None), default=None),
            note=f"run once on {self.agreement.size} ranks: the measured peak of the tightest, rank {rank}, was "
            f"{format_bytes(tightest.peak_bytes)}{of}",
        )


@dataclass(frozen=True, slots=True)
class SharedTrial:
    """Runs a plan on every rank, and says what it took in the frame of the rank that plans."""

    trial: Trial
    frame: Frame

    def measure(self, plan: Plan) -> Measured:
        """As ``Trial.measure``."""
        with self.frame.agreement.stepping():
            own = self.trial.measure(plan)
        return self.frame.merged(own)


def find_frame(agreement: Agreement, unmanaged_peak_bytes: int, budget_bytes: int | None) -> Frame:
    """Ask all ranks for their room; without budgets the first rank plans.

    Args:
        agreement: with the ranks that plan together.
        unmanaged_peak_bytes: what this rank's step takes without a plan.
        budget_bytes: of this rank.
    """
    room_bytes = 0 if budget_bytes is None else budget_bytes - unmanaged_peak_bytes
    told = agreement.all_of("room", _Room(room_bytes=room_bytes, budget_bytes=budget_bytes), _Room)
    rank, tightest = min(zip(agreement.ranks, told, strict=True), key=lambda entry: entry[1].room_bytes)
    budgets = {
        str(rank): room.budget_bytes
        for rank, room in zip(agreement.ranks, told, strict=True)
        if room.budget_bytes is not None
    }
    uneven = budgets if len(set(budgets.values())) > 1 else {}
    return Frame(agreement, rank, tightest.budget_bytes, budget_bytes, uneven)
