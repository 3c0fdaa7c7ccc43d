"""Evidence and findings in, the verdict out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.analysis.probe.evidence import Evidence
from plimsoll.analysis.probe.records import BASELINE, PLAN, ArmLog, StepRecord
from plimsoll.analysis.probe.rules import Findings, Probed, window_of
from plimsoll.analysis.probe.settings import Settings
from plimsoll.analysis.probe.statistics import first_step_at
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import finite
from plimsoll.artifacts.verdict import ArmSummary, Curves, Ruling, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a verdict says about the run besides its figures. ``items`` are counted per batch in ``items_per_step``."""

    model: str
    fingerprint: str
    signature: str
    device: str
    optimizer: str
    data: str
    versions: dict[str, str]
    items: str
    items_per_step: int
    notes: tuple[str, ...]


def make_verdict(probed: Probed, plan: Plan, settings: Settings, about: About) -> Verdict:
    """Put the verdict together."""
    evidence, findings = probed.evidence, probed.findings
    window = window_of(evidence.steps)
    target = settings.target_loss
    if target is None and len(evidence.baseline.losses):
        target = finite(float(np.mean(evidence.baseline.losses[-window:])))
    logs = {BASELINE: evidence.baseline_log, PLAN: evidence.plan_log}
    baseline, managed = (_arm(name, log, target, window, about) for name, log in logs.items())
    return Verdict(
        ruling=findings.ruling,
        decided_by=findings.decided_by,
        reason=findings.reason,
        missing=findings.missing if findings.ruling is Ruling.UNDECIDED else (),
        model=about.model,
        fingerprint=about.fingerprint,
        signature=about.signature,
        device=about.device,
        strategy=plan.strategy,
        is_lossless=plan.is_lossless,
        optimizer=about.optimizer,
        data=about.data,
        versions=about.versions,
        seed=settings.seed,
        steps=evidence.steps,
        planned_steps=settings.steps,
        confidence=1 - settings.error_to_clear,
        rules=findings.rules,
        baseline=baseline,
        plan=managed,
        target_loss=target,
        window=window,
        items=about.items,
        delay=findings.delay,
        held_out_difference=findings.held_out_difference,
        comparisons=findings.comparisons,
        gradients=findings.gradients,
        curves=_curves(evidence),
        notes=(*about.notes, *_notes(evidence, findings, plan, settings)),
    )


def _arm(name: str, log: ArmLog, target: float | None, window: int, about: About) -> ArmSummary:
    losses = np.asarray([record.loss for record in log.steps if record.loss is not None], dtype=np.float64)
    seconds = [record.seconds for record in log.steps if record.seconds is not None]
    peaks = [record.peak_bytes for record in log.steps if record.peak_bytes is not None]
    step_seconds = statistics.median(seconds) if seconds else None
    steps = None if target is None else first_step_at(losses, target, window)
    held_out = None
    if log.held_out and None not in log.held_out[-1].losses:
        held_out = statistics.fmean(loss for loss in log.held_out[-1].losses if loss is not None)
    return ArmSummary(
        name=name,
        final_loss=finite(float(losses[-window:].mean())) if len(losses) else None,
        held_out_loss=held_out,
        perplexity=None if held_out is None or held_out > _MOST_EXPONENT else math.exp(held_out),
        steps_to_target=steps,
        seconds_to_target=None if steps is None or step_seconds is None else steps * step_seconds,
        measured_step_seconds=step_seconds,
        items_per_second=about.items_per_step / step_seconds if step_seconds else None,
        measured_peak_bytes=max(peaks, default=None),
    )


_MOST_EXPONENT = 700.0
"""The exponential of more is no floating-point number."""


def _curves(evidence: Evidence) -> Curves:
    def losses(records: Sequence[StepRecord]) -> tuple[float | None, ...]:
        return tuple(record.loss for record in records)

    def norms(records: Sequence[StepRecord]) -> tuple[float | None, ...]:
        return tuple(record.gradient_norm for record in records)

    baseline, plan = evidence.baseline_log.steps, evidence.plan_log.steps
    return Curves(
        baseline_losses=losses(baseline),
        plan_losses=losses(plan),
        baseline_norms=norms(baseline),
        plan_norms=norms(plan),
    )


def _notes(evidence: Evidence, findings: Findings, plan: Plan, settings: Settings) -> tuple[str, ...]:
    notes = []
    if evidence.steps < settings.steps:
        notes.append(f"stopped after {evidence.steps} of {settings.steps} steps: the answer was clear")
    largest = max((each.largest_error for each in findings.gradients[:1]), default=0.0)
    if plan.max_error is not None and largest > plan.max_error:
        notes.append(
            f"at equal parameters the gradient erred by up to {largest:.2%}; the plan was allowed {plan.max_error:.2%}, "
            "which was measured with the weights that it was made with"
        )
    if plan.is_lossless and not evidence.is_identical and evidence.is_plan_finite and evidence.is_baseline_finite:
        notes.append(
            "the plan is lossless, and yet the arms are not equal bit for bit: the model itself is not deterministic, or "
            "the plan is wrong; `plimsoll verify` tells which"
        )
    return tuple(notes)
