"""Evidence in, the ways in which activation management goes wrong out, each with whether it shows here."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.analysis.advise.evidence import Evidence, name_receipt
from plimsoll.artifacts.advice import FailureMode, FailureSign
from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.plan import RegionPlan
from plimsoll.artifacts.receipt import Verdict as ReceiptVerdict
from plimsoll.units import format_bytes, format_share

COLLAPSE = 0.35
"""More extra time than full recomputation is known to take (20% to 33% in theory, up to 38% seen): something else is slow."""
_OFF_BY = 0.05
"""A measured peak this much above the predicted one is not explained by the plan."""
_WRONG = (
    ReceiptVerdict.GRADIENTS_DIFFER,
    ReceiptVerdict.BUFFERS_DIFFER,
    ReceiptVerdict.LOSSES_DIFFER,
    ReceiptVerdict.TENSORS_DIFFER,
    ReceiptVerdict.INTERMEDIATES_DIFFER,
)


def find_failures(evidence: Evidence) -> tuple[FailureMode, ...]:
    """The five modes, in the order of what they cost."""
    return tuple(find(evidence) for find in _MODES)


def _gradients(evidence: Evidence) -> FailureMode:
    name, title = "non-determinism", "non-determinism breaks gradients"
    receipt = evidence.receipt
    if receipt is None:
        return FailureMode(
            name=name,
            title=title,
            sign=FailureSign.NOT_CHECKED,
            evidence="no receipt was given",
            next=evidence.verify_command,
        )
    if receipt.verdict in _WRONG:
        cause = f"; {receipt.faults[0]}" if receipt.faults else ""
        return FailureMode(
            name=name,
            title=title,
            sign=FailureSign.FOUND,
            evidence=f"{name_receipt(receipt)}: {receipt.verdict}{cause}",
            next=receipt.verdict.advice,
        )
    itself = "" if receipt.is_deterministic else "; the model differs from itself from run to run"
    return FailureMode(
        name=name,
        title=title,
        sign=FailureSign.NOT_FOUND,
        evidence=f"{name_receipt(receipt)}: {receipt.verdict}{itself}",
    )


def _throughput(evidence: Evidence) -> FailureMode:
    name, title = "throughput", "throughput collapses"
    receipt, verdict = evidence.receipt, evidence.verdict
    if receipt is not None and receipt.measured_seconds and receipt.measured_baseline_seconds:
        overhead = receipt.measured_seconds / receipt.measured_baseline_seconds - 1
        source = f"receipt, {name_receipt(receipt)}"
    elif verdict is not None and verdict.plan.measured_step_seconds and verdict.baseline.measured_step_seconds:
        overhead = verdict.plan.measured_step_seconds / verdict.baseline.measured_step_seconds - 1
        source = f"probe, strategy {verdict.strategy}"
    else:
        plan = evidence.chosen
        predicted = "no plan fits" if plan is None else f"{format_share(plan.predicted_overhead)} is predicted"
        return FailureMode(
            name=name,
            title=title,
            sign=FailureSign.NOT_CHECKED,
            evidence=f"{predicted}, nothing is measured",
            next=evidence.verify_command,
        )
    is_found = overhead > COLLAPSE
    return FailureMode(
        name=name,
        title=title,
        sign=FailureSign.FOUND if is_found else FailureSign.NOT_FOUND,
        evidence=f"measured {format_share(overhead)} a step ({source}); more than {format_share(COLLAPSE)} is a collapse",
        next=f"plimsoll diagnose {evidence.target} --plan plan.json" if is_found else "",
    )


def _bubbles(evidence: Evidence) -> FailureMode:
    return FailureMode(
        name="pipeline-bubbles",
        title="the pipeline's bubbles grow",
        sign=FailureSign.NOT_CHECKED,
        evidence="one process on one device was traced; a pipeline's schedule cannot be seen from it",
    )


def _savings(evidence: Evidence) -> FailureMode:
    """Bytes no longer held between forward and backward against bytes off the peak, or the measured peak."""
    name, title = "less-saved", "less is saved than expected"
    unseen = "communication buffers and fragmentation are not seen from one process's allocations"
    receipt, plan = evidence.receipt, evidence.chosen
    measured = _measured_excess(evidence)
    if measured and receipt is not None:
        return FailureMode(
            name=name,
            title=title,
            sign=FailureSign.FOUND,
            evidence=f"{name_receipt(receipt)}: {measured}",
            next=f"plimsoll verify {evidence.target} --plan plan.json again on an idle device; see who holds the peak",
        )
    kept = () if receipt is None else [r.name for r in receipt.regions if r.engine is Engine.KEEP]
    if kept:
        return FailureMode(
            name=name,
            title=title,
            sign=FailureSign.FOUND,
            evidence=f"{len(kept)} layers kept everything although the plan drops something there ({kept[0]})",
            next="the receipt gives each layer's reason: plimsoll show receipt.json",
        )
    if plan is None or evidence.manages_nothing:
        return FailureMode(
            name=name, title=title, sign=FailureSign.NOT_CHECKED, evidence="there is no plan that saves anything"
        )
    freed = _held(evidence.made[0].plan.regions) - _held(plan.regions)
    saved = plan.baseline_peak_bytes - plan.predicted_peak_bytes
    is_found = saved < freed / 2
    figures = (
        f"the plan holds {format_bytes(freed)} less between forward and backward, its peak is predicted "
        f"{format_bytes(saved)} lower"
    )
    why = f": the peak has moved to {plan.peak.moment}" if is_found else ""
    return FailureMode(
        name=name,
        title=title,
        sign=FailureSign.FOUND if is_found else FailureSign.NOT_FOUND,
        evidence=f"{figures}{why}; {unseen}",
        next="; ".join(evidence.bottleneck.remedies) if is_found else "",
    )


def _measured_excess(evidence: Evidence) -> str:
    receipt = evidence.receipt
    if receipt is None or receipt.measured_peak_bytes is None or receipt.predicted_peak_bytes is None:
        return ""
    if receipt.measured_peak_bytes <= receipt.predicted_peak_bytes * (1 + _OFF_BY):
        return ""
    return f"measured peak {format_bytes(receipt.measured_peak_bytes)}, predicted {format_bytes(receipt.predicted_peak_bytes)}"


def _held(regions: tuple[RegionPlan, ...]) -> int:
    return sum(region.retained_bytes for region in regions)


def _debugging(evidence: Evidence) -> FailureMode:
    name, title = "debugging", "debugging gets harder"
    plan = evidence.chosen
    if plan is None or evidence.manages_nothing:
        return FailureMode(
            name=name, title=title, sign=FailureSign.NOT_FOUND, evidence="every value stays where it was"
        )
    dropped = sum(len(region.dropped) for region in plan.regions)
    packed = sum(len(region.packed) for region in plan.regions)
    return FailureMode(
        name=name,
        title=title,
        sign=FailureSign.FOUND,
        evidence=f"{dropped} values do not exist between forward and backward, {packed} exist in another form",
        next=f"plimsoll verify {evidence.target} --plan plan.json --intermediate NAME keeps one and compares it",
    )


_MODES: tuple[Callable[[Evidence], FailureMode], ...] = (_throughput, _gradients, _bubbles, _savings, _debugging)
