"""Measure how fast a link carries a device's tensors in both directions, and the CPU time of its copies.

It keeps several tensors on the link (32 MiB in all by default, so that CPU caches hardly distort the result), fetches the
oldest and stores the next until half a second has passed, and takes medians. Storing the first tensors is not counted: it
extends the file, and later ones reuse that space, as later training steps do. A disk is therefore measured through the system's
page cache. A disk that must hold more than the free memory slows down to the speed of the device itself, which this does not
measure. It also does not measure the allocation of single tensors of 32 MiB and more, whose memory returns to the system every
time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from plimsoll.engine.offload.protocol import CopyCpuSeconds, Link, Ticket
from plimsoll.tracing.meters.timing import wait_for_device
from plimsoll.units import MIB

_MOST_SECONDS = 0.5
_MOST_TRIPS = 40
_ALIVE = 8
"""Tensors on the link at once."""
_SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Measured: a transfer of ``n`` bytes takes ``latency_seconds + n / bytes_per_second``."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float
    """Seconds of a small transfer, in the slower direction."""
    out_cpu_seconds_per_byte: float
    """CPU time of the copying threads, which slows training if no core is idle."""
    in_cpu_seconds_per_byte: float


class _Trip(NamedTuple):
    """Times of one tensor out and one in, or their medians."""

    out_seconds: float
    in_seconds: float
    out_cpu_seconds: float
    in_cpu_seconds: float


def measure_link(link: Link, device: torch.device, nbytes: int = 4 * MIB) -> LinkSpeed:
    """Measure how fast ``link`` carries tensors of ``device``.

    Args:
        link: open, and not used by anything else meanwhile.
        device: the tensors' device.
        nbytes: of one measured transfer.

    Raises:
        OffloadFailed: the link cannot carry ``nbytes``.

    Example:
        >>> from plimsoll.engine.offload.disk import DiskLink
        >>> with DiskLink("/var/tmp") as link:
        ...     speed = measure_link(link, torch.device("cpu"))
        >>> speed.out_bytes_per_second > 0
        True
    """
    small = _median(_trips(link, device, _SMALL_BYTES, _MOST_SECONDS / 10))
    large = _median(_trips(link, device, nbytes, _MOST_SECONDS * 9 / 10))
    return LinkSpeed(
        out_bytes_per_second=_bandwidth(nbytes, large.out_seconds, small.out_seconds),
        in_bytes_per_second=_bandwidth(nbytes, large.in_seconds, small.in_seconds),
        latency_seconds=max(small.out_seconds, small.in_seconds),
        out_cpu_seconds_per_byte=large.out_cpu_seconds / nbytes,
        in_cpu_seconds_per_byte=large.in_cpu_seconds / nbytes,
    )


def _trips(link: Link, device: torch.device, nbytes: int, most_seconds: float) -> list[_Trip]:
    """At least one trip, then more until the time is up."""
    tensors = itertools.cycle(_noise(nbytes, device))
    begun_at = time.perf_counter()
    away: deque[Ticket] = deque()

    def send() -> None:
        away.append(link.store(next(tensors)))
        away[-1].settle()

    while not away or (len(away) < _ALIVE and time.perf_counter() < begun_at + most_seconds / 2):
        send()
    trips: list[_Trip] = []
    while not trips or (len(trips) < _MOST_TRIPS and time.perf_counter() < begun_at + most_seconds):
        in_seconds, in_cpu = _timed(link, device, away.popleft().read)
        out_seconds, out_cpu = _timed(link, device, send)
        trips.append(_Trip(out_seconds, in_seconds, out_cpu.out_seconds, in_cpu.in_seconds))
    return trips


def _timed(link: Link, device: torch.device, work: Callable[[], object]) -> tuple[float, CopyCpuSeconds]:
    """Seconds of ``work``, and CPU seconds of the link's copies during it."""
    wait_for_device(device)
    before, begun_at = link.copy_cpu_seconds, time.perf_counter()
    work()
    wait_for_device(device)
    seconds, after = time.perf_counter() - begun_at, link.copy_cpu_seconds
    return seconds, CopyCpuSeconds(after.out_seconds - before.out_seconds, after.in_seconds - before.in_seconds)


def _noise(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """Bytes that a file system cannot compress. Global random generators are not used."""
    generator = torch.Generator(device).manual_seed(0)
    words = torch.randint(2**62, (nbytes // 8 + 1,), device=device, generator=generator)
    return [words.view(torch.uint8)[:nbytes].clone() for _ in range(_ALIVE)]


def _median(trips: list[_Trip]) -> _Trip:
    return _Trip(*map(statistics.median, zip(*trips, strict=True)))


def _bandwidth(nbytes: int, seconds: float, latency_seconds: float) -> float:
    """Bytes per second without the latency; with the latency if the rest of the time is lost in its noise."""
    moving_seconds = seconds - latency_seconds
    return nbytes / (moving_seconds if moving_seconds > seconds / 10 else seconds)
