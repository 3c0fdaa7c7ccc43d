"""Data: the ways to store a value in another form between forward and backward (compressed or offloaded), and their costs.

A *form* is a way to store a value: encoded by a codec, or sent over a link to host memory or disk. ``noise`` is the relative
error of the value that backward then reads, ‖decoded - value‖ / ‖value‖. ``sensitivity`` is the relative error of the whole
gradient per unit of noise. Independent errors add as squares.
"""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.decision import Decision


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one way to store one value between forward and backward: compressed with a codec, or offloaded over a link (to host
    memory or disk).

    ``held_bytes`` stay on the device, ``link_bytes`` go over the link and stay at its other end. ``encode_seconds`` are spent
    when the forward of the region (the module that saved the value) ends, ``decode_seconds`` when backward needs the value.
    Transfer time that compute does not hide is not included in them. ``workspace_bytes`` are alive while encoding or decoding.
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
    """Whether backward may read this form only where it reads the value itself, and not to recompute other values.

    This is so if the decoded tensor is not the value itself but, for example, only its signs.
    """

    @property
    def seconds(self) -> float:
        """The seconds of encoding one value in this form plus the seconds of decoding it."""
        return self.encode_seconds + self.decode_seconds


class ValueForms(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the forms of one saved value, and the codecs that were refused for it. A form is a way to store the value:
    compressed or offloaded.

    ``refused`` lists pairs of a rejected codec and the reason. ``sensitivity`` is the relative error of the whole gradient per
    unit of relative error in this value.
    """

    value: str
    sensitivity: float = 0.0
    forms: tuple[Form, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


class RegionForms(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the forms (ways to store a value, compressed or offloaded) for the values of one region call. A region is a module
    that a plan decides about.
    """

    name: str
    call: int
    values: tuple[ValueForms, ...]


class LinkCost(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the speed of a link (the way to host memory or disk), out from the device and back. Each transfer also takes
    ``latency_seconds``.
    """

    name: str
    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float = 0.0


class Forms(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the forms that a plan may use, for each saved value of each call of a region (a module that the plan decides
    about).

    A form is a way to store a value: compressed, or offloaded over a link.
    """

    regions: tuple[RegionForms, ...] = ()
    link: LinkCost | None = None
    notes: tuple[str, ...] = ()

    def of(self, name: str, call: int) -> dict[str, ValueForms]:
        """Return a mapping from the name of each value to its forms (compressed or offloaded), for one call of a region.

        ``name`` is the region, ``call`` the number of the call.
        """
        found = next((region for region in self.regions if region.name == name and region.call == call), None)
        return {} if found is None else {entry.value: entry for entry in found.values}
