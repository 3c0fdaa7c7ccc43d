"""Report calls of a region (a module that the plan decides about) whose dropped tensors could not be rebuilt, so that
everything is kept: warn, or with several ranks make an error.
"""

from __future__ import annotations

import warnings

import torch

from plimsoll.engine.call_stream import StreamGuard, called
from plimsoll.errors import RanksDiffer


class Fallback:
    """Reports calls of one region that cannot use recipes (recorded ops that rebuild dropped tensors).

    A call that matches no recorded call, or that cannot be recorded, keeps everything, unless it may run again in backward (see
    ``rerun``). A second run is not always safe: forward may count, draw from its own generator or append tensors to a list, and
    data that it read may have changed before backward.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def say_keeps(self, reason: str) -> None:
        """Warn that all calls of the region keep everything from now on, and say why."""
        warnings.warn(f"plimsoll: region {self._name!r} keeps all its activations from now on: {reason}", stacklevel=5)

    def say_surprise(self, guard: StreamGuard, calls: int, obstacle: str) -> None:
        """Warn that a call kept everything because its torch calls match no recorded call. ``calls`` is the number of next
        calls that will be recorded again.
        """
        found = "fewer torch calls than every recorded call"
        if guard.stranger is not None:
            found = f"torch calls that were never recorded, first {called(guard.stranger)} at {guard.where}"
        reason = "Python state or the size of its inputs has changed"
        if obstacle:
            reason = f"it reads values of tensors, and it cannot run again in backward because {obstacle}"
        warnings.warn(
            f"plimsoll: a call of region {self._name!r} made {found}. Its Python code took another branch, because "
            f"{reason}. This call kept all its activations: its gradients are "
            f"right, but the step may exceed its budget. The next {calls} calls are recorded again.",
            stacklevel=8,
        )

    def refusal(self, reason: str) -> RanksDiffer:
        """Return the error for a call on this rank that cannot use recipes (recorded ops that rebuild dropped tensors).

        It is an error and not a warning because other ranks wait for the collectives in the recipes.
        """
        rank = torch.distributed.get_rank()
        return RanksDiffer(
            f"Rank {rank} cannot follow the recorded recipes of region {self._name!r}: {reason}.",
            why="the recipes repeat collectives, and all ranks must join them; this rank would leave the others waiting",
            next="the optimizer has not stepped: make the region's calls the same on all ranks, or plan without "
            "'collectives' in allow=",
            ranks=(rank,),
        )
