"""Small hand-made artifacts for tests that need a plan, a receipt or a comparison but no model."""

from __future__ import annotations

import enum
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.decision import Decision, Engine, Status
from plimsoll.artifacts.plan import FrontierPoint, Holder, Peak, Plan, RegionPlan, TimelinePoint, ValueDecision
from plimsoll.artifacts.receipt import Mismatch, Receipt, RegionOutcome
from plimsoll.units import GIB, MIB

Made = TypeVar("Made", bound=msgspec.Struct)
NAMED: dict[str, Any] = {
    "model": "TinyModel",
    "fingerprint": "f" * 16,
    "signature": "x: float32[2, 8]",
    "device": "cpu",
    "cost_device": "cpu",
    "strategy": "auto",
    "optimizer": "AdamW",
    "versions": {"plimsoll": "0.1.0", "torch": "2.13.0"},
    "steps": 5,
    "is_deterministic": True,
    "is_traced": True,
}


def filled(kind: type[Made], /, **given: Any) -> Made:
    """An artifact with these fields, and something of the right type in every other one that has no default."""
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in given:
            given[field.name] = NAMED[field.name] if field.name in NAMED else _anything(field.type, field.name)
    return kind(**given)


def _anything(type_: Any, name: str) -> Any:
    if type(None) in get_args(type_):
        return None
    kind = get_origin(type_) or type_
    if issubclass(kind, enum.Enum):
        return next(iter(kind))
    return filled(kind) if issubclass(kind, msgspec.Struct) else {str: name, int: 1, float: 0.1}.get(kind, kind())


def make_region(index: int, *, drops: tuple[str, ...] = ("mlp.act",)) -> RegionPlan:
    """One block with two values; those in ``drops`` are recomputed."""
    decisions = tuple(
        ValueDecision(
            value=name,
            decision=Decision.RECOMPUTE if name in drops else Decision.KEEP,
            bytes=size,
            seconds=0.001 if name in drops else 0.0,
            reason="recompute costs 0.1 ms/MiB, memory is worth 0.3 ms/MiB here" if name in drops else "",
        )
        for name, size in (("attn.out", 4 * MIB), ("mlp.act", 8 * MIB))
    )
    held = sum(d.bytes for d in decisions if d.decision is Decision.KEEP)
    return filled(
        RegionPlan,
        name=f"model.layers.{index}",
        call=0,
        decisions=decisions,
        retained_bytes=held,
        replay_seconds=0.001 * len(drops),
    )


def make_plan(**changes: object) -> Plan:
    """A plan over four blocks, the last one untouched."""
    peak = Peak(
        moment="in backward of model.layers.3",
        bytes=60 * MIB,
        holders=tuple(Holder(label=f"holder {i}", bytes=(8 - i) * MIB) for i in range(8)),
    )
    plan = filled(
        Plan,
        status=Status.OPTIMAL,
        budget_bytes=64 * MIB,
        floor_bytes=40 * MIB,
        baseline_peak_bytes=100 * MIB,
        baseline_seconds=0.1,
        predicted_peak_bytes=60 * MIB,
        predicted_seconds=0.103,
        lower_bound_seconds=0.1029999,
        gap_of_overhead=0.01,
        gap_of_step=0.0003,
        price_seconds_per_byte=0.001 / MIB,
        regions=(make_region(0), make_region(1), make_region(2), make_region(3, drops=())),
        peak=peak,
        baseline_peak=msgspec.structs.replace(peak, bytes=100 * MIB, moment="in forward of the loss"),
        classes={"parameter": 10 * MIB, "activation": 45 * MIB, "gradient": 5 * MIB, "buffer": 0},
        timeline=tuple(
            TimelinePoint(
                tick=tick,
                moment="forward" if tick < 30 else "backward",
                bytes=(20 + min(tick, 60 - tick)) * MIB,
                by_category={"parameter": 10 * MIB, "activation": (10 + min(tick, 60 - tick)) * MIB},
            )
            for tick in range(60)
        ),
        frontier=(
            FrontierPoint(peak_bytes=40 * MIB, step_seconds=0.12),
            FrontierPoint(peak_bytes=100 * MIB, step_seconds=0.1),
        ),
        notes=("the logits hold 3.0 MiB that no decision reaches",),
        solve_seconds=0.25,
    )
    return msgspec.structs.replace(plan, **changes)


def make_receipt(**changes: object) -> Receipt:
    """A receipt in which everything holds."""
    receipt = filled(
        Receipt,
        budget_bytes=64 * MIB,
        compared_gradients=12,
        compared_buffers=2,
        baseline_losses=(1.25, 1.125),
        plan_losses=(1.25, 1.125),
        predicted_baseline_peak_bytes=100 * MIB,
        predicted_peak_bytes=60 * MIB,
        measured_baseline_peak_bytes=101 * MIB,
        measured_peak_bytes=61 * MIB,
        measured_recording_peak_bytes=62 * MIB,
        predicted_baseline_seconds=0.1,
        predicted_seconds=0.103,
        measured_baseline_seconds=0.11,
        measured_baseline_spread_seconds=0.002,
        measured_seconds=0.114,
        measured_spread_seconds=0.003,
        regions=tuple(
            RegionOutcome(
                name=f"model.layers.{i}",
                call=0,
                engine=Engine.RECIPE if i < 3 else Engine.UNTOUCHED,
                reason="" if i < 3 else "the plan keeps everything",
                activation_bytes=12 * MIB,
                droppable_bytes=11 * MIB,
                dropped_bytes=8 * MIB if i < 3 else 0,
            )
            for i in range(4)
        ),
    )
    return msgspec.structs.replace(receipt, **changes)


def make_mismatch(*, difference: float | None = 1e-3, spread: float | None = 0.0) -> Mismatch:
    """A gradient that differs."""
    return Mismatch(
        name="model.layers.0.weight",
        max_absolute_difference=difference,
        max_relative_difference=difference,
        baseline_max_absolute_difference=spread,
    )


def make_comparison(**changes: object) -> Comparison:
    """Two strategies, the second one not measured."""
    comparison = filled(
        Comparison,
        baseline_peak_bytes=2 * GIB,
        measured_baseline_seconds=0.1,
        rows=(
            ComparisonRow(
                strategy="full",
                status=Status.FEASIBLE,
                predicted_peak_bytes=GIB,
                measured_peak_bytes=GIB + MIB,
                predicted_seconds=0.13,
                measured_seconds=0.131,
                measured_ratio=1.31,
                measured_ratio_low=1.30,
                measured_ratio_high=1.33,
                is_bit_equal=True,
            ),
            ComparisonRow(
                strategy="auto",
                status=Status.INFEASIBLE,
                budget_bytes=MIB,
                predicted_peak_bytes=GIB,
                predicted_seconds=0.13,
                note="below the floor",
            ),
        ),
    )
    return msgspec.structs.replace(comparison, **changes)
