"""Gradient traffic: what sending gradients costs a data-parallel step with each method of compression.

How each figure is defined is in docs/gradient-compression.md.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.verdict import IntervalEstimate

UNCOMPRESSED = "none"
"""The baseline that all other methods are compared with."""
LEAST_SAVED_SHARE = 0.02
"""The least share of the step that must be saved to justify gradients with an error."""


class MethodTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One way to send the gradients.

    ``sent_bytes`` is what each rank sends per step. ``measured_local_seconds`` is the work before, between and after the
    transfers (encoding, decoding). Both step times are without the optimizer. A saved share is a share of the uncompressed
    step (negative: the method costs time). ``gradient_error`` is ‖Δg‖ / ‖g‖ of the first gradient that is sent.
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
    """The cost of a step with every method of gradient compression. ``str`` shows it.

    ``methods`` begins with the uncompressed method. ``exchanges`` is the number of DDP's buckets or of FSDP2's units.
    ``measured_silent_seconds`` is a step that sends no gradients, ``measured_forward_seconds`` its forward. A transfer takes
    ``measured_latency_seconds`` + bytes that each rank sends / ``measured_bytes_per_second``. If ``assumed_bytes_per_second``
    is set, predictions are for that bandwidth.
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
        """The share of the step that a method saves: the low end of the measured interval, or for an assumed link predicted."""
        is_measured = self.assumed_bytes_per_second is None
        return method.measured_saved_share.low if is_measured else method.predicted_saved_share

    @property
    def fastest(self) -> str:
        """The method that saves most; ``none`` if no method saves at least 2% of the step."""
        first = max(self.methods, key=self.least_saved_share)
        return first.method if self.least_saved_share(first) >= LEAST_SAVED_SHARE else UNCOMPRESSED
