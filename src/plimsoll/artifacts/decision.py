"""The enums of a plan: decisions for a saved value, ways to handle a region (a module that the plan decides about), and
possible ends of a search.
"""

from __future__ import annotations

import enum

from plimsoll.artifacts.base import AdvisedEnum


class Decision(enum.StrEnum):
    """What happens to a saved value (a tensor that autograd saves) between forward and backward."""

    KEEP = "KEEP"
    """The value stays on the device unchanged."""
    RECOMPUTE = "RECOMPUTE"
    """The value is dropped. Backward runs the ops that make it again before it reads the value."""
    COMPRESS = "COMPRESS"
    """Only the value's encoded bytes stay on the device. They are decoded when backward needs the value."""
    OFFLOAD = "OFFLOAD"
    """The value's bytes go over a link to pinned host memory or disk, and return before backward needs them."""


class Engine(enum.StrEnum):
    """How one region is handled when the plan runs."""

    RECIPE = "recipe"
    """Plimsoll replaces saved tensors. Dropped tensors are rebuilt by verified recipes (lists of ops to run again)."""
    KEEP = "keep"
    """The plan drops a value in this region, but the value cannot be rebuilt safely, so all values are kept."""
    COMPILED = "compiled"
    """torch.compile compiles the region, and its partitioner, which decides what to save, follows the plan."""
    UNTOUCHED = "untouched"
    """The plan keeps everything in this region, so no hook or wrapper is installed."""


class Status(AdvisedEnum):
    """How the search for a plan ended. Each member carries advice for the user."""

    OPTIMAL = "OPTIMAL", "With the costs of this machine, no plan of this engine is faster."
    FEASIBLE = "FEASIBLE", "The plan fits, and no plan saves more than the gap."
    INFEASIBLE = "INFEASIBLE", "No plan fits: raise the budget to the floor, or make the step smaller."
    TIMED_OUT = "TIMED_OUT", "The solver ran out of time before it found a plan: give it more time or a larger budget."

    @property
    def is_usable(self) -> bool:
        """Whether the search found a plan that may be applied to a model."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)
