"""A job in; both arms advanced until the rules are clear or the steps are taken, and the evidence with its findings out."""

from __future__ import annotations

from plimsoll.artifacts.verdict import Ruling
from plimsoll.probing.arms import Arms, Job, in_turns
from plimsoll.probing.evidence import Evidence
from plimsoll.probing.rules import Probed, judge


def run_probe(job: Job) -> Probed:
    """Train both arms in turns, and stop where the answer is clear.

    The rules are held against the logs at the looks that the settings name; in between only NaN, infinity and bit-equality
    are looked at, which chance cannot fake.
    """
    settings = job.settings
    with in_turns(job) as arms:
        while True:
            probed = _clear_answer(arms, job)
            if probed is not None:
                job.report("done", 1.0)
                return probed
            if arms.steps >= settings.steps:
                return _judged(arms, job)
            arms.advance()


def _clear_answer(arms: Arms, job: Job) -> Probed | None:
    """The answer where it is clear before all steps are taken."""
    settings = job.settings
    if not arms.is_finite:
        return _judged(arms, job)
    if not settings.is_early or not 0 < arms.steps < settings.steps:
        return None
    if arms.steps >= settings.identical_steps and Evidence(*arms.logs, job.blocks.names).is_identical:
        return _judged(arms, job)
    if arms.steps not in settings.looks:
        return None
    job.report("holding the rules against the logs", arms.steps / settings.steps)
    probed = _judged(arms, job)
    ruling = probed.findings.ruling
    if ruling is Ruling.GOOD:
        return probed if 2 * arms.steps >= settings.steps else None
    return None if ruling in (Ruling.UNDECIDED, Ruling.IDENTICAL) else probed


def _judged(arms: Arms, job: Job) -> Probed:
    evidence = Evidence(*arms.logs, job.blocks.names)
    return Probed(evidence, judge(evidence, job.settings))
