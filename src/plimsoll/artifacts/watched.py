"""One step that was run as it is, with whatever it does to save memory: every op, every storage with its true life. No torch.

Unlike in a trace for planning, lives hold what saved tensors hold, and what forward makes again in backward is in it.
"""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.trace import Trace


class WatchedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A watched step.

    ``trace`` has no regions. Ticks below ``forward_end`` are forward's, below ``backward_end`` backward's. ``recomputed`` are
    the ticks of ops that ran forward again within backward. ``output_ends`` says when the storages that the step's output
    holds would be gone if it did not hold them, ``first_writes`` when gradients that were there before the step are first
    written. ``without_gradient`` names the parameters that get none.
    """

    trace: Trace
    regions: tuple[str, ...]
    forward_end: int
    backward_end: int
    recomputed: tuple[int, ...] = ()
    output_ends: dict[int, int] = {}
    first_writes: dict[int, int] = {}
    without_gradient: tuple[str, ...] = ()
