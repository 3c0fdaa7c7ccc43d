"""Gradient traffic: what a data-parallel step spends on it, and whether compressing it pays here.

How each figure is defined is in docs/gradient-compression.md.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import AdvisedEnum, ArtifactBase
from plimsoll.artifacts.verdict import IntervalEstimate, Outcome

UNCOMPRESSED = "none"
"""The method that all others are compared with."""


class Transfer(enum.StrEnum):
    """What ranks do with a payload. ``payload_bytes`` is the tensor that a rank gives."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"

    def wire_bytes(self, payload_bytes: float, ranks: int) -> float:
        """What each rank sends, on average.

        Example:
            >>> Transfer.ALL_REDUCE.wire_bytes(100, 4), Transfer.ALL_GATHER.wire_bytes(100, 4)
            (150.0, 300)
        """
        if self is Transfer.ALL_REDUCE:
            return 2 * payload_bytes * (ranks - 1) / ranks
        if self is Transfer.ALL_GATHER:
            return payload_bytes * (ranks - 1)
        return payload_bytes * (ranks - 1) / ranks


class TrafficRuling(AdvisedEnum):
    """What compressing the gradients comes to here."""

    KEEP = "KEEP", "Compress: it saves time here, and held-out loss stays within what is allowed."
    REFUSE = "REFUSE", "Do not compress: it saves no time here, or held-out loss gets worse."
    UNDECIDED = "UNDECIDED", "Not enough to tell: see what is missing."


class LinkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The median of one payload's transfers."""

    payload_bytes: int
    measured_seconds: float


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer takes ``latency_seconds`` + what each rank sends / ``bytes_per_second``.

    ``relative_error`` is how far a transfer lies from that, as a share (root mean square over ``points``).
    """

    transfer: Transfer
    latency_seconds: float
    bytes_per_second: float
    relative_error: float
    points: tuple[LinkPoint, ...]


class BucketTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket of gradients, in the order in which backward fills them: the slowest rank's time since the step began."""

    gradient_bytes: int
    measured_ready_seconds: float


class StepTiming(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose gradients are sent nowhere.

    ``measured_compute_seconds`` is forward and backward, ``measured_optimizer_seconds`` what follows. ``spread`` is half the
    interquartile range of computing, as a share. Beside a transfer, computing runs at ``compute_share`` of its speed and the
    transfer at ``transfer_share`` of its own (1: they do not get in each other's way); beside local work on gradients,
    computing runs at ``processor_share``, and so does that work.
    """

    measured_compute_seconds: float
    measured_optimizer_seconds: float
    spread: float
    compute_share: float
    transfer_share: float
    processor_share: float
    buckets: tuple[BucketTiming, ...]


class ShardedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose parameters FSDP2 gathers and whose gradients are sent nowhere; ``units`` modules reduce one after the other.

    ``measured_silent_seconds`` is the whole step, its optimizer included. ``measured_most_saved_share`` is the share of the
    uncompressed step that it takes less: a method with no work of its own that sends nothing would save that, none saves more.
    """

    units: int
    measured_silent_seconds: IntervalEstimate
    measured_most_saved_share: IntervalEstimate
    measured_optimizer_seconds: float


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """Training with the method beside training without it, from the same start, in the same orders of the data.

    ``difference`` is how much higher the method's held-out loss is, ``allowed`` what it may be, ``seed_spread`` how far
    uncompressed runs over different orders lie apart (their standard deviation).
    """

    outcome: Outcome
    steps: int
    orders: int
    held_out_batches: int
    baseline_loss: float | None
    method_loss: float | None
    difference: IntervalEstimate | None
    seed_spread: float
    allowed: float
    found: str


class MethodTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One way to send the gradients.

    ``wire_bytes`` is what each rank sends per step, in ``transfers`` collectives. ``measured_local_seconds`` is the work
    before, between and after them (encoding, decoding). ``exposed_seconds`` of ``transfer_seconds`` are not hidden behind
    computing. ``predicted_saved_share`` is the share of the uncompressed step that the method saves (negative: it costs).
    ``break_even_bytes_per_second`` is the highest bandwidth at which it still saves time, ``None`` where none was found.
    ``break_even_hidden_share``: it pays where less than this share of the uncompressed transfers is hidden; ``None`` where
    it would not even with nothing hidden. ``gradient_error`` is ‖Δg‖ / ‖g‖ of the first gradient that is sent.

    Where nothing is predicted (``Traffic.sharded``) the fields from ``transfers`` to ``predicted_saved_share`` are ``None``,
    and the two ``measured_`` ones after them are not.
    """

    method: str
    wire_bytes: int
    transfers: int | None = None
    measured_local_seconds: float | None = None
    transfer_seconds: float | None = None
    exposed_seconds: float | None = None
    predicted_step_seconds: IntervalEstimate | None = None
    predicted_saved_share: IntervalEstimate | None = None
    measured_step_seconds: IntervalEstimate | None = None
    measured_saved_share: IntervalEstimate | None = None
    break_even_bytes_per_second: float | None = None
    break_even_hidden_share: float | None = None
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    validation: Validation | None = None
    ruling: TrafficRuling
    reason: str


class Traffic(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """What gradient compression would do to a data-parallel step here. ``str`` shows it.

    ``methods`` begins with the uncompressed one, whose ruling is that of all: ``KEEP`` where some method is worth it. Of a
    model under ``DistributedDataParallel`` it has ``bucket_bytes``, ``hidden_share``, ``links`` and ``step``; of one that FSDP2
    shards it has ``sharded`` instead.
    """

    KIND: ClassVar[str] = "traffic"
    SCHEMA_VERSION: ClassVar[int] = 2
    """2: a step whose model FSDP2 shards has no prediction, link or buckets; files of schema 1 have all of them."""

    schema_version: int = SCHEMA_VERSION
    ruling: TrafficRuling
    reason: str
    missing: tuple[str, ...] = ()
    best: str | None = None
    """The method to take, if any."""
    model: str
    fingerprint: str
    device: str
    backend: str
    ranks: int
    gradient_bytes: int
    bucket_bytes: int | None = None
    optimizer: str
    data: str
    seed: int
    versions: dict[str, str]
    hidden_share: float | None = None
    """Of the uncompressed transfers: how much of their time computing hides (predicted)."""
    links: tuple[LinkFit, ...] = ()
    step: StepTiming | None = None
    sharded: ShardedStep | None = None
    methods: tuple[MethodTraffic, ...]
    notes: tuple[str, ...] = ()
