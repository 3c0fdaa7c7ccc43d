"""A link and a device in, how fast the link is both ways out, with the CPU time that its copies take.

Copies a few MiB out and in again until half a second has passed, and takes medians. The first trip is not counted: it makes
the memory that later ones use again, as later training steps do. A disk is therefore measured through the system's page
cache; one that is asked to hold more than there is free memory falls to the speed of the device itself, which this does not
see.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from plimsoll.links.bounce import BounceLink
from plimsoll.links.disk import CopyCpuSeconds, DiskLink
from plimsoll.links.protocol import Link
from plimsoll.units import MIB

_MOST_SECONDS = 0.5
_MOST_TRIPS = 20
_SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Measured: a transfer of ``n`` bytes takes ``latency_seconds + n / bytes_per_second``."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float
    """Of a small transfer, the slower way of the two."""
    out_cpu_seconds_per_byte: float
    """Of the copying threads; training pays it where no core is idle."""
    in_cpu_seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class _Trip:
    out_seconds: float
    in_seconds: float
    out_cpu_seconds: float
    in_cpu_seconds: float


def measure_link(link: Link, device: torch.device, nbytes: int = 8 * MIB) -> LinkSpeed:
    """How fast ``link`` carries tensors of ``device``.

    Args:
        link: open, and used by nobody else meanwhile.
        device: where the tensors are.
        nbytes: of one measured transfer.

    Raises:
        OffloadFailed: the link cannot carry ``nbytes``.

    Example:
        >>> with DiskLink("/var/tmp") as link:
        ...     speed = measure_link(link, torch.device("cpu"))
        >>> speed.out_bytes_per_second > 0
        True
    """
    ends_at = time.perf_counter() + _MOST_SECONDS
    small = _median(_trips(link, device, _SMALL_BYTES, time.perf_counter() + _MOST_SECONDS / 10))
    large = _median(_trips(link, device, nbytes, ends_at))
    return LinkSpeed(
        out_bytes_per_second=_bandwidth(nbytes, large.out_seconds, small.out_seconds),
        in_bytes_per_second=_bandwidth(nbytes, large.in_seconds, small.in_seconds),
        latency_seconds=max(small.out_seconds, small.in_seconds),
        out_cpu_seconds_per_byte=large.out_cpu_seconds / nbytes,
        in_cpu_seconds_per_byte=large.in_cpu_seconds / nbytes,
    )


def _trips(link: Link, device: torch.device, nbytes: int, ends_at: float) -> list[_Trip]:
    """One trip that is not counted, then one at least, then more while there is time."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    _trip(link, tensor)
    trips = [_trip(link, tensor)]
    while len(trips) < _MOST_TRIPS and time.perf_counter() < ends_at:
        trips.append(_trip(link, tensor))
    return trips


def _trip(link: Link, tensor: torch.Tensor) -> _Trip:
    _wait_for(tensor.device)
    cpu_before = _copy_cpu_seconds(link)
    begun_at = time.perf_counter()
    ticket = link.store(tensor)
    ticket.settle()
    _wait_for(tensor.device)
    out_at = time.perf_counter()
    ticket.read()
    _wait_for(tensor.device)
    in_at = time.perf_counter()
    cpu_after = _copy_cpu_seconds(link)
    return _Trip(
        out_at - begun_at,
        in_at - out_at,
        cpu_after.out_seconds - cpu_before.out_seconds,
        cpu_after.in_seconds - cpu_before.in_seconds,
    )


def _median(trips: list[_Trip]) -> _Trip:
    return _Trip(
        statistics.median(trip.out_seconds for trip in trips),
        statistics.median(trip.in_seconds for trip in trips),
        statistics.median(trip.out_cpu_seconds for trip in trips),
        statistics.median(trip.in_cpu_seconds for trip in trips),
    )


def _bandwidth(nbytes: int, seconds: float, latency_seconds: float) -> float:
    """Bytes per second beyond the latency; of the whole where that is lost in the noise of the latency."""
    moving_seconds = seconds - latency_seconds
    return nbytes / (moving_seconds if moving_seconds > seconds / 10 else seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_cpu_seconds(link: Link) -> CopyCpuSeconds:
    """Only copies to and from a disk take a CPU's time."""
    if isinstance(link, BounceLink):
        return _copy_cpu_seconds(link.inner)
    return link.copy_cpu_seconds if isinstance(link, DiskLink) else CopyCpuSeconds(0.0, 0.0)
