"""Runs a set-up of a training framework in processes of its own, one a rank: metered, or timed in turns with other arms."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.stack_setups.set_up import Arm, SetUp, Watch
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor
from plimsoll.tracing.local_tensors import local_of
from plimsoll.tracing.meters.timing import one_thread

_PROCESSES: Any = multiprocessing.get_context("fork")  # what was imported need not be imported again


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a training ended in one process."""

    peaks: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    digest: str = ""
    """Of all weights' bits."""
    failure: str = ""
    floor_bytes: int = 0
    """The budget was below this."""


class _Running:
    """One arm, in as many processes as it has ranks."""

    def __init__(self, set_up: SetUp, arm: Arm, steps: int, *, is_metered: bool) -> None:
        port = _free_port()
        pairs = [_PROCESSES.Pipe() for _ in range(set_up.ranks)]
        self._told: list[Connection] = [ours for ours, _ in pairs]
        self._processes = [
            _PROCESSES.Process(
                target=_train, args=(set_up, arm, steps, rank, port, theirs), kwargs={"is_metered": is_metered}
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()

    def next(self) -> list[Any]:
        """What every rank tells next: the seconds of a step, or how training ended."""
        return [told.recv() for told in self._told]

    def go_on(self) -> None:
        for told in self._told:
            told.send(None)

    def end(self) -> None:
        for told in self._told:
            told.close()
        for process in self._processes:
            process.join()


def metered(set_up: SetUp, arm: Arm, steps: int) -> list[Ended]:
    """Train with a meter from outside; what every rank saw."""
    running = _Running(set_up, arm, steps, is_metered=True)
    ended: list[Ended] = running.next()
    running.end()
    return ended


def timed_in_turns(set_up: SetUp, arms: Sequence[Arm], *, taught: int, rounds: int) -> list[list[float]]:
    """CPU seconds of a step of every arm, summed over ranks, round for round: each arm makes one step while the others wait."""
    running = []
    for arm in arms:
        running.append(_Running(set_up, arm, taught + rounds, is_metered=False))
        _seconds(running[-1].next())
        for _ in range(taught - 1):
            running[-1].go_on()
            _seconds(running[-1].next())
    found: list[list[float]] = []
    for number in range(rounds):
        seconds = [0.0] * len(arms)
        for index in (*range(number % len(arms), len(arms)), *range(number % len(arms))):
            running[index].go_on()
            seconds[index] = _seconds(running[index].next())
        found.append(seconds)
    for each in running:
        each.go_on()
        each.next()
        each.end()
    return found


def _seconds(told: list[Any]) -> float:
    failures = [each.failure for each in told if isinstance(each, Ended)]
    if failures:
        raise RuntimeError(next(filter(None, failures), "training ended early"))
    return sum(told)


def _train(set_up: SetUp, arm: Arm, steps: int, rank: int, port: int, told: Connection, *, is_metered: bool) -> None:
    if set_up.ranks > 1:
        os.environ.update(_as_torchrun(rank, set_up.ranks, port))

    def take_turns(seconds: float) -> None:
        told.send(seconds)
        told.recv()

    watch = Watch(LiveStorages()) if is_metered else Watch(takes_turns=take_turns)
    said: list[warnings.WarningMessage] = []
    try:
        with one_thread(), warnings.catch_warnings(record=is_metered) as caught:
            if caught is not None:
                warnings.simplefilter("always")
                said = caught
            set_up.train(watch, arm, steps)
        digest = hashlib.sha256()
        for weight in watch.weights:
            digest.update(local_of(weight).contiguous().view(torch.uint8).numpy().tobytes())
        floor_bytes = max((_floor_in(str(each.message)) for each in said), default=0)
        ended = Ended(
            peaks=tuple(watch.peaks), losses=tuple(watch.losses), digest=digest.hexdigest(), floor_bytes=floor_bytes
        )
    except BudgetBelowFloor as error:
        ended = Ended(failure=f"BudgetBelowFloor: {error.found}", floor_bytes=_floor_in(error.next))
    except Exception as error:  # noqa: BLE001 - whoever started it is told
        ended = Ended(failure=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    told.send(ended)


def _floor_in(text: str) -> int:
    """The largest budget that a refusal advises, or a warning of several ranks in its place."""
    return max(map(int, re.findall(r"\((\d+) bytes\)", text)), default=0)


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a process in its environment."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
