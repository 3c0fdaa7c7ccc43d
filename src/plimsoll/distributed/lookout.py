"""The ranks of a run in, a thread that finds out when one of them is gone or has said what happened to it out.

A process on the same machine is watched through its ``pidfd``: its end is noticed at once, however it ends. Across machines
each rank writes a sign of life twice a second and watches the next one's, so that the store is asked as often as there are
ranks, not as often as there are pairs. The thread has a connection to the store of its own: the training thread may be
waiting on the other one, or in a collective that never returns. In that last case the thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from plimsoll.distributed.bulletin import Bulletin, Cause, What, root
from plimsoll.session.rendezvous.world import World

_BEAT_SECONDS = 0.5
_HEARD_SECONDS = 2.0
"""How long a rank that failed stays, so that all hear of it: the store may end with its process."""


class _Process(msgspec.Struct, frozen=True):
    """A process, as one on the same machine (and in the same process namespace) can find it."""

    machine: str
    number: int

    @classmethod
    def own(cls) -> _Process:
        boot = Path("/proc/sys/kernel/random/boot_id")
        namespace = Path("/proc/self/ns/pid")
        if not (boot.exists() and namespace.exists()):
            return cls(f"{socket.gethostname()}/{os.getpid()}", os.getpid())  # nobody's: signs of life must do
        return cls(f"{boot.read_text().strip()}/{namespace.stat().st_ino}", os.getpid())


class Lookout:
    """Watches the other ranks until ``close``.

    Args:
        world: all ranks.
        store: a connection of this thread's own, for this purpose alone.
        step: tells the step that this rank is in.
        silence_seconds: a rank that gave no sign of life for so long counts as dead.
        give_up: called with the cause when this process has known it for ``timeout_seconds`` and not ended.
        timeout_seconds: see ``give_up``.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        *,
        step: Callable[[], int],
        silence_seconds: float,
        timeout_seconds: float,
        give_up: Callable[[Cause], None],
    ) -> None:
        self._world, self._store, self._step = world, store, step
        self._silence_seconds, self._timeout_seconds, self._give_up = silence_seconds, timeout_seconds, give_up
        self._bulletin = Bulletin(store)
        self._causes: list[Cause] = []
        self._news = threading.Condition()
        self._known_since: float | None = None
        self._next = world.ranks[(world.ranks.index(world.rank) + 1) % world.size]
        self._last_sign = (b"", time.monotonic())
        self._wake_read, self._wake_write = os.pipe()
        self._peers: dict[int, int] = {}
        """Rank by the descriptor of its process."""
        self._strangers = set(_neighbours(world))
        self._is_closing = self._is_leaving = False
        self._own = _Process.own()
        store.set(f"process/{world.rank}", msgspec.json.encode(self._own).decode())
        self._thread = threading.Thread(target=self._run, name="plimsoll-lookout", daemon=True)
        self._thread.start()

    def publish(self, cause: Cause) -> None:
        """Tell all ranks what happened to this one, which is about to leave."""
        self._is_leaving = True
        with contextlib.suppress(dist.DistError), self._news:  # the store may be gone with the rank that held it
            self._bulletin.publish(cause)
            self._take(self._bulletin.read())

    def wait_until_heard(self) -> None:
        """Stay until all ranks know of a cause, or a moment at most."""
        end = time.monotonic() + _HEARD_SECONDS
        with contextlib.suppress(dist.DistError):
            while time.monotonic() < end:
                with self._news:
                    if self._store.add("heard", 0) >= self._world.size:
                        return
                time.sleep(_BEAT_SECONDS / 10)

    def cause(self, *, settle_seconds: float) -> Cause | None:
        """The cause to name. Waits for one that is certain for so long, then takes the first.

        Args:
            settle_seconds: how long the news of a peer's end may take.
        """
        end = time.monotonic() + settle_seconds
        with self._news:
            while not any(cause.is_certain for cause in self._causes) and (left := end - time.monotonic()) > 0:
                self._wake()
                self._news.wait(min(left, _BEAT_SECONDS / 10))
            return root(self._causes)

    def close(self) -> None:
        """Stop watching and being watched; harmless when called twice."""
        if self._is_closing:
            return
        self._is_closing = True
        with contextlib.suppress(dist.DistError), self._news:
            self._store.set(f"done/{self._world.rank}", "1")
        self._wake()
        self._thread.join()
        for descriptor in (*self._peers, self._wake_read, self._wake_write):
            os.close(descriptor)

    def _wake(self) -> None:
        os.write(self._wake_write, b"!")

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        gone: list[int] = []
        while not self._is_closing:
            try:
                with self._news:
                    self._look(poller, gone)
            except dist.DistError as error:
                self._store_is_gone(poller, error)
                return
            self._end_if_stuck()
            gone = [descriptor for descriptor, _ in poller.poll(1000 * _BEAT_SECONDS)]
            if self._wake_read in gone:
                os.read(self._wake_read, 4096)

    def _look(self, poller: select.poll, gone: list[int]) -> None:
        """One round: a sign of life, the end of processes, the next rank's sign, the bulletin."""
        self._store.set(f"life/{self._world.rank}", f"{self._step()} {time.monotonic()}")
        for descriptor in gone:
            if descriptor in self._peers:
                self._note_death(self._peers[descriptor])
                poller.unregister(descriptor)
        self._meet(poller)
        sign = self._get(f"life/{self._next}")
        if sign != self._last_sign[0]:
            self._last_sign = (sign, time.monotonic())
        elif time.monotonic() - self._last_sign[1] > self._silence_seconds:
            self._note_death(self._next)
        self._take(self._bulletin.read())

    def _meet(self, poller: select.poll) -> None:
        """Watch neighbours that have come since the last round."""
        for peer in list(self._strangers):
            if not (found := self._get(f"process/{peer}")):
                continue
            self._strangers.remove(peer)
            process = msgspec.json.decode(found, type=_Process)
            if process.machine != self._own.machine:
                continue
            try:
                descriptor = os.pidfd_open(process.number)
            except ProcessLookupError:
                self._note_death(peer)
            except OSError:
                continue  # refused by a sandbox, or no descriptor is left: signs of life must do
            else:
                self._peers[descriptor] = peer
                poller.register(descriptor, select.POLLIN)

    def _note_death(self, peer: int) -> None:
        """Tell all that a rank is gone, unless it has finished, or has said something before it ended."""
        if self._get(f"done/{peer}") or any(cause.rank == peer for cause in self._bulletin.read()):
            return
        step, _, _ = self._get(f"life/{peer}").partition(b" ")
        last = int(step) if step else self._step()
        self._bulletin.publish(Cause(rank=peer, what=What.DIED, step=last, is_certain=True))

    def _get(self, key: str) -> bytes:
        """What the store holds, nothing where that is not there."""
        return self._store.get(key) if self._store.check([key]) else b""

    def _take(self, causes: list[Cause]) -> None:
        self._causes = causes
        if causes and self._known_since is None:
            self._known_since = time.monotonic()
            self._store.add("heard", 1)
        self._news.notify_all()

    def _store_is_gone(self, poller: select.poll, error: dist.DistError) -> None:
        """Nothing more can be learned from the store: the process that held it has ended, or the way to it is cut."""
        poller.unregister(self._wake_read)
        ended = [self._peers[found] for found, _ in poller.poll(1000 * _BEAT_SECONDS) if found in self._peers]
        text = f"the store cannot be reached: {str(error).splitlines()[0]}"
        causes = [Cause(rank=rank, what=What.DIED, step=self._step(), is_certain=True) for rank in ended]
        if not causes:
            first = self._world.ranks[0]
            causes = [Cause(rank=first, what=What.FAILED, step=self._step(), text=text, is_certain=False)]
        with self._news:
            self._causes = [*self._causes, *causes]
            self._known_since = self._known_since or time.monotonic()
            self._news.notify_all()
        while not self._is_closing:
            time.sleep(_BEAT_SECONDS / 10)
            self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """End the process, if the training thread does not leave by itself."""
        if self._known_since is None or time.monotonic() - self._known_since < self._timeout_seconds:
            return
        cause = root(self._causes)
        if cause is not None and not (self._is_leaving or self._is_closing):
            self._give_up(cause)


def _neighbours(world: World) -> list[int]:
    """Ranks that torchrun started beside this one; without torchrun, all."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    node = world.rank // beside
    return [rank for rank in world.ranks if rank != world.rank and rank // beside == node]
