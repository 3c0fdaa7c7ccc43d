"""What a method saves and what it does to held-out loss in; whether to take it, and why, out."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.traffic import UNCOMPRESSED, MethodTraffic, TrafficRuling, Validation
from plimsoll.artifacts.verdict import Estimate, Outcome

LEAST_SAVED_SHARE = 0.02
"""A smaller gain of the step is not worth gradients with an error."""


def judge_method(method: str, saved: Estimate, validation: Validation | None) -> tuple[TrafficRuling, str]:
    """Time first, then training: a method that saves no time needs no validation.

    Args:
        method: its name.
        saved: share of the step that it saves: measured where it was, else predicted.
        validation: of training with it, if there was one.
    """
    if method == UNCOMPRESSED:
        return TrafficRuling.UNDECIDED, "what the others are compared with"
    worth = f"worth it from {LEAST_SAVED_SHARE:.0%} on"
    if saved.high < LEAST_SAVED_SHARE:
        return TrafficRuling.REFUSE, f"saves {describe_share(saved)} of the step: {worth}"
    if validation is not None and validation.outcome is Outcome.BROKEN:
        return TrafficRuling.REFUSE, f"held-out loss: {validation.found}"
    if saved.low < LEAST_SAVED_SHARE:
        return TrafficRuling.UNDECIDED, f"saves {describe_share(saved)} of the step: {worth}"
    if validation is None:
        return TrafficRuling.UNDECIDED, f"saves {describe_share(saved)} of the step; training is not validated"
    if validation.outcome in (Outcome.OPEN, Outcome.NOT_MEASURED):
        return TrafficRuling.UNDECIDED, f"saves {describe_share(saved)} of the step; held-out loss: {validation.found}"
    return TrafficRuling.KEEP, f"saves {describe_share(saved)} of the step; held-out loss: {validation.found}"


def judge_all(methods: Sequence[MethodTraffic]) -> tuple[TrafficRuling, str, str | None, tuple[str, ...]]:
    """The ruling of all methods, its reason, the method to take, and what is missing."""
    others = [each for each in methods if each.method != UNCOMPRESSED]
    kept = [each for each in others if each.ruling is TrafficRuling.KEEP]
    if kept:
        best = max(kept, key=lambda each: saved_share(each).value)
        return TrafficRuling.KEEP, f"{best.method} {best.reason}", best.method, ()
    open_ones = [each for each in others if each.ruling is TrafficRuling.UNDECIDED]
    if open_ones:
        best = max(open_ones, key=lambda each: saved_share(each).value)
        return TrafficRuling.UNDECIDED, f"{best.method} {best.reason}", None, _missing(open_ones)
    best = max(others, key=lambda each: saved_share(each).value)
    return TrafficRuling.REFUSE, f"the fastest, {best.method}, {best.reason}", None, ()


def _missing(methods: Sequence[MethodTraffic]) -> tuple[str, ...]:
    found = []
    if any(saved_share(each).low < LEAST_SAVED_SHARE <= saved_share(each).high for each in methods):
        found.append("a narrower error bar of the step: more timed steps (--steps)")
    if any(each.validation is None for each in methods):
        found.append("training with and without, on held-out data (--validate STEPS)")
    validations = [each.validation for each in methods if each.validation is not None]
    if any(validation.outcome is Outcome.OPEN for validation in validations):
        found.append("more steps, more orders of the data or more held-out batches")
    if any(validation.outcome is Outcome.NOT_MEASURED for validation in validations):
        found.append("three held-out batches or more (--held-out), and training that stays finite without compression")
    return tuple(found)


def saved_share(method: MethodTraffic) -> Estimate:
    """What a method saves: measured where it was, else predicted."""
    saved = method.predicted_saved_share if method.measured_saved_share is None else method.measured_saved_share
    assert saved is not None, "one of both is known of every method"
    return saved


def describe_share(saved: Estimate) -> str:
    """``12.0% (9.1% to 14.8%)``."""
    return f"{saved.value:.1%} ({saved.low:.1%} to {saved.high:.1%})"
