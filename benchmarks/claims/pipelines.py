"""What is published of pipelines' bubbles, beside the simulated timeline."""

from __future__ import annotations

from benchmarks.claims.claim import Claim, Figure
from plimsoll.artifacts.job import Layout, PipelineSchedule
from plimsoll.estimator.pipeline_schedule.orders import held_bytes, in_flight, pipeline_orders
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds, simulate_pipeline

_FORWARD, _BACKWARD = 1.0, 2.0


def _bubble(layout: Layout) -> float:
    """Idle time over the time of the work itself, with equal stages."""
    share = 1 / layout.virtual_stages
    stage = ActionSeconds(
        forward_seconds=_FORWARD * share,
        input_gradient_seconds=_BACKWARD / 2 * share,
        weight_gradient_seconds=_BACKWARD / 2 * share,
    )
    timeline = simulate_pipeline(pipeline_orders(layout), [stage] * layout.stages)
    work = layout.micro_batches * (_FORWARD + _BACKWARD)
    return timeline.step_seconds / work - 1


def _fractions() -> list[Figure]:
    found = []
    for p, m in ((4, 8), (8, 64), (16, 32)):
        for schedule in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B):
            layout = Layout(pp=p, micro_batches=m, schedule=schedule)
            found.append(
                Figure(
                    what=f"{schedule.value}, p = {p}, m = {m}",
                    published=(p - 1) / m,
                    ours=_bubble(layout),
                    unit="{:.1%}",
                )
            )
    for p, m, v in ((4, 8, 2), (8, 64, 3), (8, 64, 6)):
        layout = Layout(pp=p, micro_batches=m, schedule=PipelineSchedule.INTERLEAVED, virtual_stages=v)
        found.append(
            Figure(
                what=f"interleaved, p = {p}, m = {m}, v = {v}",
                published=(p - 1) / (m * v),
                ours=_bubble(layout),
                unit="{:.1%}",
            )
        )
    return found


def _zero_bubble() -> list[Figure]:
    found = []
    for p, m in ((4, 8), (8, 64)):
        layout = Layout(pp=p, micro_batches=m, schedule=PipelineSchedule.ZERO_BUBBLE)
        # (p - 1)(T_F + T_B - T_W) with T_F = T_B = T_W: a third of 1F1B's.
        found.append(Figure(what=f"p = {p}, m = {m}", published=(p - 1) / m / 3, ours=_bubble(layout), unit="{:.1%}"))
    return found


def _waiting() -> list[Figure]:
    found = []
    for p, m in ((8, 64), (35, 280)):
        first = in_flight(pipeline_orders(Layout(pp=p, micro_batches=m)), p)[0]
        found.append(Figure(what=f"1F1B, p = {p}", published=float(p), ours=float(first), unit="{:.0f} micro-batches"))
    for p, m, v in ((8, 64, 3), (35, 280, 3)):
        layout = Layout(pp=p, micro_batches=m, schedule=PipelineSchedule.INTERLEAVED, virtual_stages=v)
        ours = held_bytes(pipeline_orders(layout), [1] * layout.stages)[0] / v
        found.append(
            Figure(
                what=f"interleaved, p = {p}, v = {v}",
                published=p * (1 + (p - 1) / (p * v)),
                ours=ours,
                unit="{:.1f} micro-batches' worth",
            )
        )
    return found


CLAIMS = (
    Claim(
        name="bubbles",
        statement="The bubble is (p - 1)/m of the work for GPipe and 1F1B, (p - 1)/(mv) interleaved",
        source="Narayanan et al. 2021 (arXiv 2104.04473), section 2.2",
        reading="the simulated timeline of equal stages without transfers",
        figures=_fractions,
        is_cheap=True,
    ),
    Claim(
        name="zero bubble",
        statement="ZB-H1 leaves a bubble of (p - 1)(T_F + T_B - T_W), a third of 1F1B's with equal thirds",
        source="Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), table 2",
        reading="the same timeline with backward in halves",
        figures=_zero_bubble,
        is_cheap=True,
    ),
    Claim(
        name="first stage",
        statement="The first stage holds p micro-batches under 1F1B, and p(1 + (p - 1)/(pv)) interleaved",
        source="Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.3",
        reading="micro-batches between forward and backward on the first rank, by the order of actions",
        figures=_waiting,
        is_cheap=True,
    ),
)
