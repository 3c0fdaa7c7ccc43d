"""What one optimizer holds from step to step, and what one of its steps takes besides. No torch in here."""

from __future__ import annotations

import enum

import msgspec

from plimsoll.artifacts.basis import Basis


class StepForm(enum.StrEnum):
    """How a step walks over the parameters.

    ``LOOP``: one after the other. ``FOREACH``: all at once, op by op (torch's choice on a GPU). ``FUSED``: one kernel that
    makes no temporaries.
    """

    LOOP = "loop"
    FOREACH = "foreach"
    FUSED = "fused"


class Temporary(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that is alive at the highest moment of a step and was not there before it."""

    label: str
    bytes: int


class OptimizerUse(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer over the parameters that one rank updates.

    ``state_bytes``: by parameter name, what lies on the device. ``host_state_bytes``: on the host (the step counters of
    loop and foreach forms). ``master_bytes``: by parameter name, copies of the weights in f32. ``temporaries``: alive together
    at the highest moment of the step. ``moved_bytes`` and ``flops``: what the step reads and writes, and computes. The relative
    error holds for the bytes of state, masters and temporaries.
    """

    name: str
    form: StepForm
    state_bytes: dict[str, int]
    host_state_bytes: int
    master_bytes: dict[str, int]
    temporaries: tuple[Temporary, ...]
    moved_bytes: int
    flops: int
    relative_error: float
    basis: Basis
    notes: tuple[str, ...] = ()
    """Which rule was followed where there is a choice (what Muon leaves to AdamW, what stays in 32 bits)."""

    @property
    def total_state_bytes(self) -> int:
        """State of all parameters on the device."""
        return sum(self.state_bytes.values())

    @property
    def total_master_bytes(self) -> int:
        """Master weights of all parameters."""
        return sum(self.master_bytes.values())

    @property
    def temporary_bytes(self) -> int:
        """What the step needs besides at its highest moment."""
        return sum(temporary.bytes for temporary in self.temporaries)
