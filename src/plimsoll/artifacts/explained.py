"""Why a step's peak is what it is: what is resident after forward, what recomputation holds, what would lower it."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.plan import Holder, Peak, TimelinePoint


class RecomputedPart(msgspec.Struct, frozen=True, kw_only=True):
    """What running forward again in backward makes in one place: the most that is alive at once, and how many ops run."""

    place: str
    most_bytes: int
    ops: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change to the step and the peak that its events then have.

    ``basis`` says how the figure was found: ``replayed`` (this step's events with the change), ``run again`` (a step of its
    own), ``modelled`` (replayed with sizes that no step of this model had) or ``planned`` (Plimsoll's engine in place of what
    the model does). ``how`` is what to write to get it.
    """

    name: str
    how: str
    predicted_peak_bytes: int
    lowers_bytes: int
    """What it takes off the peak; negative where it would raise it."""
    moment: str
    basis: str


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """A change whose effect cannot be told here, and why."""

    name: str
    why: str


class Explanation(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Where the peak of one step is, who holds it, and what would lower it. Make one with ``plimsoll.explain``.

    ``plain`` figures are those of the same step with everything kept (``None``: nothing is at work, or it could not be run).
    Holders of ``resident`` are places: regions, modules outside of them, and what stays for the whole step. Figures of bytes
    are counted op by op; on a fake device (``is_fake``) workspaces inside of kernels are not in them.
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
    """What saves memory in this step; empty where nothing does."""
    optimizer: str
    verdict: str
    peak: Peak
    classes: dict[str, int]
    """Bytes of each memory category at the peak."""
    resident_bytes: int
    resident: tuple[Holder, ...]
    recomputed: tuple[RecomputedPart, ...]
    plain_peak: Peak | None = None
    plain_resident_bytes: int | None = None
    changes: tuple[Change, ...] = ()
    """Those that lower the peak most come first."""
    unsupported: tuple[Unsupported, ...] = ()
    timeline: tuple[TimelinePoint, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def helpful(self) -> tuple[Change, ...]:
        """The changes that move the peak by more than half a percent."""
        return tuple(change for change in self.changes if change.lowers_bytes > LEAST_SHARE * self.peak.bytes)


LEAST_SHARE = 0.005
"""What moves the peak by less of it does not move it."""
