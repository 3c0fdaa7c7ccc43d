"""Explanation of a step's peak: what is resident after forward, what recomputation holds, and what would lower it."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.plan import Holder, Peak, TimelinePoint


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the bytes at a peak; ``largest`` names its largest holder."""

    name: str
    bytes: int
    share: float
    largest: str = ""


class RecomputedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that recomputation makes in one place: the most bytes alive at one time, and how many ops run."""

    place: str
    most_bytes: int
    ops: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change to the step, and the peak of the step with that change.

    ``basis`` says how the figure was found: ``replayed`` (this step's events with the change applied), ``run again`` (a second
    step with the change), ``modelled`` (replayed with sizes that were not observed in any step of this model) or ``planned``
    (Plimsoll's engine instead of the model's own memory saving). ``how`` is what to write to make the change.
    """

    name: str
    how: str
    predicted_peak_bytes: int
    lowers_bytes: int
    """How much the change lowers the peak; negative if it raises it."""
    moment: str
    basis: str


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """A change whose effect cannot be determined here, and why."""

    name: str
    why: str


class Explanation(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Where the peak of one step is, who holds it, and what would lower it. Make one with ``plimsoll.explain``.

    ``plain`` figures describe the same step with everything kept (``None``: the step does not save memory by itself, or it
    could not be run without that). Holders in ``resident`` are regions, modules outside regions, and what stays for the whole
    step. Bytes are counted op by op; on a fake device (``is_fake``) they do not include workspaces inside kernels.
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
    """What saves memory in this step; empty if nothing does."""
    optimizer: str
    verdict: str
    peak: Peak
    parts: tuple[MemoryPart, ...]
    """State, activations, head and loss, temporaries: their bytes at the peak."""
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
"""A change counts only if it lowers the peak by more than this share."""
