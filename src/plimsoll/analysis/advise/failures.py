"""The ways in which activation management goes wrong, each with whether the evidence shows it."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.analysis.advise.checklist import StepEvidence
from plimsoll.artifacts.advice import FailureMode, FailureSign
from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import ReceiptVerdict
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
_Judged = tuple[FailureSign, str, str]
"""Whether it shows, by what evidence, and what to do next."""


def find_failures(evidence: StepEvidence) -> tuple[FailureMode, ...]:
    """The five modes, those that cost most first."""
    modes = []
    for name, title, find in _MODES:
        sign, found, next_ = find(evidence)
        modes.append(FailureMode(name=name, title=title, sign=sign, evidence=found, next=next_))
    return tuple(modes)


def _throughput(evidence: StepEvidence) -> _Judged:
    verdict, seconds = evidence.verdict, evidence.receipt_seconds
    if seconds is not None:
        source = f"receipt, {evidence.receipt_name}"
    elif verdict is not None and verdict.plan.measured_step_seconds and verdict.baseline.measured_step_seconds:
        seconds = verdict.baseline.measured_step_seconds, verdict.plan.measured_step_seconds
        source = f"probe, strategy {verdict.strategy}"
    else:
        plan = evidence.chosen
        predicted = "no plan fits" if plan is None else f"{format_share(plan.predicted_overhead)} is predicted"
        return FailureSign.NOT_CHECKED, f"{predicted}, nothing is measured", evidence.verify_command
    overhead = seconds[1] / seconds[0] - 1
    found = f"measured {format_share(overhead)} a step ({source}); more than {format_share(COLLAPSE)} is a collapse"
    if overhead > COLLAPSE:
        return FailureSign.FOUND, found, f"plimsoll diagnose {evidence.target} --plan plan.json"
    return FailureSign.NOT_FOUND, found, ""


def _gradients(evidence: StepEvidence) -> _Judged:
    receipt = evidence.receipt
    if receipt is None:
        return FailureSign.NOT_CHECKED, "no receipt was given", evidence.verify_command
    found = f"{evidence.receipt_name}: {receipt.verdict}"
    if receipt.verdict in _WRONG:
        cause = f"; {receipt.faults[0]}" if receipt.faults else ""
        return FailureSign.FOUND, f"{found}{cause}", receipt.verdict.advice
    itself = "" if receipt.is_deterministic else "; the model differs from itself from run to run"
    return FailureSign.NOT_FOUND, f"{found}{itself}", ""


def _bubbles(evidence: StepEvidence) -> _Judged:
    found = "one process on one device was traced; a pipeline's schedule cannot be seen from it"
    return FailureSign.NOT_CHECKED, found, ""


def _savings(evidence: StepEvidence) -> _Judged:
    """Bytes no longer held between forward and backward against bytes off the peak, or the measured peak."""
    receipt, plan = evidence.receipt, evidence.chosen
    if receipt is not None:
        measured, predicted = receipt.measured_peak_bytes, receipt.predicted_peak_bytes
        if measured is not None and predicted is not None and measured > predicted * (1 + _OFF_BY):
            found = f"measured peak {format_bytes(measured)}, predicted {format_bytes(predicted)}"
            again = (
                f"plimsoll verify {evidence.target} --plan plan.json again on an idle device; see who holds the peak"
            )
            return FailureSign.FOUND, f"{evidence.receipt_name}: {found}", again
        kept = [region.name for region in receipt.regions if region.engine is Engine.KEEP]
        if kept:
            found = f"{len(kept)} layers kept everything although the plan drops something there ({kept[0]})"
            return FailureSign.FOUND, found, "the receipt gives each layer's reason: plimsoll show receipt.json"
    if plan is None or evidence.manages_nothing:
        return FailureSign.NOT_CHECKED, "there is no plan that saves anything", ""
    freed = _held_bytes(evidence.made[0].plan) - _held_bytes(plan)
    saved = plan.baseline_peak_bytes - plan.predicted_peak_bytes
    is_found = saved < freed / 2
    why = f": the peak has moved to {plan.peak.moment}" if is_found else ""
    return (
        FailureSign.FOUND if is_found else FailureSign.NOT_FOUND,
        f"the plan holds {format_bytes(freed)} less between forward and backward, its peak is predicted "
        f"{format_bytes(saved)} lower{why}; "
        "communication buffers and fragmentation are not seen from one process's allocations",
        "; ".join(evidence.bottleneck.remedies) if is_found else "",
    )


def _held_bytes(plan: Plan) -> int:
    return sum(region.retained_bytes for region in plan.regions)


def _debugging(evidence: StepEvidence) -> _Judged:
    plan = evidence.chosen
    if plan is None or evidence.manages_nothing:
        return FailureSign.NOT_FOUND, "every value stays where it was", ""
    dropped = sum(len(region.dropped) for region in plan.regions)
    packed = sum(len(region.packed) for region in plan.regions)
    found = f"{dropped} values do not exist between forward and backward, {packed} exist in another form"
    next_ = f"plimsoll verify {evidence.target} --plan plan.json --intermediate NAME keeps one and compares it"
    return FailureSign.FOUND, found, next_


_MODES: tuple[tuple[str, str, Callable[[StepEvidence], _Judged]], ...] = (
    ("throughput", "throughput collapses", _throughput),
    ("non-determinism", "non-determinism breaks gradients", _gradients),
    ("pipeline-bubbles", "the pipeline's bubbles grow", _bubbles),
    ("less-saved", "less is saved than expected", _savings),
    ("debugging", "debugging gets harder", _debugging),
)
