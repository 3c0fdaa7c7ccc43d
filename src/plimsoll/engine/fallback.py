"""What becomes of calls that recipes cannot serve, and what is said of them.

A call that was none of those known, or that cannot be recorded, keeps everything. No region is run a second time: forward may
count, draw from a generator of its own or collect tensors in a list, and data that it read may have changed by the time of
backward; a second run would do something else, and nothing would show it.
"""

from __future__ import annotations

import warnings

import torch

from plimsoll.engine.call_stream import StreamGuard, called
from plimsoll.errors import RanksDiffer


class Fallback:
    """Says of one region what does not go as planned."""

    def __init__(self, name: str) -> None:
        self._name = name

    def say_keeps(self, reason: str) -> None:
        """Say that calls of the region keep everything from now on."""
        warnings.warn(f"plimsoll: region {self._name!r} keeps everything: {reason}", stacklevel=5)

    def say_surprise(self, guard: StreamGuard, calls: int) -> None:
        """Say that a call has kept everything because it was none of those known."""
        found = "fewer torch calls than any recorded one"
        if guard.stranger is not None:
            found = f"torch calls that no recorded one has made, first {called(guard.stranger)} at {guard.where}"
        warnings.warn(
            f"plimsoll: a call of region {self._name!r} made {found}: its Python code has decided something else, by state "
            "of the host that has changed or by the size of its inputs. The call kept everything, so its gradients are "
            f"right and this step may be over its budget; the next {calls} calls are recorded anew.",
            stacklevel=6,
        )

    def refusal(self, reason: str) -> RanksDiffer:
        """The error of a call on this rank that cannot follow its recipes while other ranks count on its collectives."""
        rank = torch.distributed.get_rank()
        return RanksDiffer(
            f"Region {self._name!r} cannot be rebuilt on rank {rank} as it was recorded: {reason}.",
            why="its recipes repeat collectives, in which all ranks must take part; this one would leave the others waiting",
            next="nothing was stepped; give the region's calls equal shapes, or plan without 'collectives' in allow=",
            ranks=(rank,),
        )
