"""Gradient traffic that is easy to reckon with."""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.traffic import MethodTraffic, Traffic
from plimsoll.artifacts.verdict import IntervalEstimate
from plimsoll.units import MIB
from samples import filled


def make_method(method: str, *, saved: float, predicted: float | None = None) -> MethodTraffic:
    return MethodTraffic(
        method=method,
        sent_bytes=8 * MIB,
        measured_local_seconds=0.01,
        predicted_step_seconds=1.9,
        predicted_saved_share=saved if predicted is None else predicted,
        measured_step_seconds=IntervalEstimate(value=2.0, low=1.9, high=2.1),
        measured_saved_share=IntervalEstimate(value=saved, low=saved - 0.01, high=saved + 0.01),
        gradient_error=0.1,
    )


def make_traffic(*methods: MethodTraffic, **changes: object) -> Traffic:
    traffic = filled(
        Traffic,
        backend="gloo",
        ranks=2,
        layout="replicas",
        exchanges=3,
        measured_silent_seconds=1.0,
        measured_bytes_per_second=125e6,
        methods=(make_method("none", saved=0.0), *(methods or (make_method("powersgd:4", saved=0.2),))),
    )
    return msgspec.structs.replace(traffic, **changes)
