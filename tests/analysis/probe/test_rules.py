"""The rules on logs made by hand: what breaks each, what clears it, what is said first, and how often chance fools them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

from plimsoll.analysis.probe.evidence import ArmLog, GradientRecord, HeldOutRecord, ProbeEvidence, StepRecord
from plimsoll.analysis.probe.rules import STATISTICAL_RULES, Findings, ProbeSettings, judge, stop_here
from plimsoll.artifacts.verdict import WHOLE_MODEL, Outcome, Ruling

STEPS = 200
BLOCKS = ("blocks.0", "blocks.1")


class Story:
    """Two arms of one training, alike up to noise, to be changed by a test."""

    def __init__(self, *, seed: int = 0, steps: int = STEPS, noise: float = 0.02) -> None:
        random = np.random.default_rng(seed)
        common = np.exp(0.2 * random.normal(size=(steps, 3)))
        self.norms = [common.copy(), common * np.exp(noise * random.normal(size=(steps, 3)))]
        falling = 2 + 2 / np.sqrt(1 + np.arange(steps) / 10) + 0.05 * random.normal(size=steps)
        self.losses = [falling.copy(), falling + 0.1 * noise * random.normal(size=steps)]
        self.gains, self.cosines = np.full((8, 2), 1.0), np.full((8, 2), 0.999)
        self.held_out = [3 + 0.1 * random.normal(size=6)] * 2

    def evidence(self) -> ProbeEvidence:
        logs = []
        for losses, norms, held_out in zip(self.losses, self.norms, self.held_out, strict=True):
            records = [record(step, loss, row) for step, (loss, row) in enumerate(zip(losses, norms, strict=True))]
            looks = [HeldOutRecord(steps=len(records), losses=tuple(map(float, held_out)))] if len(held_out) else []
            logs.append(ArmLog(steps=records, gradients=[], held_out=looks))
        for step, (gains, cosines) in enumerate(zip(self.gains, self.cosines, strict=True)):
            logs[1].gradients.append(
                GradientRecord(
                    step=step,
                    products=tuple(map(float, gains)),
                    baseline_squares=(1.0, 1.0),
                    plan_squares=tuple(float((g / c) ** 2) for g, c in zip(gains, cosines, strict=True)),
                )
            )
        return ProbeEvidence(logs[0], logs[1], BLOCKS)

    def judged(self, **changes: object) -> Findings:
        return judge(self.evidence(), ProbeSettings(**({"steps": len(self.losses[0])} | changes)))


def record(step: int, loss: float, norms: np.ndarray) -> StepRecord:
    whole, *blocks = (float(norm) if math.isfinite(norm) else None for norm in norms)
    return StepRecord(
        step=step, loss=float(loss) if math.isfinite(loss) else None, gradient_norm=whole, block_norms=tuple(blocks)
    )


def outcomes(findings: Findings) -> dict[str, Outcome]:
    return {rule.name: rule.outcome for rule in findings.rules}


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_two_arms_that_differ_by_noise_or_a_twentieth_alone_are_good(factor: float):
    story = Story()
    story.norms[1] *= factor
    findings = story.judged()
    assert findings.ruling is Ruling.GOOD, findings.rules
    assert not findings.missing


def test_equal_bits_are_identical_and_one_other_bit_is_not():
    story = Story(noise=0.0)
    story.losses[1], story.norms[1] = story.losses[0].copy(), story.norms[0].copy()
    assert story.judged().ruling is Ruling.IDENTICAL
    story.norms[1][STEPS // 2, 2] = np.nextafter(story.norms[1][STEPS // 2, 2], 9.0)
    findings = story.judged()
    assert findings.ruling is Ruling.GOOD
    assert f"only in the first {STEPS // 2} steps" in next(
        rule.found for rule in findings.rules if rule.name == "identical"
    )


@pytest.mark.parametrize("factor", [0.8, 1.2])
@pytest.mark.parametrize("column", [0, 2])
def test_a_norm_that_moves_by_a_fifth_asks_for_recomputation(factor: float, column: int):
    story = Story()
    story.norms[1][:, column] *= factor
    findings = story.judged()
    assert (findings.ruling, findings.decided_by) == (Ruling.RECOMPUTE_INSTEAD, "shift")
    assert (WHOLE_MODEL, *BLOCKS)[column] in findings.reason
    assert findings.comparisons[column].shift.value == pytest.approx(factor - 1, abs=0.01)


def test_a_shift_that_noise_hides_is_undecided_and_says_what_is_missing():
    story = Story()
    story.norms[1][:, 1] *= np.exp(np.random.default_rng(1).normal(size=STEPS))
    findings = story.judged()
    assert findings.ruling is Ruling.UNDECIDED
    assert any(text.startswith("shift: more steps") for text in findings.missing)


@pytest.mark.parametrize(("gain", "cosine"), [(0.8, 0.999), (1.2, 0.999), (1.0, 0.8), (-1.0, -0.999)])
def test_a_gradient_that_points_elsewhere_is_found_though_its_norm_is_right(gain: float, cosine: float):
    story = Story()
    story.gains[:, 1], story.cosines[:, 1] = gain, cosine
    findings = story.judged()
    assert (findings.ruling, findings.decided_by) == (Ruling.RECOMPUTE_INSTEAD, "gradient")
    assert "blocks.1" in findings.reason


def test_spikes_twice_as_often_forbid_compression_and_a_few_more_are_not_enough_to_tell():
    story, few = Story(), Story()
    story.norms[0][[30, 90], 0] *= 6
    story.norms[1][np.arange(20, 200, 12), 0] *= 6
    findings = story.judged(is_early=False)
    assert (findings.ruling, findings.decided_by) == (Ruling.NO_COMPRESSION, "spikes")
    assert findings.comparisons[0].plan.spikes == 15
    assert findings.comparisons[0].baseline.spikes == 2
    few.norms[1][[40, 80], 0] *= 6
    assert outcomes(few.judged())["spikes"] is Outcome.OPEN


def test_a_loss_that_lags_behind_is_a_net_loss():
    story = Story()
    story.losses[1] = story.losses[1] + np.linspace(0, 0.3, STEPS)
    findings = story.judged()
    assert (findings.ruling, findings.decided_by) == (Ruling.NET_LOSS, "steps")
    assert findings.delay.low > 1.1


@pytest.mark.parametrize("worse", [0.3, math.nan])
def test_a_held_out_loss_that_is_worse_or_no_number_is_a_net_loss(worse: float):
    story = Story()
    story.held_out[1] = story.held_out[0] + worse
    findings = story.judged()
    assert (findings.ruling, findings.decided_by) == (Ruling.NET_LOSS, "held-out")
    assert math.isnan(worse) or findings.held_out_difference.value == pytest.approx(0.3)


@pytest.mark.parametrize("held_out", [np.array([]), np.array([3.0, 3.1])])
def test_without_enough_held_out_data_the_rule_is_not_measured(held_out: np.ndarray):
    story = Story()
    story.held_out = [held_out, held_out]
    findings = story.judged()
    assert outcomes(findings)["held-out"] is Outcome.NOT_MEASURED
    assert findings.ruling is Ruling.GOOD


@pytest.mark.parametrize(("arm", "ruling"), [(0, Ruling.BASELINE_DIVERGED), (1, Ruling.DIVERGED)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_ends_the_probe(arm: int, ruling: Ruling, value: float):
    story = Story(steps=60)
    story.losses[arm] = story.losses[arm][:41]
    story.norms[arm] = story.norms[arm][:41]
    story.losses[arm][-1] = value
    findings = stop_here(story.evidence(), ProbeSettings(steps=STEPS, is_early=False))
    assert (findings.ruling, findings.decided_by) == (ruling, "finite")
    assert "step 41" in findings.reason


def test_few_steps_are_undecided():
    findings = Story(steps=8).judged()
    assert findings.ruling is Ruling.UNDECIDED
    assert {"shift", "steps"} <= {text.partition(":")[0] for text in findings.missing}


def test_looks_are_whole_chunks_and_share_the_error():
    settings = ProbeSettings(steps=1000)
    assert settings.looks == (80, 140, 260, 500, 1000)
    assert settings.error_to_clear == pytest.approx(0.05 / 5)
    assert settings.error_to_break == pytest.approx(0.05 / 5 / STATISTICAL_RULES)
    assert ProbeSettings(steps=1000, is_early=False).error_to_clear == 0.05
    assert ProbeSettings(steps=1).looks == (1,)


def test_what_is_bad_is_said_early_and_what_is_good_from_half_of_the_steps():
    bad = Story(steps=80)
    bad.norms[1] *= 1.5
    settings = ProbeSettings(steps=1000)
    assert stop_here(bad.evidence(), settings).ruling is Ruling.RECOMPUTE_INSTEAD
    assert stop_here(Story(steps=80).evidence(), settings) is None
    assert stop_here(Story(steps=500).evidence(), settings).ruling is Ruling.GOOD
    assert stop_here(bad.evidence(), ProbeSettings(steps=1000, is_early=False)) is None


def test_identical_arms_stop_only_after_the_stated_number_of_steps():
    for steps, expected in ((80, None), (100, Ruling.IDENTICAL)):
        story = Story(steps=steps)
        story.losses[1], story.norms[1] = story.losses[0], story.norms[0]
        findings = stop_here(story.evidence(), ProbeSettings(steps=1000))
        assert (findings and findings.ruling) == expected


@pytest.mark.long
def test_the_shift_rule_raises_no_more_false_alarms_than_stated_at_the_very_limit():
    """Norms of AR(1) noise around a change of exactly a tenth: to break the rule would be wrong, though only just."""
    random, trials = np.random.default_rng(0), 60
    settings = ProbeSettings(steps=150, is_early=False, error=0.5)  # so much that 60 trials can tell
    broken = 0
    for _ in range(trials):
        story = Story(steps=150)
        noise = lfilter([1.0], [1.0, -0.7], random.normal(size=(350, 3)), axis=0)[200:]
        story.norms[1] = 1.1 * story.norms[0] * np.exp(0.05 * noise)
        evidence = story.evidence()
        broken += outcomes(judge(evidence, settings))["shift"] is Outcome.BROKEN
    assert broken <= stats.binom.isf(0.001, trials, settings.error / STATISTICAL_RULES)
