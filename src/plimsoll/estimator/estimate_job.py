"""Makes the estimate of one traced micro-batch: plans every rank, simulates the pipeline, computes the throughput.

MFU is the arithmetic of the model's own forward and backward over the dense peak of all ranks. It counts matrix products and
attention as torch's FLOP formulas do (a causal mask is not halved); recomputed arithmetic does not count (Chowdhery et al.
2022, PaLM, appendix B).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import msgspec

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.estimate import Estimate, StageEstimate, StageSeconds, SwitchSetting, Throughput
from plimsoll.artifacts.memory_use import AllocatorUse
from plimsoll.artifacts.naming import compress_names
from plimsoll.artifacts.trace import Phase, Trace, runs_gpu_kernels
from plimsoll.errors import InvalidLayout, InvalidOption
from plimsoll.estimator.allocator_sim.allocator import AllocatorSettings, simulate_allocator
from plimsoll.estimator.budget import RankMemory, budget_items, framework_items, kernel_items
from plimsoll.estimator.lowering import SwitchFigures, lower
from plimsoll.estimator.parallelism.layouts import layout_notes
from plimsoll.estimator.parallelism.least_seconds import least_seconds
from plimsoll.estimator.parallelism.members import stage_counts
from plimsoll.estimator.parallelism.rank import PARTLY_SHARDED, sharding_notes
from plimsoll.estimator.parallelism.stages import split_stages
from plimsoll.estimator.pipeline_schedule.orders import held_bytes, pipeline_orders
from plimsoll.estimator.pipeline_schedule.timeline import (
    ActionSeconds,
    PipelineTimeline,
    bubble_growth,
    simulate_pipeline,
)
from plimsoll.estimator.rank_estimates import Decided, KnownChoices, Rank, StageOfRank, decide_rank, simulate_again
from plimsoll.estimator.setting import AUTO, Setting
from plimsoll.estimator.setting_checks import check_setting
from plimsoll.estimator.switches import SwitchedModel
from plimsoll.estimator.trace_cache import TracedTarget
from plimsoll.planning.costing.links import Collective, collective_seconds, group_of
from plimsoll.planning.costing.roofline import peak_flops_per_second, roofline_costs
from plimsoll.planning.describe import allocation_events, classes_at_peak, describe_peak, waiting_bytes
from plimsoll.planning.describe import held_bytes as micro_batch_bytes
from plimsoll.planning.sending import Sending
from plimsoll.planning.simulate import Simulation, links_of
from plimsoll.planning.what_if import peak_with_chunked_loss
from plimsoll.units import format_bytes, format_seconds

ROOFLINE_ERROR = 0.3
"""The relative error of seconds that a roofline model predicts for jobs that differ from the published runs that the model was
tuned on.
"""
_TUNED_ERRORS = {("A100", False): 0.15, ("H100", False): 0.12, ("A100", True): 0.17}
"""The relative error of the speed, by device family and whether there are tensor or pipeline ranks.

80% of the published runs used for tuning are within this error; ``docs/project/claims.md`` says how many held-out runs are.
All of these runs train dense text models in 16 bits.
"""
_TUNED_MEMORY = {("A100", True): 0.09, ("H100", False): 0.12, ("H200", False): 0.12}
"""The relative error of all memory of a rank, by device family and whether there are pipeline ranks.

It is the largest error in the tuning half of the published runs, which also tuned the unaccounted bytes: pipelines in 16 bits
on A100, FSDP with expandable segments on H100 and H200.
"""
_WEIGHINGS = 4
"""How often the stages of an interleaved pipeline are planned, if the plans do not fit."""
_WORTH_CHUNKING = 0.03
"""If a chunked loss (the loss of a few tokens at a time) lowers the peak by more than this share, a note mentions it."""


class EstimateJob:
    """Computes the estimate of one traced step under one setting (device, layout, optimizer, strategy, budget)."""

    def __init__(self, setting: Setting, traced: TracedTarget, trace: Trace) -> None:
        self.setting = setting
        self.traced = traced
        self.facts = traced.facts
        self.trace = trace
        self.layout = setting.layout
        self.orders = pipeline_orders(self.layout)
        self._planned: list[Rank] | None = None

    def run(self, target: str, trace_seconds: float, started: float) -> Estimate:
        """Decide what every rank keeps and recomputes, simulate the pipeline, and return the estimate."""
        setting, layout = self.setting, self.layout
        ranks = self._decided(setting.strategy, setting.sending)
        timeline, step_seconds = self._timed(ranks)
        flops = sum(stage.seconds.model_flops for rank in ranks for stage in rank.stages) * layout.tp * layout.cp
        stages = tuple(self._stage(position, rank, timeline) for position, rank in enumerate(ranks))
        return Estimate(
            target=target,
            model=self.trace.model,
            device=setting.device.name,
            device_bytes=setting.device.memory_bytes,
            precision="the model's own types" if setting.precision is None else setting.precision.value,
            optimizer=_optimizer_name(ranks[0], setting),
            strategy=setting.strategy,
            budget_bytes=setting.budget_bytes,
            layout=layout,
            techniques=setting.how,
            facts=self.facts,
            stages=stages,
            expandable_bytes=self._expandable_bytes(ranks, stages),
            throughput=self._throughput(step_seconds, flops),
            notes=(*self.trace.notes, *layout_notes(layout), *sharding_notes(layout), *self._notes(ranks, timeline)),
            trace_seconds=trace_seconds,
            total_seconds=time.monotonic() - started,
        )

    def measure(self, strategy: str, sending: Sending | None = None) -> SwitchFigures:
        """Estimate the step under another strategy. Return the most bytes that the tensors of a rank take, the step's seconds,
        and the most bytes on the host.

        ``sending`` says which values are offloaded by the switches of a training framework.
        """
        ranks = self._decided(strategy, sending)
        return SwitchFigures(
            max(rank.peak_bytes for rank in ranks), self._timed(ranks)[1], max(rank.host_bytes for rank in ranks)
        )

    def measure_device(self, strategy: str) -> tuple[int, int]:
        """Return the memory that the fullest rank needs under a strategy, with framework and allocator, and its error, both in
        bytes.
        """
        ranks = self._decided(strategy, None)
        timeline = self._timed(ranks)[0]
        tightest = max(
            (self._stage(position, rank, timeline) for position, rank in enumerate(ranks)),
            key=lambda stage: stage.total_bytes,
        )
        return tightest.total_bytes, tightest.error_bytes

    def within(self, budget_bytes: int) -> EstimateJob:
        """Return the same job with another budget. Both share the stages, which do not depend on the budget."""
        other = EstimateJob(replace(self.setting, budget_bytes=budget_bytes), self.traced, self.trace)
        other.__dict__["stages_of_ranks"] = self.stages_of_ranks
        return other

    def least_bytes(self) -> int:
        """Return a lower bound of the peak of all plans: the most bytes of a rank that no plan changes. No plan is solved."""
        ranks = self.stages_of_ranks
        return max(
            stage.least_bytes + sum(other.index.lasting_bytes for other in stages if other is not stage)
            for stages in ranks
            for stage in stages
        )

    def least_seconds(self) -> float:
        """Return a lower bound of the step's seconds under this layout with any larger micro-batch, for the same samples.

        The pipeline is simulated with as many micro-batches as now: with fewer, ranks idle longer.
        """
        device, layout = self.setting.device, self.layout
        seconds: list[ActionSeconds] = []
        for number in range(layout.stages):
            stage = self.stages_of_ranks[number % layout.pp][number // layout.pp]
            least = least_seconds(stage.trace, device, layout)
            own = stage.seconds
            of_weights = least[Phase.BACKWARD] * (own.weight_gradient_seconds / (own.backward_seconds or 1.0))
            seconds.append(
                ActionSeconds(
                    forward_seconds=least[Phase.FORWARD],
                    input_gradient_seconds=least[Phase.BACKWARD] - of_weights,
                    weight_gradient_seconds=of_weights,
                )
            )
        after = max(sum(stage.overlap.optimizer_seconds for stage in stages) for stages in self.stages_of_ranks)
        return simulate_pipeline(self.orders, seconds).step_seconds + after

    def measure_rank(self, decide: Callable[[StageOfRank], Simulation]) -> tuple[StageEstimate, int]:
        """Estimate the only rank of the job under the decisions of a function, which simulates the rank's stage.

        Return the rank's memory, and its bytes on the host.
        """
        [[stage]] = self.stages_of_ranks
        rank = Rank((stage,), (Decided(decide(stage)),))
        return self._stage(0, rank, self._timed([rank])[0]), rank.host_bytes

    def lower(self, framework: str | None) -> tuple[EstimateJob, tuple[SwitchSetting, ...]]:
        """Choose the best setting of a framework's own switches within the budget.

        Without a framework, nothing is chosen.

        Returns:
            The job under that setting, and the setting's figures followed by those of similar settings.
        """
        if framework is None:
            return self, ()
        assert self.setting.budget_bytes is not None, "switches are chosen within a budget"
        jobs = {"": self}
        if (left := _leaving_shards(self.setting)) is not None:
            jobs[left.how.offload] = EstimateJob(left, self.traced, self.trace)
        model = SwitchedModel.of(
            self.trace,
            stages=self.layout.stages,
            has_host_link=bool(self.setting.device.host_link_bytes_per_second),
            may_leave_shards=len(jobs) > 1,
        )
        chosen, figures = lower(
            framework,
            model,
            self.setting.budget_bytes,
            lambda each: jobs[each.on_host].measure(each.strategy, each.sending),
        )
        job = jobs[chosen.on_host]
        job.setting = replace(job.setting, strategy=chosen.strategy, sending=chosen.sending)
        return job, figures

    @cached_property
    def stages_of_ranks(self) -> list[list[StageOfRank]]:
        """For each rank of the pipeline, from first to last: the list of the stages that this rank holds."""
        layout, setting = self.layout, self.setting
        counts = stage_counts(
            self.trace, layout, self.facts, lambda: roofline_costs(self.trace, setting.device, layout)
        )
        cut = split_stages(self.trace, layout, counts=counts, keeps_sent=not setting.how.megatron)
        flights = held_bytes(self.orders, [1] * len(cut))  # counts all stages of a rank together, if it has several
        return [
            [StageOfRank(setting, cut[stage], flights[position]) for stage in range(position, len(cut), layout.pp)]
            for position in range(layout.pp)
        ]

    def _decided(self, strategy: str, sending: Sending | None) -> list[Rank]:
        """Decide what all stages of every rank keep and recompute, and return the ranks.

        With virtual stages this happens several times: a result says how many bytes each stage's micro-batches hold, which
        ``_weighed`` needs.
        """
        if strategy == AUTO and self._planned is not None:
            return self._planned
        known: KnownChoices = {}
        setting = replace(self.setting, strategy=strategy, sending=sending)
        ranks = [decide_rank(stages, setting, known) for stages in self.stages_of_ranks]
        if self.layout.virtual_stages > 1 and strategy == AUTO:
            ranks = self._planned_by_weight(ranks, setting, known)
        elif self.layout.virtual_stages > 1:
            ranks = [decide_rank(stages, setting, known) for stages in self._weighed(ranks)]
        if strategy == AUTO:  # a search plans the fastest layout before ``run`` asks for it again
            self._planned = ranks
        return ranks

    def _planned_by_weight(self, ranks: list[Rank], setting: Setting, known: KnownChoices) -> list[Rank]:
        """Plan the ranks of an interleaved pipeline, given first plans for them. Return the fastest plans that fit, or those
        with the lowest peak.

        How many micro-batches wait on a stage depends on the bytes that they hold, and so on the plans, which depend on it in
        turn. So the peak of plans is simulated again with the micro-batches that wait under these same plans. If it exceeds the
        budget, the next plans get a budget that is lower by the excess.
        """
        tried: list[tuple[bool, float, list[Rank]]] = []
        budget_bytes = setting.budget_bytes
        for _ in range(_WEIGHINGS):
            weighed = list(self._weighed(ranks))
            ranks = [simulate_again(stages, rank.decided) for stages, rank in zip(weighed, ranks, strict=True)]
            peak_bytes = max(rank.peak_bytes for rank in ranks)
            excess_bytes = 0 if setting.budget_bytes is None else peak_bytes - setting.budget_bytes
            is_over = excess_bytes > 0
            tried.append((is_over, peak_bytes if is_over else self._timed(ranks)[1], ranks))
            if budget_bytes is None or (len(tried) > 1 and not is_over):
                break
            budget_bytes -= max(excess_bytes, 0)
            tighter = replace(setting, budget_bytes=max(budget_bytes, 1))
            ranks = [decide_rank(stages, tighter, known) for stages in weighed]
        return min(tried, key=lambda each: each[:2])[2]

    def _weighed(self, ranks: list[Rank]) -> Iterator[list[StageOfRank]]:
        """For each rank, yield its stages with ``in_flight`` set: how many micro-batches of a stage wait for their backward at
        one time.

        ``in_flight`` is the number of the stage's own micro-batches that hold as many bytes as the micro-batches of all the
        rank's stages together. It may be a fraction.
        """
        pp = self.layout.pp
        held = [micro_batch_bytes(ranks[n % pp].decided[n // pp].simulation) for n in range(self.layout.stages)]
        for position, most_bytes in enumerate(held_bytes(self.orders, held)):
            own = held[position::pp]
            flights = [max(1.0, most_bytes / each) if each else 1.0 for each in own]
            stages = zip(ranks[position].stages, flights, strict=True)
            yield [stage if stage.in_flight == flight else stage.waiting_with(flight) for stage, flight in stages]

    def _timed(self, ranks: list[Rank]) -> tuple[PipelineTimeline, float]:
        """Simulate the pipeline. Return its timeline, and the seconds of the whole step with reductions and optimizer."""
        timeline = simulate_pipeline(self.orders, self._pipeline_seconds(ranks))
        return timeline, timeline.step_seconds + max(self._after_seconds(rank) for rank in ranks)

    def _pipeline_seconds(self, ranks: list[Rank]) -> list[ActionSeconds]:
        """Return, for each stage, the seconds that forward, backward, recomputation and transfer of one micro-batch take."""
        layout, device = self.layout, self.setting.device
        group = group_of(layout, "pp")
        found = []
        for number in range(layout.stages):
            rank, position = ranks[number % layout.pp], number // layout.pp
            stage = rank.stages[position]
            overlap, weight_gradient = stage.overlap, stage.seconds.weight_gradient_seconds
            received = stage.stage.received_bytes
            found.append(
                ActionSeconds(
                    forward_seconds=overlap.forward_seconds,
                    input_gradient_seconds=overlap.backward_seconds - weight_gradient,
                    weight_gradient_seconds=weight_gradient,
                    recompute_seconds=_recompute_seconds(rank, position),
                    transfer_seconds=collective_seconds(
                        Collective.SEND, received, group.ranks, device, stride=group.stride
                    )
                    if received
                    else 0.0,
                )
            )
        return found

    def _after_seconds(self, rank: Rank) -> float:
        """Return the seconds after the last micro-batch: the part of the gradient reduction during which nothing is computed,
        and the optimizer.
        """
        return sum(stage.overlap.reduction_seconds + stage.overlap.optimizer_seconds for stage in rank.stages)

    def _stage(self, position: int, rank: Rank, timeline: PipelineTimeline) -> StageEstimate:
        """Return one row of the estimate. It describes the ranks at one position of the pipeline."""
        layout, setting = self.layout, self.setting
        tightest = rank.tightest
        simulation = rank.decided[tightest].simulation
        use = self._allocator_use(rank)
        classes = Counter(classes_at_peak(simulation))
        for other, stage in enumerate(rank.stages):
            if other != tightest:
                classes.update(stage.lasting_classes)
        is_waiting = simulation.peak_instant < simulation.index.last_wait
        memory = RankMemory(
            classes=classes,
            waiting_bytes=waiting_bytes(simulation) if is_waiting else 0,
            allocator=use,
            has_stand_ins=runs_gpu_kernels(setting.device.name),
        )
        names = [
            self.trace.regions[region].name or self.trace.model
            for stage in rank.stages
            for region in stage.stage.regions
        ]
        return StageEstimate(
            stage=position,
            ranks=layout.ranks // layout.pp,
            regions=compress_names(names),
            in_flight=held_bytes(self.orders, [1] * layout.stages)[position],
            items=budget_items(
                memory,
                rank.optimizers,
                (
                    *framework_items(setting.device, layout, self.exchanged_bytes),
                    *kernel_items(spec.name for stage in rank.stages for spec in stage.trace.specs.values()),
                ),
                has_pipeline=layout.pp > 1,
            ),
            allocated_bytes=rank.peak_bytes,
            reserved_bytes=None if use is None else use.reserved_peak_bytes,
            unmanaged_bytes=rank.peak_under([stage.unmanaged for stage in rank.stages]),
            recomputed_bytes=rank.peak_under([stage.recomputed for stage in rank.stages]),
            peak=describe_peak(simulation),
            seconds=self._seconds(rank),
            bubble_share=timeline.bubble_shares[position],
            plans=tuple(each.plan for each in rank.decided if each.plan is not None),
            whole_error=self._memory_error(),
        )

    def _allocator_use(self, rank: Rank, *, is_expandable: bool = False) -> AllocatorUse | None:
        """Simulate the caching allocator over one step of the rank's stage with the highest peak. Return the memory that the
        allocator reserves.

        Return ``None`` if the device is not a GPU.
        """
        if not self.setting.is_gpu:
            return None
        is_expandable = is_expandable or self.setting.how.expandable_segments
        events = (*rank.lasting_events(), *allocation_events(rank.decided[rank.tightest].simulation))
        return simulate_allocator(events, AllocatorSettings(is_expandable=is_expandable))

    def _expandable_bytes(self, ranks: list[Rank], stages: tuple[StageEstimate, ...]) -> int | None:
        """Simulate the caching allocator with expandable segments for the rank with the most memory. Return the bytes that it
        reserves, or ``None`` if the device is not a GPU.
        """
        tightest = max(range(len(stages)), key=lambda position: stages[position].total_bytes)
        use = self._allocator_use(ranks[tightest], is_expandable=True)
        return None if use is None else use.reserved_peak_bytes

    def _seconds(self, rank: Rank) -> StageSeconds:
        """Return the rank's seconds by kind of work, added up over the rank's stages. They are for one micro-batch, except the
        exposed communication and the optimizer, which are for the whole step.
        """
        each, overlaps = [stage.seconds for stage in rank.stages], [stage.overlap for stage in rank.stages]
        exposed = sum(self.layout.micro_batches * o.exposed_seconds + o.reduction_seconds for o in overlaps)
        return StageSeconds(
            forward_seconds=sum(s.forward_seconds for s in each),
            backward_seconds=sum(s.backward_seconds for s in each),
            weight_gradient_seconds=sum(s.weight_gradient_seconds for s in each),
            recompute_seconds=sum(_recompute_seconds(rank, position) for position in range(len(each))),
            communication_seconds=sum(s.communication_seconds for s in each),
            exposed_seconds=exposed,
            product_seconds=sum(s.product_seconds for s in each),
            optimizer_seconds=sum(o.optimizer_seconds for o in overlaps),
        )

    def _peak_flops_per_second(self) -> float:
        """Return the dense peak of one device in FLOPs per second, for the model's mix of dtypes. It is all FLOPs divided by
        the seconds that they take if each runs at its own dtype's peak.
        """
        specs = [self.trace.specs[op.cost_key] for op in self.trace.ops]
        seconds = sum(spec.flops / peak_flops_per_second(spec, self.setting.device) for spec in specs)
        return sum(spec.flops for spec in specs) / seconds if seconds else 0.0

    def _throughput(self, step_seconds: float, model_flops: int) -> Throughput:
        """Return the speed of the job: samples and tokens per second, and MFU.

        ``model_flops`` are the FLOPs of one micro-batch on all ranks of one data-parallel replica.
        """
        layout, facts = self.layout, self.facts
        replicas = layout.dp * layout.micro_batches
        samples = (facts.batch or 1) * replicas
        whole = None if facts.tokens is None else facts.tokens * layout.cp * replicas
        tokens = None if whole is None else whole * (100 - self.setting.how.padded) // 100
        peak = layout.ranks * self._peak_flops_per_second()
        return Throughput(
            step_seconds=step_seconds,
            samples_per_second=samples / step_seconds,
            tokens_per_second=None if tokens is None else tokens / step_seconds,
            mfu=model_flops * replicas / (step_seconds * peak) if peak else None,
            published_mfu=self._published_mfu(None if whole is None else whole / step_seconds),
            relative_error=self._speed_error(),
            basis=Basis.MODELLED,
        )

    @property
    def exchanged_bytes(self) -> int:
        """The size in bytes of a token that DeepEP sends, in 16 bits. It is 0 without DeepEP."""
        return 2 * (self.facts.hidden or 0) if self.setting.how.moe == "deepep" else 0

    @property
    def _is_like_published(self) -> bool:
        """Whether the job resembles the published runs used for tuning: dense text models with products in 16 bits."""
        facts = self.facts
        return bool(facts.sequence) and not facts.experts and self.layout.cp == 1 and "f32" not in self._types()

    @property
    def _family(self) -> str:
        return self.setting.device.name.partition("-")[0]

    def _speed_error(self) -> float:
        """Return the relative error of the speed: the error measured on published runs if the job is like them, otherwise the
        error of a roofline.
        """
        kind = (self._family, max(self.layout.tp, self.layout.pp) > 1)
        return _TUNED_ERRORS.get(kind, ROOFLINE_ERROR) if self._is_like_published else ROOFLINE_ERROR

    def _memory_error(self) -> float | None:
        """Return the relative error of all memory of a rank, as measured on published runs of this kind.

        Return ``None`` for other kinds of jobs.
        """
        layout, how = self.layout, self.setting.how
        is_known = layout.pp > 1 or (layout.zero >= PARTLY_SHARDED and how.expandable_segments)
        if not is_known or not self._is_like_published or how.is_adapting or how.offload:
            return None
        return _TUNED_MEMORY.get((self._family, layout.pp > 1))

    def _types(self) -> set[str]:
        """Return the names of the dtypes that the step's matrix products run in."""
        return {spec.dtype for spec in self.trace.specs.values() if spec.product is not None}

    def _published_mfu(self, tokens_per_second: float | None) -> float | None:
        """Return the MFU by the formula of papers: 6 N + 12 L H Q T FLOPs per token, divided by the dense peak in 16 bits.

        H are the attention heads and Q is the size of a head, whose product is not always the hidden size. Return ``None`` if a
        size is unknown, as without attention.
        """
        facts, peaks = self.facts, self.setting.device.peak_flops_per_second
        sizes = (
            facts.active_parameters or facts.parameters,
            facts.layers,
            facts.heads,
            facts.head_size,
            facts.sequence,
        )
        peak = peaks.get("bf16", peaks.get("f16", 0.0))
        if tokens_per_second is None or not peak or None in sizes:
            return None
        parameters, layers, heads, head_size, sequence = (each or 0 for each in sizes)
        flops = 6 * parameters + 12 * layers * heads * head_size * sequence * self.layout.cp
        return flops * tokens_per_second / (self.layout.ranks * peak)

    def _notes(self, ranks: list[Rank], timeline: PipelineTimeline) -> list[str]:
        """Return notes for the user about facts that the figures of the estimate do not show."""
        notes = []
        recompute = [sum(_recompute_seconds(rank, p) for p in range(len(rank.stages))) for rank in ranks]
        if self.layout.pp > 1 and max(recompute) > 0:
            growth = bubble_growth(self.orders, self._pipeline_seconds(ranks))
            notes.append(
                f"recomputation adds {format_seconds(growth.added_seconds)} to the pipeline's step; if it ran one micro-batch "
                f"ahead, while a rank idles, it would add {format_seconds(growth.regained_seconds)} less"
            )
        head = ranks[-1].decided[ranks[-1].tightest].simulation
        chunked = peak_with_chunked_loss(head)
        if chunked is not None and chunked < (1 - _WORTH_CHUNKING) * head.peak_bytes:
            notes.append(
                f"computing logits and loss in chunks (plimsoll.chunked.chunk_loss) would save "
                f"{format_bytes(head.peak_bytes - chunked)} of {format_bytes(ranks[-1].peak_bytes)} on the rank with the head"
            )
        longer = [each.simulation for rank in ranks for each in rank.decided if _drops_boundaries(each.simulation)]
        if longer and not any(links_of(each.index, each.choices) for each in longer):
            notes.append(
                f"{self.setting.strategy} takes as much as full here: autograd does not save the inputs of these blocks, only "
                "casts of them, and an input that is not saved is kept"
            )
        if self.setting.device.is_corrected or self.setting.device.is_described:
            notes.append(f"device figures: {self.setting.device.source}")
        if self.layout.pp > 1:
            notes.append(f"pipeline bubble: ranks idle {timeline.bubble_share:.1%} of the time")
        return notes


def _leaving_shards(setting: Setting) -> Setting | None:
    """Return the same setting, with parameter shards, their gradients and the optimizer moved to the host.

    Return ``None`` if that is impossible, or if the setting offloads something already.
    """
    if setting.how.on_host or not setting.device.host_link_bytes_per_second:
        return None
    left = replace(setting, how=msgspec.structs.replace(setting.how, offload="parameters"))
    try:
        check_setting(left)
    except (InvalidOption, InvalidLayout):
        return None
    return left


def _drops_boundaries(simulation: Simulation) -> bool:
    """Whether a strategy drops inputs of regions, so that several are recomputed from the input of the first."""
    return any(choice.is_boundary_dropped for choice in simulation.choices)


def _recompute_seconds(rank: Rank, position: int) -> float:
    """Return how many seconds longer one micro-batch of a stage takes under its plan than with everything kept."""
    return rank.decided[position].simulation.seconds - rank.stages[position].unmanaged.seconds


def _optimizer_name(rank: Rank, setting: Setting) -> str:
    """Return text for the user: the optimizer's name, how its step runs (loop, multi-tensor or fused), and whether it has
    master weights.
    """
    uses = rank.optimizers
    if not uses:
        return "no optimizer"
    return f"{uses[0].name} ({uses[0].form})" + (" with master weights" if setting.has_master_weights else "")
