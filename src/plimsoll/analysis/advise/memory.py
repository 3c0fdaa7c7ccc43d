"""Says which part of memory makes up most of the peak without a plan, what would lower the peak other than a plan, and what
each layer saves and takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from plimsoll.analysis.explain.parts import GROUP_OF, SHARDED, STATE, parts_of_peak
from plimsoll.artifacts.advice import Bottleneck, LayerUse
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.explained import Change
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Phase, Trace
from plimsoll.units import format_bytes

LITTLE = 0.1
"""A share of the peak without a plan. If recomputation can remove less than this share, the advice is not to manage
activations.
"""
_LARGE = 0.25
"""A share of the peak. Sharding is listed as a remedy if parameters, gradients, optimizer state, buffers and batch together are
at least this share.
"""
_WORTHWHILE = 0.05
"""A share of the peak. A change to the loss or the optimizer is listed as a remedy if it lowers the peak by more than this
share."""
_NOTHING = 0.005
"""A share of the peak. If recomputation can remove less than this share, the summary says that recomputation cannot lower the
peak."""
_RANKS = 8
"""The number of ranks in the example that shows what sharding would save."""


def find_bottleneck(trace: Trace, unmanaged: Plan, changes: Sequence[Change] = ()) -> Bottleneck:
    """Return what makes up the peak without a plan: its parts, the largest group of parts, and ways to lower it without a plan.

    ``unmanaged`` is the plan ``none``; its floor is the smallest peak that recomputation reaches. ``changes`` are changes to
    the loss and the optimizer, with their replayed peaks.
    """
    peak = unmanaged.baseline_peak
    parts = parts_of_peak(trace, peak, [call.name for call in trace.regions])
    groups = dict.fromkeys(GROUP_OF.values(), 0)
    for part in parts:
        groups[GROUP_OF[part.name]] += part.bytes
    largest = max(groups, key=lambda group: groups[group])
    found = Bottleneck(
        part=largest,
        peak_bytes=peak.bytes,
        floor_bytes=unmanaged.floor_bytes,
        moment=peak.moment,
        parts=parts,
        summary="",
    )
    name = "state (parameters, gradients, optimizer)" if largest == STATE else largest
    reach = (
        f"recomputation can lower it to {format_bytes(found.floor_bytes)}, by {found.reachable_share:.0%} at most"
        if found.reachable_share >= _NOTHING
        else "recomputation cannot lower it"
    )
    summary = (
        f"the largest part of the unmanaged peak of {format_bytes(peak.bytes)} is {name}: "
        f"{format_bytes(groups[largest])}, {groups[largest] / peak.bytes:.0%} ({peak.moment}); {reach}"
    )
    remedies = [
        f"{change.name}: {change.how}; this step {change.basis} with it peaks at "
        f"{format_bytes(change.predicted_peak_bytes)} instead of {format_bytes(peak.bytes)}"
        for change in changes
        if change.lowers_bytes > _WORTHWHILE * peak.bytes
    ]
    if groups[STATE] >= _LARGE * peak.bytes:
        sharded_bytes = sum(part.bytes for part in parts if part.name in SHARDED)
        remedies.append(
            f"sharding (FSDP, ZeRO-3): over {_RANKS} ranks {format_bytes(sharded_bytes)} of parameters, gradients and "
            f"optimizer state become {format_bytes(sharded_bytes / _RANKS)} each"
        )
    return msgspec.structs.replace(found, summary=summary, remedies=tuple(remedies))


def measure_layers(trace: Trace, costs: Costs, unmanaged: Plan) -> tuple[LayerUse, ...]:
    """Return, for each call of a region (a layer, for most models), the bytes that it saves for backward, and the seconds of
    its forward and backward.

    ``unmanaged`` is the plan ``none``, which keeps everything that autograd saves.
    """
    seconds: defaultdict[tuple[int, Phase], float] = defaultdict(float)
    for op in trace.ops:
        seconds[op.region, op.phase] += costs.seconds_of(op.cost_key)
    return tuple(
        LayerUse(
            name=call.name,
            call=call.call,
            saved_bytes=region.retained_bytes,
            forward_seconds=seconds[call.index, Phase.FORWARD],
            backward_seconds=seconds[call.index, Phase.BACKWARD],
        )
        for call, region in zip(trace.regions, unmanaged.regions, strict=True)
    )
