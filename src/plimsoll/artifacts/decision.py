"""The vocabulary of a plan: decisions for a value, engines for a region, and how a search can end."""

from __future__ import annotations

import enum

from plimsoll.artifacts.base import AdvisedEnum


class Decision(enum.StrEnum):
    """What happens to a saved value between forward and backward."""

    KEEP = "KEEP"
    RECOMPUTE = "RECOMPUTE"
    COMPRESS = "COMPRESS"
    """A codec's payload is held and decoded when backward needs the value."""
    OFFLOAD = "OFFLOAD"
    """The bytes go over a link (to pinned host memory or disk) and return before backward needs them."""


class Engine(enum.StrEnum):
    """How one region was handled."""

    RECIPE = "recipe"
    """Saved tensors are replaced: dropped ones are rebuilt by verified recipes."""
    KEEP = "keep"
    """The plan drops something here, but it cannot be rebuilt safely, so everything is kept."""
    COMPILED = "compiled"
    """torch.compile's partitioner follows the plan."""
    UNTOUCHED = "untouched"
    """The plan keeps everything: the engine does not install a hook or a wrapper."""


class Status(AdvisedEnum):
    """How the search for a plan ended; each status carries its own advice."""

    OPTIMAL = "OPTIMAL", "With the costs of this machine, no plan of this engine is faster."
    FEASIBLE = "FEASIBLE", "The plan fits; the gap is the most that a better plan could still save."
    INFEASIBLE = "INFEASIBLE", "No plan fits: raise the budget to the floor, or make the step smaller."
    TIMED_OUT = "TIMED_OUT", "The solver ran out of time before it found a plan: give it more time or a larger budget."

    @property
    def is_usable(self) -> bool:
        """Whether a plan with this status may be applied."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)
