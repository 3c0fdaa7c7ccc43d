"""Reports calls of a region that keep everything because recipes cannot serve them: warnings, and on several ranks errors."""

from __future__ import annotations

import warnings

import torch

from plimsoll.engine.call_stream import StreamGuard, called
from plimsoll.errors import RanksDiffer


class Fallback:
    """Reports calls of one region that recipes cannot serve.

    A call that matches no recorded call, or that cannot be recorded, keeps everything. A region is never run a second time:
    forward may count, draw from its own generator or append tensors to a list, and data that it read may have changed before
    backward. A second run would then do something else without any sign of it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def say_keeps(self, reason: str) -> None:
        """Warn that calls of the region keep everything from now on."""
        warnings.warn(f"plimsoll: region {self._name!r} keeps everything: {reason}", stacklevel=5)

    def say_surprise(self, guard: StreamGuard, calls: int) -> None:
        """Warn that a call kept everything because it matches no recorded call."""
        found = "fewer torch calls than any recorded one"
        if guard.stranger is not None:
            found = f"torch calls that no recorded one has made, first {called(guard.stranger)} at {guard.where}"
        warnings.warn(
            f"plimsoll: a call of region {self._name!r} made {found}: its Python code has decided something else, by state "
            "of the host that has changed or by the size of its inputs. The call kept everything, so its gradients are "
            f"right and this step may be over its budget; the next {calls} calls are recorded anew.",
            stacklevel=8,
        )

    def refusal(self, reason: str) -> RanksDiffer:
        """The error for a call on this rank that cannot follow its recipes while other ranks wait for the recipes'
        collectives.
        """
        rank = torch.distributed.get_rank()
        return RanksDiffer(
            f"Region {self._name!r} cannot be rebuilt on rank {rank} as it was recorded: {reason}.",
            why="its recipes repeat collectives, in which all ranks must take part; this one would leave the others waiting",
            next="nothing was stepped; give the region's calls equal shapes, or plan without 'collectives' in allow=",
            ranks=(rank,),
        )
