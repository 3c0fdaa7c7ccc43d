"""Seconds of a step, its micro-batches and its arithmetic in; tokens per second and MFU out, with their error.

MFU counts the arithmetic of the model's own forward and backward, matrix products and attention as torch's flop formulas
count them (a causal mask is not halved), against the dense peak of all ranks; what is run again does not count (Chowdhery et
al. 2022, PaLM, appendix B).
"""

from __future__ import annotations

from plimsoll.artifacts.basis import Basis
from plimsoll.artifacts.estimate import Throughput
from plimsoll.artifacts.layout import Layout
from plimsoll.artifacts.model_facts import ModelFacts

ROOFLINE_ERROR = 0.3
"""What a roofline's seconds are off by, as a share: ``docs/claims.md`` compares it with published training runs."""


def throughput(
    step_seconds: float, layout: Layout, facts: ModelFacts, model_flops: int, peak_flops_per_second: float
) -> Throughput:
    """The speed of a whole job.

    Args:
        step_seconds: from the first forward to the end of the optimizer's step.
        layout: the job's.
        facts: of the model and one rank's micro-batch.
        model_flops: of one micro-batch, on the ranks of one data-parallel replica together.
        peak_flops_per_second: dense, of one device, in the types that it computes in.
    """
    replicas = layout.dp * layout.micro_batches
    samples = (facts.batch or 1) * replicas
    tokens = None if facts.tokens is None else facts.tokens * layout.cp * replicas
    peak = layout.ranks * peak_flops_per_second
    return Throughput(
        step_seconds=step_seconds,
        samples_per_second=samples / step_seconds,
        tokens_per_second=None if tokens is None else tokens / step_seconds,
        mfu=model_flops * replicas / (step_seconds * peak) if peak else None,
        relative_error=ROOFLINE_ERROR,
        basis=Basis.MODELLED,
    )
