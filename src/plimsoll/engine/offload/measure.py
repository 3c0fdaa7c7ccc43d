"""Measure how fast a link carries a device's tensors in both directions, and the CPU time of its copies.

The measurement keeps eight tensors on the link, so that CPU caches hardly distort the result, and three in memory. It fetches
the oldest tensor and stores the next until half a second has passed, and takes medians. Storing the first tensors is
not counted, because it extends the file. Later tensors reuse that space, as later training steps do. A disk is therefore
measured through the system's page cache. If a disk must hold more bytes than the free memory, it slows down to the speed of the
device itself, which is not measured here. Also not measured is the allocation of single tensors of 32 MiB and more, whose
memory returns to the system every time.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from plimsoll.artifacts.forms import LinkCost
from plimsoll.engine.offload.open import open_link
from plimsoll.engine.offload.protocol import CopyCpuSeconds, Link, Ticket
from plimsoll.tracing.meters.timing import wait_for_device
from plimsoll.units import MIB

_MOST_SECONDS = 0.5
_MOST_TRIPS = 40
_ALIVE = 8
"""The number of tensors that are on the measured link (to host memory or disk) at the same time."""
_SMALL_BYTES = 4096
_MOST_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Data: the measured speed of a link. A transfer of ``n`` bytes takes ``latency_seconds + n / bytes_per_second``."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float
    """The seconds that a small transfer takes, in the slower of the two directions."""
    out_cpu_seconds_per_byte: float
    """The CPU time of the copying threads, in seconds per byte. It slows training if no core is idle."""
    in_cpu_seconds_per_byte: float

    def cost(self, name: str) -> LinkCost:
        """Return the speed as the cost of a link with this name, for planning. The CPU time is left out."""
        return LinkCost(
            name=name,
            out_bytes_per_second=self.out_bytes_per_second,
            in_bytes_per_second=self.in_bytes_per_second,
            latency_seconds=self.latency_seconds,
        )


class _Trip(NamedTuple):
    """The times in seconds that one tensor takes to the link and back, or medians of such times."""

    out_seconds: float
    in_seconds: float
    out_cpu_seconds: float
    in_cpu_seconds: float


def link_speed(name: str, device: torch.device, *, host_budget: int | None, largest_bytes: int) -> LinkSpeed:
    """Open and measure the link ``name``, and return its speed; later calls return the same speed without measuring.

    ``largest_bytes`` is the size of the largest tensor that will be sent. Larger tensors are not measured with, because they
    would exceed the budget of a small model. The other arguments are those of `open_link`.
    """
    # Batches of many shapes differ a little in their largest tensor: measure once for each power of two.
    nbytes = min(_MOST_BYTES, 1 << max(_SMALL_BYTES, largest_bytes).bit_length() - 1)
    return _measured_once(name, device, host_budget, nbytes)


@functools.lru_cache
def _measured_once(name: str, device: torch.device, host_budget: int | None, nbytes: int) -> LinkSpeed:
    with open_link(name, device, host_budget=host_budget, directory=None) as link:
        return measure_link(link, device, nbytes)


def measure_link(link: Link, device: torch.device, nbytes: int = _MOST_BYTES) -> LinkSpeed:
    """Measure how fast ``link`` carries tensors of ``device``, and return the speed.

    Args:
        link: the link. It must be open, and other code must not use it meanwhile.
        device: the device of the tensors.
        nbytes: the size of one measured transfer in bytes.

    Raises:
        OffloadFailed: the link cannot carry a tensor of ``nbytes``.

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
    """Send tensors of ``nbytes`` bytes over the link and back, and return their times: for at least one tensor, and for more
    until ``most_seconds`` have passed.
    """
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
    """Return the seconds that ``work`` takes, and the CPU seconds that the link's copies take during it."""
    wait_for_device(device)
    before, begun_at = link.copy_cpu_seconds, time.perf_counter()
    work()
    wait_for_device(device)
    seconds, after = time.perf_counter() - begun_at, link.copy_cpu_seconds
    return seconds, CopyCpuSeconds(after.out_seconds - before.out_seconds, after.in_seconds - before.in_seconds)


def _noise(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """Return two tensors of ``nbytes`` random bytes, which a file system cannot compress. Global random generators are not
    used.
    """
    generator = torch.Generator(device).manual_seed(0)
    words = torch.randint(2**62, (nbytes // 8 + 1,), device=device, generator=generator)
    noise = words.view(torch.uint8)[:nbytes]
    return [noise, noise.clone()]


def _median(trips: list[_Trip]) -> _Trip:
    return _Trip(*map(statistics.median, zip(*trips, strict=True)))


def _bandwidth(nbytes: int, seconds: float, latency_seconds: float) -> float:
    """Return the bandwidth in bytes per second of a transfer that took ``seconds``, with the latency subtracted.

    If the time without the latency is too short to be measured well, the whole time counts.
    """
    moving_seconds = seconds - latency_seconds
    return nbytes / (moving_seconds if moving_seconds > seconds / 10 else seconds)
