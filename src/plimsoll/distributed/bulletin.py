"""What has gone wrong on any rank in, the one cause that all ranks name out.

Ranks write into torch's store what happened to them, numbered in the order in which it came. A rank that meets an error of its
own kind (out of memory, a value that is wrong) says so for certain. One that meets a plain ``RuntimeError`` cannot know whether
that is its own or what a collective raises when a peer is gone, since gloo's errors have no type of their own. So certain
causes come first, then the earliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
from torch._C._distributed_c10d import Store


class What(StrEnum):
    """What happened to a rank."""

    FAILED = "failed"
    OUT_OF_MEMORY = "ran out of memory"
    DIED = "died"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one rank.

    ``where`` is the part of the step, ``text`` the error's own first line. ``is_certain`` is false where it may be no more than
    the consequence of what happened to another rank.
    """

    rank: int
    what: What
    step: int
    where: str = ""
    text: str = ""
    is_certain: bool

    def __str__(self) -> str:
        if self.what is What.DIED:
            return f"rank {self.rank} died (no word since step {self.step})"
        place = f"step {self.step}, {self.where}" if self.where else f"step {self.step}"
        return f"rank {self.rank} {self.what} in {place}: {self.text}"


class Bulletin:
    """Everything that ranks have said about what went wrong.

    Args:
        store: shared by all ranks, for this purpose alone.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, cause: Cause) -> None:
        """Tell all ranks."""
        number = self._store.add("said", 1)
        self._store.set(f"cause/{number}", msgspec.json.encode(cause).decode())

    def read(self) -> list[Cause]:
        """What has been said so far, in order; what is being written just now is left for later."""
        keys = [f"cause/{number}" for number in range(1, self._store.add("said", 0) + 1)]
        return [msgspec.json.decode(self._store.get(key), type=Cause) for key in keys if self._store.check([key])]


def root(causes: Sequence[Cause]) -> Cause | None:
    """The cause to name: the first certain one, or the first."""
    return next((cause for cause in causes if cause.is_certain), causes[0] if causes else None)
