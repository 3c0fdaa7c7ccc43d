"""What schedules and recomputation do to GPT-3 175B and Llama-3 405B on 1,024 devices: memory of the ranks, bubble, step.

    python -m benchmarks.pipelines [MODEL …]

Nothing runs on a GPU: one rank is traced with fake tensors, cut into stages, and the pipeline is simulated. Seconds are a
roofline's.
"""

from __future__ import annotations

import argparse
import sys
import time

import plimsoll
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.layout import Layout
from plimsoll.pipelining.growth import bubble_growth
from plimsoll.pipelining.orders import pipeline_orders
from plimsoll.pipelining.timeline import StageSeconds
from plimsoll.units import GIB

_MODELS = ("gpt3-175b", "llama-3-405b")
_DEVICE = "H100-SXM"
_LAYOUT = "dp=8,tp=8,sp,pp=16,zero=1,micro-batches=64"
_SCHEDULES = {
    "gpipe": "schedule=gpipe",
    "1f1b": "schedule=1f1b",
    "interleaved, 2 stages per rank": "schedule=interleaved,virtual=2",
    "zero-bubble": "schedule=zero-bubble",
}
_STRATEGIES = ("none", "full")


def table(model: str) -> list[str]:
    """One row per schedule and strategy."""
    rows = [
        f"### {model} on 1,024 {_DEVICE} (`{_LAYOUT}`)",
        "",
        "| schedule | recomputed | in flight, first rank | first rank, GiB | last rank, GiB | bubble | step, s |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, schedule in _SCHEDULES.items():
        for strategy in _STRATEGIES:
            found = plimsoll.estimate(model, device=_DEVICE, layout=f"{_LAYOUT},{schedule}", strategy=strategy)
            first, last = found.stages[0], found.stages[-1]
            bubble = sum(stage.bubble_share for stage in found.stages) / len(found.stages)
            rows.append(
                f"| {name} | {strategy} | {first.in_flight} | {first.allocated_bytes / GIB:.1f} "
                f"| {last.allocated_bytes / GIB:.1f} | {bubble:.1%} | {found.throughput.step_seconds:.2f} |"
            )
    return rows


def growth(model: str) -> list[str]:
    """What recomputing everything adds to a 1F1B step, and what running ahead of the gradient takes off again."""
    found = plimsoll.estimate(model, device=_DEVICE, layout=f"{_LAYOUT},schedule=1f1b", strategy="full")
    rows = [
        "",
        "| micro-batches rebuilt ahead | step, s | hidden on the first rank, s | on the last, s |",
        "|--:|--:|--:|--:|",
    ]
    for ahead in (0, 1, 2):
        effect = bubble_growth(pipeline_orders(found.layout), _seconds(found), ahead=ahead)
        rows.append(
            f"| {ahead} | {effect.ahead.step_seconds:.2f} | {effect.ranks[0].hidden_seconds:.2f} "
            f"| {effect.ranks[-1].hidden_seconds:.2f} |"
        )
    rows.append(f"\nWithout recomputation the same pipeline takes {effect.without.step_seconds:.2f} s.")
    return rows


def _seconds(found: Estimate) -> list[StageSeconds]:
    """Stages of a pipeline with one stage per rank; the transfers between them are left out."""
    return [
        StageSeconds(
            forward_seconds=stage.seconds.forward_seconds,
            input_gradient_seconds=stage.seconds.backward_seconds - stage.seconds.weight_gradient_seconds,
            weight_gradient_seconds=stage.seconds.weight_gradient_seconds,
            recompute_seconds=stage.seconds.recompute_seconds,
        )
        for stage in found.stages
    ]


def simulation_seconds() -> list[str]:
    """How long simulating a pipeline takes here."""
    layout = Layout(dp=128, tp=8, pp=16, micro_batches=128)
    each = StageSeconds(
        forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0, recompute_seconds=1.0
    )
    start = time.process_time()
    bubble_growth(pipeline_orders(layout), [each] * layout.stages)
    taken = time.process_time() - start
    return ["", f"Three timelines of {layout.ranks:,} ranks ({layout}): {taken:.1f} s on one thread."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=_MODELS, metavar="MODEL")
    for model in parser.parse_args().models:
        print("\n".join([*table(model), *growth(model), ""]), flush=True)
    print("\n".join(simulation_seconds()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
