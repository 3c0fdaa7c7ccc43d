"""Lets the ranks that make one call together agree: they exchange facts, budgets, plans and measurements.

A single process sends nothing and receives its own values.

If a decision changes which steps are run, it depends on the values of all ranks: otherwise one rank would run a step with
collectives that the others do not run. One rank solves: the tightest, whose budget leaves the least room (`tightest_rank`). It
sends its plan to all ranks as JSON.
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
"""Seconds that ranks wait, in addition to the usual time, for the rank that solves: a solver may use its time limit several
times.
"""
_PAD = "pad the batches to the same shape, set the same mode and loss, or pass ranks= with the ranks that have the same"


class _Solved(msgspec.Struct, frozen=True, kw_only=True):
    """The message from the rank that solves to all other ranks: the JSON of a plan, or the text of a `BudgetBelowFloor`."""

    plan: str = ""
    below_floor: tuple[str, str, str, tuple[str, ...]] | None = None


class DelayedLoss:
    """Delays an error in the user's loss until backward has finished, so that other ranks' collectives complete.

    If the loss fails, a sum over the whole output replaces it, so that backward runs through the whole model. After that, the
    process groups can still be used. A rank that stopped before backward would leave the others in a collective.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._failure: Exception | None = None
        # The signature of a step contains the name of its loss, and must not change.
        self.__qualname__ = name_of(loss)

    def __call__(self, output: Any) -> torch.Tensor:
        try:
            return self._loss(output)
        except Exception as error:  # a user's function may raise any error; it is raised when the step is over
            parts = [t.float().sum() for t in output_tensors(output) if t.requires_grad and t.is_floating_point()]
            if not parts:
                raise
            self._failure = self._failure or error
            return torch.stack(parts).sum()

    def raise_failure(self) -> None:
        """Raise the first error of the user's loss function if there was an error, and clear the error."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class Agreement:
    """One call (``plan``, ``attach``, …) that several ranks make together.

    Use it as a context manager (see ``Conversation``). In a single process, ``conversation`` is None.
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
        known, self._below_floor = self._below_floor, None  # its traceback holds the tensors of a trial
        if error is None or known is None or not _is_due_to(error, known):
            self._conversation.__exit__(kind, error, trace)
        elif self._solver != self._conversation.world.rank:
            assert isinstance(error, PlimsollError)
            raise RankFailed(
                f"Rank {self._solver} failed in {self._topic!r}: {error.found}",
                why=f"it has the least room of {self.size} ranks, so it plans for all of them; {error.why}",
                next=error.next,
                ranks=(self._solver,),
            ) from error

    def joint_step(self) -> JointStep:
        """Return the object that ends training steps on these ranks together: all ranks finish a step, or all run it again."""
        return JointStep(self._conversation)

    @property
    def backends(self) -> frozenset[str]:
        """The names of the communication backends (such as ``nccl``) of the model's process groups."""
        groups = () if self._conversation is None else self._conversation.groups
        return frozenset(map(torch.distributed.get_backend, groups))

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return 1 if self._conversation is None else self._conversation.world.size

    @property
    def rank(self) -> int:
        """This process's rank, as torch numbers it."""
        return 0 if self._conversation is None else self._conversation.world.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global numbers of all ranks that take part."""
        return (0,) if self._conversation is None else self._conversation.world.ranks

    def all_of(self, what: str, value: T, kind: type[T], *, more_seconds: float = 0.0) -> list[T]:
        """Return the values of all ranks, in the order of ``ranks``. msgspec must be able to encode the value.

        Raises:
            RankFailed, RankMissing, RanksDiffer: see ``Conversation.ask``.
        """
        if self._conversation is None:
            return [value]
        answers = self._conversation.ask(what, msgspec.msgpack.encode(value), more_seconds=more_seconds)
        return [msgspec.msgpack.decode(answer, type=kind) for answer in answers]

    def gathered(self, what: str, value: T, kind: type[T]) -> list[T] | None:
        """Return the values of all ranks, or ``None`` on every caller if some rank does not call within a few seconds.

        Use it for events that may happen on all ranks at once, when a single rank cannot know whether they do. ``what`` names
        the event and contains the number of the training call, so that a rank calls at most once for each name.
        """
        if self._conversation is None:
            return [value]
        answers = self._conversation.gather(what, msgspec.msgpack.encode(value))
        return None if answers is None else [msgspec.msgpack.decode(answer, type=kind) for answer in answers]

    def meet(self, what: str, *, more_seconds: float = 0.0) -> None:
        """Wait until each rank has called this. ``more_seconds`` extends the usual time limit."""
        self.all_of(what, None, type(None), more_seconds=more_seconds)

    def every(self, what: str, *, holds: bool) -> bool:
        """Return True, on all ranks, if ``holds`` is True on each rank. The ranks exchange their values."""
        return all(self.all_of(what, holds, bool))

    def same(self, what: str, facts: Mapping[str, str]) -> None:
        """Check that these facts, and the library versions, are equal on all ranks. Otherwise raise ``RanksDiffer`` on all
        ranks, with a table of the differences.
        """
        if self._conversation is not None:
            self._conversation.same(what, {**_versions(), **facts}, {BATCH: _PAD})

    @contextlib.contextmanager
    def together(self, what: str, *, more_seconds: float = 0.0) -> Iterator[None]:
        """Run the ``with`` block on each rank, and wait at its end for all ranks. If the block fails on one rank, all ranks
        raise an error.
        """
        with self:
            yield
            self.meet(what, more_seconds=more_seconds)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Allow steps with collectives inside the ``with`` block. If a rank fails there, the ranks that wait for it in a
        collective are released.
        """
        if self._conversation is None:
            yield
            return
        with self._conversation.stepping():
            yield
            if self._delayed is not None:
                self._delayed.raise_failure()
        self.meet(f"steps of {self._topic}")

    def patient(self, task: TrainingTask) -> TrainingTask:
        """Return a copy of the training task whose loss raises its errors only at the end of the step.

        The other ranks' collectives in backward can then complete, and the process groups remain usable.
        """
        if self._conversation is None or task.loss is None:
            return task
        self._delayed = DelayedLoss(task.loss)
        return dataclasses.replace(task, loss=self._delayed)

    def made_by(self, rank: int, what: str, make: Callable[[], Plan]) -> Plan:
        """Let ``rank`` make a plan with a function, and return this plan on all ranks.

        Raises:
            BudgetBelowFloor: no plan fits. It is raised on all ranks. If the caller does not catch it, the ranks other than
                ``rank`` raise ``RankFailed`` instead.
        """
        if self._conversation is None:
            return make()
        mine = _Solved()
        if rank == self.rank:
            try:
                mine = _Solved(plan=to_json(make()))
            except BudgetBelowFloor as error:
                self._below_floor = error
                mine = _Solved(below_floor=(error.found, error.why, error.next, error.others))
        # Only one rank solves: costs are measured, so each rank would find another plan.
        told = self.all_of(what, mine, _Solved, more_seconds=SOLVING_SECONDS)
        solved = told[self.ranks.index(rank)]
        if solved.below_floor is not None:
            self._solver = rank
            if rank != self.rank:
                found, why, next_, others = solved.below_floor
                self._below_floor = BudgetBelowFloor(found, why=why, next=next_, others=others)
            assert self._below_floor is not None
            raise self._below_floor
        plan = from_json(solved.plan, source=f"the plan of rank {rank}")
        assert isinstance(plan, Plan)
        return plan

    def refused_by(self, rank: int, error: BudgetBelowFloor) -> BudgetBelowFloor:
        """Return the error that all ranks raise now, because ``rank`` found that no plan fits. If the caller does not catch it,
        the ranks other than ``rank`` raise ``RankFailed``.
        """
        if self._conversation is not None:
            self._below_floor, self._solver = error, rank
        return error

    def same_plan(self, plan: Plan) -> None:
        """Check that all ranks hold the identical plan. Otherwise raise ``RanksDiffer`` on all ranks, with a digest of each
        rank's plan.
        """
        if self._conversation is not None:
            self.same("plans", plan_facts(plan))


def _is_due_to(error: BaseException | None, cause: BaseException) -> bool:
    return error is not None and (error is cause or _is_due_to(error.__cause__, cause))


def plan_facts(plan: Plan) -> dict[str, str]:
    """Return facts that identify a plan, as text by name: its model, its strategy, a digest of its JSON, and the model's
    fingerprint.
    """
    digest = hashlib.blake2s(to_json(plan).encode(), digest_size=6).hexdigest()
    return {"plan": f"{plan.model} {plan.strategy} {digest}", "plan made for": plan.fingerprint}


def agreement_for(
    model: object,
    topic: str,
    *,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Agreement:
    """Return the agreement of the ranks that train ``model``, or of this process alone if it trains alone.

    Raises:
        InvalidOption: ``ranks`` names ranks that do not exist or omits this one, or ``timeout_seconds`` is not positive.
    """
    check_timeout(timeout_seconds)
    found = find_participants(model, ranks)
    if found.world is None:
        return Agreement(None, topic)
    return Agreement(Conversation(found.world, topic, groups=found.groups, timeout_seconds=timeout_seconds), topic)


def described(**options: Any) -> dict[str, str]:
    """Return a mapping from the name of each option to its value as text, so that ranks can compare their options."""
    return {name: repr(value) for name, value in options.items()}


def _versions() -> dict[str, str]:
    return {"plimsoll": plimsoll.__version__, "torch": str(torch.__version__)}


def check_timeout(timeout_seconds: float) -> None:
    """Raise ``InvalidOption`` if a time limit is not a positive number."""
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float) or not timeout_seconds > 0:
        raise InvalidOption(
            f"timeout_seconds={timeout_seconds!r} is not a positive number.",
            why="ranks wait this many seconds for each other, and then raise an error that names the missing rank",
            next=f"pass timeout_seconds={TIMEOUT_SECONDS:g}, or leave it out",
        )
