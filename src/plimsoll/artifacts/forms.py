"""Compressed and offloaded forms of values between forward and backward, and the cost of each form.

A *form* is a codec's payload or a place at the other end of a link. ``noise`` is the relative error of the value that
backward then reads, ‖decoded - value‖ / ‖value‖. ``sensitivity`` is the relative error of the whole gradient per unit of
noise. Independent errors add as squares.
"""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.decision import Decision


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """One way to hold one value other than unchanged on the device.

    ``held_bytes`` stay on the device, ``link_bytes`` go over the link and stay at its other end. ``encode_seconds`` are
    spent when the region's forward ends, ``decode_seconds`` when backward needs the value; transfer time that compute does
    not hide is added. ``workspace_bytes`` are alive while encoding or decoding.
    """

    name: str
    decision: Decision
    held_bytes: int
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    noise: float = 0.0
    workspace_bytes: int = 0
    link_bytes: int = 0
    is_private: bool = False
    """Whether only the value's own slots may be restored from it: the decoded tensor is not the value itself."""

    @property
    def seconds(self) -> float:
        return self.encode_seconds + self.decode_seconds


class ValueForms(msgspec.Struct, frozen=True, kw_only=True):
    """The forms that one saved value may take; ``refused`` lists codecs that were tried and rejected, each with its reason."""

    value: str
    sensitivity: float = 0.0
    forms: tuple[Form, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


class RegionForms(msgspec.Struct, frozen=True, kw_only=True):
    """The forms of one region call."""

    name: str
    call: int
    values: tuple[ValueForms, ...]


class LinkCost(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speed of a link; ``latency_seconds`` is spent on every transfer."""

    name: str
    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float = 0.0


class Forms(msgspec.Struct, frozen=True, kw_only=True):
    """Every form that a plan may use for values, other than keeping and recomputing them."""

    regions: tuple[RegionForms, ...] = ()
    link: LinkCost | None = None
    notes: tuple[str, ...] = ()

    def of(self, name: str, call: int) -> dict[str, ValueForms]:
        """The forms of one region call, by the value's name."""
        found = next((region for region in self.regions if region.name == name and region.call == call), None)
        return {} if found is None else {entry.value: entry for entry in found.values}
