"""Process groups in, ranks that wait in a collective of theirs let go, out: the groups are of no use after that.

A rank that fails in the middle of a step leaves the others in a collective that it will never join. Their wait is inside of
torch, where no exception of Python's reaches them. It ends when their connection ends, so the rank that failed ends it: with
gloo by a receive that times out at once (gloo then closes every connection of the group), with other backends by ``abort``.

Known weakness: NCCL's ``abort`` ends what this rank waits for; others notice by NCCL's own watchdog.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_NO_TIME = datetime.timedelta(milliseconds=1)
_TAG = 20_873
"""Of a message that nobody sends."""


def release(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close the connections of these groups, so that whoever waits in one of their collectives gets an error.

    Args:
        groups: each with more than one rank; this rank is in no collective of theirs.
    """
    for group in groups:
        if dist.get_backend(group) == dist.Backend.GLOO:
            _close(group)
        else:
            group.abort()


def _close(group: dist.ProcessGroup) -> None:
    somebody = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):  # the time-out that this is for, or a connection that is closed already
        group.recv([torch.empty(1, device=_CPU)], somebody, _TAG).wait(_NO_TIME)
