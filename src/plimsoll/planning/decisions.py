"""Makes a plan from a simulated step, with a decision and a reason for each saved value.

A choice says which saved values of a region (module call) are kept, recomputed or stored in another form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import Plan, RegionPlan, ValueDecision
from plimsoll.artifacts.region import Origin
from plimsoll.planning.choice import Choice, form_error, forms_of, packing_seconds, with_lossy_input
from plimsoll.planning.describe import category_curves, classes_at_peak, describe_peak, describe_timeline
from plimsoll.planning.effects import held_bytes
from plimsoll.planning.explain import compared, why_kept, worth
from plimsoll.planning.fixed_parts import fixed_parts, held_for_backward
from plimsoll.planning.replay_schedule import NO_OP, Schedule, build_schedule, recipe_ops
from plimsoll.planning.simulate import Simulation, engine_seconds, is_touched, links_of
from plimsoll.planning.step import RegionView, StepIndex, boundary_values
from plimsoll.units import MIB, format_seconds


def decide(simulation: Simulation, prices_seconds_per_byte: Sequence[float]) -> tuple[RegionPlan, ...]:
    """Return the decisions of a simulated step, as one `RegionPlan` for each region.

    Args:
        simulation: the step under its choices (what to keep or recompute).
        prices_seconds_per_byte: for each region, the seconds per step that one byte costs if the region holds it from its
            forward to the end of its backward (0 if bytes are not scarce).
    """
    index = simulation.index
    counted: set[int] = set()
    op_seconds: dict[int, float] = {}
    for region, op in simulation.replayed:
        key = index.views[region].graph.ops[op].cost_key
        op_seconds[region] = op_seconds.get(region, 0.0) + index.replay_seconds(key)
    plans = []
    lossy = with_lossy_input(index, simulation.choices, links_of(index, simulation.choices))
    for view, choice, price in zip(index.views, simulation.choices, prices_seconds_per_byte, strict=True):
        schedule = _schedule(view, choice)
        engine = engine_seconds(index, view) if is_touched(view, choice) else 0.0
        engine += packing_seconds(index, view, choice)
        linked = boundary_values(index, view) if choice.is_boundary_dropped else frozenset()
        plans.append(
            RegionPlan(
                name=view.call.name,
                call=view.call.call,
                kind=view.call.kind,
                decisions=_decisions(index, view, choice, schedule, linked, price),
                retained_bytes=_retained_bytes(index, view, choice, schedule, linked, counted),
                replay_seconds=op_seconds.get(view.call.index, 0.0) + engine,
                is_boundary_dropped=bool(linked),
                is_input_lossy=view.call.index in lossy,
                price_seconds_per_byte=float(price),
                steady_inputs=tuple(sorted(view.graph.values[value].name for value in view.steady)),
                value_read=view.call.value_read,
                input_bytes=sum(value.bytes for value in view.graph.values if value.origin is Origin.INPUT),
            )
        )
    return tuple(plans)


def write_plan(simulation: Simulation, baseline: Simulation, strategy: str, region_prices: Sequence[float]) -> Plan:
    """Return a plan for a simulated step that a strategy made. The plan has neither a budget nor a lower bound.

    Args:
        simulation: the step under its choices.
        baseline: the same step with everything kept.
        strategy: the name of the strategy that made the choices.
        region_prices: for each region, the seconds per step that one held byte costs, as for ``decide``.
    """
    trace, costs = simulation.index.trace, simulation.index.costs
    curves, held = category_curves(simulation), held_for_backward(baseline)
    return Plan(
        status=Status.FEASIBLE,
        strategy=strategy,
        model=trace.model,
        fingerprint=trace.fingerprint,
        signature=trace.signature,
        device=trace.device,
        cost_source=costs.source,
        cost_device=costs.device,
        budget_bytes=None,
        floor_bytes=simulation.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_seconds=baseline.seconds,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_seconds=simulation.seconds,
        lower_bound_seconds=0.0,
        gap_of_overhead=1.0,
        gap_of_step=simulation.seconds / baseline.seconds if baseline.seconds else 0.0,
        price_seconds_per_byte=0.0,
        regions=decide(simulation, region_prices),
        peak=describe_peak(simulation),
        baseline_peak=describe_peak(baseline),
        classes=classes_at_peak(simulation, curves),
        timeline=describe_timeline(simulation, curves=curves, unmanaged=baseline),
        written=trace.written,
        activation_bytes=sum(storage.bytes for storage in held),
        fixed=fixed_parts(baseline.index, held),
    )


def _retained_bytes(
    index: StepIndex, view: RegionView, choice: Choice, schedule: Schedule, linked: frozenset[int], counted: set[int]
) -> int:
    """Return the number of bytes that a region holds between its forward and its backward, if it follows a choice.

    A storage that several regions hold counts only at the first of them: ``counted`` collects the storages counted so far.
    """
    graph = view.graph
    total = sum(form.held_bytes for form in forms_of(view, choice))
    for value in sorted((choice.kept | view.forced) - linked):
        storage = graph.values[value].storage
        if storage not in counted and value not in view.resident:
            counted.add(storage)
            total += index.trace.storages[storage].bytes
    for leaf in sorted({leaf for leaves in schedule.leaves.values() for leaf in leaves} & view.copied):
        storage = graph.values[leaf].storage
        if leaf not in view.steady or storage not in counted:
            total += graph.values[leaf].bytes
        if leaf in view.steady:
            counted.add(storage)
    return total


def _decisions(
    index: StepIndex, view: RegionView, choice: Choice, schedule: Schedule, linked: frozenset[int], price: float
) -> tuple[ValueDecision, ...]:
    """Return the decision for each saved value of a region, with its reason, in the order of saving."""
    graph = view.graph
    held = held_bytes(index, view)
    shares = _replay_shares(index, view, schedule)
    seen: set[int] = set()
    decisions = []
    for value in view.saved:
        entry = graph.values[value]
        size = 0 if entry.storage in seen else index.trace.storages[entry.storage].bytes
        seen.add(entry.storage)
        if value in choice.forms:
            decisions.append(_packed(index, view, choice, value, size, price))
            continue
        is_kept = value not in view.decided or value in choice.kept
        seconds = shares.get(value, 0.0)
        if value in linked:
            reason = "not held: the region before recomputes it"
        elif value not in view.decided:
            reason = why_kept(view, value)
        elif is_kept and not held[value]:
            reason = "keeping it is free: it stays alive until backward anyway"
        else:
            reason = compared(
                _seconds_to_rebuild(index, view, value, choice) if is_kept else seconds,
                index.trace.storages[entry.storage].bytes,
                price,
            )
        if value in view.pins:
            reason = "set by your override"
        decision = Decision.KEEP if is_kept else Decision.RECOMPUTE
        seconds = 0.0 if is_kept else seconds
        decisions.append(ValueDecision(value=entry.name, decision=decision, bytes=size, seconds=seconds, reason=reason))
    return tuple(decisions)


def _packed(index: StepIndex, view: RegionView, choice: Choice, value: int, size: int, price: float) -> ValueDecision:
    """Return the decision about one value that is compressed or offloaded, with its reason.

    ``size`` is the value's bytes, and ``price`` the seconds per step that one held byte costs.
    """
    entry, form = view.graph.values[value], view.form(value, choice.forms[value])
    saved = max(entry.bytes - form.held_bytes, 1)
    cost = f"{form.name} costs {format_seconds(form.seconds * MIB / saved)}/MiB"
    error = form_error(view, choice, value)
    added = f", gradient error {error:.2g}" if error else ""
    return ValueDecision(
        value=entry.name,
        decision=form.decision,
        bytes=size,
        seconds=form.seconds,
        reason="set by your override" if value in view.pins else f"{cost}, {worth(price)}{added}",
        form=form.name,
        held_bytes=form.held_bytes,
        error=error,
        is_lossy=form.noise > 0,
    )


def _seconds_to_rebuild(index: StepIndex, view: RegionView, value: int, choice: Choice) -> float:
    """Return the seconds of recomputing one value from the held values; infinite if the value cannot be rebuilt.

    The seconds are those of all ops on the way, as if no other value were recomputed.
    """
    if value not in view.droppable:
        return math.inf
    ops, _ = recipe_ops(view.graph, value, (view.leaves | choice.kept | choice.forms.keys()) - {value})
    return sum(index.replay_seconds(view.graph.ops[op].cost_key) for op in ops)


def _schedule(view: RegionView, choice: Choice) -> Schedule:
    """Return how and when one region recomputes the values that a choice drops, as if the region's inputs were held."""
    inputs = frozenset(view.movable) - choice.kept - choice.forms.keys()
    dropped = view.everything - choice.kept - choice.forms.keys() - inputs
    return build_schedule(view.graph, view.leaves | choice.kept | inputs, dropped, packed=choice.forms)


def _replay_shares(index: StepIndex, view: RegionView, schedule: Schedule) -> dict[int, float]:
    """Return a mapping from each dropped value to the seconds of rebuilding it.

    Ops that have already run for a value read earlier in backward do not count.
    """
    graph = view.graph
    shares: dict[int, float] = {}
    for segment in schedule.segments:
        seconds = sum(index.replay_seconds(graph.ops[step.op].cost_key) for step in segment.steps if step.op != NO_OP)
        shares[segment.value] = shares.get(segment.value, 0.0) + seconds
    return shares
