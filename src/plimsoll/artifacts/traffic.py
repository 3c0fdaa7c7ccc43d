"""Gradient traffic: the time that a data-parallel step spends on it, and whether compressing it pays here.

How each figure is defined is in docs/gradient-compression.md.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import AdvisedEnum, ArtifactBase
from plimsoll.artifacts.verdict import IntervalEstimate, Outcome

UNCOMPRESSED = "none"
"""The baseline that all other methods are compared with."""


class Transfer(enum.StrEnum):
    """A collective or transfer of one payload; ``payload_bytes`` is the size of the tensor that a rank passes to it."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"

    def wire_bytes(self, payload_bytes: float, ranks: int) -> float:
        """Bytes that each rank sends, on average.

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
    """The verdict on compressing gradients here."""

    KEEP = "KEEP", "Compress: it saves time here, and held-out loss stays within the allowed range."
    REFUSE = "REFUSE", "Do not compress: it does not save time here, or it makes held-out loss worse."
    UNDECIDED = "UNDECIDED", "Not enough data to decide: see what is missing."


class LinkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The median time of transfers of one payload."""

    payload_bytes: int
    measured_seconds: float


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer time as ``latency_seconds`` + bytes that each rank sends / ``bytes_per_second``.

    ``relative_error`` is the deviation of measured transfers from this formula, as a share (root mean square over ``points``).
    """

    transfer: Transfer
    latency_seconds: float
    bytes_per_second: float
    relative_error: float
    points: tuple[LinkPoint, ...]


class BucketTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One gradient bucket, in the order that backward fills them: seconds from the step's start on the slowest rank."""

    gradient_bytes: int
    measured_ready_seconds: float


class StepTiming(msgspec.Struct, frozen=True, kw_only=True):
    """A step that computes gradients but does not send them.

    ``measured_compute_seconds`` is forward and backward, ``measured_optimizer_seconds`` what follows. ``spread`` is half the
    interquartile range of the compute time, as a share. During a transfer, compute runs at ``compute_share`` of its speed and
    the transfer at ``transfer_share`` of its own (1: they do not slow each other). During local work on gradients, compute
    and that work both run at ``processor_share`` of their speed.
    """

    measured_compute_seconds: float
    measured_optimizer_seconds: float
    spread: float
    compute_share: float
    transfer_share: float
    processor_share: float
    buckets: tuple[BucketTiming, ...]


class ShardedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step with parameters gathered by FSDP2 and gradients not sent; ``units`` modules reduce one after the other.

    ``measured_silent_seconds`` is the whole step, including its optimizer. ``measured_most_saved_share`` is how much shorter
    this step is than the uncompressed one, as a share. It bounds every method: only a method that sends nothing and does no
    local work would save as much.
    """

    units: int
    measured_silent_seconds: IntervalEstimate
    measured_most_saved_share: IntervalEstimate
    measured_optimizer_seconds: float


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """Training with the method compared with training without it, from the same start, with the same orders of the data.

    ``difference`` is how much higher the method's held-out loss is, ``allowed`` the most that it may be higher. ``seed_spread``
    is the standard deviation between uncompressed runs over different orders.
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

    ``wire_bytes`` is what each rank sends per step, in ``transfers`` collectives. ``measured_local_seconds`` is the local work
    before, between and after them (encoding, decoding). Of ``transfer_seconds``, ``exposed_seconds`` are not hidden by
    compute. ``predicted_saved_share`` is the share of the uncompressed step that the method saves (negative: it costs time).
    ``break_even_bytes_per_second`` is the highest bandwidth at which it still saves time, ``None`` if none was found.
    ``break_even_hidden_share``: the method pays while compute hides less than this share of the uncompressed transfers;
    ``None`` if it would not pay even with nothing hidden. ``gradient_error`` is ‖Δg‖ / ‖g‖ of the first gradient that is sent.

    If nothing is predicted (``Traffic.sharded``), the fields from ``transfers`` to ``predicted_saved_share`` are ``None``,
    and the two ``measured_`` fields after them are set.
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
    """The effect of gradient compression on a data-parallel step here. ``str`` shows it.

    ``methods`` begins with the uncompressed method. Its ruling is the overall one: ``KEEP`` if any method is worth using. For a
    model under ``DistributedDataParallel``, ``bucket_bytes``, ``hidden_share``, ``links`` and ``step`` are set; for a model
    that FSDP2 shards, ``sharded`` is set instead.
    """

    KIND: ClassVar[str] = "traffic"
    SCHEMA_VERSION: ClassVar[int] = 2
    """2: a step sharded by FSDP2 does not have a prediction, link or buckets; files of schema 1 have all of them."""

    schema_version: int = SCHEMA_VERSION
    ruling: TrafficRuling
    reason: str
    missing: tuple[str, ...] = ()
    best: str | None = None
    """The recommended method, if any."""
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
    """Share of the uncompressed transfers' time that compute hides (predicted)."""
    links: tuple[LinkFit, ...] = ()
    step: StepTiming | None = None
    sharded: ShardedStep | None = None
    methods: tuple[MethodTraffic, ...]
    notes: tuple[str, ...] = ()
