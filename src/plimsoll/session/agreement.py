"""What ranks that make one call together tell each other: facts, budgets, plans and measurements.

For one process on its own all of this is empty: what it is told is what it said, and nothing is sent.

Every decision that changes which steps are run is taken on what all ranks have said. One rank solves: the tightest, whose
budget leaves the least room. Its plan goes to all as JSON (`tightest_rank`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch

import plimsoll
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import from_json
from plimsoll.errors import BudgetBelowFloor, InvalidOption, PlimsollError, RankFailed
from plimsoll.session.rendezvous.conversation import Conversation
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.rendezvous.joint_step import JointStep
from plimsoll.session.rendezvous.world import find_participants
from plimsoll.session.task import BATCH, TrainingTask
from plimsoll.tracing.recorder.calling import Loss, name_of, output_tensors

T = TypeVar("T")

SOLVING_SECONDS = 600.0
"""Beyond the usual time, ranks wait so long for the one that solves: a solver may use its time limit several times."""
_PAD = "pad the batches to the same shape, set the same mode and loss, or name the ranks that have the same: ranks="


class _Solved(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank that solves tells the others: a plan's JSON, or that nothing fits."""

    plan: str = ""
    below_floor: tuple[str, str, str] | None = None


class DelayedLoss:
    """Delays an error in the user's loss until backward has finished, so that other ranks' collectives complete.

    Where the loss fails, a number that depends on the whole output stands in for it: its backward runs through the
    whole model.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._failure: Exception | None = None
        # The name by which the signature of a step knows its loss.
        self.__qualname__ = name_of(loss)

    def __call__(self, output: Any) -> torch.Tensor:
        try:
            return self._loss(output)
        except Exception as error:  # a user's function may raise anything; it is raised when the step is over
            parts = [t.float().sum() for t in output_tensors(output) if t.requires_grad and t.is_floating_point()]
            if not parts:
                raise
            self._failure = self._failure or error
            return torch.stack(parts).sum()

    def raise_failure(self) -> None:
        """Raise what the loss raised first, if it failed; the next steps start anew."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class Agreement:
    """One call (``plan``, ``attach``, …) that ranks make together; a context manager, see ``Conversation``. There is no
    conversation where this process is on its own.
    """

    def __init__(self, conversation: Conversation | None, topic: str) -> None:
        self._conversation = conversation
        self._topic = topic
        self._below_floor: BudgetBelowFloor | None = None
        self._solver = 0
        self._delayed: DelayedLoss | None = None

    def __enter__(self) -> Agreement:
        self._below_floor = None
        if self._conversation is not None:
            self._conversation.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._conversation is None:
            return
        known = self._below_floor
        if error is None or known is None or not _is_due_to(error, known):
            self._conversation.__exit__(kind, error, trace)
        elif self._solver != self._conversation.world.rank:
            assert isinstance(error, PlimsollError)
            raise RankFailed(
                f"Rank {self._solver} failed in {self._topic!r}: {error.found}",
                why=f"it has the least room of {self.size} ranks, so it plans for all; {error.why}",
                next=error.next,
                ranks=(self._solver,),
            ) from error

    def joint_step(self) -> JointStep:
        """The end of training steps that these ranks run together."""
        return JointStep(self._conversation)

    @property
    def backends(self) -> frozenset[str]:
        """What the model's collectives run on."""
        groups = () if self._conversation is None else self._conversation.groups
        return frozenset(map(torch.distributed.get_backend, groups))

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return 1 if self._conversation is None else self._conversation.world.size

    @property
    def rank(self) -> int:
        """This rank, as torch numbers it."""
        return 0 if self._conversation is None else self._conversation.world.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that take part."""
        return (0,) if self._conversation is None else self._conversation.world.ranks

    def all_of(self, what: str, value: T, kind: type[T], *, more_seconds: float = 0.0) -> list[T]:
        """Everyone's value, in the order of ``ranks``; a value is made of what msgspec knows.

        Raises:
            RankFailed, RankMissing, RanksDiffer: see ``Conversation.ask``.
        """
        if self._conversation is None:
            return [value]
        answers = self._conversation.ask(what, msgspec.msgpack.encode(value), more_seconds=more_seconds)
        return [msgspec.msgpack.decode(answer, type=kind) for answer in answers]

    def gathered(self, what: str, value: T, kind: type[T]) -> list[T] | None:
        """Everyone's value, if all ranks come here within a few seconds; else ``None``, on all that come.

        For what may happen on all ranks at once and of which a rank alone knows nothing. ``what`` names this occasion,
        in which a rank comes at most once: it holds the number of the training call.
        """
        if self._conversation is None:
            return [value]
        answers = self._conversation.gather(what, msgspec.msgpack.encode(value))
        return None if answers is None else [msgspec.msgpack.decode(answer, type=kind) for answer in answers]

    def meet(self, what: str, *, more_seconds: float = 0.0) -> None:
        """Go on once all ranks are here."""
        self.all_of(what, None, type(None), more_seconds=more_seconds)

    def every(self, what: str, *, holds: bool) -> bool:
        """Whether something holds on every rank."""
        return all(self.all_of(what, holds, bool))

    def same(self, what: str, facts: Mapping[str, str]) -> None:
        """Go on if these facts, and the versions, are the same on all ranks; else ``RanksDiffer``, with a table, on
        all.
        """
        if self._conversation is not None:
            self._conversation.same(what, {**_versions(), **facts}, {BATCH: _PAD})

    @contextlib.contextmanager
    def together(self, what: str, *, more_seconds: float = 0.0) -> Iterator[None]:
        """Run the block on every rank, and go on only if it went well on all; they wait for each other at its end."""
        with self:
            yield
            self.meet(what, more_seconds=more_seconds)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Run steps with collectives in the block; ranks that wait there for one that failed are released."""
        if self._conversation is None:
            yield
            return
        with self._conversation.stepping():
            yield
            if self._delayed is not None:
                self._delayed.raise_failure()
        self.meet(f"steps of {self._topic}")

    def patient(self, task: TrainingTask) -> TrainingTask:
        """The task as its steps are run: where its loss fails, this rank's step goes on to its end and fails then.

        The other ranks' collectives in backward find their partner, and the process groups stay whole.
        """
        if self._conversation is None or task.loss is None:
            return task
        self._delayed = DelayedLoss(task.loss)
        return dataclasses.replace(task, loss=self._delayed)

    def made_by(self, rank: int, what: str, make: Callable[[], Plan]) -> Plan:
        """A plan that one rank makes, on all ranks.

        Raises:
            BudgetBelowFloor: on all ranks, nothing fits. Where it leaves the call, other ranks than ``rank`` raise
                ``RankFailed`` in its place.
        """
        if self._conversation is None:
            return make()
        mine = _Solved()
        if rank == self.rank:
            try:
                mine = _Solved(plan=to_json(make()))
            except BudgetBelowFloor as error:
                self._below_floor = error
                mine = _Solved(below_floor=(error.found, error.why, error.next))
        told = self.all_of(what, mine, _Solved, more_seconds=SOLVING_SECONDS)
        solved = told[self.ranks.index(rank)]
        if solved.below_floor is not None:
            self._solver = rank
            if rank != self.rank:
                found, why, next_ = solved.below_floor
                self._below_floor = BudgetBelowFloor(found, why=why, next=next_)
            assert self._below_floor is not None
            raise self._below_floor
        plan = from_json(solved.plan, source=f"the plan of rank {rank}")
        assert isinstance(plan, Plan)
        return plan

    def refused_by(self, rank: int, error: BudgetBelowFloor) -> BudgetBelowFloor:
        """An error that all ranks raise now; where it leaves the call, other ranks than ``rank`` raise ``RankFailed``."""
        self._below_floor, self._solver = error, rank
        return error

    def same_plan(self, plan: Plan) -> None:
        """Go on if all ranks hold the identical plan; else ``RanksDiffer`` on all ranks, with a digest of each."""
        if self._conversation is not None:
            self.same("plans", plan_facts(plan))


def _is_due_to(error: BaseException | None, cause: BaseException) -> bool:
    return error is not None and (error is cause or _is_due_to(error.__cause__, cause))


def plan_facts(plan: Plan) -> dict[str, str]:
    """What tells one plan from another: its strategy, its budget, and a digest of its JSON."""
    digest = hashlib.blake2s(to_json(plan).encode(), digest_size=6).hexdigest()
    return {"plan": f"{plan.model} {plan.strategy} {digest}", "plan made for": plan.fingerprint}


def agreement_for(
    model: object,
    topic: str,
    *,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Agreement:
    """The agreement of the ranks that train ``model``; of this process alone where there are no others.

    Raises:
        InvalidOption: ``ranks`` that do not exist or without this one; no time to wait.
    """
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float) or not timeout_seconds > 0:
        raise InvalidOption(
            f"timeout_seconds={timeout_seconds!r} is no time to wait.",
            why="ranks wait so many seconds for each other before they name the one that is missing",
            next=f"timeout_seconds={TIMEOUT_SECONDS:g}, or leave it out",
        )
    found = find_participants(model, ranks)
    if found.world is None:
        return Agreement(None, topic)
    return Agreement(Conversation(found.world, topic, groups=found.groups, timeout_seconds=timeout_seconds), topic)


def described(**options: Any) -> dict[str, str]:
    """Options as facts: by name, as text."""
    return {name: repr(value) for name, value in options.items()}


def _versions() -> dict[str, str]:
    return {"plimsoll": plimsoll.__version__, "torch": str(torch.__version__)}
