"""What serves the calls that recipes cannot: the region is re-run by ``torch.utils.checkpoint``, or keeps everything."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from plimsoll.artifacts.decision import Engine
from plimsoll.errors import RanksDiffer
from plimsoll.tracing.recorder.collectives import is_routing


class Fallback:
    """What is known of one region about running it twice, and the ways to run it without recipes."""

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self._name = name
        self._forward = forward
        self.may_rerun = True
        """Whether nothing was seen yet that speaks against running it twice."""
        self.routes = False
        """Whether some op chooses which token goes where."""
        self.peers: tuple[int, ...] = ()
        """Global ranks with which its collectives talk."""

    @property
    def engine(self) -> Engine:
        """Which way to take: a region that changes anything outside of itself must not run twice.

        It writes buffers or inputs, counts in an attribute, is given an object (a cache) that it may write to, or talks to
        other ranks, which would not answer a second time.
        """
        return Engine.RERUN if self.may_rerun and not self.peers else Engine.KEEP

    def run(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region without recipes."""
        if engine is Engine.KEEP:
            return self._forward(*args, **kwargs)
        context_fn = _saving_routes if self.routes else noop_context_fn
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    def warn(self, engine: Engine, reason: str) -> None:
        what = (
            "is re-run as a whole in backward (torch.utils.checkpoint)"
            if engine is Engine.RERUN
            else "keeps everything"
        )
        warnings.warn(f"plimsoll: region {self._name!r} {what}: {reason}", stacklevel=5)

    def refusal(self, reason: str) -> RanksDiffer:
        """The error of a call on this rank that cannot follow its recipes while other ranks count on its collectives."""
        rank = torch.distributed.get_rank()
        return RanksDiffer(
            f"Region {self._name!r} cannot be rebuilt on rank {rank} as it was recorded: {reason}.",
            why="its recipes repeat collectives, in which all ranks must take part; this one would leave the others waiting",
            next="nothing was stepped; give the region's calls equal shapes, or plan without 'collectives' in allow=",
            ranks=(rank,),
        )


def _saving_routes() -> tuple[Any, Any]:
    """Forward's and recomputation's context: what chose tokens or experts in forward is kept for the second run.

    A router that runs again may break a tie otherwise, and would then send tokens to experts that forward did not use.
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    routes = isinstance(func, torch._ops.OpOverload) and is_routing(func)
    return CheckpointPolicy.MUST_SAVE if routes else CheckpointPolicy.PREFER_RECOMPUTE
