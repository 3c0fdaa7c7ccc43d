"""Timed transfers of several sizes in, latency and bandwidth of the link out.

    seconds = latency + wire_bytes / bandwidth

Source: the α-β model of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005; ``wire_bytes`` is what a rank sends (nccl-tests, "bus bandwidth"). Known weakness: a backend that changes its algorithm
with the size does not lie on one line; the fit's error says how far off it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from plimsoll.artifacts.traffic import LinkFit, LinkPoint, Transfer


def fit_link(transfer: Transfer, points: Sequence[LinkPoint], ranks: int) -> LinkFit:
    """Latency and bandwidth with the least relative error; neither is negative.

    Args:
        transfer: what was timed.
        points: at least two payloads of different sizes.
        ranks: that took part.

    Example:
        >>> points = [LinkPoint(payload_bytes=size, measured_seconds=1e-3 + size / 1e6) for size in (100, 1000, 10000)]
        >>> fit = fit_link(Transfer.ALL_REDUCE, points, 2)
        >>> f"{fit.latency_seconds:.4f} s, {fit.bytes_per_second:.0f} B/s, {fit.relative_error:.1%} off"
        '0.0010 s, 1000000 B/s, 0.0% off'
    """
    wire = np.array([transfer.wire_bytes(point.payload_bytes, ranks) for point in points])
    seconds = np.array([point.measured_seconds for point in points])
    scale = wire.max()  # columns of one size, for a well-conditioned fit
    rows = np.stack([1 / seconds, wire / scale / seconds], axis=1)
    (latency, full_size_seconds), _ = nnls(rows, np.ones(len(points)))
    errors = rows @ np.array([latency, full_size_seconds]) - 1
    return LinkFit(
        transfer=transfer,
        latency_seconds=float(latency),
        bytes_per_second=float(scale / full_size_seconds) if full_size_seconds > 0 else math.inf,
        relative_error=float(np.sqrt((errors**2).mean())),
        points=tuple(points),
    )


def transfer_seconds(fit: LinkFit, payload_bytes: float, ranks: int, *, bandwidth_scale: float = 1.0) -> float:
    """What a transfer takes on a link, or on one whose bandwidth is ``bandwidth_scale`` times as large."""
    return fit.latency_seconds + fit.transfer.wire_bytes(payload_bytes, ranks) / (
        fit.bytes_per_second * bandwidth_scale
    )
