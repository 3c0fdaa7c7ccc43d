"""A job in; both arms advanced until the rules are clear or the steps are taken, and the evidence with its findings out."""

from __future__ import annotations

from plimsoll.analysis.probe.arms import Job, in_turns
from plimsoll.analysis.probe.evidence import Evidence
from plimsoll.analysis.probe.rules import Probed, judge, stop_here


def run_probe(job: Job) -> Probed:
    """Train both arms in turns, and stop where the answer is clear."""
    settings = job.settings
    with in_turns(job) as arms:
        while True:
            evidence = Evidence(*arms.logs, job.blocks.names)
            findings = stop_here(evidence, settings)
            if findings is None and arms.steps >= settings.steps:
                findings = judge(evidence, settings)
            if findings is not None:
                job.report("done", 1.0)
                return Probed(evidence, findings)
            arms.advance()
