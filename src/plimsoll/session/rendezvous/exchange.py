"""One exchange: every rank leaves a message and gets everyone's, or all ranks raise the same error in time.

Messages go through torch's store, not through collectives: a rank that waits can give up. Whether an exchange took place is
decided once, by whoever is first to write the verdict: the last rank to come writes that it is complete, the first rank
whose time is up writes who is missing. So either all ranks get all messages, or all raise, the straggler too.

Known weakness: a rank that dies between its message and its reading is not noticed here; its message counts.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist

from plimsoll.errors import RankMissing
from plimsoll.session.rendezvous.world import World

TIMEOUT_SECONDS = 60.0
"""How long ranks wait for each other unless told otherwise."""

_COMPLETE = b"complete"
_MISSING = b"missing "


def exchange(
    world: World, topic: str, message: bytes, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> tuple[bytes, ...]:
    """Give a message and get those of all ranks, in the order of ``world.ranks``.

    Every rank calls this as often as the others, for each topic.

    Raises:
        RankMissing: some rank did not come in time; it is raised on all ranks, also on the late ones.
    """
    meeting = Meeting.arrive(world, topic, message, timeout_seconds)
    return meeting.collect()


@dataclass(frozen=True, slots=True)
class Meeting:
    """One exchange, as one rank sees it: its keys in the store."""

    world: World
    topic: str
    turn: int
    timeout_seconds: float

    @classmethod
    def arrive(cls, world: World, topic: str, message: bytes, timeout_seconds: float) -> Meeting:
        """Leave a message. The last rank to come declares the exchange complete."""
        turn = world.store.add(f"{topic}/turn/{world.rank}", 1)
        meeting = cls(world, topic, turn, timeout_seconds)
        world.store.set(meeting._key(world.rank), message)  # type: ignore[arg-type]  # the stub forgets bytes
        if world.store.add(meeting._key("arrived"), 1) == world.size:
            world.store.compare_set(meeting._key("verdict"), "", _COMPLETE.decode())
        return meeting

    def collect(self) -> tuple[bytes, ...]:
        """Wait for the verdict, then read everyone's message."""
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
        """Whether all ranks have come, or come in so many seconds; nothing is decided by asking."""
        try:
            self.world.store.wait([self._key("verdict")], datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def note(self, name: str, text: str) -> str:
        """Write something beside the messages, unless a rank has done so already; what is there then."""
        noted: bytes = self.world.store.compare_set(self._key(name), "", text)
        return noted.decode()

    def noted(self, name: str) -> str:
        """What some rank has written under this name; empty where none has."""
        key = self._key(name)
        return self.world.store.get(key).decode() if self.world.store.check([key]) else ""

    def has_come(self, rank: int) -> bool:
        """Whether a rank has left its message."""
        here: bool = self.world.store.check([self._key(rank)])
        return here

    def message_of(self, rank: int) -> bytes:
        """The message of a rank that has come."""
        return self.world.store.get(self._key(rank))

    def _key(self, what: int | str) -> str:
        return f"{self.topic}/{self.turn}/{what}"

    def _verdict(self) -> bytes:
        store, key = self.world.store, self._key("verdict")
        try:
            store.wait([key], datetime.timedelta(seconds=self.timeout_seconds))
        except dist.DistStoreError:
            missing = [str(rank) for rank in self.world.ranks if not store.check([self._key(rank)])]
            # The last rank may come between the end of the wait and this look.
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
            why="every rank has to take part; one that comes late, died or runs other code would leave the others waiting",
            next="look at what the missing ranks are doing, or give them more time: timeout_seconds=",
            ranks=missing,
        )
