"""A budget as users write it in, bytes that the device has out."""

from __future__ import annotations

from plimsoll.artifacts.costs import Costs
from plimsoll.errors import BudgetAboveDevice
from plimsoll.units import format_bytes, parse_bytes

AUTO_MARGIN = 0.08
"""``budget="auto"`` leaves this share of the device's memory free: allocator fragmentation, libraries' workspaces, others."""


def read_budget(budget: int | str | None) -> int | None:
    """The bytes that were asked for, ``None`` where the device decides (``"auto"``) or nothing does.

    Raises:
        InvalidBudget: no unit, an ambiguous unit, or nothing positive.
    """
    return None if budget is None or budget == "auto" else parse_bytes(budget)


def resolve_budget(budget: int | str | None, costs: Costs) -> int | None:
    """The budget in bytes: ``"auto"`` from the device's memory; refused where the device has less.

    Raises:
        InvalidBudget: see ``read_budget``.
        BudgetAboveDevice: more than the device has.
    """
    asked_bytes, memory_bytes = read_budget(budget), costs.memory_bytes
    if budget == "auto":
        if memory_bytes is None:
            raise BudgetAboveDevice(
                f"The memory of {costs.device} is not known.",
                why="budget='auto' takes the device's memory less a margin",
                next="name the budget in bytes",
            )
        return int(memory_bytes * (1 - AUTO_MARGIN))
    if asked_bytes is not None and memory_bytes is not None and asked_bytes > memory_bytes:
        raise BudgetAboveDevice(
            f"budget {format_bytes(asked_bytes)} is more than {costs.device} has, {format_bytes(memory_bytes)}.",
            why="a plan for memory that is not there would run out of it",
            next=f'budget "{memory_bytes}B" or less, or budget="auto"',
        )
    return asked_bytes
