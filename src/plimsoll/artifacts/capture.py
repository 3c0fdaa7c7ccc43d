"""What torch.compile's front end took of one training step: keys of ops, in order. No torch in here."""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.advice import GraphBreak


class BackwardOp(msgspec.Struct, frozen=True, kw_only=True):
    """One op of backward, and whether it belongs to an autograd node that a captured graph made."""

    cost_key: str
    is_captured: bool


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """One step under a compiler that captures graphs and runs them op by op.

    ``forward`` has one entry per run of a captured graph, the ``cost_key``s of its ops; ``backward`` has all ops of backward;
    both in the order of execution. ``failure`` is empty where the step ran to its end; otherwise it says why not, and
    nothing counts as captured. With ``is_asked`` false the compiler was not asked at all, and ``failure`` says why.
    """

    is_asked: bool
    failure: str = ""
    graphs: int = 0
    forward: tuple[tuple[str, ...], ...] = ()
    backward: tuple[BackwardOp, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
