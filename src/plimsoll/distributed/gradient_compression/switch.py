"""The single communication hook that DDP's reducer accepts in its lifetime; compression is switched on and off inside it.

Do not add ``from __future__ import annotations`` here: DDP compares a hook's annotations with classes, not with names.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

Reduced: TypeAlias = torch.futures.Future[torch.Tensor]
"""A future of the bucket's memory after averaging."""


class Switch:
    """The hook's state in DDP: compression while it is on, otherwise the all-reduce that DDP itself would do."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.answer: Callable[[GradBucket], Reduced] | None = None
        """Averages a bucket, at once or asynchronously; None while compression is off."""


def reduce_bucket(switch: Switch, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook that DDP calls for every bucket."""
    if switch.answer is not None:
        return switch.answer(bucket)
    flat = bucket.buffer().mul_(1 / switch.group.size())
    work = dist.all_reduce(flat, group=switch.group, async_op=True)
    assert work is not None, "it is asynchronous"
    reduced: Reduced = work.get_future().then(lambda future: future.value()[0])
    return reduced
