"""One training step that ranks run together: all finish it, or all run it again.

The first rank that writes the outcome of a step decides it: the last rank to finish writes that the step is complete, or a rank
that fails writes that it has failed. So a rank returns from a step only when no other rank can fail in it any more. This costs
one short wait at the end of every step, through torch's store and not through a collective.

A rank that runs out of memory also closes the connections of the model's groups, because the others wait in a collective that
it will not join. These others then raise errors, which are not their own. When all ranks have restored their state, the groups
get new connections. Known weakness: if a rank waits in a collective of a group that the model does not show, it keeps waiting.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from plimsoll.errors import RankError, RankFailed, RankMissing
from plimsoll.session.rendezvous.conversation import Conversation, release, renew

_COMPLETE, _MEMORY, _FAILED = "complete", "memory", "failed"
_PATIENCE_SECONDS = 600.0
"""Seconds that a rank that finished its step waits for the others, in addition to the usual time."""
_GRACE_SECONDS = 3.0
"""Seconds to wait for another rank to report its failure before an error counts as this rank's own."""


class JointStep:
    """Ends training steps on all ranks of a conversation together. A conversation of ``None`` means a single process."""

    def __init__(self, conversation: Conversation | None) -> None:
        self._conversation = conversation
        self._groups = () if conversation is None else _all_groups(conversation)
        self._steps = self._renewals = 0
        self._number = (
            0 if conversation is None else conversation.world.store.add(f"joint/{conversation.world.rank}", 1)
        )

    def begin(self) -> None:
        """Begin a step. All ranks must call this."""
        self._steps += 1
        if self._conversation is not None and self._conversation.world.is_first and self._steps > 2:
            # All ranks have begun the last step, so all have read the keys of the step before it.
            for what in ("ended", "verdict"):
                self._conversation.world.store.delete_key(self._key(what, self._steps - 2))

    def failed_elsewhere(self) -> RankFailed | None:
        """Report to the other ranks that this rank has finished the step. Return ``None`` once all have finished, or the error
        of a rank that ran out of memory.

        Raises:
            RankFailed: another rank failed for another reason, and does not run the step again.
            RankMissing: another rank does not finish.
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
                f"Not all of {world.size} ranks reached the end of their training step within {seconds:g} s.",
                why="a step counts once all ranks have reached its end, because all run it again if one runs out of memory",
                next="call handle.step equally often on every rank, and find out what the missing ranks are doing",
                ranks=(),
            )
        if verdict == _COMPLETE:
            return None
        error = self._error(verdict)
        if verdict.startswith(_FAILED):
            raise error
        return error

    def failure(self, error: Exception) -> Exception | None:
        """Decide what an error that left the step means.

        Return ``None`` if it must be raised itself, because it is this rank's own and the ranks do not run the step again.
        Otherwise return the error to raise in case the step cannot be run again.
        """
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if self._conversation is None:
            return error if is_memory else None
        world = self._conversation.world
        verdict = ""
        # Such an error may only be the echo of another rank that closed its connections. That rank reports within seconds.
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
        """Give the model's process groups new connections. Ranks that wait in a collective are released first. All ranks must
        call this.
        """
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
            why="either all ranks finish a step, or all run it again, or all raise an error",
            next=f"see the error of rank {rank}",
            ranks=(int(rank),),
        )

    def _key(self, what: str, step: int | None = None) -> str:
        return f"joint/{self._number}/{self._steps if step is None else step}/{what}"


def _all_groups(conversation: Conversation) -> tuple[dist.ProcessGroup, ...]:
    """Return the model's groups, and the job's default group if all its ranks take part: loops often reduce losses in it."""
    whole = dist.group.WORLD
    groups = list(conversation.groups)
    if whole is not None and whole.size() == conversation.world.size and dist.get_backend(whole) == dist.Backend.GLOO:
        groups.append(whole)
    return tuple(dict.fromkeys(groups))
