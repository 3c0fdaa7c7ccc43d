"""Plans the stages of one rank of a pipeline within one budget for all of them. All replicas of a stage (ranks with the same
stage) get the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.plan import Plan
from plimsoll.distributed.pipelines.stage_steps import StageStep
from plimsoll.errors import BudgetBelowFloor, RanksDiffer
from plimsoll.estimator.pipeline_schedule.orders import Action
from plimsoll.estimator.pipeline_schedule.rank_memory import RankPeak, rank_peak
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds
from plimsoll.planning.describe import describe_peak
from plimsoll.planning.explain import name_holders
from plimsoll.planning.simulate import Simulation
from plimsoll.session.agreement import Agreement, check_timeout
from plimsoll.session.rendezvous.conversation import Conversation
from plimsoll.session.rendezvous.world import World
from plimsoll.units import budget_text, format_bytes

_HALVINGS = 7
"""The number of steps of the bisection that finds the budget of each stage.

They find it to within a hundredth of the range between the lowest reachable peak and the peak without a plan.
"""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Data: the plans of one rank: one plan per stage, the peak of all stages together on this rank, and each stage's seconds
    per micro-batch.

    The peak includes the bytes that the rank holds in addition to its stages.
    """

    plans: dict[int, Plan]
    peak: RankPeak
    seconds: dict[int, ActionSeconds]


class RankPlanner:
    """Makes the plans of one rank from its stages and their actions in a step.

    ``beside_bytes`` are bytes that the rank holds all the time in addition to its stages, such as receive buffers.
    """

    def __init__(self, steps: Mapping[int, StageStep], actions: Sequence[Action], beside_bytes: int) -> None:
        self._steps = dict(steps)
        self._actions = actions
        self._beside_bytes = beside_bytes

    def lowest(self) -> RankPlan:
        """Return the plans under the smallest budgets: each stage has its smallest reachable peak."""
        return self._at(0.0)

    def solve(self, budget_bytes: int, excess_bytes: int = 0) -> RankPlan:
        """Return the plans of all stages whose common peak is within a budget of the whole rank.

        ``excess_bytes`` are subtracted from the budget. They are the measured peak of a step minus its predicted peak.

        Raises:
            BudgetBelowFloor: even the smallest peak is too large; the error names the stage that has it.
        """
        room_bytes = budget_bytes - excess_bytes
        if self._peak(1.0).peak_bytes <= room_bytes:
            return self._at(1.0)
        if self._peak(0.0).peak_bytes > room_bytes:
            raise self._below_floor(budget_bytes, excess_bytes)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._peak(middle).peak_bytes <= room_bytes:
                low = middle
            else:
                high = middle
        return self._at(low)

    def peak_of(self, plans: Mapping[int, Plan]) -> RankPeak:
        """Return the peak of this rank under the given plans, one per stage."""
        return self._peak_of({index: self._steps[index].under(plan) for index, plan in plans.items()})

    def _budget(self, index: int, share: float) -> int:
        low, high = self._steps[index].range_bytes
        return low + int((high - low) * share)

    def _simulations(self, share: float) -> dict[int, Simulation]:
        return {index: step.simulation(self._budget(index, share)) for index, step in self._steps.items()}

    def _peak(self, share: float) -> RankPeak:
        return self._peak_of(self._simulations(share))

    def _peak_of(self, simulations: Mapping[int, Simulation]) -> RankPeak:
        memory = {index: self._steps[index].memory(simulation) for index, simulation in simulations.items()}
        return rank_peak(self._actions, memory, beside_bytes=self._beside_bytes)

    def _at(self, share: float) -> RankPlan:
        plans = {index: step.plan(self._budget(index, share)) for index, step in self._steps.items()}
        simulations = {index: self._steps[index].under(plan) for index, plan in plans.items()}
        seconds = {index: self._steps[index].seconds(simulation) for index, simulation in simulations.items()}
        return RankPlan(plans, self._peak_of(simulations), seconds)

    def _below_floor(self, budget_bytes: int, excess_bytes: int) -> BudgetBelowFloor:
        simulations = self._simulations(0.0)
        peak = self._peak_of(simulations)
        stage = peak.action.stage if peak.action is not None else max(simulations)
        floor_bytes = peak.peak_bytes + excess_bytes
        stages = "stage" if len(simulations) == 1 else "stages"
        named = ", ".join(map(str, sorted(simulations)))
        measured = f", and includes {format_bytes(excess_bytes)} measured beyond the prediction" if excess_bytes else ""
        return BudgetBelowFloor(
            f"budget {format_bytes(budget_bytes)} is below the smallest reachable peak of {stages} {named}, "
            f"{format_bytes(floor_bytes)}.",
            why=f"the peak is in {peak.moment}{measured}; in stage {stage} alone, "
            f"{name_holders(describe_peak(simulations[stage]))} are alive at the same time",
            next=f"{budget_text(floor_bytes)} ({floor_bytes} bytes), or a smaller micro-batch, or fewer layers in stage "
            f"{stage}",
        )


TIMEOUT_SECONDS = 300.0
"""The default seconds that ranks wait for each other.

If torch infers shapes, ranks trace their stages one after the other, and the first rank waits until the last one is done.
"""
_TOPIC = "planning pipeline stages"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's message to the other ranks when they agree on plans, as data: its stages and their models, the bytes that its
    plans may take, whether its last step was within its budget, and whether an optimizer has stepped since `attach_schedule`.
    """

    stages: tuple[int, ...]
    fingerprints: tuple[str, ...]
    room_bytes: int
    does_fit: bool
    has_stepped: bool


class StageAgreement(Agreement):
    """Lets the ranks of a pipeline job agree on plans. If ``world`` is ``None``, this rank is the only one, and only its own
    plans count.
    """

    def __init__(self, world: World | None, timeout_seconds: float) -> None:
        check_timeout(timeout_seconds)
        conversation = None if world is None else Conversation(world, _TOPIC, timeout_seconds=timeout_seconds)
        super().__init__(conversation, _TOPIC)

    def compare(self, mine: Standing) -> tuple[Standing, bool, bool]:
        """Exchange data with all ranks: each rank's stages, the bytes that its plans may take, whether its last step kept to
        its budget, and whether its optimizer has stepped.

        Return three results. The first is this rank's data, with the smallest ``room_bytes`` (bytes that plans may take) among
        all ranks with the same stages. The second is True if the last step of each rank was within its budget, and the third
        if optimizers have stepped on all ranks.

        Raises:
            RanksDiffer: ranks with the same stage have different models.
            RankMissing: a rank did not answer.
        """
        everyone = self.all_of("standing", mine, Standing)
        replicas = [other for other in everyone if other.stages == mine.stages]
        for other in everyone:
            _refuse_differing([one for one in everyone if one.stages == other.stages])
        room_bytes = min(other.room_bytes for other in replicas)
        do_fit, have_stepped = (
            all(each) for each in zip(*((o.does_fit, o.has_stepped) for o in everyone), strict=True)
        )
        return msgspec.structs.replace(mine, room_bytes=room_bytes), do_fit, have_stepped

    def adopt(self, mine: Standing, made: RankPlan) -> tuple[dict[int, Plan], dict[int, ActionSeconds]]:
        """Exchange plans with all ranks, so that all replicas of a stage (ranks with the same stage) run the same plan.

        Return two mappings by stage: the plans of the first rank that has the same stages as this one, and the seconds of the
        stages of all ranks.
        """
        offers = self.all_of("plans", _Offer(stages=mine.stages, seconds=made.seconds, plans=made.plans), _Offer)
        first = next(offer for offer in offers if offer.stages == mine.stages)
        everyones: dict[int, ActionSeconds] = {}
        for offer in offers:
            for index, found in offer.seconds.items():
                everyones.setdefault(index, found)
        return first.plans, everyones


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    stages: tuple[int, ...]
    seconds: dict[int, ActionSeconds]
    plans: dict[int, Plan]


def _refuse_differing(replicas: Sequence[Standing]) -> None:
    different = next((one for one in replicas if one.fingerprints != replicas[0].fingerprints), None)
    if different is not None:
        raise RanksDiffer(
            f"Ranks that run the stages {list(different.stages)} have different models.",
            why=f"their modules' fingerprints are {', '.join(replicas[0].fingerprints)} and "
            f"{', '.join(different.fingerprints)}: classes, names, shapes or dtypes differ",
            next="build the same stage on every data- and tensor-parallel rank",
        )
