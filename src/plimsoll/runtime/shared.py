"""What all regions of one managed model share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plimsoll.runtime.inspection import Inspector
from plimsoll.runtime.links import LinkTable
from plimsoll.runtime.packed import Packer
from plimsoll.runtime.sensing import Sensor
from plimsoll.runtime.sentinels import SentinelPolicy
from plimsoll.runtime.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """``links`` between regions, what packs and moves values, who checks and inspects, and who watches (``None``: nobody).

    ``splits_backward``: gradients of inputs and of weights are made one after the other, from one graph (see ``halves``).
    """

    links: LinkTable
    packer: Packer
    traffic: Traffic
    policy: SentinelPolicy
    inspector: Inspector
    generators: tuple[torch.Generator, ...]
    sensor: Sensor | None = None
    repeats_collectives: bool = False
    """Whether recipes may talk to other ranks, as the plan allows."""
    splits_backward: bool = False
