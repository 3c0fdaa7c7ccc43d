"""Gradient traffic: the time that sending gradients adds to a data-parallel step, for each method of compressing them.

How each figure is defined is in docs/gradient-compression.md.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.verdict import IntervalEstimate

UNCOMPRESSED = "none"
"""The name of the method that does not compress: the baseline for all other methods."""
LEAST_SAVED_SHARE = 0.02
"""A share of the step's time. A method of compression counts as useful only if it saves at least this share, because it makes
the gradients inexact."""


class MethodTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the figures of one method of sending the gradients, such as one codec.

    ``sent_bytes`` are the bytes that each rank sends per step. ``measured_local_seconds`` is the time of the work before,
    between and after the transfers (encoding, decoding). Both step times are without the optimizer. A saved share is the time
    that the method saves, as a share of the step without compression (negative: the method costs time). ``gradient_error`` is
    ‖Δg‖ / ‖g‖ of the first gradient that is sent.
    """

    method: str
    sent_bytes: int
    measured_local_seconds: float
    predicted_step_seconds: float
    predicted_saved_share: float
    measured_step_seconds: IntervalEstimate
    measured_saved_share: IntervalEstimate
    gradient_error: float


class Traffic(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: the time of a data-parallel step with each method of gradient compression. ``str`` shows it as text.

    ``methods`` begins with the uncompressed method. ``exchanges`` is the number of DDP's buckets or of FSDP2's units.
    ``measured_silent_seconds`` is the time of a step that does not send gradients, ``measured_forward_seconds`` the time of its
    forward. A transfer takes ``measured_latency_seconds`` + bytes that each rank sends / ``measured_bytes_per_second``. If
    ``assumed_bytes_per_second`` is set, predictions use that bandwidth instead.
    """

    KIND: ClassVar[str] = "traffic"
    SCHEMA_VERSION: ClassVar[int] = 3

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    device: str
    backend: str
    ranks: int
    layout: str
    data: str
    seed: int
    versions: dict[str, str]
    exchanges: int
    measured_forward_seconds: float
    measured_silent_seconds: float
    measured_latency_seconds: float
    measured_bytes_per_second: float
    assumed_bytes_per_second: float | None = None
    methods: tuple[MethodTraffic, ...]

    def least_saved_share(self, method: MethodTraffic) -> float:
        """Return the share of the step's time that a method saves at least.

        It is the low end of the measured interval. For an assumed bandwidth it is the predicted share.
        """
        is_measured = self.assumed_bytes_per_second is None
        return method.measured_saved_share.low if is_measured else method.predicted_saved_share

    @property
    def fastest(self) -> str:
        """The name of the method that saves the most time; ``none`` if no method saves at least 2% of the step."""
        first = max(self.methods, key=self.least_saved_share)
        return first.method if self.least_saved_share(first) >= LEAST_SAVED_SHARE else UNCOMPRESSED
