"""What all regions of one managed model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plimsoll.engine.inspection import Inspector
from plimsoll.engine.linked_inputs import LinkTable
from plimsoll.engine.offload.transfers import TransfersUnderWay
from plimsoll.engine.sensing import Sensor
from plimsoll.engine.sentinels import SentinelPolicy
from plimsoll.engine.stored_forms import Packer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """``links`` between regions, what packs and moves values, who checks and inspects, and who watches (``None``: nobody).

    ``splits_backward``: gradients of inputs and of weights are made one after the other, from one graph (see ``halves``).
    """

    links: LinkTable
    packer: Packer
    transfers: TransfersUnderWay
    policy: SentinelPolicy
    inspector: Inspector
    generators: tuple[torch.Generator, ...]
    sensor: Sensor | None = None
    repeats_collectives: bool = False
    """Whether recipes may talk to other ranks, as the plan allows."""
    agree_on_service: Callable[[str, tuple[int, ...], str], None] | None = None
    """Compares with other ranks how a region that repeats collectives is served: region, ranks, service."""
    splits_backward: bool = False
