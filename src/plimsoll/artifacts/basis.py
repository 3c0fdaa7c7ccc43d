"""Where a figure of an estimate comes from. No torch in here."""

from __future__ import annotations

import enum


class Basis(enum.StrEnum):
    """How much a figure can be relied on; all but ``EXACT`` and ``UNSUPPORTED`` carry a relative error.

    ``EXACT``: counted, and compared with torch. ``MODELLED``: computed with a model whose parts are known, such as a simulated
    allocator or a roofline. ``ASSUMED``: a figure that others measured, or a convention. ``UNSUPPORTED``: no figure at all.
    """

    EXACT = "exact"
    MODELLED = "modelled"
    ASSUMED = "assumed"
    UNSUPPORTED = "unsupported"
