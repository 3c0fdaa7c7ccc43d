"""What every rank knows about its stages in, one plan for the replicas of a stage and the seconds of all stages out.

Replicas are the data- and tensor-parallel ranks that run the same stages. The one with the least room decides, and all take the
plan of the first of them: they have to run the same ops. Across stages plans differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from plimsoll.artifacts.plan import Plan
from plimsoll.distributed.pipelines.rank_plans import RankPlan
from plimsoll.errors import RanksDiffer
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds
from plimsoll.session.rendezvous.exchange import exchange, together
from plimsoll.session.rendezvous.world import World

TIMEOUT_SECONDS = 300.0
"""Where torch infers shapes, ranks trace their stages one after the other: the first waits for the last."""
_TOPIC = "planning pipeline stages"
_T = TypeVar("_T", bound=msgspec.Struct)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank tells the others: its stages and their models, its room, and whether its last step kept to it."""

    stages: tuple[int, ...]
    fingerprints: tuple[str, ...]
    room_bytes: int
    does_fit: bool


class StageAgreement:
    """The ranks of a job, seen from one of them. Without others everything is as this rank has it.

    Args:
        world: ``None`` for one rank.
        timeout_seconds: how long to wait for the others.
    """

    def __init__(self, world: World | None, timeout_seconds: float) -> None:
        self.world = world
        self._timeout_seconds = timeout_seconds

    def compare(self, mine: Standing) -> tuple[Standing, bool]:
        """This rank's standing with the room of its tightest replica, and whether all ranks fit.

        Raises:
            RanksDiffer: replicas of a stage have different models.
            RankMissing: a rank did not come.
        """
        everyone = self._exchange("standing", mine)
        replicas = [other for other in everyone if other.stages == mine.stages]
        for other in everyone:
            _refuse_differing([one for one in everyone if one.stages == other.stages])
        room_bytes = min(other.room_bytes for other in replicas)
        return msgspec.structs.replace(mine, room_bytes=room_bytes), all(other.does_fit for other in everyone)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around work that may fail on one rank alone: where it does, all ranks raise.

        Raises:
            RankFailed: on the others.
        """
        if self.world is None:
            return contextlib.nullcontext()
        return together(self.world, _TOPIC, timeout_seconds=self._timeout_seconds)

    def adopt(self, mine: Standing, made: RankPlan) -> tuple[dict[int, Plan], dict[int, ActionSeconds]]:
        """The plans of the first replica, and the seconds of every stage that some rank runs.

        Args:
            mine: this rank's standing.
            made: its own plans.
        """
        seconds = {index: _Seconds.of(found) for index, found in made.seconds.items()}
        offers = self._exchange("plans", _Offer(stages=mine.stages, seconds=seconds, plans=made.plans))
        first = next(offer for offer in offers if offer.stages == mine.stages)
        everyones: dict[int, ActionSeconds] = {}
        for offer in offers:
            for index, found in offer.seconds.items():
                everyones.setdefault(index, found.as_stage())
        return first.plans, everyones

    def _exchange(self, what: str, mine: _T) -> Sequence[_T]:
        if self.world is None:
            return (mine,)
        messages = exchange(
            self.world, f"{_TOPIC}: {what}", msgspec.json.encode(mine), timeout_seconds=self._timeout_seconds
        )
        return [msgspec.json.decode(message, type=type(mine)) for message in messages]


class _Seconds(msgspec.Struct, frozen=True, kw_only=True):
    forward: float
    input_gradient: float
    weight_gradient: float
    recompute: float

    @classmethod
    def of(cls, stage: ActionSeconds) -> _Seconds:
        return cls(
            forward=stage.forward_seconds,
            input_gradient=stage.input_gradient_seconds,
            weight_gradient=stage.weight_gradient_seconds,
            recompute=stage.recompute_seconds,
        )

    def as_stage(self) -> ActionSeconds:
        return ActionSeconds(
            forward_seconds=self.forward,
            input_gradient_seconds=self.input_gradient,
            weight_gradient_seconds=self.weight_gradient,
            recompute_seconds=self.recompute,
        )


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    stages: tuple[int, ...]
    seconds: dict[int, _Seconds]
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
