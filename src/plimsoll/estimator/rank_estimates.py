"""Decides what each rank of a pipeline keeps and recomputes. The result has the rank's memory and time.

A rank of an interleaved pipeline holds several stages. Each stage is planned separately, with the lasting bytes of the other
stages taken off the budget. Its ``in_flight`` counts its own micro-batches, as many as hold the bytes that the micro-batches of
all stages hold at most. It may be a fraction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.memory_use import AllocationEvent, OptimizerUse
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.estimator.parallelism.overlap import OverlappedSeconds, RankSeconds, measure_rank, overlapped_seconds
from plimsoll.estimator.parallelism.rank import rank_trace
from plimsoll.estimator.parallelism.stages import StageTrace
from plimsoll.estimator.parallelism.units import in_f32, rank_parameters
from plimsoll.estimator.setting import AUTO, EVERYTHING, NOTHING, Setting, optimizer_of
from plimsoll.planning.choice import Choice
from plimsoll.planning.choices import ChoiceSet
from plimsoll.planning.costing.host import host_forms, host_forms_of_switches
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.simulate import Simulation, choices_of, run_choices
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import (
    choose_full,
    choose_min_cut,
    keeps_the_rest,
    send_kept,
    strategy_choices,
)

KnownChoices = dict[Hashable, ChoiceSet]


@dataclass(frozen=True, slots=True)
class Decided:
    """The simulated step of one stage under a strategy, as data. ``plan`` is the plan if the strategy is ``auto`` and a plan
    was solved.
    """

    simulation: Simulation
    plan: Plan | None = None


class StageOfRank:
    """One stage of the pipeline as one rank runs it: with the rank's shards, optimizer and collectives.

    ``in_flight`` is the largest number of its micro-batches that are between forward and backward at one time.
    """

    def __init__(self, setting: Setting, stage: StageTrace, in_flight: float) -> None:
        self.setting = setting
        self.stage = stage
        self.in_flight = in_flight

    def waiting_with(self, in_flight: float) -> StageOfRank:
        """Return the same stage with ``in_flight`` micro-batches in flight (between forward and backward).

        The new stage shares the trace and the other parts that do not depend on this number.
        """
        other = StageOfRank(self.setting, self.stage, in_flight)
        alike = ("optimizer", "trace", "costs", "seconds", "overlap")
        other.__dict__.update({name: self.__dict__[name] for name in alike if name in self.__dict__})
        return other

    @cached_property
    def optimizer(self) -> OptimizerUse | None:
        """The memory that the optimizer needs for this rank's parameters and the work of its step, or ``None`` without an
        optimizer.
        """
        return optimizer_of(self.setting, rank_parameters(self.stage.trace, self.setting.layout, self.setting.held))

    @cached_property
    def trace(self) -> Trace:
        """The trace of one micro-batch's step, as this rank runs it."""
        return rank_trace(
            self.stage.trace,
            self.setting.layout,
            self.optimizer,
            self.setting.held,
            is_stepping_early=self.setting.how.optimizer_in_backward,
        )

    @cached_property
    def costs(self) -> Costs:
        """For each op of the trace, the seconds that a roofline model predicts on the device."""
        return roofline_costs(self.trace, self.setting.device, self.setting.layout)

    @cached_property
    def index(self) -> StepIndex:
        """The stage's step in the form that the planner reads. It counts the activations of micro-batches that wait for their
        backward.
        """
        return self._indexed()

    def _indexed(self) -> StepIndex:
        forms = host_forms(self.trace, self.setting.device) if self.setting.is_sending else None
        return StepIndex(self.trace, self.costs, forms, in_flight=self.in_flight)

    @cached_property
    def sending_index(self) -> StepIndex:
        """The stage's step in the form that the planner reads (see ``index``), with values that may be offloaded to the host.
        It is used for settings whose framework switches offload.
        """
        forms = host_forms_of_switches(self.trace, self.setting.device)
        return StepIndex(self.trace, self.costs, forms, in_flight=self.in_flight)

    @cached_property
    def unmanaged(self) -> Simulation:
        """The simulation of the stage's step if all values are kept."""
        return run_choices(self.index, self.named_choices(self.index, NOTHING))

    @cached_property
    def recomputed(self) -> Simulation:
        """The simulation of the stage's step if only the inputs of its regions (managed module calls) are kept."""
        return run_choices(self.index, choose_full(self.index, ""))

    @property
    def least_bytes(self) -> int:
        """A lower bound of the stage's peak under any plan: the most bytes that are in memory at one instant whatever is
        decided.

        With virtual stages, micro-batches in flight are left out, because how many of them wait on each stage depends on the
        decisions.
        """
        index = self.index
        fixed = index.fixed
        if self.setting.layout.virtual_stages > 1:
            fixed = fixed - index.waits(index.between_bytes)
        return int(fixed.max())

    @cached_property
    def seconds(self) -> RankSeconds:
        """The seconds that one micro-batch takes without recomputation, by kind of work."""
        return measure_rank(self.trace, self.costs)

    @cached_property
    def overlap(self) -> OverlappedSeconds:
        """The seconds of one micro-batch with its data-parallel collectives, which run at the same time as compute and delay
        it.
        """
        return overlapped_seconds(self.trace, self.costs, gathers_late=self.setting.how.comm_overlap)

    @cached_property
    def host_bytes(self) -> int:
        """The bytes that this rank holds on the host during the whole step: optimizer state, and parameter shards with their
        gradients.
        """
        how, held, use = self.setting.how, self.setting.held, self.optimizer
        # A paged optimizer sends its state over the link. Otherwise only step counters are on the host.
        is_there = use is not None and ("optimizer" in how.on_host or use.link_bytes > 0)
        state_bytes = use.host_state_bytes if use is not None and is_there else 0
        if not held.on_host:
            return state_bytes
        shards = rank_parameters(self.stage.trace, self.setting.layout, held)
        gradients = (in_f32(each) if held.gradients else each for each in shards if each.is_trainable)
        return state_bytes + sum(each.bytes for each in (*shards, *gradients))

    @property
    def lasting_classes(self) -> Counter[str]:
        """A mapping from category (parameters, gradients, optimizer state) to the bytes of that category that the stage holds
        during the whole step.
        """
        classes: Counter[str] = Counter()
        for storage in self.index.lasting:
            classes[storage.category.value] += storage.bytes
        return classes

    def decide(self, setting: Setting, budget_bytes: int | None, known: KnownChoices) -> Decided:
        """Simulate the stage under a setting's strategy, and solve a plan if the strategy is ``auto``.

        Apart from the strategy, ``setting`` must equal the stage's own setting. If the budget cannot be met, the result has the
        smallest reachable peak. ``known`` remembers the possible choices (what a region keeps, recomputes or offloads) of
        regions that were seen in other stages. Those of this stage are added to it.

        Raises:
            InvalidStrategy: the strategy does not exist.
        """
        strategy = setting.strategy
        if setting.sending is not None:
            choices = self.named_choices(self.sending_index, strategy)
            return Decided(setting.sending.run(self.sending_index, choices))
        if strategy != AUTO and "activations" in self.setting.how.on_host:
            choices = self.named_choices(self.index, strategy)
            return Decided(run_choices(self.index, send_kept(self.index, choices)))
        if strategy == NOTHING:
            return Decided(self.unmanaged)
        if strategy == EVERYTHING:
            return Decided(self.recomputed)
        if strategy != AUTO:
            return Decided(run_choices(self.index, self.named_choices(self.index, strategy)))
        if budget_bytes is None or self.unmanaged.peak_bytes <= budget_bytes:
            return Decided(self.unmanaged)
        planner = Planner(self._indexed(), known_choices=known)
        plan = solve(planner, budget_bytes=budget_bytes, raise_below_floor=False)
        return Decided(run_choices(planner.index, choices_of(planner.index, plan.regions)), plan)

    def follow(self, decided: Decided) -> Decided:
        """Simulate decisions that were made for the same stage with another number of micro-batches in flight."""
        simulation = run_choices(self.index, decided.simulation.choices)
        if decided.plan is None:
            return Decided(simulation)
        plan = msgspec.structs.replace(
            decided.plan, predicted_peak_bytes=simulation.peak_bytes, in_flight=math.ceil(self.in_flight)
        )
        return Decided(simulation, plan)

    def named_choices(self, index: StepIndex, strategy: str) -> tuple[Choice, ...]:
        """Return the decisions of a named strategy: for each region, the choice of values that are kept, recomputed or
        offloaded.

        If blocks run in fused kernels, values that these kernels do not save are dropped.
        """
        choices = strategy_choices(index, strategy)
        if not self.setting.how.is_fused or not keeps_the_rest(strategy):
            return choices
        saved = choose_min_cut(index, "")
        return tuple(
            choice.without(view.everything - cut.kept)
            for view, choice, cut in zip(index.views, choices, saved, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """One pipeline rank, as data: its stages, and for each stage the simulated step and plan that were decided.

    ``tightest`` is the position of the stage whose step has the rank's peak.
    """

    stages: tuple[StageOfRank, ...]
    decided: tuple[Decided, ...]

    @property
    def peaks(self) -> list[int]:
        """For each stage, the rank's peak in bytes while that stage runs.

        The other stages then hold only what they hold all the time, such as parameters.
        """
        return [
            each.simulation.peak_bytes + self.lasting_beside(position) for position, each in enumerate(self.decided)
        ]

    @property
    def tightest(self) -> int:
        peaks = self.peaks
        return peaks.index(max(peaks))

    @property
    def peak_bytes(self) -> int:
        """The largest total of live tensors at any moment of the step."""
        return max(self.peaks)

    @property
    def host_bytes(self) -> int:
        """The most bytes that the host holds for this rank at one time."""
        stages = zip(self.stages, self.decided, strict=True)
        return sum(stage.host_bytes + int(stage.in_flight * each.simulation.link_bytes) for stage, each in stages)

    def lasting_beside(self, position: int) -> int:
        """Return the bytes that the rank's other stages (all but the one at ``position``) hold during the whole step."""
        return sum(stage.index.lasting_bytes for other, stage in enumerate(self.stages) if other != position)

    @property
    def optimizers(self) -> list[OptimizerUse]:
        """A list with the optimizer of each stage. It is empty without an optimizer."""
        return [stage.optimizer for stage in self.stages if stage.optimizer is not None]

    def lasting_events(self) -> list[AllocationEvent]:
        """Return allocation events for the tensors that the other stages hold during the whole step. The tightest stage (whose
        step has the peak) is left out.
        """
        others = [stage for position, stage in enumerate(self.stages) if position != self.tightest]
        storages = [storage for stage in others for storage in stage.index.lasting if storage.bytes]
        return [
            AllocationEvent(
                instant=0,
                block=-1 - number,
                bytes=storage.bytes,
                label=storage.label,
                category=storage.category,
                lasts=True,
            )
            for number, storage in enumerate(storages)
        ]

    def peak_under(self, simulations: Sequence[Simulation]) -> int:
        """Return the rank's peak if its stages ran as in ``simulations``, one simulation per stage."""
        return max(s.peak_bytes + self.lasting_beside(position) for position, s in enumerate(simulations))


def decide_rank(stages: Sequence[StageOfRank], setting: Setting, known: KnownChoices) -> Rank:
    """Decide what each stage of a rank keeps and recomputes, under the setting's strategy.

    Each stage's budget is the rank's budget less the bytes that the other stages hold all the time.
    """
    decided = []
    for position, stage in enumerate(stages):
        beside = sum(other.index.lasting_bytes for at, other in enumerate(stages) if at != position)
        budget_bytes = None if setting.budget_bytes is None else max(setting.budget_bytes - beside, 1)
        decided.append(stage.decide(setting, budget_bytes, known))
    return Rank(tuple(stages), tuple(decided))


def simulate_again(stages: Sequence[StageOfRank], decided: Sequence[Decided]) -> Rank:
    """Simulate earlier decisions again, on the same stages with other numbers of micro-batches in flight."""
    return Rank(tuple(stages), tuple(stage.follow(each) for stage, each in zip(stages, decided, strict=True)))
