"""Compares several ways to run one step outside of PyTorch: measures them in alternating rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.units import check_count

_ROUNDING = 1e-6
"""The largest relative difference of the gradient that counts as rounding, from sums in another order."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Data: one of several ways to run the same step (for example under a plan) that are compared.

    ``run`` computes a gradient, and returns when the gradient is computed. ``gradient`` is one result of it. ``peak_bytes`` are
    the bytes that the framework counts.
    """

    run: Callable[[], object]
    gradient: Sequence[Any]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class TimedOn:
    """Data: how a comparison was timed: the clock, the device, the versions of libraries, and what was timed."""

    clock: Callable[[], float]
    device: str
    versions: Mapping[str, str]
    signature: str
    note: str


def compare_ways(plain: Way, ways: Mapping[str, Way], place: TimedOn, *, model: str, steps: int) -> Comparison:
    """Measure all ways, and return a comparison with one row per way. A row compares the way with the plain step.

    In each round, each way runs once. Ratios are medians over rounds.
    """
    check_count("steps", steps, least=1)
    every = {"": plain, **ways}
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for number in range(steps):
        # Reverse the order in every other round, so that no way profits from its position.
        for name in list(every) if number % 2 else list(every)[::-1]:
            started = place.clock()
            every[name].run()
            seconds[name].append(place.clock() - started)
    rows = []
    for name, way in ways.items():
        apart = gradients_apart(plain.gradient, way.gradient)
        rows.append(
            ComparisonRow(
                strategy=name,
                measured_peak_bytes=way.peak_bytes,
                measured_seconds=statistics.median(seconds[name]),
                measured_ratio=statistics.median(a / b for a, b in zip(seconds[name], seconds[""], strict=True)),
                is_bit_equal=apart == 0.0,
                is_rounding=apart <= _ROUNDING,
                gradient_error=apart,
            )
        )
    return Comparison(
        model=model,
        signature=place.signature,
        device=place.device,
        versions=dict(place.versions),
        steps=steps,
        baseline_peak_bytes=plain.peak_bytes,
        measured_baseline_seconds=statistics.median(seconds[""]),
        rows=tuple(rows),
        notes=(place.note,),
    )


def gradients_apart(wanted: Sequence[Any], found: Sequence[Any]) -> float:
    """Return the relative error of the whole gradient, ‖Δg‖ / ‖g‖.

    For a single array, this number says little if the array is only rounding, such as the bias of a key.
    """
    difference = length = 0.0
    for a, b in zip(wanted, found, strict=True):
        # Numpy's own functions do not support bfloat16.
        kind = np.complex128 if np.iscomplexobj(a) else np.float64
        exact = np.asarray(a).astype(kind)
        difference += float(np.sum(np.abs(exact - np.asarray(b).astype(kind)) ** 2))
        length += float(np.sum(np.abs(exact) ** 2))
    # The smallest length avoids a division by zero if the gradient is zero.
    return math.sqrt(difference / max(length, 1e-60))
