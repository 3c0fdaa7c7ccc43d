"""Artifacts that fill every part of a page, about a model whose names try to break out of it."""

from __future__ import annotations

import math
import random

import msgspec

from advice_samples import make_advice
from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.finding import (
    Finding,
    Layer,
    OverheadCause,
    OverheadPart,
    PhaseUse,
    ProfileOrigin,
    Side,
    WarningSign,
    WorkPhase,
    WorkUnit,
)
from plimsoll.artifacts.plan import FrontierPoint, Holder, Peak, Plan, RegionPlan, TimelinePoint, ValueDecision
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.verdict import (
    NORM_QUANTILES,
    ArmSummary,
    Curves,
    GradientComparison,
    IntervalEstimate,
    NormComparison,
    NormSummary,
    Outcome,
    Rule,
    Ruling,
    Verdict,
)
from plimsoll.units import MIB
from samples import filled, make_comparison, make_mismatch, make_plan, make_receipt

HOSTILE = "<script>alert(1)</script>"
HOSTILE_TAGS = "</script><img src=x onerror=alert(2)>"
HOSTILE_QUOTES = "\"'><b>bold</b>&amp;{{ 7*7 }}"
MODEL = f"Net{HOSTILE}"
_FORMS = ("", "", "int8", "disk")
_BLOCKS = 6
_STEPS = 120


def make_full_plan() -> Plan:
    """Six blocks by eight values with all four decisions; the peak is in the first backward ops."""
    regions = tuple(_region(index) for index in range(_BLOCKS))
    timeline = tuple(_point(tick) for tick in range(200))
    highest = max(timeline, key=lambda point: point.bytes)
    peak = Peak(
        moment=highest.moment,
        bytes=highest.bytes,
        holders=(Holder(label="parameters", bytes=20 * MIB), Holder(label=HOSTILE_TAGS, bytes=9 * MIB)),
    )
    return make_plan(
        model=MODEL,
        status=Status.FEASIBLE,
        regions=regions,
        timeline=timeline,
        peak=peak,
        classes=highest.by_category,
        predicted_peak_bytes=highest.bytes,
        budget_bytes=highest.bytes + MIB,
        frontier=tuple(
            FrontierPoint(peak_bytes=(40 + 5 * step) * MIB, step_seconds=0.1 + 0.03 * math.exp(-step / 3))
            for step in range(13)
        ),
        notes=(f"a note about {HOSTILE_QUOTES}",),
        link="disk",
        max_error=0.01,
        predicted_error=0.004,
    )


def _region(index: int) -> RegionPlan:
    usual = ("mlp.gate::silu#0", "mlp.up::mm#0", "norm::rsqrt#0", "drop", "residual")
    names = ("attn.qkv", HOSTILE, HOSTILE_QUOTES, *usual)
    decisions = tuple(_decision(name, list(Decision)[(index + place) % 4], place) for place, name in enumerate(names))
    return filled(
        RegionPlan,
        name=f"blocks.{HOSTILE_TAGS}.{index}",
        kind=f"kind {index}",
        decisions=decisions,
        retained_bytes=sum(d.held_bytes if d.is_packed else d.bytes for d in decisions),
        replay_seconds=0.002,
        price_seconds_per_byte=0.0003 / MIB * (_BLOCKS - index),
    )


def _decision(name: str, decision: Decision, place: int) -> ValueDecision:
    is_packed = decision in (Decision.COMPRESS, Decision.OFFLOAD)
    return ValueDecision(
        value=name,
        decision=decision,
        bytes=(1 + place) * MIB,
        seconds=0.0 if decision is Decision.KEEP else 0.0004,
        reason=f"costs 0.1 ms/MiB in {HOSTILE_QUOTES}, memory is worth 0.3 ms/MiB here",
        form=_FORMS[list(Decision).index(decision)],
        held_bytes=MIB // 2 if decision is Decision.COMPRESS else 0,
        is_lossy=is_packed and decision is Decision.COMPRESS,
    )


def _point(tick: int) -> TimelinePoint:
    phase = "forward" if tick < 80 else "backward" if tick < 170 else "optimizer"
    activation = max(0, min(tick, 170 - tick)) * MIB // 3
    gradient = max(0, min(tick - 80, 90)) * MIB // 5
    by_category = {
        "parameter": 18 * MIB,
        "optimizer state": 36 * MIB,
        "activation": activation,
        "gradient": gradient,
        "temporary": (tick % 7) * MIB // 2,
    }
    return TimelinePoint(
        tick=tick,
        moment=f"{phase} of blocks.{HOSTILE} (mm)",
        bytes=sum(by_category.values()),
        by_category=by_category,
        unmanaged_seconds=0.0005 * tick,
    )


def make_full_receipt() -> Receipt:
    """A lossy plan's receipt: some gradients differ within what was allowed."""
    mismatch = msgspec.structs.replace(make_mismatch(), name=f"{HOSTILE}.weight")
    return make_receipt(
        model=MODEL,
        is_lossless=False,
        max_error=0.01,
        gradient_error=0.003,
        gradient_mismatches=(mismatch,),
        baseline_losses=(2.0, 1.8, 1.7),
        plan_losses=(2.0, 1.8, 1.7),
    )


def make_full_comparison() -> Comparison:
    """Peers around the plan, two of them at nearly one place."""
    figures = (("none", 100, 1.0), ("full", 45, 1.31), ("sqrt", 60, 1.28), ("every:2", 61, 1.27), (HOSTILE, 66, 1.04))
    rows = tuple(
        ComparisonRow(
            strategy=name,
            status=Status.FEASIBLE,
            predicted_peak_bytes=peak * MIB,
            measured_peak_bytes=peak * MIB,
            predicted_seconds=0.1 * ratio,
            measured_seconds=0.1 * ratio,
            measured_ratio=ratio,
            measured_ratio_low=ratio - 0.02,
            measured_ratio_high=ratio + 0.02,
            is_bit_equal=True,
        )
        for name, peak, ratio in figures
    )
    return make_comparison(model=MODEL, baseline_peak_bytes=100 * MIB, rows=rows)


def make_verdict(**changes: object) -> Verdict:
    """A probe of 120 steps that found nothing wrong; the last loss of the plan is not finite."""
    dice = random.Random(3)
    losses = tuple(4 * math.exp(-step / 40) + 1 + 0.05 * dice.random() for step in range(_STEPS))
    norms = tuple(0.5 + dice.lognormvariate(0, 0.4) for _ in range(_STEPS))
    verdict = filled(
        Verdict,
        ruling=Ruling.GOOD,
        decided_by="all rules",
        reason="Every rule is clear.",
        model=MODEL,
        data=f"the text of {HOSTILE}",
        steps=_STEPS,
        planned_steps=1000,
        confidence=0.95,
        rules=(
            Rule(name="shift", ruling=Ruling.RECOMPUTE_INSTEAD, outcome=Outcome.CLEAR, allowed="10%", found="1.2%"),
            Rule(name=HOSTILE, ruling=Ruling.NET_LOSS, outcome=Outcome.OPEN, allowed="5%", found="?", missing="data"),
        ),
        baseline=ArmSummary(name="baseline", final_loss=1.2, measured_step_seconds=0.1, measured_peak_bytes=100 * MIB),
        plan=ArmSummary(name="plan", final_loss=1.21, measured_step_seconds=0.11, measured_peak_bytes=60 * MIB),
        target_loss=1.5,
        window=10,
        items="tokens",
        comparisons=tuple(_norms(name) for name in ("whole model", f"blocks.{HOSTILE}", HOSTILE_TAGS, "blocks.2")),
        gradients=(filled(GradientComparison, block="whole model"),),
        curves=Curves(
            baseline_losses=losses,
            plan_losses=(*losses[:-1], None),
            baseline_norms=norms,
            plan_norms=tuple(norm * 1.01 for norm in norms),
        ),
    )
    return msgspec.structs.replace(verdict, **changes)


def _norms(block: str) -> NormComparison:
    def summary(scale: float) -> NormSummary:
        quantiles = tuple(scale * (0.2 + share) for share in NORM_QUANTILES)
        return filled(NormSummary, median=quantiles[3], percentile_95=quantiles[5], quantiles=quantiles)

    shift = IntervalEstimate(value=0.02, low=-0.01, high=0.05)
    return NormComparison(block=block, baseline=summary(1.0), plan=summary(1.02), shift=shift)


def make_finding(**changes: object) -> Finding:
    """A diagnosis with three parts, one of them a gain."""

    def side(source: str, step_seconds: float) -> Side:
        uses = (PhaseUse(phase=WorkPhase.FORWARD, busy_seconds=0.03, count=40.0, read_bytes=9.0 * MIB),)
        return filled(
            Side,
            source=source,
            step_seconds=step_seconds,
            busy_seconds=0.8 * step_seconds,
            idle_seconds=0.2 * step_seconds,
            waiting_seconds=0.0,
            count=120.0,
            phases=uses,
            attributed_share=0.995,
        )

    finding = filled(
        Finding,
        origin=ProfileOrigin.PROFILED,
        unit=WorkUnit.CPU_OPS,
        model=MODEL,
        baseline=side("plain", 0.1),
        plan=side("managed", 0.112),
        parts=(
            OverheadPart(
                cause=OverheadCause.RECOMPUTE, seconds=0.01, spread_seconds=0.001, details=(f"mm in {HOSTILE}",)
            ),
            OverheadPart(cause=OverheadCause.MEMORY, seconds=-0.001, spread_seconds=0.0005),
            OverheadPart(cause=OverheadCause.UNEXPLAINED, seconds=0.003),
        ),
        layers=(filled(Layer, name=HOSTILE_TAGS),),
        signs=(
            WarningSign(name="kernels per layer", is_raised=True, text=f"1.60 × in {HOSTILE}"),
            WarningSign(name="bandwidth", is_raised=None, text="the trace has no shapes"),
        ),
    )
    return msgspec.structs.replace(finding, **changes)


def full_page() -> list[Plan | Receipt | Comparison | Verdict | Finding | Advice]:
    """One artifact of every kind."""
    return [
        make_full_plan(),
        make_full_receipt(),
        make_full_comparison(),
        make_verdict(),
        make_finding(),
        make_advice(model=MODEL),
    ]
