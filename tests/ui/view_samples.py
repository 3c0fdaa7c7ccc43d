"""One small artifact of every kind, for tests that show them all."""

from __future__ import annotations

from advice_samples import make_advice
from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.estimate import BudgetItem, Estimate, StageEstimate, Throughput
from plimsoll.artifacts.explained import Change, Explanation, MemoryPart, RecomputedPart, Unsupported
from plimsoll.artifacts.fault import Cause, Fault
from plimsoll.artifacts.fit import Fit, FitChange, FitPoint
from plimsoll.artifacts.job import Layout, ModelFacts
from plimsoll.artifacts.lengths import LengthRow, SequenceLengths
from plimsoll.artifacts.plan import Holder, Peak
from plimsoll.artifacts.receipt import OWN, Intermediate, Slope
from plimsoll.units import GIB, MIB
from samples import filled, make_comparison, make_mismatch, make_plan, make_receipt
from traffic_samples import make_traffic
from ui.pages.page_samples import make_finding, make_full_comparison, make_full_plan, make_full_receipt, make_verdict

PEAK = Peak(
    moment="in backward",
    bytes=60 * MIB,
    holders=tuple(Holder(label=f"h.{i // 2}.{name}", bytes=MIB) for i, name in enumerate("aabcdefghijk")),
)


def make_stage(stage: int) -> StageEstimate:
    items = (
        BudgetItem(name="parameters", bytes=2 * GIB, relative_error=0.0, basis=Basis.EXACT),
        BudgetItem(name="fragmentation", bytes=GIB, relative_error=0.2, basis=Basis.MODELLED, note="reserved only"),
        BudgetItem(name="NCCL", bytes=None, relative_error=0.0, basis=Basis.UNSUPPORTED, note="no NCCL here"),
    )
    return filled(
        StageEstimate,
        stage=stage,
        ranks=2,
        regions=f"model.layers.{4 * stage}–{4 * stage + 3}",
        in_flight=4 - stage,
        items=items,
        allocated_bytes=2 * GIB,
        reserved_bytes=3 * GIB,
        unmanaged_bytes=4 * GIB,
        recomputed_bytes=GIB,
        peak=PEAK,
        bubble_share=0.3,
    )


def make_estimate(stages: int = 4) -> Estimate:
    """A pipeline, or one device."""
    speed = filled(
        Throughput, tokens_per_second=40000.0, mfu=0.4, relative_error=0.3, note="collectives are not hidden"
    )
    return filled(
        Estimate,
        target="tiny",
        device="H100-SXM",
        device_bytes=80 * GIB,
        layout=Layout(pp=stages, dp=2),
        facts=ModelFacts(name="tiny", architecture="TinyModel", batch=2, sequence=512, parameters=10**9),
        stages=tuple(make_stage(stage) for stage in range(stages)),
        throughput=speed,
        expandable_bytes=2 * GIB,
        notes=("a note of the estimate",),
    )


def make_fit(*, fits: bool = True) -> Fit:
    """Two points, the second one the best, or none."""

    status = Status.OPTIMAL if fits else Status.INFEASIBLE
    points = (
        filled(FitPoint, micro_batch=size, sequence=256, status=status, saved_bytes=10 * MIB, rebuilt_bytes=rebuilt)
        for size, rebuilt in ((1, 0), (2, 4 * MIB))
    )
    return filled(
        Fit,
        budget_bytes=64 * MIB,
        items_name="tokens",
        points=tuple(points),
        best=1 if fits else None,
        changes=() if fits else (FitChange(name="ZeRO", does_fit=None, note="not known here"),),
    )


def make_lengths(*, tokens: int | None = 4096) -> SequenceLengths:
    """Two rows that fit, the second up to the limit of the search, or two rows that do not fit."""
    first = filled(LengthRow, name="keep everything", tokens=tokens, least_tokens=4000, most_tokens=5000)
    last = filled(LengthRow, name="+ tiles", tokens=tokens and 8192, host_bytes=GIB, is_gaining=tokens is not None)
    return filled(
        SequenceLengths,
        budget_bytes=64 * MIB,
        device_bytes=GIB,
        batch=2,
        limit_tokens=8192,
        rows=(first, last),
        traced_tokens=(4096, 8192),
        notes=("a note of the lengths",),
    )


def make_explanation(*, is_helped: bool = True) -> Explanation:
    """A checkpointed step with one change that helps, or none."""
    change = Change(
        name="chunked loss",
        how="chunk_loss(model)",
        predicted_peak_bytes=40 * MIB,
        lowers_bytes=20 * MIB if is_helped else 0,
        moment="in forward",
        basis="replayed",
    )
    return filled(
        Explanation,
        is_fake=not is_helped,
        setup="every:2" if is_helped else "",
        verdict="The logits hold the peak.",
        peak=PEAK,
        parts=(MemoryPart(name="activations of the layers", bytes=60 * MIB, share=1.0, largest="model.layers.0"),),
        resident_bytes=30 * MIB,
        resident=PEAK.holders,
        recomputed=tuple(RecomputedPart(place=f"h.{i}", most_bytes=MIB, ops=5) for i in range(8)),
        plain_peak=PEAK if is_helped else None,
        changes=(change,),
        unsupported=(Unsupported(name="fused", why="no such kernel"),),
        timeline=make_plan().timeline,
        notes=("a note of the explanation",),
    )


FAULT = Fault(step=1, region="a", value="b", op="mul", cause=Cause.TRANSFER, elements=4, differing_elements=4)

ARTIFACTS = {
    "plan": make_plan(),
    "plan with all decisions": make_full_plan(),
    "plan of nothing": make_plan(regions=(), timeline=(), classes={}, budget_bytes=None, baseline_seconds=0.0),
    "plan that does not fit": make_plan(status=Status.INFEASIBLE, frontier=()),
    "receipt": make_receipt(),
    "receipt within its error": make_full_receipt(),
    "receipt of what differs": make_receipt(
        gradient_mismatches=(make_mismatch(difference=None),) * 12, faults=(FAULT,) * 12, is_deterministic=False
    ),
    "receipt of an own method": make_receipt(
        strategy=OWN,
        method="torch.utils.checkpoint",
        slope=Slope(expected=1.0, measured=0.9, measured_error=1e-6),
        baseline_curve=(2.0, 1.0),
        plan_curve=(2.0, None),
        compared_tensors=3,
        measured_peak_bytes=None,
        intermediates=(
            Intermediate(module="h.0", call=1, is_gradient=True, is_bit_equal=True),
            Intermediate(module="h.1", call=0, is_gradient=False, is_bit_equal=False, max_absolute_difference=0.5),
        ),
    ),
    "receipt of losses that are not finite": make_receipt(baseline_losses=(None, 1.0), plan_losses=(None, 1.0)),
    "comparison": make_full_comparison(),
    "comparison of the unmeasured": make_comparison(),
    "comparison of nothing": make_comparison(rows=()),
    "verdict": make_verdict(missing=("more steps",)),
    "verdict of little": make_verdict(comparisons=(), gradients=()),
    "finding": make_finding(measured_baseline_seconds=0.05, measured_plan_seconds=0.06),
    "finding of nothing": make_finding(parts=(), signs=(), layers=(), model=""),
    "advice": make_advice(),
    "estimate": make_estimate(),
    "estimate of one device": make_estimate(1),
    "fit": make_fit(),
    "fit of nothing": make_fit(fits=False),
    "lengths": make_lengths(),
    "lengths of nothing": make_lengths(tokens=None),
    "explanation": make_explanation(),
    "explanation without help": make_explanation(is_helped=False),
    "traffic": make_traffic(),
}
