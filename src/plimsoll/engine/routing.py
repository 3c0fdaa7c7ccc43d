"""Contexts for ``torch.utils.checkpoint`` out, in which what was routed in forward stays so when the region runs again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from plimsoll.tracing.recorder.collectives import is_routing


def saving_routes() -> tuple[Any, Any]:
    """Forward's and recomputation's context: results that choose tokens or experts are kept from the one to the other."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    routes = isinstance(func, torch._ops.OpOverload) and is_routing(func)
    return CheckpointPolicy.MUST_SAVE if routes else CheckpointPolicy.PREFER_RECOMPUTE
