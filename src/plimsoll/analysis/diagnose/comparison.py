"""Compares two profiles of one step, without and with a plan.

The result has figures for each side, causes of the overhead, warning signs, and notes about what the traces do not show.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from plimsoll.analysis.diagnose.accounts import keep_ledger
from plimsoll.analysis.diagnose.attribution import tabulate_layers
from plimsoll.analysis.diagnose.causes import repeats_are_inferred, split_overhead
from plimsoll.analysis.diagnose.ledger import Ledger, WorkKind, is_heavy
from plimsoll.analysis.diagnose.profile import Profile
from plimsoll.artifacts.finding import (
    CONTENDED_BANDWIDTH_SHARE,
    EXCESSIVE_KERNEL_RATIO,
    LONG_GAP_SECONDS,
    Finding,
    PhaseUse,
    ProfileOrigin,
    Side,
    WarningSign,
    WorkPhase,
    WorkUnit,
)
from plimsoll.errors import InvalidTrace
from plimsoll.units import format_seconds

Bandwidth = Callable[[str], float | None]
"""A function from a device's name to its peak bandwidth in bytes per second, or ``None`` if it is unknown."""

_NS = 1e-9
_LONG_GAP_NS = LONG_GAP_SECONDS / _NS
_NOTABLE_GAP_SHARE = 0.05
"""A share of the step's time. A warning sign is raised if long gaps (idle intervals) together take more than this share."""
_LEAST_COMMON_SHARE = 0.9
"""If the plan's profile has less than this share of the baseline's forward ops, the two profiles count as different models."""
_MOST_FACTOR = 1.1
"""If forward ops run more often than in the baseline by more than this factor, the two profiles differ in their steps or
micro-batches."""
_SAME_FACTOR, _MOST_KEYS, _FEW_KEYS = 0.02, 0.8, 8
"""Three numbers that decide whether all ops run more often by the same factor. Two factors are equal if they differ by at most
the first share. Nearly all ops must have equal factors: at least the second share of them, and at least the third number."""


def compare_profiles(baseline: Profile, plan: Profile, *, origin: ProfileOrigin, bandwidth: Bandwidth) -> Finding:
    """Split the time that a plan adds into causes, by comparing a profile without and a profile with the plan.

    ``bandwidth`` looks up a device's peak bandwidth if the traces do not contain it.

    Raises:
        InvalidTrace: the profiles are not of the same step.
    """
    unit = WorkUnit.KERNELS if baseline.device and plan.device else WorkUnit.CPU_OPS
    before, after = (_with_bandwidth(keep_ledger(each, unit), bandwidth) for each in (baseline, plan))
    refuse_unlike(before, after)
    rows, are_modules = tabulate_layers(before, after)
    layers = [row for row in rows if are_modules and row.name[-1:].isdigit()]
    sides = (
        _measure_side(before, [row.baseline_count for row in layers]),
        _measure_side(after, [row.plan_count for row in layers]),
    )
    return Finding(
        origin=origin,
        unit=unit,
        device=after.device_name,
        baseline=sides[0],
        plan=sides[1],
        parts=split_overhead(before, after),
        layers=rows,
        are_layers_modules=are_modules,
        signs=tuple(_read_signs(*sides, unit)),
        notes=tuple(_notes(baseline, plan, before, after)),
    )


def _with_bandwidth(ledger: Ledger, bandwidth: Bandwidth) -> Ledger:
    if ledger.bandwidth_bytes_per_second is not None or ledger.device is None:
        return ledger
    return msgspec.structs.replace(ledger, bandwidth_bytes_per_second=bandwidth(ledger.device_name))


def refuse_unlike(baseline: Ledger, plan: Ledger) -> None:
    """Raise if two profiles cannot come from the same model, batch and number of steps.

    The forward ops per step are compared (kernels if ops are unknown), with their shapes if both traces record them. A plan may
    add ops to the forward pass, but the baseline's ops must all be there.

    Raises:
        InvalidTrace: says which share of the baseline's forward pass the plan's profile has.
    """
    ours, theirs = _forward_counts(baseline, plan), _forward_counts(plan, baseline)
    total = sum(ours.values())
    if not total:
        raise InvalidTrace(
            f"{baseline.source} does not show work in its steps.",
            why=f"none of its {baseline.steps} steps ran an operation or a kernel",
            next="profile whole training steps, and export the trace after the profiler has stopped",
        )
    factors = [theirs[key] / count for key, count in ours.items() if theirs[key]]
    common = sum(min(count, theirs[key]) for key, count in ours.items()) / total
    factor = statistics.median(factors) if factors else 0.0
    if _is_uniform(factors, factor, baseline, plan) and not 1 / _MOST_FACTOR <= factor <= _MOST_FACTOR:
        raise InvalidTrace(
            f"{plan.source} runs each forward operation {factor:.2f} times as often as {baseline.source}.",
            why=f"this is per step, over {plan.steps} and {baseline.steps} recognised steps; "
            "with a plan, forward runs once per step, as in the baseline",
            next="profile the same number of steps in both runs, and call profiler.step() after each step",
        )
    if common < _LEAST_COMMON_SHARE:
        missing = sorted(((n - theirs[key], key) for key, n in ours.items() if theirs[key] < n), reverse=True)
        examples = ", ".join(f"{count:.0f} × {key[:60]}" for count, key in missing[:2])
        raise InvalidTrace(
            f"{plan.source} has only {common:.0%} of the forward operations of {baseline.source}.",
            why=f"of {total:.0f} operations per step, {total * (1 - common):.0f} are missing or have other shapes, "
            f"such as {examples}; the traces seem to be of different models or batches",
            next="profile the same model and batch twice, once without and once with the plan",
        )


def _is_uniform(factors: list[float], factor: float, baseline: Ledger, plan: Ledger) -> bool:
    """Return True if nearly all ops run more often in the plan's profile, all by about ``factor``.

    Then the two profiles differ in steps or micro-batches. If both traces mark their steps, at least eight operations must
    agree on the factor; otherwise one is enough.
    """
    same = sum(1 for each in factors if abs(each - factor) <= _SAME_FACTOR * factor)
    least = _FEW_KEYS if baseline.are_steps_marked and plan.are_steps_marked else 1
    return same >= max(_MOST_KEYS * len(factors), least)


def _forward_counts(ledger: Ledger, other: Ledger) -> Counter[str]:
    """Return a mapping from each forward op to how often it runs per step. The key is its name and, if both traces have shapes,
    its shape.

    If only one of the two steps is compiled, fusion removes and adds element-wise ops. Then only matrix products, convolutions
    and attention are counted, which fusion does not change.
    """
    has_shapes = ledger.has_shapes and other.has_shapes
    is_compiled, is_other_compiled = (any(work.is_fused for work in each.work) for each in (ledger, other))
    counts = Counter(
        f"{name} {shape}" if has_shapes else name
        for name, shape in _forward_work(ledger, has_ops=bool(ledger.forward_ops and other.forward_ops))
        if is_compiled == is_other_compiled or is_heavy(name)
    )
    return Counter({key: count / ledger.steps for key, count in counts.items()})


def _forward_work(ledger: Ledger, *, has_ops: bool) -> Sequence[tuple[str, str]]:
    """Return pairs of name and shape for the work of forward.

    The work is the forward ops; or the forward kernels if one of the profiles lacks ops; or all kernels if phases are unknown.
    """
    if has_ops:
        return ledger.forward_ops
    kernels = [work for work in ledger.work if work.kind in (WorkKind.COMPUTE, WorkKind.GRAPH)]
    forward = [work for work in kernels if work.phase is WorkPhase.FORWARD]
    return [(work.name, work.shape) for work in forward or kernels]


def _measure_side(ledger: Ledger, layer_counts: Sequence[float]) -> Side:
    """Return all figures of one profile (without or with the plan), each as a value for one step.

    ``layer_counts`` are the kernels per step of each numbered layer.
    """
    steps = ledger.steps
    busy_ns = sum(work.own_ns for work in ledger.work)
    long_gaps = [gap.length_ns for gap in ledger.idle if gap.length_ns > _LONG_GAP_NS]
    copies = [work.bytes for work in ledger.work if work.kind in (WorkKind.COPY, WorkKind.SET)]
    known = [size for size in copies if size is not None]

    def share(nanoseconds: int) -> float:
        return nanoseconds / busy_ns if busy_ns else 0.0

    return Side(
        source=ledger.source,
        steps=steps,
        step_seconds=sum(ledger.wall_ns) / steps * _NS,
        busy_seconds=busy_ns / steps * _NS,
        idle_seconds=sum(gap.length_ns for gap in ledger.idle) / steps * _NS,
        waiting_seconds=sum(gap.waiting_ns for gap in ledger.idle) / steps * _NS,
        count=sum(1 for work in ledger.work if work.is_counted) / steps,
        kernels_per_layer=sum(layer_counts) / len(layer_counts) if layer_counts else None,
        layers=len(layer_counts),
        long_gaps=len(long_gaps) / steps,
        long_gap_seconds=sum(long_gaps) / steps * _NS,
        graph_launches=ledger.graph_launches / steps,
        copied_bytes=sum(known) / steps if len(known) == len(copies) else None,
        phases=tuple(
            _phase_use(ledger, phase) for phase in WorkPhase if any(work.phase is phase for work in ledger.work)
        ),
        attributed_share=share(sum(work.own_ns for work in ledger.work if work.operation)),
        phased_share=share(sum(work.own_ns for work in ledger.work if work.phase is not WorkPhase.OTHER)),
        module_share=share(sum(work.own_ns for work in ledger.work if work.module)),
    )


def _phase_use(ledger: Ledger, phase: WorkPhase) -> PhaseUse:
    works = [work for work in ledger.work if work.phase is phase]
    busy_seconds = sum(work.own_ns for work in works) * _NS
    sizes = [work.bytes for work in works if work.bytes is not None]
    read_bytes = sum(sizes) if ledger.has_shapes and sizes else None
    peak = ledger.bandwidth_bytes_per_second
    has_share = read_bytes is not None and bool(peak) and busy_seconds > 0
    return PhaseUse(
        phase=phase,
        busy_seconds=busy_seconds / ledger.steps,
        count=sum(1 for work in works if work.is_counted) / ledger.steps,
        read_bytes=None if read_bytes is None else read_bytes / ledger.steps,
        bandwidth_share=read_bytes / busy_seconds / peak if has_share and read_bytes is not None and peak else None,
    )


def _read_signs(baseline: Side, plan: Side, unit: WorkUnit) -> list[WarningSign]:
    """Return all warning signs, such as long idle gaps.

    Each compares a figure of the plan's profile with a threshold, and says whether the figure is beyond it.
    """
    where, before, after = "per step", baseline.count, plan.count
    if baseline.kernels_per_layer and plan.kernels_per_layer:
        where, before, after = "per layer", baseline.kernels_per_layer, plan.kernels_per_layer
    ratio = after / before if before else 0.0
    gap_share = plan.long_gap_seconds / plan.step_seconds if plan.step_seconds else 0.0
    signs = [
        WarningSign(
            name=f"{unit} {where}",
            is_raised=ratio > EXCESSIVE_KERNEL_RATIO,
            text=f"{before:.0f} in the baseline, {after:.0f} with the plan: {ratio:.2f} × "
            f"(more than {EXCESSIVE_KERNEL_RATIO} × is excessive)",
        ),
        _bandwidth_sign(plan),
        WarningSign(
            name=f"gaps over {LONG_GAP_SECONDS * 1e6:.0f} µs",
            is_raised=gap_share > _NOTABLE_GAP_SHARE,
            text=f"{plan.long_gaps:.1f} per step, {format_seconds(plan.long_gap_seconds)} ({gap_share:.0%} of the step); "
            f"in the baseline {baseline.long_gaps:.1f}, {format_seconds(baseline.long_gap_seconds)}",
        ),
    ]
    if baseline.graph_launches or plan.graph_launches:
        is_broken = plan.graph_launches < baseline.graph_launches
        text = (
            f"{baseline.graph_launches:.1f} launched per step in the baseline, {plan.graph_launches:.1f} with the plan"
        )
        broken = "; the plan breaks a capture" if is_broken else ""
        signs.append(WarningSign(name="CUDA graphs", is_raised=is_broken, text=text + broken))
    return signs


def _bandwidth_sign(plan: Side) -> WarningSign:
    is_raised: bool | None = None
    use = next((use for use in plan.phases if use.phase is WorkPhase.RECOMPUTE), None)
    if use is None:
        text = "the trace does not show recomputation"
    elif use.read_bytes is None:
        text = "the trace does not contain shapes (profile with record_shapes=True)"
    elif use.bandwidth_share is None:
        text = "the device's peak bandwidth is neither in the trace nor in the catalogue"
    else:
        is_raised = use.bandwidth_share > CONTENDED_BANDWIDTH_SHARE
        most = f"(more than {CONTENDED_BANDWIDTH_SHARE:.0%} is contention)"
        text = f"at least {use.bandwidth_share:.0%} of the device's peak bandwidth {most}"
    return WarningSign(name="bandwidth while recomputing", is_raised=is_raised, text=text)


def _notes(baseline: Profile, plan: Profile, before: Ledger, after: Ledger) -> list[str]:
    """Return sentences that say what the two traces do not record, and what this means for the result."""
    notes = [*before.notes, *after.notes]
    if before.unit is WorkUnit.CPU_OPS:
        lacking = [profile.source for profile in (baseline, plan) if not profile.device]
        notes.append(
            f"{lacking[0]} does not show device activity, so the CPU ops of both traces are compared."
            if len(lacking) == 1
            else "The traces do not show device activity, so CPU ops are compared, and time between ops counts as host time."
        )
    if not (before.has_modules and after.has_modules):
        notes.append(
            "The traces do not contain modules, so work is grouped by operation: profile with with_stack=True, or let "
            "`plimsoll diagnose TARGET` make the profiles."
        )
    if not (before.has_shapes and after.has_shapes):
        notes.append(
            "The traces do not contain shapes, so the bytes read per phase are unknown: profile with record_shapes=True."
        )
    elif after.bandwidth_bytes_per_second is None:
        notes.append(
            f"The peak bandwidth of {after.device_name or 'the device'} is unknown, so shares of it are not shown."
        )
    if repeats_are_inferred(before, after):
        notes.append(
            "The traces do not mark recomputation: forward work that runs more often with the plan counts as recomputed."
        )
    if any(work.kind is WorkKind.GRAPH for each in (before, after) for work in each.work):
        notes.append(
            "Each CUDA graph was traced as one piece, so its kernels are unknown: record with --cuda-graph-trace=node."
        )
    if not any(work.phase is WorkPhase.OPTIMIZER for work in after.work):
        notes.append("The profiled steps do not contain an optimizer step: only forward and backward are compared.")
    if min(before.steps, after.steps) < 2:
        notes.append("At least one trace has only one step, so the spread is unknown: profile several steps.")
    return notes
