"""Copies in, the threads and the file that carry them out: bounded, counted, and closed in good order.

After a fork the child has neither the threads nor a say in which extents are taken, so every entry asks for the owner.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from plimsoll.engine.offload.backing import BackingFile
from plimsoll.errors import OffloadFailed


class Transport:
    """Carries copies between memory and ``file``.

    Args:
        file: closed together with this.
        workers: the most threads; they start when there is work for them.
        most_out_bytes: the bound on what is on its way out.
    """

    def __init__(self, file: BackingFile, workers: int, most_out_bytes: int) -> None:
        self.file = file
        self.out_bytes = 0
        """On its way out now."""
        self.out_cpu_seconds = 0.0
        self.in_cpu_seconds = 0.0
        self._most_out_bytes = most_out_bytes
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="plimsoll-disk")
        self._owner_pid = os.getpid()
        self._is_closed = False

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Let a thread do ``work``; nothing where no thread will ever come (the pool, or the interpreter, is closing)."""
        try:
            return self._pool.submit(work)
        except RuntimeError:
            return None

    def admit(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be on their way out; more than the bound go alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self.out_bytes or self.out_bytes + nbytes <= self._most_out_bytes)
            self.out_bytes += nbytes

    def account_out(self, nbytes: int, cpu_seconds: float) -> None:
        """``nbytes`` that were admitted are out, or have failed."""
        with self._changed:
            self.out_bytes -= nbytes
            self.out_cpu_seconds += cpu_seconds
            self._changed.notify_all()

    def account_in(self, cpu_seconds: float) -> None:
        with self._changed:
            self.in_cpu_seconds += cpu_seconds

    def check_owner(self) -> None:
        """
        Raises:
            OffloadFailed: in a process that was forked from the one that opened the link.
        """
        if self._owner_pid != os.getpid():
            raise OffloadFailed(
                f"This disk link belongs to process {self._owner_pid}.",
                why=f"process {os.getpid()} was forked from it and has none of its copying threads",
                next="open a link in the forked process, or run the step where the link was opened",
            )

    def check_open(self) -> None:
        """
        Raises:
            OffloadFailed: closed, or of another process.
        """
        self.check_owner()
        if self._is_closed:
            raise OffloadFailed(
                "This disk link is closed.",
                why="close() was called and its file is gone",
                next="open another link, and close it after the last backward",
            )

    def close(self) -> None:
        """Finish what is under way, end the threads, give the file back. In a forked child: only its own copy of these."""
        if self._owner_pid == os.getpid() and not self._is_closed:
            self._pool.shutdown(wait=True)
            self.file.close()
        self._is_closed = True
