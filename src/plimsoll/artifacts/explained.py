"""Explanation of a step's peak: which memory stays after forward, what recomputation takes, and what lowers the peak."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.plan import Holder, Peak, TimelinePoint


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one part of the bytes at a peak.

    ``share`` is the part's share of the peak, ``largest`` names its largest tensor or group of tensors.
    """

    name: str
    bytes: int
    share: float
    largest: str = ""


class RecomputedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Data: what recomputation does in one place of the model, such as one block.

    It has the most bytes of rebuilt values that are alive at one time, and the number of ops that run again.
    """

    place: str
    most_bytes: int
    ops: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one possible change to the step, and the predicted peak of the step with that change.

    ``basis`` says how the figure was found: ``replayed`` (this step's events with the change applied), ``run again`` (a second
    step with the change), ``modelled`` (replayed with sizes that were not observed in any step of this model) or ``planned`` (a
    plan of Plimsoll instead of the model's own memory saving). ``how`` is what to write to make the change.
    """

    name: str
    how: str
    predicted_peak_bytes: int
    lowers_bytes: int
    """By how many bytes the change lowers the peak; negative if the change raises the peak."""
    moment: str
    basis: str


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """Data: a change to the step whose effect on the peak cannot be determined for this step, and the reason."""

    name: str
    why: str


class Explanation(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: when the peak of one step occurs, which tensors take the memory, and what would lower it.

    ``plimsoll.explain`` makes one. ``plain_peak`` and ``plain_resident_bytes`` describe the same step if all values are kept.
    They are ``None`` if the step does not save memory by itself, or could not be run without saving memory. ``resident`` lists
    what holds memory between forward and backward: regions (modules that the plan decides about), modules outside regions, and
    tensors that stay for the whole step. Bytes are counted op by op. On a fake device (``is_fake``) they do not include
    workspaces inside kernels.
    """

    KIND: ClassVar[str] = "explanation"
    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    signature: str
    device: str
    is_fake: bool
    setup: str
    """A text that says what saves memory in this step, such as the step's own checkpointing; empty if nothing does."""
    optimizer: str
    verdict: str
    peak: Peak
    parts: tuple[MemoryPart, ...]
    """The bytes at the peak of each part: parameters, gradients, activations, head and loss, temporaries and others."""
    resident_bytes: int
    resident: tuple[Holder, ...]
    recomputed: tuple[RecomputedPart, ...]
    plain_peak: Peak | None = None
    plain_resident_bytes: int | None = None
    changes: tuple[Change, ...] = ()
    """Possible changes, largest reduction of the peak first."""
    unsupported: tuple[Unsupported, ...] = ()
    timeline: tuple[TimelinePoint, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def helpful(self) -> tuple[Change, ...]:
        """The changes that lower the peak by more than half a percent."""
        return tuple(change for change in self.changes if change.lowers_bytes > LEAST_SHARE * self.peak.bytes)


LEAST_SHARE = 0.005
"""A change counts as helpful only if it lowers the peak by more than this share of the peak."""
