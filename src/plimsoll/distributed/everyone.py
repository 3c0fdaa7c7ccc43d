"""The ranks of a run in, what they do together out; a process on its own does it alone, by the same code."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from plimsoll.session.rendezvous.exchange import exchange, together
from plimsoll.session.rendezvous.world import World, current_world


@dataclass(frozen=True, slots=True)
class Everyone:
    """All ranks of the run, or the one process that there is (``world`` is ``None``)."""

    world: World | None
    timeout_seconds: float

    @classmethod
    def here(cls, timeout_seconds: float) -> Everyone:
        """Seen from this process."""
        return cls(current_world(), timeout_seconds)

    @property
    def rank(self) -> int:
        """This process's number."""
        return 0 if self.world is None else self.world.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return 1 if self.world is None else self.world.size

    @property
    def is_first(self) -> bool:
        """Whether this process does what only one does."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no process group."""
        return self.world is None

    def exchange(self, topic: str, message: bytes) -> tuple[bytes, ...]:
        """Everyone's message on every rank, by rank."""
        if self.world is None:
            return (message,)
        return exchange(self.world, topic, message, timeout_seconds=self.timeout_seconds)

    def together(self, topic: str) -> contextlib.AbstractContextManager[None]:
        """A block that goes well on all ranks or raises on all."""
        if self.world is None:
            return contextlib.nullcontext()
        return together(self.world, topic, timeout_seconds=self.timeout_seconds)
