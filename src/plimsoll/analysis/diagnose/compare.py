"""Two profiles in, a ``Finding`` out: accounts, thresholds, causes, and what the traces cannot tell."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from plimsoll.analysis.diagnose.accounts import keep_ledger
from plimsoll.analysis.diagnose.layers import tabulate_layers
from plimsoll.analysis.diagnose.ledger import Ledger, WorkKind
from plimsoll.analysis.diagnose.matching import refuse_unlike
from plimsoll.analysis.diagnose.measures import layer_counts, measure_side, read_signs
from plimsoll.analysis.diagnose.profile import Profile
from plimsoll.analysis.diagnose.split import repeats_are_inferred, split_overhead
from plimsoll.artifacts.finding import Finding, ProfileOrigin, WorkPhase, WorkUnit

Bandwidth = Callable[[str], float | None]
"""A device's name in, its peak in bytes per second out."""


def compare_profiles(baseline: Profile, plan: Profile, *, origin: ProfileOrigin, bandwidth: Bandwidth) -> Finding:
    """Explain the difference of two profiles.

    Args:
        baseline: the step without the plan.
        plan: the step with it.
        origin: where they come from.
        bandwidth: looks up a device's peak where the traces do not have it.

    Raises:
        InvalidTrace: they are not two runs of the same step.
    """
    unit = WorkUnit.KERNELS if baseline.device and plan.device else WorkUnit.CPU_OPS
    before, after = (_with_bandwidth(keep_ledger(each, unit), bandwidth) for each in (baseline, plan))
    refuse_unlike(before, after)
    rows, are_modules = tabulate_layers(before, after)
    sides = [
        measure_side(ledger, layer_counts(rows, is_plan=ledger is after) if are_modules else ())
        for ledger in (before, after)
    ]
    return Finding(
        origin=origin,
        unit=unit,
        device=after.device_name,
        baseline=sides[0],
        plan=sides[1],
        parts=split_overhead(before, after),
        layers=rows,
        are_layers_modules=are_modules,
        signs=read_signs(sides[0], sides[1], unit),
        notes=tuple(_notes(baseline, plan, before, after)),
    )


def _with_bandwidth(ledger: Ledger, bandwidth: Bandwidth) -> Ledger:
    if ledger.bandwidth_bytes_per_second is not None or ledger.device is None:
        return ledger
    return msgspec.structs.replace(ledger, bandwidth_bytes_per_second=bandwidth(ledger.device_name))


def _notes(baseline: Profile, plan: Profile, before: Ledger, after: Ledger) -> list[str]:
    """What the traces do not have, and what follows from that."""
    notes = [*before.notes, *after.notes]
    if before.unit is WorkUnit.CPU_OPS:
        notes.append(_cpu_note(baseline, plan))
    if not (before.has_modules and after.has_modules):
        notes.append(
            "The traces do not know modules, so work is grouped by operation: profile with with_stack=True, or let "
            "`plimsoll diagnose TARGET` profile."
        )
    if not (before.has_shapes and after.has_shapes):
        notes.append(
            "The traces have no shapes, so bytes read per phase are not known: profile with record_shapes=True."
        )
    elif after.bandwidth_bytes_per_second is None:
        notes.append(
            f"The peak bandwidth of {after.device_name or 'the device'} is not known, so no share of it is given."
        )
    if repeats_are_inferred(before, after):
        notes.append(
            "The traces do not mark recomputation: forward work that runs more often with the plan counts as recomputed."
        )
    if any(work.kind is WorkKind.GRAPH for each in (before, after) for work in each.work):
        notes.append(
            "CUDA graphs were traced as a whole, so what happens inside is not known: record with --cuda-graph-trace=node."
        )
    if not any(work.phase is WorkPhase.OPTIMIZER for work in after.work):
        notes.append("The profiled steps show no optimizer step: forward and backward are compared.")
    if min(before.steps, after.steps) < 2:
        notes.append("One step on a side says nothing about the spread: profile several.")
    return notes


def _cpu_note(baseline: Profile, plan: Profile) -> str:
    lacking = [profile.source for profile in (baseline, plan) if not profile.device]
    if len(lacking) == 1:
        return f"{lacking[0]} has no device activity, so both are compared by their CPU ops."
    return "The traces have no device activity: CPU ops are compared, and the time between ops is the host's."
