"""What schedules and recomputation do to GPT-3 175B and Llama-3 405B on 1,024 devices: memory of the ranks, bubble, step.

    python -m benchmarks.pipelines [MODEL …]

Nothing runs on a GPU: one rank is traced with fake tensors, cut into stages, and the pipeline is simulated. Seconds are a
roofline's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import cached_property

from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import Trace
from plimsoll.estimator.parallelism.layouts import read_layout
from plimsoll.estimator.parallelism.stages import StageTrace, split_stages
from plimsoll.estimator.pipeline_schedule.orders import Orders, held_bytes, pipeline_orders
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds, bubble_growth, simulate_pipeline
from plimsoll.estimator.rank_estimates import StageOfRank
from plimsoll.estimator.setting import Setting
from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
from plimsoll.estimator.trace_cache import AnswerCache, TracedTarget
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.links import Collective, collective_seconds, group_of
from plimsoll.planning.simulate import Simulation
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


class _Pipeline:
    """One model under one layout: stages that are alike are looked at once."""

    def __init__(self, trace: Trace, layout: Layout, strategy: str) -> None:
        self.layout = layout
        self.setting = Setting(
            device=find_device(_DEVICE),
            layout=layout,
            optimizer="adamw",
            has_master_weights=True,
            strategy=strategy,
            budget_bytes=None,
        )
        self.stages = split_stages(trace, layout)
        self.orders: Orders = pipeline_orders(layout)

    @cached_property
    def seconds(self) -> list[ActionSeconds]:
        """Of every stage."""
        known: dict[tuple[bool, bool, int], ActionSeconds] = {}
        found = []
        for stage in self.stages:
            kind = (stage is self.stages[0], stage is self.stages[-1], len(stage.regions))
            if kind not in known:
                known[kind] = self._seconds_of(stage)
            found.append(known[kind])
        return found

    def _seconds_of(self, stage: StageTrace) -> ActionSeconds:
        alone = StageOfRank(self.setting, stage, 1)
        group = group_of(self.layout, "pp")
        return ActionSeconds(
            forward_seconds=alone.overlap.forward_seconds,
            input_gradient_seconds=alone.overlap.backward_seconds - alone.seconds.weight_gradient_seconds,
            weight_gradient_seconds=alone.seconds.weight_gradient_seconds,
            recompute_seconds=self._simulated(alone).seconds - alone.index.base_seconds,
            transfer_seconds=collective_seconds(
                Collective.SEND, stage.received_bytes, group.ranks, self.setting.device, stride=group.stride
            ),
        )

    def in_flight(self, rank: int) -> int:
        """Micro-batches (with several stages: times stages) that a rank holds at most."""
        return held_bytes(self.orders, [1] * len(self.stages))[rank]

    def peak_bytes(self, rank: int) -> int:
        """The most that live tensors take on a rank."""
        mine = [StageOfRank(self.setting, s, self.in_flight(rank)) for s in self.stages[rank :: self.layout.pp]]
        lasting = sum(stage.lasting_bytes for stage in mine)
        return max(self._simulated(stage).peak_bytes + lasting - stage.lasting_bytes for stage in mine)

    def _simulated(self, stage: StageOfRank) -> Simulation:
        return stage.unmanaged if self.setting.strategy == "none" else stage.recomputed


def table(model: str, trace: Trace) -> list[str]:
    """One row per schedule and strategy."""
    rows = [
        f"### {model} on 1,024 {_DEVICE} (`{_LAYOUT}`)",
        "",
        "| schedule | recomputed | in flight | first rank, GiB | last rank, GiB | bubble | forward and backward, s |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, schedule in _SCHEDULES.items():
        for strategy in _STRATEGIES:
            pipeline = _Pipeline(trace, read_layout(f"{_LAYOUT},{schedule}"), strategy)
            timeline = simulate_pipeline(pipeline.orders, pipeline.seconds)
            peaks = [pipeline.peak_bytes(rank) / GIB for rank in (0, pipeline.layout.pp - 1)]
            rows.append(
                f"| {name} | {strategy} | {pipeline.in_flight(0)} | {peaks[0]:.1f} | {peaks[1]:.1f} "
                f"| {timeline.bubble_share:.1%} | {timeline.step_seconds:.2f} |"
            )
    return rows


def growth(trace: Trace) -> list[str]:
    """What recomputing everything adds to a 1F1B step, and what running ahead of the gradient takes off again."""
    rows = [
        "",
        "| 1f1b, recomputed | rebuilt ahead | forward and backward, s | hidden on the first rank, s | on the last, s |",
        "|---|--:|--:|--:|--:|",
    ]
    pipeline = _Pipeline(trace, read_layout(f"{_LAYOUT},schedule=1f1b"), "full")
    for name, stages in (("every stage", pipeline.seconds), ("all but the last", _last_kept(trace, pipeline))):
        for ahead in (0, 1, 2):
            effect = bubble_growth(pipeline.orders, stages, ahead=ahead)
            hidden = effect.ahead.hidden_seconds
            rows.append(f"| {name} | {ahead} | {effect.ahead.step_seconds:.2f} | {hidden[0]:.2f} | {hidden[-1]:.2f} |")
    return rows


def _last_kept(trace: Trace, pipeline: _Pipeline) -> Sequence[ActionSeconds]:
    """The last stage, which has one micro-batch in flight, keeps everything."""
    kept = _Pipeline(trace, pipeline.layout, "none").seconds[-1]
    return [*pipeline.seconds[:-1], kept]


def simulation_seconds() -> list[str]:
    """How long simulating a pipeline takes here."""
    layout = Layout(dp=128, tp=8, pp=16, micro_batches=128)
    each = ActionSeconds(
        forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0, recompute_seconds=1.0
    )
    start = time.process_time()
    bubble_growth(pipeline_orders(layout), [each] * layout.stages)
    taken = time.process_time() - start
    return ["", f"Three timelines of {layout.ranks:,} ranks ({layout}): {taken:.1f} s on one thread."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=_MODELS, metavar="MODEL")
    spread = read_layout(_LAYOUT)
    for model in parser.parse_args().models:
        request = TraceRequest(
            target=model, device_name=_DEVICE, tp=spread.tp, sequence_parallel=spread.sequence_parallel
        )
        trace = trace_target(request, cache=AnswerCache(TracedTarget)).trace
        print("\n".join([*table(model, trace), *growth(trace), ""]), flush=True)
    print("\n".join(simulation_seconds()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
