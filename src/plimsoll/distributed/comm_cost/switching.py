"""One communication hook for torch's wrapper in, any hook at any time out.

No ``from __future__ import annotations`` here: torch compares a hook's annotations with the classes themselves.
"""

from typing import Protocol

import torch
from torch._C._distributed_c10d import GradBucket

from plimsoll.distributed.comm_cost.hooks import Hook


class Switch(Protocol):
    """What knows the hook of the moment."""

    hook: Hook


def hand_over(switch: Switch, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook that torch is given, with the switch as its state."""
    return switch.hook(bucket)
