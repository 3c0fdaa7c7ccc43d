"""One exchange: every rank leaves a message and gets the messages of all ranks, or all ranks raise the same error in time.

Messages go through torch's store, not through collectives, so a waiting rank can give up. The first rank that writes the
verdict decides the outcome: the last rank to arrive writes that the exchange is complete, or the first rank whose time is up
writes who is missing. So either all ranks get all messages, or all raise, including the late ones.

Known weakness: if a rank dies after it has left its message, the others do not notice it, and its message counts.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist

from plimsoll.errors import RankMissing
from plimsoll.session.rendezvous.world import World

TIMEOUT_SECONDS = 60.0
"""The default time that ranks wait for each other."""

_COMPLETE = b"complete"
_MISSING = b"missing "


def exchange(
    world: World, topic: str, message: bytes, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> tuple[bytes, ...]:
    """Leave a message and return the messages of all ranks, in the order of ``world.ranks``.

    Every rank must call this equally often for each topic.

    Raises:
        RankMissing: some rank did not arrive in time. All ranks raise it, including the late ones.
    """
    meeting = Meeting.arrive(world, topic, message, timeout_seconds)
    return meeting.collect()


@dataclass(frozen=True, slots=True)
class Meeting:
    """One exchange from one rank's view: it writes and reads the exchange's keys in the shared store."""

    world: World
    topic: str
    turn: int
    timeout_seconds: float

    @classmethod
    def arrive(cls, world: World, topic: str, message: bytes, timeout_seconds: float) -> Meeting:
        """Leave this rank's message in the shared store. The last rank to arrive also writes there that the exchange is
        complete.
        """
        turn = world.store.add(f"{topic}/turn/{world.rank}", 1)
        meeting = cls(world, topic, turn, timeout_seconds)
        world.store.set(meeting._key(world.rank), message)  # type: ignore[arg-type]  # the stub forgets bytes
        if world.store.add(meeting._key("arrived"), 1) == world.size:
            world.store.compare_set(meeting._key("verdict"), "", _COMPLETE.decode())
        return meeting

    def collect(self) -> tuple[bytes, ...]:
        """Wait until the exchange is decided (complete, or time is up), then read and return the messages of all ranks."""
        world, store = self.world, self.world.store
        verdict = self._verdict()
        if verdict != _COMPLETE:
            raise self._missing(verdict)
        keys = [self._key(rank) for rank in world.ranks]
        messages = [store.get(key) for key in keys]
        if store.add(self._key("read"), 1) == world.size:
            for key in (*keys, *map(self._key, ("arrived", "verdict", "read"))):
                store.delete_key(key)
        return tuple(messages)

    def is_complete_within(self, seconds: float) -> bool:
        """Return True if all ranks have left their messages, or do so within ``seconds``. This does not decide the exchange:
        later ranks may still arrive.
        """
        try:
            self.world.store.wait([self._key("verdict")], datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def note(self, name: str, text: str) -> str:
        """Write a text under ``name`` unless another rank has done so. Return the text that is there then."""
        noted: bytes = self.world.store.compare_set(self._key(name), "", text)
        return noted.decode()

    def noted(self, name: str) -> str:
        """Return the text that some rank has written under ``name``; empty if none has."""
        key = self._key(name)
        return self.world.store.get(key).decode() if self.world.store.check([key]) else ""

    def has_come(self, rank: int) -> bool:
        """True if a rank has left its message."""
        here: bool = self.world.store.check([self._key(rank)])
        return here

    def message_of(self, rank: int) -> bytes:
        """Return the message of a rank that has arrived."""
        return self.world.store.get(self._key(rank))

    def _key(self, what: int | str) -> str:
        return f"{self.topic}/{self.turn}/{what}"

    def _verdict(self) -> bytes:
        store, key = self.world.store, self._key("verdict")
        try:
            store.wait([key], datetime.timedelta(seconds=self.timeout_seconds))
        except dist.DistStoreError:
            missing = [str(rank) for rank in self.world.ranks if not store.check([self._key(rank)])]
            # If all are here, the last rank arrived between the end of the wait and this check.
            proposed = _MISSING + ",".join(missing).encode() if missing else _COMPLETE
            decided: bytes = store.compare_set(key, "", proposed.decode())
            return decided
        verdict: bytes = store.get(key)
        return verdict

    def _missing(self, verdict: bytes) -> RankMissing:
        missing = tuple(int(rank) for rank in verdict.removeprefix(_MISSING).decode().split(",") if rank)
        named = ("Rank " if len(missing) == 1 else "Ranks ") + ", ".join(map(str, missing))
        return RankMissing(
            f"{named} did not come to {self.topic!r} within {self.timeout_seconds:g} s.",
            why="every rank must make this call; a missing rank is late, has died, or runs other code",
            next="find out what the missing ranks are doing, or give them more time with timeout_seconds=",
            ranks=missing,
        )
