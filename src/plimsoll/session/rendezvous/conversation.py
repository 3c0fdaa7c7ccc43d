"""A call that ranks make together: every rank gets every rank's message, or every rank raises the same error.

A conversation is a sequence of exchanges in the same order on every rank. A rank that raises between two exchanges reports its
error in the next exchange, whichever that is. The other ranks make that exchange too, and raise ``RankFailed``. So ranks do not
wait for a rank that has given up, and no message remains that could disturb the next conversation.

Between exchanges the ranks may run steps with collectives. A rank that fails in the middle of a step leaves the others in a
collective that it will never join. They wait inside torch, where Python exceptions do not reach them. The wait ends when their
connections end. So if the model's process groups are known, the rank that failed closes their connections (`release`), and the
others report which rank failed. The ranks are then not at the same collective, and the groups cannot be used again: the job
must be restarted.

Not covered: collectives of groups that the model does not show (they end by torch's own time-out), and a rank whose step never
ends. A rank that dies ends torchrun's job. NCCL's ``abort`` ends this rank's wait; the other ranks notice by NCCL's own
watchdog.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import msgspec
import torch
import torch.distributed as dist

from plimsoll.errors import InvalidModel, PlimsollError, RankError, RankFailed, RankMissing, RanksDiffer
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS, Meeting, exchange
from plimsoll.session.rendezvous.world import World
from plimsoll.tracing.recorder.collectives import failed_in_collective

_GRACE_SECONDS = 3.0
"""How long a rank that failed waits for the others to leave the step by themselves, before it closes the groups."""
_GATHERING_SECONDS = 5.0
"""How long ranks wait for others that may not call at all. Training stands still meanwhile."""
_RELEASED = "released"
_ANEW = "; then restart the job: the model's process groups were closed, to end the wait for that rank"
_WHY = "ranks can share a plan only if they run the same step of the same model, with the same options and versions"


class _Failure(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An error as text, to send it to other ranks: what was found, why, and what to do next.

    ``may_be_echo``: the error may be only a consequence of another rank's failure. Torch raises such errors in a collective
    when another rank has closed its connections.
    """

    found: str
    why: str
    next: str
    may_be_echo: bool

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        if isinstance(error, PlimsollError):
            return cls(found=error.found, why=error.why, next=error.next, may_be_echo=False)
        may_be_echo = type(error) is RuntimeError or isinstance(error, dist.DistError)
        return cls(found=f"{type(error).__name__}: {error}", why="", next="see its traceback", may_be_echo=may_be_echo)


class _Turn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Data: a rank's message in one exchange between ranks: the name of the step that the rank is in, the content of the
    message, and the rank's failure if it failed.
    """

    step: str
    message: bytes = b""
    failure: _Failure | None = None


class Conversation:
    """The exchanges of one call. Use it as a context manager. An error that leaves the block is reported to the other ranks.

    ``groups`` are the process groups of the model's collectives. They are released if this rank fails in a step.
    """

    def __init__(
        self,
        world: World,
        topic: str,
        *,
        groups: Sequence[dist.ProcessGroup] = (),
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.world = world
        self._topic = topic
        self.groups = tuple(groups)
        self.timeout_seconds = timeout_seconds
        self._step = ""
        self._is_over = False
        self._is_stepping = False

    def __enter__(self) -> Conversation:
        self._step, self._is_over, self._is_stepping = "", False, False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._is_over:
            self._give_up(error)

    def ask(self, step: str, message: bytes = b"", *, more_seconds: float = 0.0) -> tuple[bytes, ...]:
        """Send a message and return the messages of all ranks, in the order of ``world.ranks``.

        All ranks must be in the same ``step``. ``more_seconds`` extends the usual time for a rank that has work to do before it
        answers.

        Raises:
            RankFailed: another rank has raised since the last exchange.
            RankMissing: another rank did not call in time.
            RanksDiffer: another rank is in another step.
        """
        turn = msgspec.msgpack.encode(_Turn(step=step, message=message))
        timeout_seconds = self.timeout_seconds + more_seconds
        try:
            answers = Meeting.arrive(self.world, self._topic, turn, timeout_seconds).collect()
        except RankError:
            self._is_over = True
            raise
        turns = [msgspec.msgpack.decode(answer, type=_Turn) for answer in answers]
        failures = {rank: turn for rank, turn in zip(self.world.ranks, turns, strict=True) if turn.failure is not None}
        if failures:
            self._is_over = True
            rank, first = next(iter(failures.items()))
            raise self._failed(rank, first, tuple(failures))
        if any(turn.step != step for turn in turns):
            self._is_over = True
            raise differing({"step": [turn.step for turn in turns]}, self.world.ranks)
        self._step = step
        return tuple(turn.message for turn in turns)

    def same(self, step: str, facts: Mapping[str, str], next_: Mapping[str, str] = {}, *, why: str = _WHY) -> None:
        """Check that these facts are equal on all ranks. Otherwise raise ``RanksDiffer`` on all ranks, with a table of the
        differences.

        ``next_`` gives advice for a single differing fact by its name, and under ``""`` for all others.
        """
        told = [msgspec.msgpack.decode(answer) for answer in self.ask(step, msgspec.msgpack.encode(facts))]
        names = dict.fromkeys(name for one in told for name in one)
        table = {name: [one.get(name, "nothing") for one in told] for name in names}
        odd = [name for name, values in table.items() if len(set(values)) > 1]
        if odd:
            self.end()
            known = odd[0] if len(odd) == 1 and odd[0] in next_ else ""
            raise differing(table, self.world.ranks, next_.get(known, ""), why=why)

    def gather(self, occasion: str, message: bytes) -> tuple[bytes, ...] | None:
        """Outside of a conversation: return the messages of all ranks, or ``None`` if some rank does not call within a few
        seconds.

        ``occasion`` must be different each time. A rank calls at most once for each.
        """
        seconds = min(self.timeout_seconds, _GATHERING_SECONDS)
        try:
            return exchange(self.world, f"{self._topic}/{occasion}", message, timeout_seconds=seconds)
        except RankMissing:
            return None

    def begin_anew(self) -> None:
        """Begin the numbering of exchanges again, after all ranks have left their steps at different places. All ranks must
        call this.
        """
        self._topic += "/again"

    def end(self) -> None:
        """Note that all ranks already know the error that is being raised, so that this rank does not report it again."""
        self._is_over = True

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Run steps with collectives. If this rank fails in the block, ranks that wait for it in a collective are released."""
        self._is_stepping = True
        yield
        self._is_stepping = False

    def _give_up(self, error: BaseException) -> None:
        """Report this rank's error to the other ranks. If they wait in a collective that this rank will not join, close its
        connections.
        """
        turn = _Turn(step=self._step, failure=_Failure.of(error))
        self._is_over = True
        try:
            meeting = Meeting.arrive(self.world, self._topic, msgspec.msgpack.encode(turn), self.timeout_seconds)
        except dist.DistError:  # the store and the job have ended: let this rank's own error appear
            return
        if not self._is_stepping or not self.groups:
            return  # outside of a step, the others wait in the store and get the message
        culprit = meeting.noted(_RELEASED)
        if not culprit:
            if meeting.is_complete_within(_GRACE_SECONDS):
                self._name_cause(meeting, error)
                return
            # If a collective raised this error, the fault is not here: name the rank that did not come out of its step.
            lost = tuple(rank for rank in self.world.ranks if not meeting.has_come(rank))
            if lost and failed_in_collective(error):
                release(self.groups)
                raise self._lost(lost, error) from error
            culprit = meeting.note(_RELEASED, str(self.world.rank))
        release(self.groups)  # also if this rank was released by another one: others may still wait for this rank
        rank = int(culprit)
        if rank != self.world.rank:
            first = msgspec.msgpack.decode(meeting.message_of(rank), type=_Turn)
            raise self._failed(rank, first, (rank,), _ANEW) from error

    def _name_cause(self, meeting: Meeting, error: BaseException) -> None:
        """Called if all ranks have failed. If this rank's error may be only a consequence of another rank's failure, raise an
        error that names that failure.
        """
        if not _Failure.of(error).may_be_echo:
            return
        for rank in filter(meeting.has_come, self.world.ranks):
            turn = msgspec.msgpack.decode(meeting.message_of(rank), type=_Turn)
            if turn.failure is not None and not turn.failure.may_be_echo:
                raise self._failed(rank, turn, (rank,), _ANEW) from error

    def _lost(self, ranks: tuple[int, ...], error: BaseException) -> RankMissing:
        named = _named(ranks).capitalize()
        return RankMissing(
            f"{named} was lost in {self._topic!r}: a collective of this rank's step failed with {type(error).__name__}.",
            why="the lost rank has neither finished its step nor reported an error: it has died, or it hangs",
            next=f"look at the last output of rank {ranks[0]}{_ANEW}",
            ranks=ranks,
        )

    def _failed(self, rank: int, turn: _Turn, ranks: tuple[int, ...], advice: str = "") -> RankFailed:
        assert turn.failure is not None
        more = "" if len(ranks) == 1 else f" (and {len(ranks) - 1} more)"
        place = f" after {turn.step!r}" if turn.step else ""
        why = f": {turn.failure.why}" if turn.failure.why else ""
        return RankFailed(
            f"Rank {rank}{more} failed in {self._topic!r}{place}: {turn.failure.found}",
            why=f"either all ranks continue, or none does{why}",
            next=f"on rank {rank}: {turn.failure.next}{advice}",
            ranks=ranks,
        )


def differing(facts: dict[str, list[str]], ranks: Sequence[int], next_: str = "", *, why: str = _WHY) -> RanksDiffer:
    """Return the error for facts that should be equal on all ranks, as a table of values and the ranks that have them.

    ``facts`` has one value per rank. Equal facts are left out.
    """
    rows, odd = [], set[int]()
    for name, values in facts.items():
        by_value: dict[str, list[int]] = {}
        for rank, value in zip(ranks, values, strict=True):
            by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            rows.append(f"{name}: " + "; ".join(f"{_named(who)} {value}" for value, who in by_value.items()))
            most = max(by_value.values(), key=len)
            odd.update(rank for who in by_value.values() if who is not most for rank in who)
    return RanksDiffer(
        "The ranks are not doing the same:\n" + "\n".join(f"    {row}" for row in rows),
        why=why,
        next=next_ or "pass the same on all ranks, or pass ranks= with the ranks that do the same",
        ranks=tuple(sorted(odd)),
    )


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_CPU = torch.device("cpu")
_NO_TIME = datetime.timedelta(milliseconds=1)
_TAG = 20_873
"""A message tag that no message is ever sent with, so that a receive with this tag times out."""
_KINDS = range(32, 256)
"""The numbers of kinds of backends that torch does not use itself: torch numbers kinds in one byte and names only the first
few.
"""


def release(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close the connections of these groups, so that ranks that wait in one of their collectives get an error.

    Those ranks wait inside torch, where Python exceptions do not reach them. A group whose connections were closed cannot be
    used until ``renew`` gives it new ones. Then all objects that hold the group (a reducer, a device mesh) can continue. With
    gloo, a receive that times out at once makes gloo close every connection of the group. Other backends use ``abort``. Each
    group must have more than one rank, and this rank must not be in one of their collectives.
    """
    for group in groups:
        if dist.get_backend(group) == dist.Backend.GLOO:
            _close(group)
        else:
            group.abort()


def _close(group: dist.ProcessGroup) -> None:
    # gloo's abort() does not end a running collective (torch 2.13). A receive that times out makes gloo close all connections
    # of the group, on this rank's action alone.
    somebody = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):  # the expected time-out, or a connection that is closed already
        group.recv([torch.empty(1, device=_CPU)], somebody, _TAG).wait(_NO_TIME)


def renew(world: World, groups: Iterable[dist.ProcessGroup], occasion: str) -> None:
    """Give released gloo groups new connections. All ranks must call this.

    A group never replaces the first backend of each kind, so the new backend is registered under an unused kind. The private
    names were seen in torch 2.13 and 2.15; 2.9 and 2.11 bind the same ones.

    Raises:
        InvalidModel: all kinds are used.
    """
    for group in groups:
        name, about = group.group_name, group.group_desc
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        store = dist.PrefixStore(f"renewed/{occasion}/{name}/{ranks}", world.store)
        timeout = group._get_backend(_CPU).options._timeout
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)
        backend._set_sequence_number_for_group()
        for kind in _KINDS:
            for device in group._device_types:
                group._register_backend(device, dist.ProcessGroup.BackendType(kind), backend)
            if group._get_backend(_CPU) is backend:
                break
        else:
            raise InvalidModel(
                f"A process group got new connections {len(_KINDS)} times, and cannot get more.",
                why="it gets new connections each time a training step runs out of memory, and torch numbers them in one byte",
                next="restart the job with a smaller budget",
            )
        group._set_group_name(name)  # the backend stores both
        group._set_group_desc(about)
