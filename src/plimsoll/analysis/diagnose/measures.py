"""A ledger in, its figures per step out; and the signs that the thresholds give."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.analysis.diagnose.layers import repeated_layers
from plimsoll.analysis.diagnose.ledger import Ledger, WorkKind
from plimsoll.artifacts.finding import (
    CONTENDED_BANDWIDTH_SHARE,
    EXCESSIVE_KERNEL_RATIO,
    LONG_GAP_SECONDS,
    Layer,
    PhaseUse,
    Side,
    WarningSign,
    WorkPhase,
    WorkUnit,
)
from plimsoll.units import format_seconds

_NS = 1e-9
_LONG_GAP_NS = LONG_GAP_SECONDS / _NS
_NOTABLE_GAP_SHARE = 0.05
"""Long gaps are a sign where they take more of the step than this."""


def measure_side(ledger: Ledger, layer_counts: Sequence[float]) -> Side:
    """Everything that is said of one profile, per step.

    Args:
        ledger: the accounts.
        layer_counts: kernels of each numbered layer.
    """
    busy_ns = sum(work.own_ns for work in ledger.work)
    long_gaps = [gap.length_ns for gap in ledger.idle if gap.length_ns > _LONG_GAP_NS]
    copies = [work.bytes for work in ledger.work if work.kind in (WorkKind.COPY, WorkKind.SET)]
    known = [size for size in copies if size is not None]

    def share(nanoseconds: int) -> float:
        return nanoseconds / busy_ns if busy_ns else 0.0

    return Side(
        source=ledger.source,
        steps=ledger.steps,
        step_seconds=sum(ledger.wall_ns) / ledger.steps * _NS,
        busy_seconds=busy_ns / ledger.steps * _NS,
        idle_seconds=sum(gap.length_ns for gap in ledger.idle) / ledger.steps * _NS,
        waiting_seconds=sum(gap.waiting_ns for gap in ledger.idle) / ledger.steps * _NS,
        count=sum(1 for work in ledger.work if work.is_counted) / ledger.steps,
        kernels_per_layer=sum(layer_counts) / len(layer_counts) if layer_counts else None,
        layers=len(layer_counts),
        long_gaps=len(long_gaps) / ledger.steps,
        long_gap_seconds=sum(long_gaps) / ledger.steps * _NS,
        graph_launches=ledger.graph_launches / ledger.steps,
        copied_bytes=sum(known) / ledger.steps if len(known) == len(copies) else None,
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


def read_signs(baseline: Side, plan: Side, unit: WorkUnit) -> tuple[WarningSign, ...]:
    """Where the plan stands against each threshold."""
    signs = [_ratio_sign(baseline, plan, unit), _bandwidth_sign(plan), _gap_sign(baseline, plan)]
    if baseline.graph_launches or plan.graph_launches:
        signs.append(
            WarningSign(
                name="CUDA graphs",
                is_raised=plan.graph_launches < baseline.graph_launches,
                text=f"{baseline.graph_launches:.1f} launched per step in the baseline, {plan.graph_launches:.1f} with the plan"
                + ("; the plan breaks a capture" if plan.graph_launches < baseline.graph_launches else ""),
            )
        )
    return tuple(signs)


def _ratio_sign(baseline: Side, plan: Side, unit: WorkUnit) -> WarningSign:
    where, before, after = "per step", baseline.count, plan.count
    if baseline.kernels_per_layer and plan.kernels_per_layer:
        where, before, after = "per layer", baseline.kernels_per_layer, plan.kernels_per_layer
    ratio = after / before if before else 0.0
    return WarningSign(
        name=f"{unit} {where}",
        is_raised=ratio > EXCESSIVE_KERNEL_RATIO,
        text=f"{before:.0f} in the baseline, {after:.0f} with the plan: {ratio:.2f} × "
        f"(more than {EXCESSIVE_KERNEL_RATIO} × is excessive)",
    )


def _bandwidth_sign(plan: Side) -> WarningSign:
    name = "bandwidth while recomputing"
    use = next((use for use in plan.phases if use.phase is WorkPhase.RECOMPUTE), None)
    if use is None:
        return WarningSign(name=name, is_raised=None, text="the trace shows no recomputation")
    if use.read_bytes is None:
        return WarningSign(name=name, is_raised=None, text="the trace has no shapes (record_shapes=True)")
    if use.bandwidth_share is None:
        return WarningSign(
            name=name, is_raised=None, text="the device's peak is neither in the trace nor in the catalogue"
        )
    return WarningSign(
        name=name,
        is_raised=use.bandwidth_share > CONTENDED_BANDWIDTH_SHARE,
        text=f"at least {use.bandwidth_share:.0%} of the device's peak "
        f"(more than {CONTENDED_BANDWIDTH_SHARE:.0%} is contention)",
    )


def _gap_sign(baseline: Side, plan: Side) -> WarningSign:
    share = plan.long_gap_seconds / plan.step_seconds if plan.step_seconds else 0.0
    return WarningSign(
        name=f"gaps over {LONG_GAP_SECONDS * 1e6:.0f} µs",
        is_raised=share > _NOTABLE_GAP_SHARE,
        text=f"{plan.long_gaps:.1f} per step, {format_seconds(plan.long_gap_seconds)} ({share:.0%} of the step); "
        f"in the baseline {baseline.long_gaps:.1f}, {format_seconds(baseline.long_gap_seconds)}",
    )


def layer_counts(rows: Sequence[Layer], *, is_plan: bool) -> list[float]:
    """Kernels of each numbered layer on one side."""
    return [row.plan_count if is_plan else row.baseline_count for row in repeated_layers(rows)]
