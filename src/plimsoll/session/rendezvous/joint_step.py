"""One training step that ranks run together: all come to its end, or all run it again.

How a step ended is decided once, by whoever is first to write it down: the last rank to come to its end writes that it is
complete, a rank that fails writes that it has. So a rank may return from a step only when no other one can fail in it any
more. That is one short wait at the end of every step, through torch's store and not through a collective.

A rank that runs out of memory then ends the connections of the model's groups, as the others wait in a collective that it
will not join. What that raises on them is no error of theirs. When all have put everything back, the groups get new
connections. Known weakness: a rank that waits in a collective of another group, which the model does not show, waits on.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from plimsoll.errors import RankError, RankFailed, RankMissing
from plimsoll.session.rendezvous.conversation import Conversation, release, renew

_COMPLETE, _MEMORY, _FAILED = "complete", "memory", "failed"
_PATIENCE_SECONDS = 600.0
"""Beyond the usual time, a rank that is through with its step waits so long for the others."""
_GRACE_SECONDS = 3.0
"""An error that may come of another rank's failure waits so long for that rank to say so."""


class JointStep:
    """How the ranks of a conversation end a step, again and again; ``None``: this process is on its own."""

    def __init__(self, conversation: Conversation | None) -> None:
        self._conversation = conversation
        self._groups = () if conversation is None else _all_groups(conversation)
        self._steps = self._renewals = 0
        self._number = (
            0 if conversation is None else conversation.world.store.add(f"joint/{conversation.world.rank}", 1)
        )

    def begin(self) -> None:
        """A step begins, on all ranks alike."""
        self._steps += 1
        if self._conversation is not None and self._conversation.world.is_first and self._steps > 2:
            for what in ("ended", "verdict"):  # all have read those of the last but one
                self._conversation.world.store.delete_key(self._key(what, self._steps - 2))

    def failed_elsewhere(self) -> RankFailed | None:
        """This rank has come to the end: ``None`` once all have, else the error of the rank that ran out of memory.

        Raises:
            RankFailed: another rank failed for some other reason, and does not run the step again.
            RankMissing: another rank does not come to the end.
        """
        if self._conversation is None:
            return None
        world = self._conversation.world
        if world.store.add(self._key("ended"), 1) == world.size:
            world.store.compare_set(self._key("verdict"), "", _COMPLETE)
        seconds = self._conversation.timeout_seconds + _PATIENCE_SECONDS
        verdict = self._verdict(seconds)
        if not verdict:
            raise RankMissing(
                f"Not all of {world.size} ranks came to the end of their training step within {seconds:g} s.",
                why="a step counts when all ranks have come to its end, as all run it again where one runs out of memory",
                next="call handle.step on every rank as often, and look at what the others are doing",
                ranks=(),
            )
        if verdict == _COMPLETE:
            return None
        error = self._error(verdict)
        if verdict.startswith(_FAILED):
            raise error
        return error

    def failure(self, error: Exception) -> Exception | None:
        """What an error means that came out of the step: the one to raise if all cannot run it again, or ``None`` where it is
        this rank's own and passes.
        """
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if self._conversation is None:
            return error if is_memory else None
        world = self._conversation.world
        verdict = ""
        if not is_memory and isinstance(error, RuntimeError | RankError):
            verdict = self._verdict(_GRACE_SECONDS)
        if not verdict:
            kind = _MEMORY if is_memory else _FAILED
            said = f"{kind} {world.rank} {type(error).__name__}: {error}"
            verdict = world.store.compare_set(self._key("verdict"), "", said).decode()
        if not verdict.startswith(_MEMORY):
            return None
        if is_memory:
            return error
        if not isinstance(error, RuntimeError | RankError):
            return None
        return self._error(verdict)

    def renew(self) -> None:
        """End what the others wait for, if they do; every group has connections again when all ranks have called this."""
        if self._conversation is not None:
            release(self._groups)
            self._conversation.begin_anew()
            renew(self._conversation.world, self._groups, f"{self._number}/{self._renewals}")
            self._renewals += 1

    def _verdict(self, seconds: float) -> str:
        assert self._conversation is not None
        store, key = self._conversation.world.store, self._key("verdict")
        try:
            store.wait([key], datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            return ""
        return store.get(key).decode()

    def _error(self, verdict: str) -> RankFailed:
        _, rank, said = verdict.split(" ", 2)
        return RankFailed(
            f"Rank {rank} failed in a training step: {said}",
            why="all ranks come to the end of a step, or all run it again, or none does",
            next=f"see the error of rank {rank}",
            ranks=(int(rank),),
        )

    def _key(self, what: str, step: int | None = None) -> str:
        return f"joint/{self._number}/{self._steps if step is None else step}/{what}"


def _all_groups(conversation: Conversation) -> tuple[dist.ProcessGroup, ...]:
    """The model's groups, and the one of the whole job if all of it takes part: users reduce their losses in that one."""
    whole = dist.group.WORLD
    groups = list(conversation.groups)
    if whole is not None and whole.size() == conversation.world.size and dist.get_backend(whole) == dist.Backend.GLOO:
        groups.append(whole)
    return tuple(dict.fromkeys(groups))
