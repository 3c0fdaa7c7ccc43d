"""Plans for regions (module calls) whose bytes depend on data: regions whose code reads values of tensors.

Another batch may make such a region save larger tensors (a router sends it more rows), or tensors that the plan does not know
(its code takes another way than in the planned step). The plan's peak contains neither. So a part of the budget stays free for
larger tensors, and the other bytes between peak and budget decide whether unknown tensors are kept or dropped.
"""

from __future__ import annotations

import math
import statistics

import msgspec

from plimsoll.artifacts.plan import Plan, RegionPlan

_DEVIATIONS = 2.0
"""The bytes that stay free, in standard deviations of the step's bytes. In a normal distribution, 1 step in 44 needs more."""


def spread_bytes(plan: Plan) -> int:
    """Return how many bytes more than a plan's peak another batch may need, because regions that read values hold more.

    A plan is made from one step, but a step has several regions of one kind, and each of them read other values. They are alike
    if they decide about equally many values. The deviations of the bytes that they hold add up as those of independent numbers.
    """
    held: dict[tuple[int, int], list[int]] = {}
    for region in plan.regions:
        if region.value_read:
            key = (len(region.decisions), len(region.dropped))
            held.setdefault(key, []).append(region.retained_bytes)
    variance = sum(len(alike) * statistics.pvariance(alike) for alike in held.values())
    return math.ceil(_DEVIATIONS * math.sqrt(variance))


def with_spare_bytes(plan: Plan, spare_bytes: int) -> Plan:
    """Return the plan with the bytes that each region may keep in values that the plan does not know.

    ``spare_bytes`` are the bytes between the peak and the budget. The bytes that stay free for larger tensors are subtracted,
    and the regions that read values share the rest. A region that keeps everything and saves much may keep any number of
    unknown bytes, because watching it would cost time. A region that saves little is watched: its code may have returned early
    in the planned step, which says nothing about its other ways.
    """
    readers = sum(1 for region in plan.regions if region.value_read)
    if not readers:
        return plan
    share = max(spare_bytes - spread_bytes(plan), 0) // readers
    granted = (1 << share.bit_length()) >> 1  # rounded down, so that plans with nearly the same budget do the same
    regions = tuple(
        msgspec.structs.replace(region, spare_bytes=None if _keeps_much(region) else granted)
        if region.value_read
        else region
        for region in plan.regions
    )
    return msgspec.structs.replace(plan, regions=regions)


def _keeps_much(region: RegionPlan) -> bool:
    """Return True if the region keeps everything, and autograd saves more than twice the bytes of its inputs in it."""
    return region.is_untouched and sum(each.bytes for each in region.decisions) > 2 * region.input_bytes
