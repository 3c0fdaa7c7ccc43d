"""A training loop in; the same loop, which ends in time and names the cause on every rank when one fails or dies, out."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from plimsoll.distributed.bulletin import Cause, What
from plimsoll.distributed.lookout import Lookout
from plimsoll.distributed.whereabouts import Whereabouts
from plimsoll.errors import InvalidOption, PlimsollError, RankError, RankFailed
from plimsoll.session.rendezvous.world import World, current_world

SILENCE_SECONDS = 60.0
TIMEOUT_SECONDS = 20.0
"""Shorter than the 30 s after which torchrun kills what it has asked to end."""

_SETTLE_SECONDS = 3.0
"""How long the news of a peer's end may take, once a collective has failed here."""
_MOST_CHARACTERS = 300


class Removable(Protocol):
    """What ``plimsoll.apply`` and ``plimsoll.attach`` return."""

    def remove(self) -> None:
        """Undo everything."""


@contextlib.contextmanager
def named_failures(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    first_step: int = 0,
    handle: Removable | None = None,
    silence_seconds: float = SILENCE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Iterator[Whereabouts]:
    """Run the training loop so that every rank learns why the job ends. All ranks enter it together.

    When a rank raises, runs out of memory or dies, its peers are left in collectives that fail with a broken connection, or do
    not return. Here they raise ``RankFailed`` with the peer's cause, from their own error: "rank 2 ran out of memory in step
    17, in backward of layers.3: …". The rank that failed raises its own error, with a note of step and place. torchrun's
    summary names the cause as well, and ``--max-restarts`` works as ever. Parameters and optimizer are as before the failed
    step on every rank where the optimizer's step had not begun; gradients and buffers are those of the moment.

    Args:
        model: as it is trained.
        optimizer: whose steps are counted.
        first_step: the number of the first step.
        handle: of ``plimsoll.apply`` or ``attach``; removed when the loop ends in an error.
        silence_seconds: a rank on another machine that gave no sign of life for so long counts as dead.
        timeout_seconds: a rank that cannot raise within that time, because a collective does not return, is ended, with the
            cause on its standard error.

    Yields:
        Where this rank is; ``.step`` may be set by a loop that counts otherwise.

    Raises:
        RankFailed: another rank was the cause.
        InvalidOption: seconds that mean nothing.

    Example:
        >>> with named_failures(model, optimizer, first_step=step):  # doctest: +SKIP
        ...     for batch in batches:
        ...         train(batch)
    """
    _check_seconds(silence_seconds=silence_seconds, timeout_seconds=timeout_seconds)
    world = current_world()
    here = Whereabouts(model, optimizer, first_step)
    watch = None
    try:
        if world is not None:
            watch = _Watch(world, here, silence_seconds, timeout_seconds)
        yield here
    except BaseException as error:
        if handle is not None:
            handle.remove()
        if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
            raise
        _end(error, here, watch)
    finally:
        here.remove()
        if watch is not None:
            watch.close()


def _end(error: BaseException, here: Whereabouts, watch: _Watch | None) -> NoReturn:
    """Raise the error to the end, or the peer's cause instead; either way torchrun hears of it."""
    place = here.describe(error.__traceback__)
    named = None if watch is None else watch.explain(error, here.step, place)
    if named is None:
        error.add_note(f"plimsoll: in step {here.step}, {place}")
        get_error_handler().record_exception(error)
        raise error
    get_error_handler().record_exception(named)
    _say(named)  # torchrun may end this process before its traceback is written
    if named is error:
        raise error
    raise named from error


class _Watch:
    """One rank's side of it: a lookout for the others, and SIGTERM, with which torchrun ends ranks whose peer has failed."""

    def __init__(self, world: World, here: Whereabouts, silence_seconds: float, timeout_seconds: float) -> None:
        turn = world.store.add(f"failures/turn/{world.rank}", 1)
        self._world = world
        self._here = here
        self._is_ending = False
        self._raised: RankFailed | None = None
        self._lookout = Lookout(
            world,
            PrefixStore(f"failures/{turn}", world.store).clone(),  # type: ignore[attr-defined]  # missing in the stub
            step=lambda: here.step,
            silence_seconds=silence_seconds,
            timeout_seconds=timeout_seconds,
            give_up=self._give_up,
        )
        self._earlier: Any = None
        is_main = threading.current_thread() is threading.main_thread()
        self._has_signal = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._has_signal:
            self._earlier = signal.signal(signal.SIGTERM, self._on_terminate)

    def explain(self, error: BaseException, step: int, place: str) -> RankFailed | None:
        """The error to raise instead; ``None`` where this rank's own is the cause."""
        self._is_ending = True
        if error is self._raised:
            return self._raised
        is_certain = type(error) is not RuntimeError and not isinstance(error, dist.DistError | RankError)
        own = Cause(
            rank=self._world.rank,
            what=What.OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError | MemoryError) else What.FAILED,
            step=step,
            where=place,
            text=_first_line(error),
            is_certain=is_certain,
        )
        self._lookout.publish(own)
        cause = None if is_certain else self._lookout.cause(settle_seconds=_SETTLE_SECONDS)
        if cause is None or cause.rank == self._world.rank:
            self._lookout.wait_until_heard()
            return None
        return _failed(cause, f"this rank was in step {step}, {place}, and got {_first_line(error)}")

    def close(self) -> None:
        """Stop watching, and leave SIGTERM as it was."""
        if self._has_signal and signal.getsignal(signal.SIGTERM) == self._on_terminate:
            signal.signal(signal.SIGTERM, self._earlier)
        self._lookout.close()

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        """Asked to end: because of a peer (then raise that), or by somebody (then end as if nobody had listened)."""
        if self._is_ending:
            return
        cause = self._lookout.cause(settle_seconds=_SETTLE_SECONDS)
        if cause is None or cause.rank == self._world.rank:
            signal.signal(signal.SIGTERM, self._earlier)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._raised = _failed(cause, f"this rank was in step {self._here.step}, and was asked to end")
        raise self._raised

    def _give_up(self, cause: Cause) -> None:
        """The training thread hangs in something that no exception reaches: say why, and end the process."""
        error = _failed(cause, f"this rank was in step {self._here.step}, in a call that did not return")
        get_error_handler().record_exception(error)
        _say(error)
        os._exit(1)


def _say(error: RankFailed) -> None:
    sys.stderr.write(f"plimsoll: {error}\n")
    sys.stderr.flush()


def _failed(cause: Cause, why: str) -> RankFailed:
    told = str(cause)
    return RankFailed(
        f"{told[0].upper()}{told[1:]}" + ("" if told.endswith(".") else "."),
        why=why,
        next=f"see the log of rank {cause.rank}; with its last checkpoint the run goes on as if nothing had happened"
        + ("" if cause.what is not What.OUT_OF_MEMORY else ", under a smaller budget or with a smaller batch"),
        ranks=(cause.rank,),
    )


def _first_line(error: BaseException) -> str:
    said = error.found if isinstance(error, PlimsollError) else str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0] if said else 'no message'}"[:_MOST_CHARACTERS]


def _check_seconds(**given: float) -> None:
    for name, seconds in given.items():
        if not seconds > 0:
            raise InvalidOption(
                f"{name}={seconds!r} is no time to wait.",
                why="ranks need a moment to tell each other what happened",
                next=f"give {name}= a number of seconds above 0",
            )
