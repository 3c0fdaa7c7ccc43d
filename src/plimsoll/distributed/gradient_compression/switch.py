"""The one communication hook that DDP's reducer takes for its whole life; who answers it may change.

There is no ``from __future__ import annotations`` here: DDP compares a hook's annotations with classes, not with names.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

Reduced: TypeAlias = torch.futures.Future[torch.Tensor]
"""The bucket's memory, once it is averaged."""


class Switch:
    """What DDP holds on to: compression while there is one, otherwise the all-reduce that DDP would do."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.answer: Callable[[GradBucket], Reduced] | None = None
        """Averages a bucket, now or soon."""


def reduce_bucket(switch: Switch, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls for every bucket."""
    if switch.answer is not None:
        return switch.answer(bucket)
    flat = bucket.buffer().mul_(1 / switch.group.size())
    work = dist.all_reduce(flat, group=switch.group, async_op=True)
    assert work is not None, "it is asynchronous"
    reduced: Reduced = work.get_future().then(lambda future: future.value()[0])
    return reduced
